package schedule

import (
	"encoding/binary"
	"math"
	"slices"
	"time"

	"sluice/router/tokenize"
	"sluice/router/worker"
)

// A record stores its decisions encoded, one after another, as bytes without pointers: there are at
// least as many records as streams, each with the terms of all candidates, most of which are zero,
// small, or equal to those of the previous candidate. The encoding keeps the precision that is
// shown.
//
// A decision is the numbers of encodeDecision, as varints, followed by its terms. A term is the
// rank's number (see rankIDs), its marks, a set of those of its other numbers that are not zero,
// its cost in µs, then, according to the marks, its prices and its credit, and those numbers.

// The marks of a term; the feed's state is stored above them.
const (
	markApprox = 1 << iota
	markInFlight
	markExcluded
	markPriced   // its prices differ from those of the previous term
	markCredited // its credit differs from its cached tokens and is stored
	markFeed     = iota
)

// The marks of a decision, stored above its leg; the source of the prompt's ids is stored above them.
const (
	markSession   = 1 << 2 // it has a session
	markAtSession = 1 << 3
	markSource    = 4
)

// toMicros converts ms to µs with the rounding of round3.
func toMicros(ms float64) int64 { return int64(ms*1000 + 0.5) }

// maxEncodedTerm bounds the bytes of a decision's own numbers, at most eleven of five or ten bytes,
// and of one term: four of ten bytes, eleven of five and a few more.
const maxEncodedTerm = 128

// putVarint writes a varint at position at, which must have space, and returns the position after
// it.
func putVarint(b *[maxEncodedTerm]byte, at int, n uint64) int {
	if n < 0x80 {
		b[at&(maxEncodedTerm-1)] = byte(n)
		return at + 1
	}
	return putLongVarint(b, at, n)
}

func putLongVarint(b *[maxEncodedTerm]byte, at int, n uint64) int {
	for ; n >= 0x80; n >>= 7 {
		b[at&(maxEncodedTerm-1)] = byte(n) | 0x80
		at++
	}
	b[at&(maxEncodedTerm-1)] = byte(n)
	return at + 1
}

// putCandidate encodes a term; before is the previous term of the decision. It returns the number
// of bytes.
func putCandidate(b *[maxEncodedTerm]byte, t, before *candidateState, number uint32) (at int) {
	marks := uint64(t.feed) << markFeed
	if t.approx {
		marks |= markApprox
	}
	if t.inFlight {
		marks |= markInFlight
	}
	if t.excluded {
		marks |= markExcluded
	}
	priced, credited := t.price != before.price, t.credit != float64(t.cached)
	if priced {
		marks |= markPriced
	}
	if credited {
		marks |= markCredited
	}
	at = putVarint(b, at, uint64(number))
	at = putVarint(b, at, marks)
	have, haveAt := uint16(0), at
	at += 2
	at = putVarint(b, at, uint64(toMicros(t.cost)))
	if priced {
		for _, n := range t.price {
			at = putVarint(b, at, uint64(uint32(n)))
		}
	}
	if credited {
		binary.LittleEndian.PutUint64(b[at:], math.Float64bits(t.credit))
		at += 8
	}
	if t.queued != 0 {
		have |= 1
		at = putVarint(b, at, uint64(t.queued))
	}
	if t.blocks != 0 {
		have |= 1 << 1
		at = putVarint(b, at, uint64(uint32(t.blocks)))
	}
	if t.work != 0 {
		have |= 1 << 2
		at = putVarint(b, at, uint64(t.work))
	}
	if t.requests != 0 {
		have |= 1 << 3
		at = putVarint(b, at, uint64(uint32(t.requests)))
	}
	if t.waiting != -1 { // the engine has reported it
		have |= 1 << 4
		at = putVarint(b, at, uint64(uint32(t.waiting+1)))
	}
	if t.otherTokens != 0 {
		have |= 1 << 5
		at = putVarint(b, at, uint64(t.otherTokens))
	}
	if t.cached|t.depth|t.host|t.disk|t.lackingTokens != 0 {
		for i, n := range [...]int32{t.cached, t.depth, t.host, t.disk, t.lackingTokens} {
			if n != 0 {
				have |= 1 << (6 + i)
				at = putVarint(b, at, uint64(uint32(n)))
			}
		}
	}
	if t.evicted != 0 {
		have |= 1 << 11
		at = putVarint(b, at, uint64(uint32(t.evicted)))
	}
	binary.LittleEndian.PutUint16(b[haveAt:], have)
	return at
}

