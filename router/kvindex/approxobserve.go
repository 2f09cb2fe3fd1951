package kvindex

import (
	"math"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Recording of prompts in an Approx: new blocks and blocks that are seen again.

// provenance is how the router learned of blocks.
type provenance uint8

const (
	seenCached   provenance = iota // the engine reported them as cached
	seenSent                       // a request sends them
	seenImported                   // imported from the previous process: any of them may be looked up by its hash
)

// observe records the blocks of seqs, which follow the last block of observation parent if that is
// not 0, as seen now. It returns how many are new, and the observation that ends with the last
// block.
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
		case e != last: // else a block would follow itself
			n, last = s.refresh(seqs, now, source, e, last)
		}
		seqs = seqs[n:]
	}
	return added, last
}

// insert creates observations for the blocks of seqs up to the first with which an observation
// already begins. None begins with the first block; later ones may exist only if preceding blocks
// were dropped. A new observation is linked behind parent on its older side: each block is older
// than its predecessors in the list, so that a prompt is dropped from its end on and never gets a
// hole.
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

// insertObservation inserts an observation on the older side of newer, 0 for the most recent end.
// If an observation begins with the same block already, which two blocks with one hash can cause,
// the new one could not be found; it is removed again and the existing one is returned.
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

// countFollower counts an observation that follows observation e; 0 is none.
func (s *approxShard) countFollower(e uint32) {
	if e != 0 {
		if x := s.seen.at(e); x.followers < math.MaxUint8 {
			x.followers++
		}
	}
}

// store adds blocks that follow the last one of observation parent to the index and sets s.places
// to their places.
func (s *approxShard) store(slot worker.Slot, seqs []blockhash.Seq, parent uint32) {
	ev := &s.ev // a local variable would be moved to the heap by Store
	if parent != 0 {
		p := s.seen.at(parent)
		ev.HasParent, ev.parentAt = true, placeAfter(p.place, int(p.n)-1)
	}
	s.places = slices.Grow(s.places[:0], len(seqs))[:len(seqs)]
	ev.Slot, ev.places, ev.seqs = slot, s.places, seqs
	s.approx.index.Store(ev)
	*ev = Stored{}
}

// refresh records that the first block of seqs, with which observation e begins, was seen again
// behind observation newer, and likewise the blocks of e that follow in seqs. The remaining blocks
// of e become another observation. Two observations that have become contiguous are merged.
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
	if s.hasGaps() { // its predecessor may have been dropped and added again
		s.countFollower(newer)
	}
	if newer != 0 && source != seenImported {
		if y := s.seen.at(newer); !y.unconfirmed && y.end() == x.place && y.n+x.n <= maxSpan {
			y.n += x.n
			if y.followers < math.MaxUint8 { // 255 stands for more
				y.followers = uint8(min(max(int(y.followers)-1, 0)+int(x.followers), math.MaxUint8))
			}
			s.remove(e)
			return n, newer
		}
	}
	return n, e
}

// matchLen returns how many blocks of seqs are blocks of observation e, which begins with the first
// of them. The sequence hashes agree up to some position and differ from there on.
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

// split leaves the first n blocks in observation e and moves the rest to a new one.
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

// maxPrefetch bounds the blocks that prefetch loads: more would evict each other from the
// processor's caches before use.
const maxPrefetch = 64

// prefetch loads the cells of blocks that will be looked up one after another. Loads that do not
// depend on each other overlap.
func (t *table) prefetch(seqs []blockhash.Seq) (sink uint64) {
	if len(t.cells) == 0 {
		return 0
	}
	for _, seq := range seqs[:min(len(seqs), maxPrefetch)] {
		sink += uint64(t.cells[t.home(uint64(seq))].ref)
	}
	return sink
}
