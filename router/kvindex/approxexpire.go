package kvindex

import "time"

// Removal from an Approx: above the memory bound and after the time to live.

// trimStep is the number of blocks that are removed at a time.
const trimStep = 64

// trim removes blocks above the memory bound, the oldest of all shards first, and checks one
// shard's expiry, so that a shard without requests does not keep expired blocks.
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
			return // other callers have emptied it and continue
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

// stale may be called without the lock.
func (s *approxShard) stale(now time.Duration) bool {
	oldest := s.oldest.Load()
	return oldest != noObservation && s.approx.isExpired(time.Duration(oldest), now)
}

// approxStep bounds how many blocks are removed while a shard's lock is held once, and so by one
// request: after a pause in traffic everything has expired at once.
const approxStep = 128

func (s *approxShard) expire(now time.Duration) {
	for n := 0; n < approxStep && s.first != 0 && s.approx.isExpired(s.seen.at(s.first).at, now); {
		k := min(int(s.seen.at(s.first).n), approxStep-n)
		s.dropTail(s.first, k)
		n += k
	}
}

// startSweep removes a shard's remaining expired blocks, and those of all other shards, on a
// goroutine that ends when nothing is expired.
func (a *Approx) startSweep(s *approxShard, now time.Duration) {
	if s.stale(now) && a.sweeping.CompareAndSwap(false, true) {
		go a.sweep()
	}
}

func (a *Approx) sweep() {
	defer a.sweeping.Store(false)
	for i := range a.shards {
		for s := &a.shards[i]; s.stale(a.clock.Now()); {
			s.mu.Lock()
			s.expire(a.clock.Now())
			s.unlock()
			yield()
		}
	}
}

// dropTail removes the last n blocks of an observation, and the observation with its last block.
// flushEvicted removes them from the index.
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

// remove removes an observation whose blocks are gone or belong to another one.
func (s *approxShard) remove(e uint32) {
	x := s.seen.at(e)
	if r := &s.ranks[x.slot]; r.get(uint64(x.first)) == e {
		r.remove(uint64(x.first))
	}
	s.unlink(e)
	s.seen.free(e)
}

// flushEvicted removes the dropped blocks from the index.
func (s *approxShard) flushEvicted() {
	if len(s.evicting) > 0 {
		s.approx.index.removeSpans(s.evictingSlot, s.evicting)
		s.evicting = s.evicting[:0]
	}
}
