package kvindex

import "time"

// What an Approx forgets: what is over its bound, and what is past its time.

// trimStep is how many blocks go at a time.
const trimStep = 64

// trim forgets what is over the bound, the oldest of all shards first, and looks
// after one shard's expiry, so that one that nobody asks does not keep what is past.
func (a *Approx) trim(now time.Duration) {
	if s := &a.shards[a.nextExpiry.Add(1)%approxShards]; s.stale(now) && s.mu.TryLock() {
		s.expire(now)
		s.unlock()
	}
	for a.overLimit() {
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
		for n := 0; n < trimStep && s.first != 0; {
			k := min(int(s.seen.at(s.first).n), trimStep-n)
			s.dropTail(s.first, k)
			n += k
			a.evicted.Add(uint64(k))
		}
		s.unlock()
	}
}

// stale may be asked without the lock.
func (s *approxShard) stale(now time.Duration) bool {
	oldest := s.oldest.Load()
	return oldest != noObservation && s.approx.isExpired(time.Duration(oldest), now)
}

// approxStep bounds how many blocks are forgotten under one hold of a shard's lock, and
// so by one request: when traffic comes again after a pause, all there was is past its
// time at once.
const approxStep = 128

func (s *approxShard) expire(now time.Duration) {
	for n := 0; n < approxStep && s.first != 0 && s.approx.isExpired(s.seen.at(s.first).at, now); {
		k := min(int(s.seen.at(s.first).n), approxStep-n)
		s.dropTail(s.first, k)
		n += k
	}
}

// startSweep has what a shard has left past its time forgotten beside the callers, and
// that of all other shards with it. It ends when nothing is past its time.
func (a *Approx) startSweep(s *approxShard, now time.Duration) {
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

// dropTail takes the last n blocks of a sighting away, and itself with the last of them; they
// leave the index with withdraw at the latest.
func (s *approxShard) dropTail(e uint32, n int) {
	x := s.seen.at(e)
	if x.slot != s.evictingSlot {
		s.flushEvicted()
		s.evictingSlot = x.slot
	}
	x.n -= int32(n)
	s.evicting = append(s.evicting, span{x.end(), int32(n)})
	if s.blocks -= n; x.n == 0 {
		s.remove(e)
	}
}

// remove takes a sighting away whose blocks are in none, or in another one.
func (s *approxShard) remove(e uint32) {
	x := s.seen.at(e)
	if r := &s.ranks[x.slot]; r.get(uint64(x.first)) == e {
		r.remove(uint64(x.first))
	}
	s.unlink(e)
	s.seen.free(e)
}

// flushEvicted takes what was forgotten out of the index.
func (s *approxShard) flushEvicted() {
	if len(s.evicting) > 0 {
		s.approx.index.removeSpans(s.evictingSlot, s.evicting)
		s.evicting = s.evicting[:0]
	}
}
