package kvindex

import (
	"math"
	"slices"
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
// for nobody, also where all prompts begin alike. Beside it stands when each
// (rank, block) was last seen, and where it lies in the index: in shards by the first
// block of a prompt, each with a lock of its own for those who write. So a block is looked
// up in one table, and the index keeps none of its own for it. A block is in the index as
// long as it has a sighting; both change under the shard's lock, and the index's own locks
// come after it. The bound on memory is that of all shards together, so a beginning that all
// prompts share may have all of it.
type Approx struct {
	max       int64
	ttl       atomic.Int64 // ns
	start     time.Time
	index     *radix
	sightings atomic.Int64
	turn      atomic.Uint32 // whose expiry is looked after next
	sweeping  atomic.Bool   // a sweep is under way
	evicted   atomic.Uint64
	shards    [approxShards]approxShard
}

const (
	approxShardBits = 6
	approxShards    = 1 << approxShardBits
)

type approxShard struct {
	mu   sync.Mutex
	of   *Approx
	told int // its part of Approx.sightings
	// oldest is when first was seen, for others to read; noSighting where there is none.
	oldest atomic.Int64

	ranks []table // by slot: sequence hash -> sighting
	// seen is a list from what was seen longest ago to the latest.
	seen        slab[sighting]
	first, last uint32
	coming      []uint32    // sightings of blocks on their way into the index
	places      []uint64    // of blocks on their way out of it; scratch for those that come
	gone        worker.Slot // whose those are that go
	ev          Stored      // what observe stores
	sink        uint64      // what is looked at ahead, so that it does
	_           [64]byte    // the next one's lock is on a cache line of its own
}

const noSighting = math.MaxInt64

type sighting struct {
	hash         blockhash.Seq
	place        uint64        // in the index; see sideCell
	at           time.Duration // since Approx.start
	older, newer uint32
	slot         worker.Slot
	// fresh: brought by one request, so never yet counted on by another.
	fresh bool
}

// sightingBytes is what one is taken to cost: the record and a half-full table.
const sightingBytes = int64(unsafe.Sizeof(sighting{}) + 2*unsafe.Sizeof(cell{}))

// NewApprox makes an empty Approx.
func NewApprox(opt ApproxOptions) *Approx {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = 256 << 20
	}
	a := &Approx{max: opt.MaxBytes, start: time.Now()}
	a.SetTTL(opt.TTL)
	a.index = New(Options{MaxBytes: opt.MaxBytes}).(*radix)
	a.index.max, a.index.owned = math.MaxInt64, true // what goes at the bound is said here, with its sighting
	for i := range a.shards {
		a.shards[i].of = a
		a.shards[i].oldest.Store(noSighting)
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

// past says whether what was seen at a time is past its own.
func (a *Approx) past(at, now time.Duration) bool { return int64(now-at) > a.ttl.Load() }

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
	s.observe(slot, seqs, now, true)
	s.unlock()
	a.trim(now)
	a.sweepRest(s, now)
}

// over says whether more is held than may be; the index publishes what it takes by
// the grain.
func (a *Approx) over() bool {
	return a.index.bytes.Load()+shardCount*a.index.grain+a.sightings.Load()*sightingBytes > a.max
}

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

// unlock ends a writer's turn and tells the others of it.
func (s *approxShard) unlock() {
	s.withdraw()
	if n := s.seen.live(); n != s.told {
		s.of.sightings.Add(int64(n - s.told))
		s.told = n
	}
	oldest := int64(noSighting)
	if s.first != 0 {
		oldest = int64(s.seen.at(s.first).at)
	}
	s.oldest.Store(oldest)
	s.mu.Unlock()
}

// observe notes the blocks of seqs, which follow s.ev's parent if there is one, as seen
// now, and says how many are new.
func (s *approxShard) observe(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, fresh bool) (added int) {
	s.withdraw()
	ev := &s.ev // not on the stack: Store would have it moved to the heap
	ev.Slot = slot
	for int(ev.Slot) >= len(s.ranks) {
		s.ranks = append(s.ranks, table{})
	}
	r := &s.ranks[ev.Slot]
	var before, parent uint32 // the list goes on in front of this entry; those that come, behind that one
	store := func(end int) {
		if n := len(s.coming); n > 0 {
			from := end - n
			if from > 0 {
				ev.HasParent, ev.parentAt, ev.parentSeq = true, s.seen.at(parent).place, seqs[from-1]
			}
			s.places = slices.Grow(s.places, n)[:n]
			clear(s.places)
			ev.places, ev.seqs = s.places, seqs[from:end]
			added += s.of.index.Store(ev).Added
			for i, e := range s.coming {
				s.seen.at(e).place = s.places[i]
			}
			s.coming, s.places = s.coming[:0], s.places[:0]
		}
	}
	for i, seq := range seqs {
		if i%touchMost == 0 {
			s.sink += r.touch(seqs[i:])
		}
		e := r.get(uint64(seq))
		switch {
		case e == 0:
			e = s.seen.alloc()
			*s.seen.at(e) = sighting{hash: seq, slot: ev.Slot, fresh: fresh}
			r.put(uint64(seq), e)
			if len(s.coming) == 0 {
				parent = before
			}
			s.coming = append(s.coming, e)
		case e == before: // a block that follows itself
			store(i)
			continue
		default:
			store(i)
			s.unlink(e)
			s.seen.at(e).fresh = false
		}
		// A block is put behind its successors' age, so that a prompt is
		// forgotten from its end on and never with a hole in it.
		s.linkBefore(e, before)
		s.seen.at(e).at = now
		before = e
	}
	store(len(seqs))
	s.ev = Stored{}
	return added
}

// touchMost bounds how many blocks touch looks at: more would drive each other out of the
// processor's caches before they are used.
const touchMost = 64

// touch looks at the cells where blocks will be looked for one after another. Loads that
// do not wait for each other take the time of one.
func (t *table) touch(seqs []blockhash.Seq) (sink uint64) {
	if len(t.cells) == 0 {
		return 0
	}
	for _, seq := range seqs[:min(len(seqs), touchMost)] {
		sink += uint64(t.cells[t.home(uint64(seq))].ref)
	}
	return sink
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
	if int(slot) < len(s.ranks) {
		for i, seq := range seqs[cachedBlocks:] {
			if i%touchMost == 0 {
				s.sink += s.ranks[slot].touch(seqs[cachedBlocks+i:])
			}
			if e := s.ranks[slot].get(uint64(seq)); e != 0 && !s.seen.at(e).fresh {
				s.forget(e)
			}
		}
	}
	s.observe(slot, seqs[:cachedBlocks], now, false)
	s.unlock()
	a.trim(now)
	a.sweepRest(s, now)
}

// Find is as Index.Find. What is past its time it forgets first, unless somebody is
// writing there or there is much of it: then it may tell of it for that moment longer.
func (a *Approx) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) > 0 {
		now := time.Since(a.start)
		if s := a.shard(seqs[0]); s.stale(now) && s.mu.TryLock() {
			s.expire(now)
			s.unlock()
			a.sweepRest(s, now)
		}
	}
	a.index.Find(seqs, o)
}

