package kvindex

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/dataplane/monotime"
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// ApproxOptions configures an Approx. Zero values select the defaults.
type ApproxOptions struct {
	MaxBytes int64         // [256 MiB]; above it the least recently seen blocks are dropped
	TTL      time.Duration // [2m]; blocks that were not seen for this long are dropped
}

// Approx predicts which blocks ranks have where there are no KV events: in text mode and with
// engines that publish none. It assumes that a rank has what the router has sent to it (Observe)
// until the engine contradicts (Confirm) or the time to live ends. All methods may be called from
// any goroutine.
//
// The predictions are stored in an index like New's, so Find takes no lock and waits for no writer,
// even if all prompts begin alike. Observations record what was seen when. They are sharded by a
// prompt's first block, with a lock per shard for writers. An observation is a stretch of blocks
// that were seen together and are contiguous in the index, which has their hashes; a table maps the
// hash of its first block to it. A long prompt therefore needs almost no memory besides the index,
// and is not processed block by block when it is seen again. A block is in the index exactly as
// long as it is in an observation. Both change under the shard's lock, which is taken before the
// index's own locks. The memory bound is shared by all shards, so a prefix that all prompts share
// may use all of it.
type Approx struct {
	max          int64
	ttl          atomic.Int64 // ns
	clock        monotime.Clock
	index        *radix
	observations atomic.Int64
	blocks       atomic.Int64  // blocks of all observations
	nextExpiry   atomic.Uint32 // the shard whose expiry is checked next
	sweeping     atomic.Bool   // a sweep is running
	evicted      atomic.Uint64
	shards       [approxShards]approxShard
}

const (
	approxShardBits = 6
	approxShards    = 1 << approxShardBits
)

type approxShard struct {
	mu     sync.Mutex
	approx *Approx
	// This shard's published contributions to Approx.observations and Approx.blocks, and its
	// current number of blocks.
	published, publishedBlocks, blocks int
	// oldest is the time of the first observation, for readers without the lock; noObservation if
	// there is none.
	oldest atomic.Int64

	// gapsSince is when blocks were last removed while later blocks of the prompt may have stayed,
	// or were added out of the order of seen. Observations that were seen later are reachable
	// through their predecessors.
	gapsSince time.Duration

	ranks []table // by slot: sequence hash of the first block -> observation
	// seen is the list of observations from the least to the most recently seen.
	seen         slab[observation]
	first, last  uint32
	evicting     []span      // blocks to be removed from the index
	evictingSlot worker.Slot // the slot of these blocks
	expired      []uint32    // scratch: observations to be removed
	places       []uint64    // scratch: places of new blocks
	ev           Stored      // the event that observe stores
	sink         uint64      // result of prefetching loads, so that the compiler keeps them
	_            [64]byte    // puts the next shard's lock on another cache line
}

const noObservation = math.MaxInt64

type observation struct {
	span
	first        blockhash.Seq
	at           time.Duration // on Approx.clock
	older, newer uint32
	slot         worker.Slot
	// unconfirmed: sent by one request and not yet expected by another.
	unconfirmed bool
	// followers is an upper bound of how many observations follow its blocks; 255 stands for more.
	followers uint8
}

// span is a number of blocks that are contiguous in one extent of the index.
type span struct {
	place uint64 // of the first block; see engineCell
	n     int32
}

func (x *span) end() uint64 { return placeAfter(x.place, int(x.n)) }

// Assumed memory of an observation: the record and its share of a half-full table.
const observationBytes = int64(unsafe.Sizeof(observation{})) + 2*int64(unsafe.Sizeof(cell{}))

// maxSpan bounds the blocks of an observation, and so how much is copied while a lock is held.
const maxSpan = 256

// NewApprox returns an empty Approx.
func NewApprox(opt ApproxOptions) *Approx {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = 256 << 20
	}
	a := &Approx{max: opt.MaxBytes, clock: monotime.StartClock()}
	a.SetTTL(opt.TTL)
	a.index = New(Options{MaxBytes: opt.MaxBytes}).(*radix)
	a.index.max, a.index.ownerPlaces = math.MaxInt64, true // this type bounds the memory, together with its observations
	for i := range a.shards {
		a.shards[i].approx = a
		a.shards[i].oldest.Store(noObservation)
	}
	return a
}

// SetTTL changes ApproxOptions.TTL, also for existing observations. Those that a shorter TTL makes
// too old are dropped gradually.
func (a *Approx) SetTTL(ttl time.Duration) {
	if ttl <= 0 {
		ttl = 2 * time.Minute
	}
	a.ttl.Store(int64(ttl))
}

