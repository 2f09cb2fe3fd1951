package relay

import (
	"bytes"
	"math"

	"sluice/dataplane/membudget"
	"sluice/dataplane/redact"
	"sluice/dataplane/upstream"
)

// maxBufferedEvent bounds the partial event that is held. A longer event is streamed.
const maxBufferedEvent = 32 << 10

// maxEventParts bounds the number of reads that bring parts of a held event, because each read
// scans the whole part again. An event in more parts is streamed.
const maxEventParts = 32

// partialEvent belongs to a stream that is not rewritten. It holds the beginning of an event whose
// end has not been read, and redacts private members.
//
// An event that is split over reads is held until its end. An engine that dies inside it then
// leaves the client after a whole event, where an error event can follow, and a private member is
// found before any of it is sent. An event beyond maxBufferedEvent is streamed, and redacted as it
// passes.
type partialEvent struct {
	redactor redact.Redactor
	buf      *membudget.Buffer // bytes as read, from the beginning of an event; nil: none
	joined   *membudget.Buffer // buf and the read that followed, until they have been sent
	parts    int               // reads since buf began
	chunks   upstream.Chunks   // the state of the chunk framing before buf
	size     []byte            // digits of an unfinished chunk size, of a body that is not held
	// streaming: nothing is held and the redactor sees each read, because the event is too long or
	// the body is not an event stream.
	streaming bool
}

func (h *partialEvent) release() {
	if h != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.releaseSent()
	}
}

// releaseSent releases what has been sent. It may be a whole read, and a stream with a slow client
// must keep only the partial event.
func (h *partialEvent) releaseSent() {
	membudget.Default.Put(h.joined)
	h.joined = nil
}

// passesUnchanged reports whether the last read is sent as it is: nothing is held, no event in it
// has private members, and it ends with a whole event and not just after the beginning of a chunk.
func (s *stream) passesUnchanged() bool {
	if e := s.editor; e != nil && (e.partial.buf != nil || e.partial.streaming) {
		return false
	}
	return !s.scanning || s.scan.AtBoundary() && !s.scan.private && !s.chunks.InChunk()
}

// holdPartialEvent returns what is sent of the held bytes and p, and holds the rest. before is the
// state of the chunk framing before p. final: p is the last read.
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
	if s.scan.Partial != nil {
		partial = s.scan.Partial.B
	}
	partialLen := len(partial)
	at := before
	_, payload := s.redactPayload(raw, &at, math.MaxInt, nil)
	at = before
	n, _ := s.redactPayload(raw, &at, payload-partialLen, nil)
	if payload > partialLen { // the held event has ended; the partial event is another one
		h.parts = 0
	}
	h.streaming = s.scan.Oversized || len(raw)-n > 2*maxBufferedEvent && partialLen > 0 || partialLen > maxBufferedEvent ||
		h.parts > maxEventParts || unusualFraming(partial)
	private := s.scan.private || h.streaming || final && partialLen > 0
	h.redactor = redact.NewEventRedactor(s.scan.engineMessage || s.resp.Status >= 400)
	s.scan.private, s.scan.engineMessage = false, false
	if h.streaming || final || partialLen == 0 && !s.chunks.InChunk() {
		var redactor *redact.Redactor
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

// holdAfterStreamed returns what is sent of p while an event is streamed that is too long to be
// held. Where that event ends in p, the partial event after it is held again.
func (s *stream) holdAfterStreamed(p []byte, before upstream.Chunks, final bool) []byte {
	h := s.editor.partial
	h.redactor.IsFailure = s.scan.engineMessage
	h.redactor.IsRefusal = h.redactor.IsRefusal || s.scan.engineMessage
	s.scan.private, s.scan.engineMessage = false, false
	var partial []byte // payload of the event that has not ended
	if s.scan.Partial != nil {
		partial = s.scan.Partial.B
	}
	at := before
	_, payload := s.redactPayload(p, &at, math.MaxInt, nil)
	if !s.scanning || s.scan.Oversized || len(partial) >= payload || len(partial) > maxBufferedEvent || final || unusualFraming(partial) {
		s.redactPayload(p, &before, math.MaxInt, &h.redactor)
		h.streaming = !s.scanning || !s.scan.AtBoundary()
		return p
	}
	n, _ := s.redactPayload(p, &before, payload-len(partial), &h.redactor)
	h.streaming, h.parts = false, 0
	if len(partial) == 0 && !s.chunks.InChunk() {
		return p
	}
	return h.split(p, n, before)
}

// holdSize returns good without the digits of an unfinished chunk size at its end, after the digits
// that it held before. The client thus gets no part of a chunk size that turns out to be malformed.
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
	case h.buf != nil: // buf has the digits
		digits = 0
	case len(good) < digits: // good continues the held digits
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

// unusualFraming reports whether tail, the beginning of an event, is a comment or has several data
// lines. It is sent as it comes, because an empty line may never end it.
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
	return lines > 1 // no engine splits JSON over several lines
}

var dataLine = []byte("\ndata:")

// redactPayload steps over raw up to n bytes of payload and feeds them to v, unless v is nil. c is
// the state of the chunk framing and is advanced. It returns the bytes of raw and of payload that
// it passed.
func (s *stream) redactPayload(raw []byte, c *upstream.Chunks, n int, v *redact.Redactor) (at, payload int) {
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
		case v.NeedsWhole():
			parts = append(parts, part)
		default:
			v.Feed(part)
		}
		at += size
		payload += len(part)
	}
	if len(parts) > 0 {
		v.FeedAll(parts)
	}
	return at, payload
}

// combine returns the held bytes followed by p. Nothing is held afterwards.
func (h *partialEvent) combine(p []byte) []byte {
	h.releaseSent() // in case nobody did
	h.joined = membudget.Default.Get(len(h.buf.B) + len(p))
	copy(h.joined.B[copy(h.joined.B, h.buf.B):], p)
	membudget.Default.Put(h.buf)
	h.buf = nil
	return h.joined.B
}

// split returns the first n bytes of raw and holds the rest. c is the state of the framing between
// them.
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