// encodeDecision appends a decision and its candidates.
func encodeDecision(b []byte, d *decision, terms []candidateState, ranks *rankIDs) []byte {
	b = slices.Grow(b, maxEncodedTerm*(1+len(terms)))
	scratch := func() *[maxEncodedTerm]byte { return (*[maxEncodedTerm]byte)(b[len(b) : len(b)+maxEncodedTerm]) }
	own := scratch()
	at := putVarint(own, 0, uint64(d.at))
	marked := int32(d.leg) | int32(d.source)<<markSource
	if d.session != 0 {
		marked |= markSession
	}
	if d.atSession {
		marked |= markAtSession
	}
	for _, n := range [...]int32{
		marked, d.attempt, d.prompt, d.output, d.candidates, d.excluded, d.races, d.chosen + 1, int32(len(terms)),
	} {
		at = putVarint(own, at, uint64(uint32(n)))
	}
	if d.session != 0 {
		at = putVarint(own, at, uint64(d.session))
	}
	b = b[:len(b)+at]
	before := &unpriced
	for i := range terms {
		t := &terms[i]
		b = b[:len(b)+putCandidate(scratch(), t, before, ranks.number(t.rank))]
		before = t
	}
	return b
}

// unpriced takes the place of the term before a decision's first.
var unpriced candidateState

// decodeDecision decodes a record's next decision with its terms, whose costs are in whole µs, and
// returns the bytes after it.
func decodeDecision(b []byte, terms []candidateState, ranks *rankIDs) (d decision, all []candidateState, rest []byte) {
	u := decoder{b}
	d.at = time.Duration(u.number())
	leg, n := int32(0), int32(0)
	for _, to := range [...]*int32{
		&leg, &d.attempt, &d.prompt, &d.output, &d.candidates, &d.excluded, &d.races, &d.chosen, &n,
	} {
		*to = int32(u.number())
	}
	d.leg, d.chosen, d.atSession = LegKind(leg&(markSession-1)), d.chosen-1, leg&markAtSession != 0
	d.source = tokenize.Source(leg >> markSource)
	if leg&markSession != 0 {
		d.session = uint32(u.number())
	}
	terms = slices.Grow(terms[:0], int(n))
	before := &unpriced
	for range n {
		t := candidateState{rank: ranks.rank(uint32(u.number()))}
		marks := u.number()
		t.approx, t.inFlight, t.excluded = marks&markApprox != 0, marks&markInFlight != 0, marks&markExcluded != 0
		t.feed = worker.FeedState(marks >> markFeed)
		have := binary.LittleEndian.Uint16(u.next(2))
		t.cost = float64(int64(u.number())) / 1000
		if t.price = before.price; marks&markPriced != 0 {
			for i := range t.price {
				t.price[i] = int32(u.number())
			}
		}
		if marks&markCredited != 0 {
			t.credit = math.Float64frombits(binary.LittleEndian.Uint64(u.next(8)))
		}
		number := func(i int) (n int64) {
			if have>>i&1 != 0 {
				n = int64(u.number())
			}
			return n
		}
		t.queued, t.blocks, t.work = number(0), int32(number(1)), number(2)
		t.requests, t.waiting, t.otherTokens = int32(number(3)), int32(number(4))-1, number(5)
		t.cached, t.depth = int32(number(6)), int32(number(7))
		t.host, t.disk, t.lackingTokens, t.evicted = int32(number(8)), int32(number(9)), int32(number(10)), int32(number(11))
		if marks&markCredited == 0 {
			t.credit = float64(t.cached)
		}
		terms = append(terms, t)
		before = &terms[len(terms)-1]
	}
	return d, terms, u.b
}

type decoder struct{ b []byte }

func (u *decoder) next(n int) []byte {
	head := u.b[:n]
	u.b = u.b[n:]
	return head
}

func (u *decoder) number() uint64 {
	v, n := binary.Uvarint(u.b)
	u.b = u.b[n:]
	return v
}
