package relay

import (
	"bytes"
	"math"

	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// maxBufferedEvent bounds what is held back of an event that a read has split; a longer one flows.
const maxBufferedEvent = 32 << 10

// maxEventParts bounds how many reads may bring parts of an event that is held: each looks at all
// of it again. An event in more parts flows.
const maxEventParts = 32

// partialEvent is what a stream whose bytes pass as they come has for what is rare: the beginning
// of an event whose end has not come, and the veil over private members.
//
// An event that is split over reads waits for its end: an engine that dies in it leaves the
// client behind a whole event, where an error can be told, and a private member is seen
// before any of it is out. One beyond maxBufferedEvent flows, and the veil with it.
type partialEvent struct {
	redactor redactor
	buf      *membudget.Buffer // bytes as they came, from an event's beginning on; nil: none
	joined   *membudget.Buffer // what was held, and what follows, until they were passed on
	parts    int               // at what is held
	chunks   upstream.Chunks   // where the framing stands before those that are held
	size     []byte            // digits of a chunk's size whose end has not come, of a body that is not held
	// follows: the veil does, nothing is held: in an event that is too long, or what is no
	// event stream.
	streaming bool
}

func (h *partialEvent) release() {
	if h != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.releaseSent()
	}
}

// releaseSent lets go of what went out: it may be a whole read, and what a slow client's stream
// keeps is only what was held back of it.
func (h *partialEvent) releaseSent() {
	membudget.Default.Put(h.joined)
	h.joined = nil
}

// passesUnchanged says whether what a read brought passes as it is: nothing is held, and it ends
// with an event that has nothing private, as those before, and not where a chunk has just begun.
func (s *stream) passesUnchanged() bool {
	if e := s.editor; e != nil && (e.partial.buf != nil || e.partial.streaming) {
		return false
	}
	return !s.scanning || s.scan.atBoundary() && !s.scan.private && !s.chunks.InChunk()
}

// holdPartialEvent gives what goes out of what is held and p, which follows. before is where the
// framing stood before p; last: nothing comes behind.
func (s *stream) holdPartialEvent(p []byte, before upstream.Chunks, final bool) []byte {
	if s.editor == nil {
		s.editor = &editor{partial: new(partialEvent)}
	}
	h := s.editor.partial
	if h.streaming {
		return s.holdAfterStreamed(p, before, final)
	}
	raw := p
	if h.parts++; h.buf != nil {
		raw, before = h.combine(p), h.chunks
	} else {
		h.parts = 0
	}
	var partial []byte // payload of the event that has not ended
	if s.scan.partial != nil {
		partial = s.scan.partial.B
	}
	partialLen := len(partial)
	at := before
	_, payload := s.redactPayload(raw, &at, math.MaxInt, nil)
	at = before
	n, _ := s.redactPayload(raw, &at, payload-partialLen, nil)
	if payload > partialLen { // the event that was held has ended: what is held now is another
		h.parts = 0
	}
	h.streaming = s.scan.oversized || len(raw)-n > 2*maxBufferedEvent && partialLen > 0 || partialLen > maxBufferedEvent ||
		h.parts > maxEventParts || unusualFraming(partial)
	private := s.scan.private || h.streaming || final && partialLen > 0
	h.redactor = newEventRedactor(s.scan.engineMessage || s.resp.Status >= 400)
	s.scan.private, s.scan.engineMessage = false, false
	if h.streaming || final || partialLen == 0 && !s.chunks.InChunk() {
		var redactor *redactor
		if private {
			redactor = &h.redactor
		}
		s.redactPayload(raw, &before, math.MaxInt, redactor)
		return h.split(raw, len(raw), before)
	}
	if private {
		s.redactPayload(raw, &before, payload-partialLen, &h.redactor)
	}
	return h.split(raw, n, at)
}

