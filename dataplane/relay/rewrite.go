package relay

import (
	"bytes"
	"errors"
	"strconv"

	"sluice/dataplane/objpool"
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

// LargeEventRewriter is a Rewriter of events that may be longer than 64 KiB.
type LargeEventRewriter interface {
	// MaxEvent is how many bytes an event may have; in the place of a longer one the
	// client gets an error.
	MaxEvent() int
}

// editor runs a Rewriter. It takes the engine's chunk framing off, collects
// whole events, and puts what becomes of them in chunks of its own.
type editor struct {
	rewriter Rewriter
	events   eventFramer
	out      *chunkBuffer  // from an event until it was passed on; else nil
	partial  *partialEvent // without a rewriter
}

// chunkBuffer is where a chunk's head and payload to go out are laid. It is lent to one event
// after the other: between two of them a stream has none.
type chunkBuffer struct{ b []byte }

var chunkBuffers = objpool.Pool[chunkBuffer]{New: func() *chunkBuffer { return &chunkBuffer{make([]byte, 0, 1<<10)} }}

// output is what was laid out behind from.
func (e *editor) output(from int) []byte {
	out := e.out.b[from:]
	if len(out) == 0 {
		e.releaseSent()
	}
	return out
}

// maxPooledBuffer is kept of one.
const maxPooledBuffer = 32 << 10

// releaseSent lets go of what was laid out: it has gone.
func (e *editor) releaseSent() {
	if e == nil {
		return
	}
	if e.partial != nil {
		e.partial.releaseSent()
	}
	if e.out == nil {
		return
	}
	if cap(e.out.b) <= maxPooledBuffer {
		chunkBuffers.Put(e.out)
	}
	e.out = nil
}

// rewrites says whether events are changed: most streams' pass as they come.
func (e *editor) rewrites() bool { return e != nil && e.rewriter != nil }

// holdsPartial says whether bytes are held back that pass as they come.
func (e *editor) holdsPartial() bool {
	return e != nil && e.partial != nil && e.partial.buf != nil
}

func (e *editor) release() {
	if e == nil {
		return
	}
	e.events.release()
	e.partial.release()
	e.releaseSent()
}

// feed rewrites the events that p completes.
func (e *editor) feed(p []byte) error {
	e.events.normalize(p)
	for len(p) > 0 {
		n, event, tooBig := e.events.next(p)
		p = p[n:]
		if tooBig {
			return errTooBig
		}
		if event != nil {
			e.out.b = e.rewriter.Event(e.out.b, event)
			e.events.release()
		}
	}
	return nil
}

// endAtCR rewrites the last event of a body whose last byte is a CR that ends the event.
func (e *editor) endAtCR() {
	if f := &e.events; f.line == lineCR && f.partial != nil && !f.oversized {
		f.endLineAtCR()
		e.out.b = e.rewriter.Event(e.out.b, f.partial.B)
		f.release()
	}
}

// errTooBig ends a stream with an event that is too long to be rewritten, and must not pass
// as it is: what follows would have a gap before it.
var errTooBig = errors.New("an event of the engine is too long to be passed on")

// rewrite gives what goes to the client for one read of the engine's body.
func (s *stream) rewrite(p []byte) (out []byte, broken error) {
	e := s.editor
	if e.out == nil {
		e.out = chunkBuffers.Get()
	}
	r := e.out
	r.b = append(r.b[:0], emptyChunkHeader[:]...)
	done := false
	if !s.chunked {
		s.scan.feed(p)
		broken = e.feed(p)
		s.redactRewritten()
		return e.output(ChunkHeaderSize), broken
	}
	carry := s.migration()
	before := s.chunks
	for at := 0; at < len(p) && !done; {
		before = s.chunks
		n, payload, err := s.chunks.Next(p[at:])
		at += n
		if len(payload) > 0 {
			if carry == nil {
				s.scan.feed(payload)
			}
			if tooBig := e.feed(payload); tooBig != nil {
				broken = tooBig
				break
			}
		}
		if err != nil {
			broken = err
			break
		}
		if done = s.chunks.Done(); done && at == len(p) {
			s.resp.MarkBodyDone()
		}
	}
	if done {
		e.endAtCR()
	}
	if carry != nil {
		// Looked at as the client gets it: as one stream. What both learn of it, its id and
		// its time, is kept once.
		if s.scan.template.idAndTime == "" {
			s.scan.template.idAndTime = carry.Transcript.template.idAndTime
		}
		s.scan.feed(r.b[ChunkHeaderSize:])
		done = done && carry.Transcript.FailureEvent() == nil && !carry.Transcript.needsRound()
	}
	if done && s.incomplete() {
		s.chunks, done, broken = before, false, errIncomplete
	}
	s.redactRewritten()
	var from int
	if r.b, from = FrameChunk(r.b); done {
		r.b = append(r.b, lastChunk...)
	}
	return e.output(from), broken
}

// redactRewritten blanks what is private in the events that go out, where the scan has seen
// such. Records between them are the program's own, and so is who reads them.
func (s *stream) redactRewritten() {
	if !s.scan.mayHaveRecords {
		s.redactEvents(s.editor.out.b[ChunkHeaderSize:])
	}
	s.scan.private, s.scan.engineMessage = false, false
}

// redactEvents blanks what is private in events that the scan has seen and nobody else.
func (s *stream) redactEvents(events []byte) {
	if s.scan.private {
		v := newEventRedactor(s.scan.engineMessage)
		v.feed(events)
	}
}

// ChunkHeaderSize is the room that FrameChunk needs: a chunk's length and the end of its line.
const ChunkHeaderSize = 16 + len("\r\n")

var emptyChunkHeader [ChunkHeaderSize]byte

// FrameChunk makes a chunk of what b has behind its first ChunkHeaderSize bytes, where it is,
// and gives where that begins; of nothing it makes none.
func FrameChunk(b []byte) (framed []byte, from int) {
	n := len(b) - ChunkHeaderSize
	if n == 0 {
		return b, ChunkHeaderSize
	}
	var digits [16]byte
	size := strconv.AppendUint(digits[:0], uint64(n), 16)
	from = ChunkHeaderSize - len(size) - len("\r\n")
	copy(b[from:], size)
	copy(b[ChunkHeaderSize-2:], "\r\n")
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

// EventData gives the data of an event that has one line of it, nil for others.
func EventData(event []byte) []byte {
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