// Ahead looks at the memory that a Find of these blocks will begin with: see
// schedule.Scheduler.Ahead.
func (a *Approx) Ahead(seqs []blockhash.Seq) (sum uint64) {
	if len(seqs) == 0 {
		return 0
	}
	return a.index.shardOf(uint64(seqs[0])).table.touch(seqs)
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
			s.forget(e)
			n++
		}
	}
	return n, true
}

// Len is the number of (rank, block) entries.
func (a *Approx) Len() int { return int(a.sightings.Load()) }

// Bytes is the memory the entries take.
func (a *Approx) Bytes() int64 { return a.index.Bytes() + a.sightings.Load()*sightingBytes }

// Evicted is how many entries the bound on memory has cost so far.
func (a *Approx) Evicted() uint64 { return a.evicted.Load() }

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

// forget takes a sighting away; the block leaves the index with withdraw at the
// latest.
func (s *approxShard) forget(e uint32) {
	s.unlink(e)
	x := s.seen.at(e)
	if x.slot != s.gone {
		s.withdraw()
		s.gone = x.slot
	}
	if x.place != 0 {
		s.places = append(s.places, x.place)
	}
	s.ranks[x.slot].remove(uint64(x.hash))
	s.seen.free(e)
}

// withdraw takes what was forgotten out of the index.
func (s *approxShard) withdraw() {
	if len(s.places) > 0 {
		s.of.index.removeAt(s.gone, s.places)
		s.places = s.places[:0]
	}
}

// linkBefore puts e next to newer on its older side; 0 means the latest end.
func (s *approxShard) linkBefore(e, newer uint32) {
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
	s.seen.at(e).older, s.seen.at(e).newer = older, newer
}

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
	x.older, x.newer = 0, 0
}