// holdAfterStreamed returns what the client gets of p while an event is streamed that is too long
// to be held. Where that event ends in p, what follows it is held again.
func (s *stream) holdAfterStreamed(p []byte, before upstream.Chunks, final bool) []byte {
	h := s.editor.partial
	h.redactor.isFailure = s.scan.engineMessage
	h.redactor.isRefusal = h.redactor.isRefusal || s.scan.engineMessage
	s.scan.private, s.scan.engineMessage = false, false
	var partial []byte // payload of the event that has not ended
	if s.scan.partial != nil {
		partial = s.scan.partial.B
	}
	at := before
	_, payload := s.redactPayload(p, &at, math.MaxInt, nil)
	if !s.scanning || s.scan.oversized || len(partial) >= payload || len(partial) > maxBufferedEvent || final || unusualFraming(partial) {
		s.redactPayload(p, &before, math.MaxInt, &h.redactor)
		h.streaming = !s.scanning || !s.scan.atBoundary()
		return p
	}
	n, _ := s.redactPayload(p, &before, payload-len(partial), &h.redactor)
	h.streaming, h.parts = false, 0
	if len(partial) == 0 && !s.chunks.InChunk() {
		return p
	}
	return h.split(p, n, before)
}

// holdSize gives good without the digits at its end of a chunk's size of which more may come,
// behind those that it held before: the client gets no part of a size that turns out to be
// none.
func (s *stream) holdSize(good []byte) []byte {
	digits := s.chunks.SizeDigits()
	if digits == 0 && (s.editor == nil || len(s.editor.partial.size) == 0) {
		return good
	}
	if s.editor == nil {
		s.editor = &editor{partial: new(partialEvent)}
	}
	h := s.editor.partial
	switch {
	case h.buf != nil: // it has them
		digits = 0
	case len(good) < digits: // they are those held before, and good
		h.size = append(h.size, good...)
		return nil
	}
	out, size := good[:len(good)-digits], good[len(good)-digits:]
	if len(h.size) > 0 {
		whole := membudget.Default.Get(len(h.size) + len(out))
		copy(whole.B[copy(whole.B, h.size):], out)
		size = append(h.size[:0], size...)
		h.releaseSent()
		h.joined, out = whole, whole.B
	}
	h.size = append(h.size[:0], size...)
	return out
}

// unusualFraming says whether the beginning of an event is of a stream whose events do not
// end with an empty line, or a comment: it is shown as it comes.
func unusualFraming(tail []byte) bool {
	if len(tail) == 0 {
		return false
	}
	if tail[0] == ':' && tail[len(tail)-1] == '\n' {
		return true
	}
	lines := bytes.Count(tail, dataLine)
	if bytes.HasPrefix(tail, dataLine[1:]) {
		lines++
	}
	return lines > 1 // no engine spreads JSON over several
}

var dataLine = []byte("\ndata:")

// redactPayload goes over raw up to n bytes of payload, which the veil, where there is one,
// looks at; c is the framing.
func (s *stream) redactPayload(raw []byte, c *upstream.Chunks, n int, v *redactor) (at, payload int) {
	var parts [][]byte
	for at < len(raw) && payload < n {
		before := *c
		size, part := len(raw)-at, raw[at:]
		if s.chunked {
			size, part, _ = c.Next(raw[at:])
		}
		if over := payload + len(part) - n; over > 0 {
			if size, part = size-over, part[:len(part)-over]; s.chunked {
				*c = before
				_, _, _ = c.Next(raw[at : at+size])
			}
		}
		if size == 0 {
			break
		}
		switch {
		case v == nil:
		case v.isFailure || v.watches && !v.str:
			parts = append(parts, part) // an error's text may be cut by chunks
		default:
			v.feed(part)
		}
		at += size
		payload += len(part)
	}
	if len(parts) > 0 {
		v.feedAll(parts)
	}
	return at, payload
}

// combine puts p behind what is held, which is not held any more.
func (h *partialEvent) combine(p []byte) []byte {
	h.releaseSent() // where nobody has said so
	h.joined = membudget.Default.Get(len(h.buf.B) + len(p))
	copy(h.joined.B[copy(h.joined.B, h.buf.B):], p)
	membudget.Default.Put(h.buf)
	h.buf = nil
	return h.joined.B
}

// split gives the first n of raw, and holds what follows, before which the framing
// stands at c.
func (h *partialEvent) split(raw []byte, n int, c upstream.Chunks) []byte {
	h.chunks = c
	switch {
	case n == 0 && h.joined != nil:
		h.buf, h.joined = h.joined, nil
	case n < len(raw):
		h.buf = membudget.Default.Get(len(raw) - n)
		copy(h.buf.B, raw[n:])
	}
	return raw[:n]
}