// isExpired reports whether an observation made at time at has expired.
func (a *Approx) isExpired(at, now time.Duration) bool { return int64(now-at) > a.ttl.Load() }

// shard returns the shard of prompts that begin with block first. It uses other bits of the hash
// than the shard's tables, which would otherwise use one part of their cells only.
func (a *Approx) shard(first blockhash.Seq) *approxShard {
	return &a.shards[uint64(first)*a.index.spread>>(64-approxShardBits)]
}

// Observe records that a prompt with these blocks was sent to a rank, which will have them after
// the prefill. Call it when the rank is chosen.
func (a *Approx) Observe(slot worker.Slot, seqs []blockhash.Seq) {
	if slot >= worker.MaxSlots || len(seqs) == 0 {
		return
	}
	now := a.clock.Now()
	s := a.shard(seqs[0])
	s.mu.Lock()
	s.expire(now)
	s.observe(slot, seqs, now, seenSent, 0)
	s.unlock()
	a.trim(now)
	a.startSweep(s, now)
}

// overLimit reports whether the bound is exceeded. The index publishes its memory use in steps.
func (a *Approx) overLimit() bool {
	return a.index.bytes.Load()+shardCount*a.index.publishStep+a.observationMemory() > a.max
}

// observationMemory is the memory of the observations.
func (a *Approx) observationMemory() int64 { return a.observations.Load() * observationBytes }

// unlock publishes a writer's changes and releases the shard's lock.
func (s *approxShard) unlock() {
	s.flushEvicted()
	if n := s.seen.live(); n != s.published {
		s.approx.observations.Add(int64(n - s.published))
		s.published = n
	}
	if s.blocks != s.publishedBlocks {
		s.approx.blocks.Add(int64(s.blocks - s.publishedBlocks))
		s.publishedBlocks = s.blocks
	}
	oldest := int64(noObservation)
	if s.first != 0 {
		oldest = int64(s.seen.at(s.first).at)
	}
	s.oldest.Store(oldest)
	s.mu.Unlock()
}

// Confirm reports how many leading blocks of a prompt the engine found in its cache. These are
// certain. Of the other blocks, those that earlier requests had sent are dropped: the engine has
// evicted them or does not cache. Blocks that only this request has sent remain, because they have
// just been computed. Call it once per request, with the blocks passed to Observe.
func (a *Approx) Confirm(slot worker.Slot, seqs []blockhash.Seq, cachedBlocks int) {
	if slot >= worker.MaxSlots || len(seqs) == 0 {
		return
	}
	now := a.clock.Now()
	cachedBlocks = min(max(cachedBlocks, 0), len(seqs))
	s := a.shard(seqs[0])
	s.mu.Lock()
	s.expire(now)
	s.observe(slot, seqs[:cachedBlocks], now, seenCached, 0)
	s.forgetShared(slot, seqs[cachedBlocks:])
	s.unlock()
	a.trim(now)
	a.startSweep(s, now)
}

// forgetShared drops those blocks of seqs that more than one request has relied on. It drops the
// last of them first, so that a block is dropped before its predecessor.
func (s *approxShard) forgetShared(slot worker.Slot, seqs []blockhash.Seq) {
	r := &s.ranks[slot]
	keep, follows, gaps := 0, false, s.hasGaps() // with gaps, a block may remain that nothing before it leads to
	for i := 0; i < len(seqs); {
		if i%maxPrefetch == 0 {
			s.sink += r.prefetch(seqs[i:])
		}
		e := r.get(uint64(seqs[i]))
		if e == 0 {
			i++
			follows = false
			continue
		}
		n := s.matchLen(e, seqs[i:])
		i += n
		if s.seen.at(e).unconfirmed {
			follows = false
			continue
		}
		s.split(e, n)
		x := s.seen.at(e)
		if keep += int(x.followers); follows && !gaps {
			keep-- // drop this one too
		}
		x.unconfirmed, follows = true, true // a block is handled once even if its hash occurs twice
		s.expired = append(s.expired, e)
	}
	if keep > 0 {
		s.markGaps()
	}
	for i := len(s.expired) - 1; i >= 0; i-- {
		s.dropTail(s.expired[i], int(s.seen.at(s.expired[i]).n))
	}
	s.expired = s.expired[:0]
}

// Forget drops the blocks of a prompt on a rank, except the first keep ones. Call it when nobody is
// expected to ask for them again.
func (a *Approx) Forget(slot worker.Slot, seqs []blockhash.Seq, keep int) {
	if slot >= worker.MaxSlots || keep >= len(seqs) {
		return
	}
	s := a.shard(seqs[0])
	s.mu.Lock()
	s.forget(slot, seqs, keep)
	s.unlock()
}

