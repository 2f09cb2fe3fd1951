package relay

import (
	"bytes"
	"math"

	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// maxHeld bounds what is held back of an event that a read has split; a longer one flows.
const maxHeld = 32 << 10

// maxLooks bounds how many reads may bring parts of an event that is held: each looks at all
// of it again. An event in more parts flows.
const maxLooks = 32

// held is what a stream whose bytes pass as they come has for what is rare: the beginning
// of an event whose end has not come, and the veil over private members.
//
// An event that is split over reads waits for its end: an engine that dies in it leaves the
// client behind a whole event, where an error can be told, and a private member is seen
// before any of it is out. One beyond maxHeld flows, and the veil with it.
type held struct {
	veil   veil
	buf    *membudget.Buffer // bytes as they came, from an event's beginning on; nil: none
	whole  *membudget.Buffer // what was held, and what follows, until they were passed on
	looks  int               // at what is held
	chunks upstream.Chunks   // where the framing stands before those that are held
	size   []byte            // digits of a chunk's size whose end has not come, of a body that is not held
	// follows: the veil does, nothing is held: in an event that is too long, or what is no
	// event stream.
	follows bool
}

func (h *held) drop() {
	if h != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.passed()
	}
}

// passed lets go of what went out: it may be a whole read, and what a slow client's stream
// keeps is only what was held back of it.
func (h *held) passed() {
	membudget.Default.Put(h.whole)
	h.whole = nil
}

// passes says whether what a read brought passes as it is: nothing is held, and it ends
// with an event that has nothing private, as those before, and not where a chunk has just begun.
func (s *stream) passes() bool {
	if e := s.edit; e != nil && (e.held.buf != nil || e.held.follows) {
		return false
	}
	return !s.scanning || s.scan.between() && !s.scan.private && !s.chunks.Midway()
}

// guard gives what goes out of what is held and p, which follows. before is where the
// framing stood before p; last: nothing comes behind.
func (s *stream) guard(p []byte, before upstream.Chunks, last bool) []byte {
	if s.edit == nil {
		s.edit = &editor{held: new(held)}
	}
	h := s.edit.held
	if h.follows {
		h.veil.telling = s.scan.telling
		after := before
		_, payload := s.follow(p, &after, math.MaxInt, &h.veil)
		h.follows = !s.scanning || !s.scan.between()
		s.scan.private, s.scan.telling = false, false
		if h.follows || !s.chunks.Midway() || last {
			return p
		}
		h.looks = 0 // the event has ended, and another chunk begun
		n, _ := s.follow(p, &before, payload, nil)
		return h.release(p, n, before)
	}
	raw := p
	if h.looks++; h.buf != nil {
		raw, before = h.join(p), h.chunks
	} else {
		h.looks = 0
	}
	var tail []byte // payload of the event that has not ended
	if s.scan.carry != nil {
		tail = s.scan.carry.B
	}
	split := len(tail)
	h.veil = veil{events: true, telling: s.scan.telling}
	veil := &h.veil
	if h.follows = s.scan.over || len(raw) > 2*maxHeld && split > 0 || split > maxHeld || h.looks > maxLooks || endsOtherwise(tail); !h.follows && !s.scan.private && (!last || split == 0) {
		veil = nil
	}
	s.scan.private, s.scan.telling = false, false
	if h.follows || last || split == 0 && !s.chunks.Midway() {
		s.follow(raw, &before, math.MaxInt, veil)
		return h.release(raw, len(raw), before)
	}
	at := before
	_, payload := s.follow(raw, &at, math.MaxInt, nil)
	n, _ := s.follow(raw, &before, payload-split, veil)
	return h.release(raw, n, before)
}

// holdSize gives good without the digits at its end of a chunk's size of which more may come,
// behind those that it held before: the client gets no part of a size that turns out to be
// none.
func (s *stream) holdSize(good []byte) []byte {
	digits := s.chunks.SizeDigits()
	if digits == 0 && (s.edit == nil || len(s.edit.held.size) == 0) {
		return good
	}
	if s.edit == nil {
		s.edit = &editor{held: new(held)}
	}
	h := s.edit.held
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
		h.passed()
		h.whole, out = whole, whole.B
	}
	h.size = append(h.size[:0], size...)
	return out
}

// endsOtherwise says whether the beginning of an event is of a stream whose events do not
// end with an empty line, or a comment: it is shown as it comes.
func endsOtherwise(tail []byte) bool {
	if len(tail) == 0 {
		return false
	}
	if tail[0] == ':' && tail[len(tail)-1] == '\n' {
		return true
	}
	if cr := bytes.IndexByte(tail, '\r'); cr >= 0 && cr+1 < len(tail) && tail[cr+1] != '\n' {
		return true
	}
	lines := bytes.Count(tail, dataLine)
	if bytes.HasPrefix(tail, dataLine[1:]) {
		lines++
	}
	return lines > 1 // no engine spreads JSON over several
}

var dataLine = []byte("\ndata:")

// follow goes over raw up to n bytes of payload, which the veil, where there is one,
// looks at; c is the framing.
func (s *stream) follow(raw []byte, c *upstream.Chunks, n int, v *veil) (at, payload int) {
	var told [][]byte
	for at < len(raw) && payload < n {
		before := *c
		took, part := len(raw)-at, raw[at:]
		if s.chunked {
			took, part, _ = c.Next(raw[at:])
		}
		if over := payload + len(part) - n; over > 0 {
			if took, part = took-over, part[:len(part)-over]; s.chunked {
				*c = before
				_, _, _ = c.Next(raw[at : at+took])
			}
		}
		if took == 0 {
			break
		}
		switch {
		case v == nil:
		case v.telling:
			told = append(told, part)
		default:
			v.feed(part)
		}
		at += took
		payload += len(part)
	}
	if len(told) > 0 {
		v.feedAll(told)
	}
	return at, payload
}

// join puts p behind what is held, which is not held any more.
func (h *held) join(p []byte) []byte {
	h.passed() // where nobody has said so
	h.whole = membudget.Default.Get(len(h.buf.B) + len(p))
	copy(h.whole.B[copy(h.whole.B, h.buf.B):], p)
	membudget.Default.Put(h.buf)
	h.buf = nil
	return h.whole.B
}

// release gives the first n of raw, and holds what follows, before which the framing
// stands at c.
func (h *held) release(raw []byte, n int, c upstream.Chunks) []byte {
	h.chunks = c
	switch {
	case n == 0 && h.whole != nil:
		h.buf, h.whole = h.whole, nil
	case n < len(raw):
		h.buf = membudget.Default.Get(len(raw) - n)
		copy(h.buf.B, raw[n:])
	}
	return raw[:n]
}
