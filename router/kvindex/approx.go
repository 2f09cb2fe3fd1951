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
// What is believed lies in an index of New's kind, so Find takes no lock and waits
// for nobody, also where all prompts begin alike. Beside it stands what was seen when: in
// shards by the first block of a prompt, each with a lock of its own for those who write.
// A sighting is of a stretch of blocks that came together and lie behind one another in the
// index, which has their hashes; a table leads to it from the first one's. So what a long
// prompt brings costs next to no memory beside the index, and what of it comes again is not
// looked at block by block. A block is in the index as long as it is in a sighting; both
// change under the shard's lock, and the index's own locks come after it. The bound on memory
// is that of all shards together, so a beginning that all prompts share may have all of it.
type Approx struct {
	max          int64
	ttl          atomic.Int64 // ns
	start        time.Time
	index        *radix
	observations atomic.Int64
	blocks       atomic.Int64  // that they are of
	nextExpiry   atomic.Uint32 // whose expiry is looked after next
	sweeping     atomic.Bool   // a sweep is under way
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
	// Its part of Approx.sightings and Approx.blocks as told, and of the latter as it is.
	published, publishedBlocks, blocks int
	// oldest is when first was seen, for others to read; noObservation where there is none.
	oldest atomic.Int64

	// torn is when blocks last went from before others, which may have stayed, or came beside
	// the order of seen: what was seen later is reached through all that is before it.
	gapsSince time.Duration

	ranks []table // by slot: sequence hash of its first block -> sighting
	// seen is a list from what was seen longest ago to the latest.
	seen         slab[observation]
	first, last  uint32
	evicting     []span      // of blocks on their way out of the index
	evictingSlot worker.Slot // whose those are
	expired      []uint32    // scratch: sightings on their way out of here
	places       []uint64    // scratch: where blocks that come lie
	ev           Stored      // what observe stores
	sink         uint64      // what is looked at ahead, so that it does
	_            [64]byte    // the next one's lock is on a cache line of its own
}

const noObservation = math.MaxInt64

type observation struct {
	span
	first        blockhash.Seq
	at           time.Duration // since Approx.start
	older, newer uint32
	slot         worker.Slot
	// fresh: brought by one request, so never yet counted on by another.
	unconfirmed bool
	// behind is no less than how many others lie behind blocks of it, or have lain there; 255
	// is for more.
	followers uint8
}

// span is blocks that lie one behind the other in one run of the index.
type span struct {
	place uint64 // of the first; see engineCell
	n     int32
}

func (x *span) end() uint64 { return placeAfter(x.place, int(x.n)) }

// What a sighting is taken to cost: the record, and a half-full table's share.
const observationBytes = int64(unsafe.Sizeof(observation{})) + 2*int64(unsafe.Sizeof(cell{}))

// maxSpan bounds the blocks of a sighting, and so what is copied of them under one hold
// of a lock.
const maxSpan = 256

// NewApprox makes an empty Approx.
func NewApprox(opt ApproxOptions) *Approx {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = 256 << 20
	}
	a := &Approx{max: opt.MaxBytes, start: time.Now()}
	a.SetTTL(opt.TTL)
	a.index = New(Options{MaxBytes: opt.MaxBytes}).(*radix)
	a.index.max, a.index.ownerPlaces = math.MaxInt64, true // what goes at the bound is said here, with its sighting
	for i := range a.shards {
		a.shards[i].approx = a
		a.shards[i].oldest.Store(noObservation)
	}
	return a
}

// SetTTL is ApproxOptions.TTL from now on, for what was seen before too: what a shorter
// one makes too old is forgotten by and by.
func (a *Approx) SetTTL(ttl time.Duration) {
	if ttl <= 0 {
		ttl = 2 * time.Minute
	}
	a.ttl.Store(int64(ttl))
}

// isExpired says whether what was seen at a time is past its own.
func (a *Approx) isExpired(at, now time.Duration) bool { return int64(now-at) > a.ttl.Load() }

// shard is that of prompts that begin with a block: not by the bits by which tables of a
// shard say where the block's cell is, or all first blocks would lie in one corner of them.
func (a *Approx) shard(first blockhash.Seq) *approxShard {
	return &a.shards[uint64(first)*a.index.spread>>(64-approxShardBits)]
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
	s.observe(slot, seqs, now, seenSent, 0)
	s.unlock()
	a.trim(now)
	a.startSweep(s, now)
}

// overLimit says whether more is held than may be; the index publishes what it takes by
// the grain.
func (a *Approx) overLimit() bool {
	return a.index.bytes.Load()+shardCount*a.index.publishStep+a.observationMemory() > a.max
}

// observationMemory is the memory that the sightings take.
func (a *Approx) observationMemory() int64 { return a.observations.Load() * observationBytes }

// unlock ends a writer's turn and tells the others of it.
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
	s.observe(slot, seqs[:cachedBlocks], now, seenCached, 0)
	s.forgetShared(slot, seqs[cachedBlocks:])
	s.unlock()
	a.trim(now)
	a.startSweep(s, now)
}

// forgetShared forgets of the blocks of seqs those that more than one request has counted on. The
// last of those goes first, so that whoever is behind another goes before it.
func (s *approxShard) forgetShared(slot worker.Slot, seqs []blockhash.Seq) {
	r := &s.ranks[slot]
	keep, follows, gaps := 0, false, s.hasGaps() // torn: what follows need not have been counted
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
			keep-- // this one goes as well
		}
		x.unconfirmed, follows = true, true // it comes once, also where its hash comes twice
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

// markGaps notes that from now on blocks may be held that are not reached through those before
// them. Those were seen by now, whoever's clock they go by.
func (s *approxShard) markGaps() { s.gapsSince = time.Since(s.approx.start) }

// hasGaps says whether there may be such blocks yet.
func (s *approxShard) hasGaps() bool { return s.first != 0 && s.seen.at(s.first).at <= s.gapsSince }

// Find is as Index.Find. What is past its time it forgets first, unless somebody is
// writing there or there is much of it: then it may tell of it for that moment longer.
func (a *Approx) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) > 0 {
		now := time.Since(a.start)
		if s := a.shard(seqs[0]); s.stale(now) && s.mu.TryLock() {
			s.expire(now)
			s.unlock()
			a.startSweep(s, now)
		}
	}
	a.index.Find(seqs, o)
}

// Prefetch looks at the memory that a Find of these blocks will begin with: see
// schedule.Scheduler.Ahead.
func (a *Approx) Prefetch(seqs []blockhash.Seq) (sum uint64) {
	if len(seqs) == 0 {
		return 0
	}
	return a.index.shardOf(uint64(seqs[0])).table.prefetch(seqs)
}

// Clear forgets everything of a rank and returns how many blocks it held. It does so
// in steps, between which others write.
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

// clearSome forgets approxStep blocks of a rank, looking at cells of its table from at
// down and round, and says whether all are gone.
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

// Len is the number of (rank, block) entries.
func (a *Approx) Len() int { return int(a.blocks.Load()) }

// Bytes is the memory the entries take.
func (a *Approx) Bytes() int64 { return a.index.Bytes() + a.observationMemory() }

// Evicted is how many entries the bound on memory has cost so far.
func (a *Approx) Evicted() uint64 { return a.evicted.Load() }

// link puts a sighting next to another on its older side; 0 means the latest end.
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

// unlink takes a sighting out of the list.
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
