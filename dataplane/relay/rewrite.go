package relay

import (
	"bytes"
	"strconv"
)

// Rewriter changes the events of one stream on their way to the client: cuts
// members that are no client's business, or gives them another shape. Its
// methods are called on the relaying goroutine, one at a time.
type Rewriter interface {
	// Event appends to dst what the client gets in place of one event, whose
	// bytes, the empty line included, it borrows; nothing appended drops it.
	// Comments and "data: [DONE]" are events too.
	Event(dst, event []byte) []byte
}

// Roomy is a Rewriter of events that may be longer than 64 KiB.
type Roomy interface {
	// MaxEvent is how many bytes an event may have; in the place of a longer one the
	// client gets an error.
	MaxEvent() int
}

// editor runs a Rewriter. It takes the engine's chunk framing off, collects
// whole events, and puts what becomes of them in chunks of its own.
type editor struct {
	rewriter Rewriter
	events   framer
	out      []byte // room for a chunk's head, and payload to go out
}

// on says whether there is one: most streams have none.
func (e *editor) on() bool { return e != nil }

func (e *editor) end() {
	if e != nil {
		e.events.drop()
	}
}

// feed rewrites the events that p completes.
func (e *editor) feed(p []byte) {
	for len(p) > 0 {
		n, event, tooBig := e.events.next(p)
		p = p[n:]
		if tooBig {
			e.out = append(e.out, tooBigEvent...)
		}
		if event != nil {
			e.out = e.rewriter.Event(e.out, event)
			e.events.drop()
		}
	}
}

// tooBigEvent stands for an event that is too long to be rewritten and must not
// pass as it is.
const tooBigEvent = "data: {\"error\":{\"message\":\"an event of the engine is too long to be passed on\",\"type\":\"upstream_error\",\"param\":null,\"code\":502}}\n\n"

// rewrite gives what goes to the client for one read of the engine's body.
func (s *stream) rewrite(p []byte) (out []byte, broken error) {
	e := s.edit
	if e.out == nil {
		e.out = make([]byte, ChunkHead, 128)
	}
	e.out = e.out[:ChunkHead]
	done := false
	if !s.chunked {
		s.scan.feed(p)
		e.feed(p)
		return e.out[ChunkHead:], nil
	}
	carry := s.rare.carry
	for at := 0; at < len(p) && !done; {
		n, payload, err := s.chunks.Next(p[at:])
		at += n
		if len(payload) > 0 {
			if carry == nil {
				s.scan.feed(payload)
			}
			e.feed(payload)
		}
		if err != nil {
			broken = err
			break
		}
		if done = s.chunks.Done(); done && at == len(p) {
			s.resp.Finish()
		}
	}
	if carry != nil {
		// Looked at as the client gets it: as one stream.
		s.scan.feed(e.out[ChunkHead:])
		done = done && carry.Transcript.Failed == nil && !carry.Transcript.unfinished()
	}
	var from int
	if e.out, from = FrameChunk(e.out); done {
		e.out = append(e.out, lastChunk...)
	}
	return e.out[from:], broken
}

// ChunkHead is the room that FrameChunk needs: a chunk's length and the end of its line.
const ChunkHead = 16 + len("\r\n")

// FrameChunk makes a chunk of what b has behind its first ChunkHead bytes, where it is,
// and gives where that begins; of nothing it makes none.
func FrameChunk(b []byte) (framed []byte, from int) {
	n := len(b) - ChunkHead
	if n == 0 {
		return b, ChunkHead
	}
	var digits [16]byte
	size := strconv.AppendUint(digits[:0], uint64(n), 16)
	from = ChunkHead - len(size) - len("\r\n")
	copy(b[from:], size)
	copy(b[ChunkHead-2:], "\r\n")
	return append(b, "\r\n"...), from
}

// AppendChunk appends payload as one chunk of transfer coding chunked; it must not be
// empty.
func AppendChunk(dst, payload []byte) []byte {
	dst = strconv.AppendInt(dst, int64(len(payload)), 16)
	dst = append(dst, "\r\n"...)
	dst = append(dst, payload...)
	return append(dst, "\r\n"...)
}

// DataOf gives the data of an event that has one line of it, nil for others.
func DataOf(event []byte) []byte {
	var data []byte
	for len(event) > 0 {
		line := event
		if i := bytes.IndexByte(event, '\n'); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		line = bytes.TrimSuffix(line, []byte{'\r'})
		if !bytes.HasPrefix(line, dataPrefix) {
			continue
		}
		if data != nil {
			return nil
		}
		data = fieldValue(line[len(dataPrefix):])
	}
	return data
}
