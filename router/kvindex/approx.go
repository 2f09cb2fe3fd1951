package kvindex

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// ApproxOptions of an Approx; zero values mean the default.
type ApproxOptions struct {
	MaxBytes int64         // [256 MiB]; at the bound what was seen longest ago goes first
	TTL      time.Duration // [2m]; what has not been seen for so long is forgotten
}

// Approx guesses what ranks hold where no events tell: in text mode and with
// engines that publish none. It believes what the router itself has sent where
// (Observe) until the engine says otherwise (Confirm) or time passes. All
// methods may be called from any goroutine.
//
// It is cut into shards by the first block of a prompt, each with a lock of its own:
// prompts that begin differently do not meet. Find is not free of locks, as that of
// Index is: it takes its shard's for reading, and waits while Observe or Confirm is
// at a prompt that begins with the same block, for as long as that takes (tens of
// nanoseconds a block). The bound on memory is that of all shards together, so a
// beginning that all prompts share may have all of it. Each call holds one lock at a
// time.
type Approx struct {
	max    int64
	ttl    time.Duration
	start  time.Time
	bytes  atomic.Int64
	turn   atomic.Uint32 // whose expiry is looked after next
	shards [approxShards]approxShard
}

const approxShards = 64

type approxShard struct {
	mu      sync.RWMutex
	of      *Approx
	graph   graph
	evicted uint64
	told    int64 // its part of Approx.bytes
	// oldest is when first was seen, for others to read; noSighting where there is none.
	oldest atomic.Int64

	// seen runs beside graph.entries, by the same numbers, as a list from the
	// entry seen longest ago to the latest.
	seen        []sighting
	first, last uint32
	_           [64]byte // the next one's lock is on a cache line of its own
}

const noSighting = math.MaxInt64

type sighting struct {
	older, newer uint32
	at           time.Duration // since Approx.start
	// fresh: brought by one request, so never yet counted on by another.
	fresh bool
}

// NewApprox makes an empty Approx.
func NewApprox(opt ApproxOptions) *Approx {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = 256 << 20
	}
	if opt.TTL <= 0 {
		opt.TTL = 2 * time.Minute
	}
	a := &Approx{max: opt.MaxBytes, ttl: opt.TTL, start: time.Now()}
	for i := range a.shards {
		s := &a.shards[i]
		s.of, s.seen = a, make([]sighting, 1)
		s.oldest.Store(noSighting)
	}
	return a
}

// shard is that of prompts that begin with a block.
func (a *Approx) shard(first blockhash.Seq) *approxShard {
	return &a.shards[uint64(first)*0x9e3779b97f4a7c15>>58]
}

// Observe notes that a prompt with these blocks was sent to a rank, which will
// hold them once it has computed them. Call it when the choice is made.
func (a *Approx) Observe(slot worker.Slot, seqs []blockhash.Seq) {
	if slot >= worker.MaxSlots || len(seqs) == 0 {
		return
	}
	now := time.Since(a.start)
	s := a.shard(seqs[0])
	s.mu.Lock()
	s.expire(now)
	s.observe(slot, seqs, now, true)
	s.unlock()
	a.trim(now)
}

// trim forgets what is over the bound, the oldest of all shards first, and looks
// after one shard's expiry, so that one that nobody asks does not keep what is past.
func (a *Approx) trim(now time.Duration) {
	if s := &a.shards[a.turn.Add(1)%approxShards]; s.stale(now) && s.mu.TryLock() {
		s.expire(now)
		s.unlock()
	}
	for a.bytes.Load() > a.max {
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
		for n := 0; n < 64 && s.first != 0 && a.bytes.Load()+s.bytes()-s.told > a.max; n++ {
			s.forget(s.first)
			s.evicted++
		}
		s.unlock()
	}
}

// unlock ends a writer's turn and tells the others of it.
func (s *approxShard) unlock() {
	n := s.bytes()
	s.of.bytes.Add(n - s.told)
	s.told = n
	oldest := int64(noSighting)
	if s.first != 0 {
		oldest = int64(s.seen[s.first].at)
	}
	s.oldest.Store(oldest)
	s.mu.Unlock()
}

func (s *approxShard) observe(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, fresh bool) {
	s.observeAfter(0, slot, seqs, now, fresh)
}

