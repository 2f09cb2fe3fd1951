package kvindex

import "time"

// What an Approx forgets: what is over its bound, and what is past its time.

// trimStep is how many blocks go at a time.
const trimStep = 64

// trim forgets what is over the bound, the oldest of all shards first, and looks
// after one shard's expiry, so that one that nobody asks does not keep what is past.
func (a *Approx) trim(now time.Duration) {
	if s := &a.shards[a.turn.Add(1)%approxShards]; s.stale(now) && s.mu.TryLock() {
		s.expire(now)
		s.unlock()
	}
	for a.over() {
		s := &a.shards[0]
		for i := range a.shards {
			if o := &a.shards[i]; o.oldest.Load() < s.oldest.Load() {
				s = o
			}
		}
		s.mu.Lock()
		if s.first == 0 {
			s.unlock()
			return // others have emptied it meanwhile, and are at it
		}
		for n := 0; n < trimStep && s.first != 0; n++ {
			s.forget(s.first)
			a.evicted.Add(1)
		}
		s.unlock()
	}
}

// stale may be asked without the lock.
func (s *approxShard) stale(now time.Duration) bool {
	oldest := s.oldest.Load()
	return oldest != noSighting && s.of.past(time.Duration(oldest), now)
}

// approxStep bounds how many blocks are forgotten under one hold of a shard's lock, and
// so by one request: when traffic comes again after a pause, all there was is past its
// time at once.
const approxStep = 128

func (s *approxShard) expire(now time.Duration) {
	for n := 0; n < approxStep && s.first != 0 && s.of.past(s.seen.at(s.first).at, now); n++ {
		s.forget(s.first)
	}
}

// sweepRest has what a shard has left past its time forgotten beside the callers, and
// that of all other shards with it. It ends when nothing is past its time.
func (a *Approx) sweepRest(s *approxShard, now time.Duration) {
	if s.stale(now) && a.sweeping.CompareAndSwap(false, true) {
		go a.sweep()
	}
}

func (a *Approx) sweep() {
	defer a.sweeping.Store(false)
	for i := range a.shards {
		for s := &a.shards[i]; s.stale(time.Since(a.start)); {
			s.mu.Lock()
			s.expire(time.Since(a.start))
			s.unlock()
			yield()
		}
	}
}

// forget takes a sighting away; the block leaves the index with withdraw at the latest. The
// one behind it is filed from then on. Had one of the same hash been filed already, which two
// blocks of one hash can bring about, the other could not be found any more, and goes too.
func (s *approxShard) forget(e uint32) {
	for e != 0 {
		s.unlink(e, e)
		x := s.seen.at(e)
		if x.slot != s.gone {
			s.withdraw()
			s.gone = x.slot
		}
		if x.place != 0 {
			s.places = append(s.places, x.place)
		}
		r, next := &s.ranks[x.slot], x.next
		if x.filed {
			r.remove(uint64(x.hash))
			s.filed--
		}
		if x.prev != 0 {
			s.seen.at(x.prev).next = 0
		}
		s.seen.free(e)
		if e = next; e != 0 {
			y := s.seen.at(e)
			y.prev = 0
			if y.filed || r.get(uint64(y.hash)) == 0 {
				s.file(e)
				return
			}
		}
	}
}

// withdraw takes what was forgotten out of the index.
func (s *approxShard) withdraw() {
	if len(s.places) > 0 {
		s.of.index.removeAt(s.gone, s.places)
		s.places = s.places[:0]
	}
}
