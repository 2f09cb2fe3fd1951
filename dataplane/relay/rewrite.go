package relay

import (
	"errors"

	"sluice/dataplane/objpool"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
)

// editor runs a Rewriter. It removes the engine's chunk framing, collects whole events and puts the
// rewritten events into chunks of its own.
type editor struct {
	rewriter sse.Rewriter
	events   sse.Framer
	out      *chunkBuffer  // from the first event until it has been sent; else nil
	partial  *partialEvent // of a stream without a rewriter
}

// chunkBuffer holds a chunk that is about to be sent. Streams borrow it for an event, so that idle
// streams have none.
type chunkBuffer struct{ b []byte }

var chunkBuffers = objpool.Pool[chunkBuffer]{New: func() *chunkBuffer { return &chunkBuffer{make([]byte, 0, 1<<10)} }}

// output returns what has been appended after from.
func (e *editor) output(from int) []byte {
	out := e.out.b[from:]
	if len(out) == 0 {
		e.releaseSent()
	}
	return out
}

// maxPooledBuffer is the largest buffer that is returned to the pool.
const maxPooledBuffer = 32 << 10

// releaseSent returns the memory of what has been sent.
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

// rewrites reports whether events are rewritten. Those of most streams are not.
func (e *editor) rewrites() bool { return e != nil && e.rewriter != nil }

// holdsPartial reports whether a partial event of a stream without a rewriter is held.
func (e *editor) holdsPartial() bool {
	return e != nil && e.partial != nil && e.partial.buf != nil
}

func (e *editor) release() {
	if e == nil {
		return
	}
	e.events.Release()
	e.partial.release()
	e.releaseSent()
}

// feed rewrites the events that p completes.
func (e *editor) feed(p []byte) error {
	e.events.Normalize(p)
	for len(p) > 0 {
		n, event, tooBig := e.events.Next(p)
		p = p[n:]
		if tooBig {
			return errTooBig
		}
		if event != nil {
			e.out.b = e.rewriter.Event(e.out.b, event)
			e.events.Release()
		}
	}
	return nil
}

// endAtCR rewrites the last event of a body whose last byte is a CR that ends the event.
func (e *editor) endAtCR() {
	if event := e.events.EndAtCR(); event != nil {
		e.out.b = e.rewriter.Event(e.out.b, event)
		e.events.Release()
	}
}

// errTooBig ends a stream with an event that is too long to be rewritten. It must not pass
// unchanged, and skipping it would leave a gap.
var errTooBig = errors.New("the engine sent an event that is too long")

var emptyChunkHeader [sse.ChunkHeaderSize]byte

// rewrite returns what the client gets for one read of the engine's body.
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
		return e.output(sse.ChunkHeaderSize), broken
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
		// The scan sees what the client gets, as one stream. The id and time, which both it and the
		// transcript learn, are stored once.
		if s.scan.template.IDAndTime == "" {
			s.scan.template.IDAndTime = carry.Transcript.IDAndTime()
		}
		s.scan.feed(r.b[sse.ChunkHeaderSize:])
		done = done && carry.Transcript.FailureEvent() == nil && !carry.Transcript.NeedsRound()
	}
	if done && s.incomplete() {
		s.chunks, done, broken = before, false, errIncomplete
	}
	s.redactRewritten()
	var from int
	if r.b, from = sse.FrameChunk(r.b); done {
		r.b = append(r.b, sse.LastChunk...)
	}
	return e.output(from), broken
}

// redactRewritten blanks private members in the rewritten events where the scan has seen any.
// Records between events come from this program and are read by it, so they are not redacted.
func (s *stream) redactRewritten() {
	if !s.scan.mayHaveRecords {
		s.redactEvents(s.editor.out.b[sse.ChunkHeaderSize:])
	}
	s.scan.private, s.scan.engineMessage = false, false
}

// redactEvents blanks private members in events that only the scan has seen.
func (s *stream) redactEvents(events []byte) {
	if s.scan.private {
		v := redact.NewEventRedactor(s.scan.engineMessage)
		v.Feed(events)
	}
}
