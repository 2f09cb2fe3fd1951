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
// block of a prompt, each with a lock of its own for those who write. A sighting names that
// of the block that came with it, right behind it, so a table has only what a walk begins at
// or branches off to: what a long prompt brings lies in memory as it is read, and a block of
// it costs no look at a table far from the caches. A block is in the index as
// long as it has a sighting; both change under the shard's lock, and the index's own locks
// come after it. The bound on memory is that of all shards together, so a beginning that all
// prompts share may have all of it.
type Approx struct {
	max       int64
	ttl       atomic.Int64 // ns
	start     time.Time
	index     *radix
	sightings atomic.Int64
	filed     atomic.Int64  // of those, how many are in a table
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
	mu sync.Mutex
	of *Approx
	// Its part of Approx.sightings and of Approx.filed, as told and as it is.
	told, filedTold, filed int
	// oldest is when first was seen, for others to read; noSighting where there is none.
	oldest atomic.Int64

	ranks []table // by slot: sequence hash -> sighting, of those that are filed
	// seen is a list from what was seen longest ago to the latest.
	seen        slab[sighting]
	first, last uint32
	coming      []uint32    // sightings of blocks on their way into the index, or out of here
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
	// next is the first block that came behind this one, prev this one's parent if it is
	// that parent's next; 0 for none. Whatever is not filed is the next of one that is held.
	next, prev uint32
	slot       worker.Slot
	// fresh: brought by one request, so never yet counted on by another.
	fresh bool
	filed bool // in the table of its rank
}

// What a sighting is taken to cost: the record, and if it is filed a half-full table's share.
const (
	sightingBytes = int64(unsafe.Sizeof(sighting{}))
	filedBytes    = 2 * int64(unsafe.Sizeof(cell{}))
)

// chainMost bounds how many sightings follow each other of which only the first is filed,
// so that a walk over a table, chain by chain, can be made in steps.
const chainMost = 64

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
	s.observe(slot, seqs, now, sawFresh, 0)
	s.unlock()
	a.trim(now)
	a.sweepRest(s, now)
}

// over says whether more is held than may be; the index publishes what it takes by
// the grain.
func (a *Approx) over() bool {
	return a.index.bytes.Load()+shardCount*a.index.grain+a.own() > a.max
}

// own is the memory that the sightings take.
func (a *Approx) own() int64 {
	return a.sightings.Load()*sightingBytes + a.filed.Load()*filedBytes
}

// unlock ends a writer's turn and tells the others of it.
func (s *approxShard) unlock() {
	s.withdraw()
	if n := s.seen.live(); n != s.told {
		s.of.sightings.Add(int64(n - s.told))
		s.told = n
	}
	if s.filed != s.filedTold {
		s.of.filed.Add(int64(s.filed - s.filedTold))
		s.filedTold = s.filed
	}
	oldest := int64(noSighting)
	if s.first != 0 {
		oldest = int64(s.seen.at(s.first).at)
	}
	s.oldest.Store(oldest)
	s.mu.Unlock()
}

// saw is how blocks came to be seen.
type saw uint8

const (
	sawAgain  saw = iota // the engine had them
	sawFresh             // a request brings them
	sawBefore            // by the process before this one: any of them may be asked for by its hash
)

// observe notes the blocks of seqs, which follow the block of sighting parent if that is not
// 0, as seen now. It says how many are new, and the sighting of the last.
func (s *approxShard) observe(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, how saw, parent uint32) (added int, last uint32) {
	s.withdraw()
	for int(slot) >= len(s.ranks) {
		s.ranks = append(s.ranks, table{})
	}
	r := &s.ranks[slot]
	last = parent
	for len(seqs) > 0 {
		n := 1
		switch e := s.behind(r, last, seqs[0]); {
		case e == 0:
			n, last = s.bring(slot, seqs, now, how, last)
			added += s.store(slot, seqs[:n])
		case e == last: // a block follows itself
		case how == sawBefore:
			_, last = s.again(seqs[:1], now, e, last)
		default:
			n, last = s.again(seqs, now, e, last)
		}
		if how == sawBefore {
			s.file(last)
		}
		seqs = seqs[n:]
	}
	return added, last
}

// behind is the sighting of a block behind that of sighting e, or, with 0, of a prompt's
// first; 0 where there is none.
func (s *approxShard) behind(r *table, e uint32, seq blockhash.Seq) uint32 {
	if e != 0 {
		if next := s.seen.at(e).next; next != 0 && s.seen.at(next).hash == seq {
			return next
		}
	}
	return r.get(uint64(seq))
}

// bring makes sightings of the blocks of seqs as far as they have none; the first has none.
// Those are put behind that of parent, on its older side: a block is put behind its
// successors' age, so that a prompt is forgotten from its end on and never with a hole in it.
func (s *approxShard) bring(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, how saw, parent uint32) (n int, last uint32) {
	r := &s.ranks[slot]
	last = parent
	older, p := s.last, (*sighting)(nil)
	if parent != 0 {
		p = s.seen.at(parent)
		older = p.older
	}
	for ; n < len(seqs); n++ {
		if n%touchMost == 0 {
			s.sink += r.touch(seqs[n:])
		}
		if n > 0 && r.get(uint64(seqs[n])) != 0 {
			break
		}
		e := s.seen.alloc()
		x := s.seen.at(e)
		*x = sighting{hash: seqs[n], at: now, newer: last, slot: slot, fresh: how == sawFresh}
		switch {
		case p == nil:
			s.last = e
		case p.next == 0:
			p.older, p.next, x.prev = e, e, last
		default:
			p.older = e
		}
		if n%chainMost == 0 || how == sawBefore {
			s.file(e)
		}
		s.coming = append(s.coming, e)
		last, p = e, x
	}
	p.older = older
	if older != 0 {
		s.seen.at(older).newer = last
	} else {
		s.first = last
	}
	return n, last
}

