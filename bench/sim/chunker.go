package sim

import "strconv"

// chunker writes the SSE events of one response at a time, each as one HTTP chunk in one
// write. With coalesce the events of a step become one chunk.
type chunker struct {
	buf      []byte
	r        *response
	coalesce bool
}

const chunkHeadSpace = 10 // space for eight hex digits and CRLF

func (w *chunker) open(r *response) { w.r = r }

// begin returns the buffer to which the caller appends one event; end takes it back.
func (w *chunker) begin() []byte {
	return append(w.buf[:0], "          "...)
}

func (w *chunker) end(b []byte) {
	w.buf = b
	w.r.events++
	if w.coalesce {
		w.r.coalesced = append(w.r.coalesced, b[chunkHeadSpace:]...)
		return
	}
	w.chunk(b)
}

// chunk frames b, whose first chunkHeadSpace bytes are reserved for that, and sends it.
func (w *chunker) chunk(b []byte) {
	n := len(b) - chunkHeadSpace
	at := chunkHeadSpace - 2
	b[at], b[at+1] = '\r', '\n'
	for first := true; first || n > 0; first = false {
		at--
		b[at] = hexDigits[n&15]
		n >>= 4
	}
	b = append(b, "\r\n"...)
	w.buf = b
	w.r.send(b[at:]) // the connection's own goroutine notices a disconnected client
}

// flush sends the events that a step held back.
func (w *chunker) flush() {
	if len(w.r.coalesced) == 0 {
		return
	}
	w.chunk(append(append(w.buf[:0], "          "...), w.r.coalesced...))
	w.r.coalesced = w.r.coalesced[:0]
}

// finish ends the body.
func (w *chunker) finish() {
	w.flush()
	w.r.send([]byte("0\r\n\r\n"))
}

// appendIDs appends token ids as a JSON array.
func appendIDs(b []byte, ids []uint32) []byte {
	b = append(b, '[')
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	return append(b, ']')
}
