package kvindex

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"sluice/router/worker"
)

// New makes the index.
func New(opt Options) Index {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = defaultMaxBytes
	}
	ix := &radix{max: opt.MaxBytes, publishStep: opt.MaxBytes >> publishShift, spread: rand.Uint64() | 1, factor: rand.Uint64() | 1}
	for i := range ix.shards {
		ix.shards[i].init(ix, uint64(i))
	}
	ix.validPlace = ix.valid
	return ix
}

// radix is a path-compressed radix index over sequence hashes, cut into shards.
//
// A prompt lies in one shard, chosen by the hash of its first block, and a shard is
// an index by itself: see shard. What ranks know of their engines' hashes lies in
// side tables, one a rank, which lead to places in the shards' runs; splits and joins
// leave places alone.
//
// Readers take no lock, never wait for a writer and allocate nothing; see fragment
// for the memory order and find.go for what they are promised.
//
// Writers. A writer takes its rank's lock, which orders what one rank says, and
// under it the lock of one shard at a time, for one batch of blocks. Only the walk
// and the change of the shard happen under the second: the engine's hashes are
// looked up, entered and taken out, tables are moved, all under the first. That is
// the larger part of the work and most of its cache misses, so writers of different
// ranks go on side by side even while all their prompts begin alike and lie in one
// shard. An entry is told from one whose block was evicted by two numbers that a run
// publishes in one atomic word (run.life), so no shard is locked for that.
//
// Cache lines. What readers load (the tables' directories) is apart from what
// writers store; a shard's writers share its line of counters, a rank's writer has
// its own; common to all writers are bytes and tick, which change once in many
// batches. Nothing here but directories holds pointers, so
// the garbage collector passes by.
type radix struct {
	spread      uint64 // odd, random: which prompts and fragments meet cannot be chosen from outside
	factor      uint64 // odd, random: spreads engines' hashes
	max         int64
	publishStep int64 // a shard publishes no less than this of what its entries take
	validPlace  func(uint64) bool
	// owned: whoever stores keeps himself where its blocks lie (Stored.places), beside what
	// else he keeps of them, and takes them away by that. The side tables stay empty, and
	// nothing is evicted here.
	ownerPlaces bool
	ranks       [worker.MaxSlots]atomic.Pointer[rankState]
	shards      [shardCount]shard

	bytes       atomic.Int64
	_           [cacheLine]byte
	tick        atomic.Uint32 // the time by which leaves are cold
	clears      atomic.Uint32 // numbers the Clears
	evicted     atomic.Uint64
	reserved    atomic.Int64 // cells that all ranks' tables are never to go below
	checks      atomic.Uint64
	ranksMu     sync.Mutex    // held while a rank's state is made
	activeRanks []worker.Slot // those that have one; under births
}

// rankState is what the index knows of one rank. The rank's lock comes before any
// shard's, and no two ranks' are held at a time but by tries.
type rankState struct {
	mu          sync.Mutex // held through a whole Clear
	engineTable engineTable
	displaced   []uint64     // places in other shards, of blocks that an event has replaced
	sink        uint64       // what is looked at ahead, so that it does
	netStored   uint64       // blocks it has stored less those it has taken away; loaded by anyone
	evicted     atomic.Int64 // of those, blocks that others took away
	cells       atomic.Int64 // about how many are in use in side, for who has no lock
	batch       batch
	_           [cacheLine]byte
}

// batchMax is the most blocks that are placed or taken away under one hold of a
// shard's lock; ownerBatch likewise of an owner of places, for whom that is less work.
const (
	batchMax   = 32
	ownerBatch = 256
)

// batch is the scratch space of a rank's writer.
type batch struct {
	cell  [batchMax]int32  // see engineTable.put
	place [batchMax]uint64 // what the engine's hash stood for until now; 0: nothing
}

func (ix *radix) rank(slot worker.Slot) *rankState {
	if r := ix.ranks[slot].Load(); r != nil {
		return r
	}
	ix.ranksMu.Lock()
	defer ix.ranksMu.Unlock()
	if ix.ranks[slot].Load() == nil {
		ix.ranks[slot].Store(new(rankState))
		ix.activeRanks = append(ix.activeRanks, slot)
	}
	return ix.ranks[slot].Load()
}