// forget is forgetShared for all blocks from index keep on, also those that one request alone relies
// on.
func (s *approxShard) forget(slot worker.Slot, seqs []blockhash.Seq, keep int) {
	if int(slot) >= len(s.ranks) {
		return
	}
	r := &s.ranks[slot]
	staying, follows, gaps := 0, false, s.hasGaps()
	for i := 0; i < len(seqs); {
		e := r.get(uint64(seqs[i]))
		if e == 0 || slices.Contains(s.expired, e) { // a hash may occur twice
			i++
			follows = false
			continue
		}
		n := s.matchLen(e, seqs[i:])
		if i < keep {
			n = min(n, keep-i)
			s.split(e, n)
			i += n
			continue
		}
		i += n
		s.split(e, n)
		if staying += int(s.seen.at(e).followers); follows && !gaps {
			staying-- // drop this one too
		}
		follows = true
		s.expired = append(s.expired, e)
	}
	if staying > 0 {
		s.markGaps()
	}
	for i := len(s.expired) - 1; i >= 0; i-- {
		s.dropTail(s.expired[i], int(s.seen.at(s.expired[i]).n))
	}
	s.expired = s.expired[:0]
}

// markGaps records that from now on there may be blocks that their predecessors do not lead to. All
// of them were seen before now.
func (s *approxShard) markGaps() { s.gapsSince = s.approx.clock.Now() }

// hasGaps reports whether there may still be such blocks.
func (s *approxShard) hasGaps() bool { return s.first != 0 && s.seen.at(s.first).at <= s.gapsSince }

// Find is Index.Find. It first drops expired blocks, unless a writer has the shard or there are
// many of them; the result may then still contain them.
func (a *Approx) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) > 0 {
		now := a.clock.Now()
		if s := a.shard(seqs[0]); s.stale(now) && s.mu.TryLock() {
			s.expire(now)
			s.unlock()
			a.startSweep(s, now)
		}
	}
	a.index.Find(seqs, o)
}

// Prefetch loads the memory that a Find of these blocks reads first; see
// schedule.Scheduler.Prefetch.
func (a *Approx) Prefetch(seqs []blockhash.Seq) (sum uint64) {
	if len(seqs) == 0 {
		return 0
	}
	return a.index.shardOf(uint64(seqs[0])).table.prefetch(seqs)
}

// Clear removes all blocks of a rank and returns how many there were. It works in steps, between
// which other writers continue.
func (a *Approx) Clear(slot worker.Slot) (n int) {
	for i := range a.shards {
		s := &a.shards[i]
		for at := -1; ; yield() {
			s.mu.Lock()
			forgot, done := s.clearSome(slot, &at)
			s.unlock()
			if n += forgot; done {
				break
			}
		}
	}
	return n
}

// clearSome removes up to approxStep blocks of a rank, scanning its table downwards from cell at
// with wrap-around, and reports whether none are left.
func (s *approxShard) clearSome(slot worker.Slot, at *int) (n int, done bool) {
	if int(slot) >= len(s.ranks) {
		return 0, true
	}
	for r := &s.ranks[slot]; r.n > 0; {
		if *at < 0 || *at >= len(r.cells) {
			*at = len(r.cells) - 1
		}
		switch e := r.cells[*at].ref; {
		case e == 0:
			*at--
		case n == approxStep:
			return n, false
		default:
			k := min(int(s.seen.at(e).n), approxStep-n)
			s.dropTail(e, k)
			n += k
		}
	}
	return n, true
}

// Len returns the number of (rank, block) entries.
func (a *Approx) Len() int { return int(a.blocks.Load()) }

// Bytes returns the memory of the entries.
func (a *Approx) Bytes() int64 { return a.index.Bytes() + a.observationMemory() }

// Evicted returns how many entries were dropped to stay below the memory bound.
func (a *Approx) Evicted() uint64 { return a.evicted.Load() }

// link inserts an observation into the list on the older side of newer; 0 means the most recent
// end.
func (s *approxShard) link(e, newer uint32) {
	older := s.last
	if newer != 0 {
		older = s.seen.at(newer).older
		s.seen.at(newer).older = e
	} else {
		s.last = e
	}
	if older != 0 {
		s.seen.at(older).newer = e
	} else {
		s.first = e
	}
	x := s.seen.at(e)
	x.newer, x.older = newer, older
}

// unlink removes an observation from the list.
func (s *approxShard) unlink(e uint32) {
	x := s.seen.at(e)
	if x.older != 0 {
		s.seen.at(x.older).newer = x.newer
	} else {
		s.first = x.newer
	}
	if x.newer != 0 {
		s.seen.at(x.newer).older = x.older
	} else {
		s.last = x.older
	}
}