// store puts the blocks whose sightings are coming into the index.
func (s *approxShard) store(slot worker.Slot, seqs []blockhash.Seq) (added int) {
	ev := &s.ev // not on the stack: Store would have it moved to the heap
	if newer := s.seen.at(s.coming[0]).newer; newer != 0 {
		parent := s.seen.at(newer)
		ev.HasParent, ev.parentAt, ev.parentSeq = true, parent.place, parent.hash
	}
	s.places = slices.Grow(s.places, len(seqs))[:len(seqs)]
	clear(s.places)
	ev.Slot, ev.places, ev.seqs = slot, s.places, seqs
	added = s.of.index.Store(ev).Added
	for i, e := range s.coming {
		s.seen.at(e).place = s.places[i]
	}
	s.coming, s.places = s.coming[:0], s.places[:0]
	*ev = Stored{}
	return added
}

// again notes that the block of sighting first, the first of seqs, was seen again behind that
// of sighting newer, and those behind it with it as long as one was right behind the other
// before: these are moved at once.
func (s *approxShard) again(seqs []blockhash.Seq, now time.Duration, first, newer uint32) (n int, last uint32) {
	last = first
	x := s.seen.at(first)
	x.at, x.fresh = now, false
	for n = 1; n < len(seqs); n++ {
		if x.next == 0 || x.next != x.older || x.next == newer {
			break
		}
		y := s.seen.at(x.next)
		if y.hash != seqs[n] {
			break
		}
		last, x = x.next, y
		x.at, x.fresh = now, false
	}
	if s.seen.at(first).newer != newer {
		s.unlink(first, last)
		s.linkBefore(first, last, newer)
	}
	return n, last
}

// file has a sighting found by its hash.
func (s *approxShard) file(e uint32) {
	if x := s.seen.at(e); !x.filed {
		s.ranks[x.slot].put(uint64(x.hash), e)
		x.filed = true
		s.filed++
	}
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
	_, last := s.observe(slot, seqs[:cachedBlocks], now, sawAgain, 0)
	s.disown(slot, seqs[cachedBlocks:], last)
	s.unlock()
	a.trim(now)
	a.sweepRest(s, now)
}

// disown forgets of the blocks of seqs, which follow that of sighting last if that is not 0,
// those that more than one request has counted on.
func (s *approxShard) disown(slot worker.Slot, seqs []blockhash.Seq, last uint32) {
	r := &s.ranks[slot]
	for i, seq := range seqs {
		if last == 0 && i%touchMost == 0 {
			s.sink += r.touch(seqs[i:])
		}
		if last = s.behind(r, last, seq); last == 0 {
			continue
		}
		if x := s.seen.at(last); !x.fresh {
			x.fresh = true // it comes once, also where its hash comes twice
			s.coming = append(s.coming, last)
		}
	}
	s.forgetComing()
}

// forgetComing forgets what is coming, the last first, so that whoever is behind another
// goes before it. What has gone meanwhile, as forget says, is not fresh.
func (s *approxShard) forgetComing() {
	for i := len(s.coming) - 1; i >= 0; i-- {
		if e := s.coming[i]; s.seen.at(e).fresh {
			s.forget(e)
		}
	}
	s.coming = s.coming[:0]
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
		case n > approxStep-chainMost:
			return n, false
		default:
			before := s.seen.live()
			for first := e; e != 0 && (e == first || !s.seen.at(e).filed); e = s.seen.at(e).next {
				s.seen.at(e).fresh = true
				s.coming = append(s.coming, e)
			}
			s.forgetComing()
			n += before - s.seen.live()
		}
	}
	return n, true
}

// Len is the number of (rank, block) entries.
func (a *Approx) Len() int { return int(a.sightings.Load()) }

// Bytes is the memory the entries take.
func (a *Approx) Bytes() int64 { return a.index.Bytes() + a.own() }

// Evicted is how many entries the bound on memory has cost so far.
func (a *Approx) Evicted() uint64 { return a.evicted.Load() }

// linkBefore puts what lies from first, the newest, to last next to newer on its older side;
// 0 means the latest end.
func (s *approxShard) linkBefore(first, last, newer uint32) {
	older := s.last
	if newer != 0 {
		older = s.seen.at(newer).older
		s.seen.at(newer).older = first
	} else {
		s.last = first
	}
	if older != 0 {
		s.seen.at(older).newer = last
	} else {
		s.first = last
	}
	s.seen.at(first).newer, s.seen.at(last).older = newer, older
}

// unlink takes what lies from first, the newest, to last out of the list.
func (s *approxShard) unlink(first, last uint32) {
	newer, older := s.seen.at(first).newer, s.seen.at(last).older
	if older != 0 {
		s.seen.at(older).newer = newer
	} else {
		s.first = newer
	}
	if newer != 0 {
		s.seen.at(newer).older = older
	} else {
		s.last = older
	}
}