// unlockRank ends a writer's turn.
func (ix *radix) unlockRank(rank *rankState) {
	if ix.overLimit() {
		ix.evict(rank)
	}
	if n := int64(rank.engineTable.n); n>>5 != rank.cells.Load()>>5 {
		rank.cells.Store(n)
	}
	if invariants {
		ix.checkSome(rank)
	}
	rank.mu.Unlock()
}

// tidyStep is how many cells a tidy moves at once: as many as take a writer well under
// a millisecond, though each is a load from anywhere.
const tidyStep = 1 << 13

// tidy gives back the cells whose blocks were evicted. The caller has the rank's lock.
func (r *rankState) tidy(ix *radix) {
	if r.engineTable.stale.Load() > int64(r.engineTable.n)/4+64 {
		r.engineTable.ensureRoom(0, ix.factor, ix.validPlace)
		if r.engineTable.old != nil { // a good part: its rank may be idle
			r.engineTable.moveCells(tidyStep, ix.factor, ix.validPlace)
		}
		r.engineTable.ensureRoom(0, ix.factor, ix.validPlace)
		r.cells.Store(int64(r.engineTable.n))
	}
}

func (ix *radix) shardOf(seq uint64) *shard {
	return &ix.shards[seq*ix.spread>>(64-shardBits)]
}

// valid says whether a place names a block that its rank holds: what was evicted
// is past the end of its run, or the run is another by now.
func (ix *radix) valid(p uint64) bool {
	genAndLen := atomic.LoadUint32(&ix.shards[placeShard(p)].extents.read(placeExtent(p)).genAndLen)
	return uint16(genAndLen>>16) == placeGen(p) && placePos(p) < int(genAndLen&lenMask)
}

// reserveShare is into how many parts what is left for all is cut for one rank.
const reserveShare = 4

// Reserve implements Reserver. What is reserved for all ranks together is bounded
// by half of Options.MaxBytes, and for one by a quarter of what others have left of
// that: an engine's announcement is its word alone, and one that says too much must
// leave room for those after it.
func (ix *radix) Reserve(slot worker.Slot, blocks int) {
	if slot >= worker.MaxSlots || blocks <= 0 {
		return
	}
	rank := ix.rank(slot)
	rank.mu.Lock()
	defer rank.mu.Unlock()
	floor := rank.engineTable.floor
	if allowed := (ix.max/2 - (ix.reserved.Load()-int64(floor))*16) / 20 / reserveShare; int64(blocks) > allowed {
		blocks = int(max(0, allowed))
	}
	rank.engineTable.reserve(blocks, ix.factor, ix.validPlace)
	ix.reserved.Add(int64(rank.engineTable.floor - floor))
}

// CachedBlocks implements Index.
func (ix *radix) CachedBlocks(slot worker.Slot) int {
	if slot < worker.MaxSlots {
		if r := ix.ranks[slot].Load(); r != nil {
			return int(int64(atomic.LoadUint64(&r.netStored)) - r.evicted.Load())
		}
	}
	return 0
}

// Len implements Index.
func (ix *radix) Len() (n int) {
	for i := range ix.shards {
		sh := &ix.shards[i]
		sh.mu.Lock()
		n += sh.len
		sh.mu.Unlock()
	}
	return n
}

// Bytes implements Index: what the entries take now. Memory once taken for nodes
// and runs is kept for later ones and not counted twice.
func (ix *radix) Bytes() int64 {
	n := ix.bytes.Load()
	for i := range ix.shards {
		sh := &ix.shards[i]
		sh.mu.Lock()
		n += sh.memoryUse() - sh.used
		sh.mu.Unlock()
	}
	return n
}

// publishShift makes a grain of the bound: over all shards what is not published is
// less than a four-thousandth of it.
const publishShift = 12 + shardBits

// overLimit says whether the index may be past its bound.
func (ix *radix) overLimit() bool { return ix.bytes.Load() > ix.max-shardCount*ix.publishStep }

// Evicted implements Evictor.
func (ix *radix) Evicted() uint64 { return ix.evicted.Load() }