// observeAfter is observe for blocks that follow a node, 0 at the start of a prompt.
func (s *approxShard) observeAfter(parent uint32, slot worker.Slot, seqs []blockhash.Seq, now time.Duration, fresh bool) {
	var before uint32 // the list goes on in front of this entry
	for _, seq := range seqs {
		parent = s.graph.nodeFor(seq, parent)
		e := s.graph.entryOf(slot, Device, EngineHash(seq))
		if e == 0 {
			e, _ = s.graph.add(slot, Device, EngineHash(seq), parent)
			for int(e) >= len(s.seen) {
				s.seen = append(s.seen, sighting{})
			}
			s.seen[e] = sighting{fresh: fresh}
		} else {
			s.unlink(e)
			s.seen[e].fresh = false
		}
		// A block is put behind its successors' age, so that a prompt is
		// forgotten from its end on and never with a hole in it.
		s.linkBefore(e, before)
		s.seen[e].at = now
		before = e
	}
}

// Confirm tells how many leading blocks of a prompt the engine found in its
// cache when it began. Those are held for sure. Of the rest, what had been
// counted on from earlier requests is withdrawn: the engine had dropped it, or
// does not cache. What only this request brought stays, for it has just been
// computed. Call it once a request, with the blocks given to Observe.
func (a *Approx) Confirm(slot worker.Slot, seqs []blockhash.Seq, cachedBlocks int) {
	if slot >= worker.MaxSlots || len(seqs) == 0 {
		return
	}
	now := time.Since(a.start)
	cachedBlocks = min(max(cachedBlocks, 0), len(seqs))
	s := a.shard(seqs[0])
	s.mu.Lock()
	s.expire(now)
	for _, seq := range seqs[cachedBlocks:] {
		if e := s.graph.entryOf(slot, Device, EngineHash(seq)); e != 0 && !s.seen[e].fresh {
			s.forget(e)
		}
	}
	s.observe(slot, seqs[:cachedBlocks], now, false)
	s.unlock()
	a.trim(now)
}

// Find is as Index.Find, but for the lock.
func (a *Approx) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) == 0 {
		o.Reset()
		return
	}
	now := time.Since(a.start)
	s := a.shard(seqs[0])
	if s.stale(now) {
		s.mu.Lock()
		s.expire(now)
		s.unlock()
	}
	s.mu.RLock()
	s.graph.find(seqs, o)
	s.mu.RUnlock()
}

// Clear forgets everything of a rank and returns how many blocks it held.
func (a *Approx) Clear(slot worker.Slot) (n int) {
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.Lock()
		if int(slot) < len(s.graph.ranks) {
			for _, c := range s.graph.ranks[slot].byHash[Device].cells {
				if c.ref != 0 {
					s.unlink(c.ref)
				}
			}
			n += s.graph.clear(slot)
		}
		s.unlock()
	}
	return n
}

// Len is the number of (rank, block) entries.
func (a *Approx) Len() (n int) {
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.RLock()
		n += s.graph.len
		s.mu.RUnlock()
	}
	return n
}

// Bytes is the memory the entries take.
func (a *Approx) Bytes() int64 { return a.bytes.Load() }

// Evicted is how many entries the bound on memory has cost so far.
func (a *Approx) Evicted() (n uint64) {
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.RLock()
		n += s.evicted
		s.mu.RUnlock()
	}
	return n
}

func (s *approxShard) bytes() int64 {
	return s.graph.bytes() + int64(s.graph.entries.live())*int64(unsafe.Sizeof(sighting{}))
}

// stale may be asked without the lock.
func (s *approxShard) stale(now time.Duration) bool {
	oldest := s.oldest.Load()
	return oldest != noSighting && now-time.Duration(oldest) > s.of.ttl
}

func (s *approxShard) expire(now time.Duration) {
	for s.first != 0 && now-s.seen[s.first].at > s.of.ttl {
		s.forget(s.first)
	}
}

func (s *approxShard) forget(e uint32) {
	s.unlink(e)
	s.graph.drop(e)
}

// linkBefore puts e next to newer on its older side; 0 means the latest end.
func (s *approxShard) linkBefore(e, newer uint32) {
	older := s.last
	if newer != 0 {
		older = s.seen[newer].older
		s.seen[newer].older = e
	} else {
		s.last = e
	}
	if older != 0 {
		s.seen[older].newer = e
	} else {
		s.first = e
	}
	s.seen[e].older, s.seen[e].newer = older, newer
}

func (s *approxShard) unlink(e uint32) {
	x := &s.seen[e]
	if x.older != 0 {
		s.seen[x.older].newer = x.newer
	} else {
		s.first = x.newer
	}
	if x.newer != 0 {
		s.seen[x.newer].older = x.older
	} else {
		s.last = x.older
	}
	x.older, x.newer = 0, 0
}
