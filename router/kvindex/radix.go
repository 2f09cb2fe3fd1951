package kvindex

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"sluice/router/worker"
)

// New returns an empty index.
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

// radix is a path-compressed radix index over sequence hashes, divided into shards.
//
// The hash of a prompt's first block selects its shard; each shard is an independent index (see
// shard). One engine table per rank maps the engine's hashes to places in the shards' extents.
// Splitting and joining nodes does not change places.
//
// Readers take no lock, never wait for a writer and allocate nothing. See node for the memory order
// and find.go for the guarantees.
//
// Writers: a writer takes its rank's lock, which orders the events of one rank, and within it the
// lock of one shard at a time, for one batch of blocks. Only the walk and the change of the shard
// need the shard's lock. Look-ups, insertions and removals of engine hashes and moves of tables
// need the rank's lock alone; they are most of the work and of its cache misses. Writers of
// different ranks therefore run in parallel even if all their prompts begin alike and lie in one
// shard. An extent publishes its generation and length in one atomic word (extent.genAndLen), by
// which an entry of an evicted block is recognised without the shard's lock.
//
// Cache lines: the tables' directories, which readers load, are apart from the fields that writers
// store. The writers of a shard share its line of counters; a rank's writer has its own. All
// writers share bytes and tick, which change once in many batches. Only directories contain
// pointers, so the garbage collector has little to scan.
type radix struct {
	spread      uint64 // odd, random: clients cannot choose which prompts and nodes collide
	factor      uint64 // odd, random: spreads the engines' hashes
	max         int64
	publishStep int64 // a shard publishes its memory use in steps of at least this many bytes
	validPlace  func(uint64) bool
	// ownerPlaces: the caller of Store records the places of its blocks itself (Stored.places) and
	// removes blocks by place. The engine tables stay empty and the index evicts nothing.
	ownerPlaces bool
	ranks       [worker.MaxSlots]atomic.Pointer[rankState]
	shards      [shardCount]shard

	bytes       atomic.Int64
	_           [cacheLine]byte
	tick        atomic.Uint32 // logical clock by which the age of leaves is measured
	clears      atomic.Uint32 // numbers the calls of Clear
	evicted     atomic.Uint64
	reserved    atomic.Int64 // sum of the ranks' reserved cells, below which their tables do not shrink
	checks      atomic.Uint64
	ranksMu     sync.Mutex    // held while a rank's state is created
	activeRanks []worker.Slot // ranks that have a state; guarded by ranksMu
}

// rankState is the index's state of one rank. The rank's lock is taken before any shard's. A second
// rank's lock is taken only by TryLock.
type rankState struct {
	mu          sync.Mutex // held during a whole Clear
	engineTable engineTable
	displaced   []uint64               // places in other shards, of blocks that an event replaced
	sink        uint64                 // result of prefetching loads, so that the compiler keeps them
	netStored   [NumTiers]uint64       // blocks stored minus blocks removed by its writer; any goroutine may load them
	evicted     [NumTiers]atomic.Int64 // blocks of these that other writers evicted
	cells       atomic.Int64           // approximate number of used cells of engineTable, for readers without the lock
	batch       batch
	_           [cacheLine]byte
}

// batchMax is the largest number of blocks that are stored or removed while a shard's lock is held
// once; ownerBatch is the same for an owner of places, whose blocks cost less.
const (
	batchMax   = 32
	ownerBatch = 256
)

// batch is the scratch space of a rank's writer.
type batch struct {
	cell  [batchMax]int32  // see engineTable.put
	place [batchMax]uint64 // the place that the engine hash had before; 0: none
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

// unlockRank ends a write and releases the rank's lock.
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

// tidyStep is the number of cells that one tidy moves. Each is a random memory access; together
// they take a writer well under a millisecond.
const tidyStep = 1 << 13

// tidy frees the cells of evicted blocks. The caller holds the rank's lock.
func (r *rankState) tidy(ix *radix) {
	if r.engineTable.stale.Load() > int64(r.engineTable.n)/4+64 {
		r.engineTable.ensureRoom(0, ix.factor, ix.validPlace)
		if r.engineTable.old != nil { // a large step: the rank may be idle
			r.engineTable.moveCells(tidyStep, ix.factor, ix.validPlace)
		}
		r.engineTable.ensureRoom(0, ix.factor, ix.validPlace)
		r.cells.Store(int64(r.engineTable.n))
	}
}

func (ix *radix) shardOf(seq uint64) *shard {
	return &ix.shards[seq*ix.spread>>(64-shardBits)]
}

// valid reports whether place p names a block that its rank has. The place of an evicted block is
// beyond the end of its extent or has an earlier generation.
func (ix *radix) valid(p uint64) bool {
	genAndLen := atomic.LoadUint32(&ix.shards[placeShard(p)].extents.read(placeExtent(p)).genAndLen)
	return uint16(genAndLen>>16) == placeGen(p) && placePos(p) < int(genAndLen&lenMask)
}

// reserveShare: one rank may reserve at most 1/reserveShare of what is left.
const reserveShare = 4

// Reserve implements Reserver. All reservations together are bounded by half of Options.MaxBytes,
// and each by a quarter of what is left of that. An engine's announced capacity is not verified, so
// an engine that announces too much must leave space for the others.
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
func (ix *radix) CachedBlocks(slot worker.Slot) (n int) {
	for _, blocks := range ix.CachedBlocksByTier(slot) {
		n += blocks
	}
	return n
}

// CachedBlocksByTier implements TierCounter.
func (ix *radix) CachedBlocksByTier(slot worker.Slot) (n [NumTiers]int) {
	if slot < worker.MaxSlots {
		if r := ix.ranks[slot].Load(); r != nil {
			for tier := range n {
				n[tier] = int(int64(atomic.LoadUint64(&r.netStored[tier])) - r.evicted[tier].Load())
			}
		}
	}
	return n
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

// Bytes implements Index: the memory that the entries take now. Memory that was allocated for nodes
// and extents and is free again is kept for later ones and does not count.
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

// publishShift sets publishStep: the unpublished memory of all shards together is less than 1/4096
// of the bound.
const publishShift = 12 + shardBits

// overLimit reports whether the index may exceed its bound.
func (ix *radix) overLimit() bool { return ix.bytes.Load() > ix.max-shardCount*ix.publishStep }

// Evicted implements Evictor.
func (ix *radix) Evicted() uint64 { return ix.evicted.Load() }
