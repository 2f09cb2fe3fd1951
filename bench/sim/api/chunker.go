package api

import "strconv"

// Chunker writes the SSE events of one response at a time, each as one HTTP chunk in one
// write. With Coalesce the events of a step become one chunk.
type Chunker struct {
	buf      []byte
	r        *Response
	Coalesce bool
}

const chunkHeadSpace = 10 // space for eight hex digits and CRLF

// Open selects the response that the next events are of.
func (w *Chunker) Open(r *Response) { w.r = r }

// Begin returns the buffer to which the caller appends one event; End takes it back.
func (w *Chunker) Begin() []byte {
	return append(w.buf[:0], "          "...)
}

// End sends the event in b, or holds it back until Flush.
func (w *Chunker) End(b []byte) {
	w.buf = b
	w.r.Events++
	if w.Coalesce {
		w.r.coalesced = append(w.r.coalesced, b[chunkHeadSpace:]...)
		return
	}
	w.chunk(b)
}

// chunk frames b, whose first chunkHeadSpace bytes are reserved for that, and sends it.
func (w *Chunker) chunk(b []byte) {
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
	w.r.Send(b[at:]) // the connection's own goroutine notices a disconnected client
}

// Flush sends the events that a step held back.
func (w *Chunker) Flush() {
	if len(w.r.coalesced) == 0 {
		return
	}
	w.chunk(append(append(w.buf[:0], "          "...), w.r.coalesced...))
	w.r.coalesced = w.r.coalesced[:0]
}

// Finish ends the body.
func (w *Chunker) Finish() {
	w.Flush()
	w.r.Send([]byte("0\r\n\r\n"))
}

// AppendIDs appends token ids as a JSON array.
func AppendIDs(b []byte, ids []uint32) []byte {
	b = append(b, '[')
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	return append(b, ']')
}
