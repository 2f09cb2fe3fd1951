package kvindex

import (
	"math"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// What an Approx sees: the blocks of a prompt, as far as they are new and as far as they come
// again.

// provenance is how blocks came to be seen.
type provenance uint8

const (
	seenCached   provenance = iota // the engine had them
	seenSent                       // a request brings them
	seenImported                   // by the process before this one: any of them may be asked for by its hash
)

// observe notes the blocks of seqs, which follow the last one of sighting parent if that is
// not 0, as seen now. It says how many are new, and the sighting that ends with the last.
func (s *approxShard) observe(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, source provenance, parent uint32) (added int, last uint32) {
	s.flushEvicted()
	for int(slot) >= len(s.ranks) {
		s.ranks = append(s.ranks, table{})
	}
	r := &s.ranks[slot]
	last = parent
	for len(seqs) > 0 {
		n := 1
		switch e := r.get(uint64(seqs[0])); {
		case e == 0:
			n, last = s.insert(slot, seqs, now, source, last)
			added += n
		case e != last: // else a block follows itself
			n, last = s.refresh(seqs, now, source, e, last)
		}
		seqs = seqs[n:]
	}
	return added, last
}

// insert makes sightings of the blocks of seqs as far as none begins there; none does with the
// first, and behind it only where blocks have gone from before others. They are put behind parent on its older side: a block is put behind its
// successors' age, so that a prompt is forgotten from its end on and never with a hole in it.
func (s *approxShard) insert(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, source provenance, parent uint32) (n int, last uint32) {
	for n = 1; n < len(seqs) && seqs[n] != seqs[0]; n++ {
	}
	if r := &s.ranks[slot]; s.hasGaps() {
		for i := 1; i < n; i++ {
			if i%maxPrefetch == 1 {
				s.sink += r.prefetch(seqs[i:n])
			}
			if r.get(uint64(seqs[i])) != 0 {
				n = i
			}
		}
	}
	s.store(slot, seqs[:n], parent)
	last = parent
	for i := 0; i < n; {
		x := observation{span: span{s.places[i], 1}, first: seqs[i], at: now, slot: slot, unconfirmed: source == seenSent}
		i++
		for limit := int32(maxSpan); source != seenImported && i < n && x.n < limit && s.places[i] == x.end(); i++ {
			x.n++
		}
		last = s.insertObservation(x, last)
	}
	return n, last
}

// insertObservation takes a sighting in, on the older side of another, 0 for the latest end. Where one
// begins with the same block already, which two blocks of one hash can bring about, it could
// not be found, and goes again; then the other is given.
func (s *approxShard) insertObservation(x observation, newer uint32) uint32 {
	e := s.seen.alloc()
	*s.seen.at(e) = x
	s.link(e, newer)
	s.countFollower(newer)
	s.blocks += int(x.n)
	if r := &s.ranks[x.slot]; r.get(uint64(x.first)) == 0 {
		r.put(uint64(x.first), e)
		return e
	}
	s.dropTail(e, int(x.n))
	s.flushEvicted()
	return newer
}

// countFollower counts what has been put behind a sighting; 0 is none.
func (s *approxShard) countFollower(e uint32) {
	if e != 0 {
		if x := s.seen.at(e); x.followers < math.MaxUint8 {
			x.followers++
		}
	}
}

// store puts blocks that follow the last one of a sighting into the index, and leaves in
// s.places where they lie.
func (s *approxShard) store(slot worker.Slot, seqs []blockhash.Seq, parent uint32) {
	ev := &s.ev // not on the stack: Store would have it moved to the heap
	if parent != 0 {
		p := s.seen.at(parent)
		ev.HasParent, ev.parentAt = true, placeAfter(p.place, int(p.n)-1)
	}
	s.places = slices.Grow(s.places[:0], len(seqs))[:len(seqs)]
	ev.Slot, ev.places, ev.seqs = slot, s.places, seqs
	s.approx.index.Store(ev)
	*ev = Stored{}
}

// refresh notes that the first of seqs, with which sighting e begins, was seen again behind
// sighting newer, and with it those of its blocks that come behind. What is left of them is
// another sighting's from then on. Two that have become one are made one.
func (s *approxShard) refresh(seqs []blockhash.Seq, now time.Duration, source provenance, e, newer uint32) (n int, last uint32) {
	n = 1
	if source != seenImported {
		n = s.matchLen(e, seqs)
	}
	s.split(e, n)
	x := s.seen.at(e)
	x.at, x.unconfirmed = now, false
	if x.newer != newer {
		s.unlink(e)
		s.link(e, newer)
	}
	if s.hasGaps() { // it may have lain behind what went and came again
		s.countFollower(newer)
	}
	if newer != 0 && source != seenImported {
		if y := s.seen.at(newer); !y.unconfirmed && y.end() == x.place && y.n+x.n <= maxSpan {
			y.n += x.n
			if y.followers < math.MaxUint8 { // else it stays that
				y.followers = uint8(min(max(int(y.followers)-1, 0)+int(x.followers), math.MaxUint8))
			}
			s.remove(e)
			return n, newer
		}
	}
	return n, e
}

// matchLen is how many of seqs, with the first of which sighting e begins, are its blocks.
// Sequence hashes are equal up to a place and different from there on.
func (s *approxShard) matchLen(e uint32, seqs []blockhash.Seq) int {
	x := s.seen.at(e)
	sh := &s.approx.index.shards[placeShard(x.place)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	length := sh.hashes(x.span)
	lo, hi := 1, min(len(length), len(seqs)) // equal below lo, different from hi on
	if length[hi-1] == uint64(seqs[hi-1]) {
		return hi
	}
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); length[mid] == uint64(seqs[mid]) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// split leaves the first n blocks to sighting e, and makes another one of the rest.
func (s *approxShard) split(e uint32, n int) {
	x := s.seen.at(e)
	if n >= int(x.n) {
		return
	}
	rest := *x
	rest.span = span{placeAfter(x.place, n), x.n - int32(n)}
	sh := &s.approx.index.shards[placeShard(x.place)]
	sh.mu.Lock()
	rest.first = blockhash.Seq(sh.hashes(rest.span)[0])
	sh.mu.Unlock()
	x.n = int32(n)
	s.blocks -= int(rest.n)
	s.insertObservation(rest, e)
}

// maxPrefetch bounds how many blocks touch looks at: more would drive each other out of the
// processor's caches before they are used.
const maxPrefetch = 64

// prefetch looks at the cells where blocks will be looked for one after another. Loads that
// do not wait for each other take the time of one.
func (t *table) prefetch(seqs []blockhash.Seq) (sink uint64) {
	if len(t.cells) == 0 {
		return 0
	}
	for _, seq := range seqs[:min(len(seqs), maxPrefetch)] {
		sink += uint64(t.cells[t.home(uint64(seq))].ref)
	}
	return sink
}
