package kvindex

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

const (
	shardBits  = 4
	shardCount = 1 << shardBits
)

// shard holds all prompts whose first block's hash selects it.
//
// A sequence hash names a block and all blocks before it, so a look-up needs no tree of children:
// the node table maps the hash of a node's first block to the node; the node's last hash tells
// whether the prompt contains the whole node; then the prompt's next hash is looked up in the
// table. A rank whose blocks end inside a node splits the node. Neighbouring nodes with the same
// holders are joined. A block lies in at most one node.
//
// One writer at a time, serialised by mu, changes the shard. Readers run concurrently.
type shard struct {
	table       nodeTable
	words       wordSlab
	yielders    yieldRequests
	readSamples readSamples
	_           [cacheLine]byte

	mu      sync.Mutex
	ix      *radix
	number  uint64
	extents extentSlab
	copies  map[copyOf]int // blocks with several engine hashes: the number beyond the first
	entries int            // engine table cells that name a block of this shard
	used    int64          // memory use as last published
	ops     uint32
	// unanchored counts what a writer cannot reach from the previous block: nodes behind a hole and
	// extents whose parent is gone.
	unanchored int
	// The list of extents that end in a leaf, by last use.
	oldest, newest uint32
	tidy           []worker.Slot // ranks whose tables contain many cells of evicted blocks

	len       int // (rank, tier, block) entries
	hasCopies atomic.Bool
	coldest   atomic.Uint64 // the tick of the oldest leaf's last use
	_         [cacheLine]byte
}

// copyOf names a block that a rank has in a tier under more than one engine hash.
type copyOf struct {
	extent uint32
	pos    uint16
	slot   worker.Slot
	tier   Tier
}

func (sh *shard) init(ix *radix, no uint64) {
	sh.ix, sh.number, sh.copies = ix, no, make(map[copyOf]int)
	sh.table.init(ix.spread)
	sh.coldest.Store(math.MaxUint64)
}

// lock takes the shard's lock for one batch of a writer.
func (sh *shard) lock() {
	sh.mu.Lock()
	sh.yielders.yieldToReaders()
}

// ticks is the number of batches of a shard per tick.
const ticks = 4

func (sh *shard) unlock() {
	if sh.ops++; sh.ops%ticks == 0 {
		sh.ix.tick.Add(1)
	}
	sh.account()
	sh.mu.Unlock()
}

// yieldRequests counts the readers that writers overtake repeatedly and that ask the writers to
// pause.
type yieldRequests struct{ atomic.Int32 }

// maxYield is the longest time for which a writer pauses for readers.
const maxYield = 200 * time.Microsecond

func (r *yieldRequests) yieldToReaders() {
	if r.Load() == 0 {
		return
	}
	for start := time.Now(); r.Load() > 0 && time.Since(start) < maxYield; {
		yield()
	}
}

// Assumed memory costs in bytes: a node with its slot of the node table and its share of empty
// slots, an extent, an engine table cell with its share of empty cells, and a copy.
const (
	nodeCost   = 64 + 8 + 16
	extentCost = 44
	entryCost  = 24
	copyCost   = 64
)

// memoryUse is the memory that the entries take, in bytes.
func (sh *shard) memoryUse() int64 {
	n := int64(sh.table.nodes.live())*nodeCost + int64(sh.extents.live)*extentCost +
		sh.words.inUse*8 + int64(len(sh.copies))*copyCost
	if !sh.ix.ownerPlaces {
		n += int64(sh.entries) * entryCost
	}
	return n
}

// account publishes the memory use, in steps of publishStep, and the age of the coldest leaf.
func (sh *shard) account() {
	if d := sh.memoryUse() - sh.used; d > sh.ix.publishStep || d < -sh.ix.publishStep {
		sh.ix.bytes.Add(d)
		sh.used += d
	}
	cold := uint64(math.MaxUint64)
	if sh.oldest != 0 {
		cold = uint64(sh.extents.at(sh.oldest).used)
	}
	if sh.coldest.Load() != cold {
		sh.coldest.Store(cold)
	}
	if has := len(sh.copies) > 0; has != sh.hasCopies.Load() {
		sh.hasCopies.Store(has)
	}
}

// addCounts adds to the number of blocks that a rank, whose lock the caller holds, has in a tier.
func (sh *shard) addCounts(slot worker.Slot, tier Tier, blocks int) {
	sh.len += blocks
	r := sh.ix.ranks[slot].Load()
	release(&r.netStored[tier], r.netStored[tier]+uint64(blocks))
}

// place returns the place of a block, as engine table cells store it.
func (sh *shard) place(ext uint32, pos int, tier Tier) uint64 {
	return placeOf(uint32(sh.number)<<extentBits|ext, pos, tier, sh.extents.at(ext).gen())
}

// hashAt returns the sequence hash at a position of an extent.
func (sh *shard) hashAt(r *extent, pos int) uint64 {
	p, at := sh.words.page(r.storage)
	return p[at+uint32(pos)]
}

// hashes returns the sequence hashes of a span. The caller holds the shard's lock.
func (sh *shard) hashes(x span) []uint64 {
	p, at := sh.words.page(sh.extents.at(placeExtent(x.place)).storage)
	return p[at+uint32(placePos(x.place)):][:x.n]
}

// nodeOf returns the node of an extent that contains a position, or 0 if the position is in a hole.
func (sh *shard) nodeOf(r *extent, pos int) uint32 {
	for id := r.tail; id != 0; id = sh.table.nodes.links(id).prev {
		if n := sh.table.nodes.at(id); n.off() <= pos {
			if pos < n.end() {
				return id
			}
			return 0
		}
	}
	return 0
}

// removeCopy removes one of several engine hashes of a block and reports whether there were
// several.
func (sh *shard) removeCopy(ext uint32, pos int, slot worker.Slot, tier Tier) bool {
	if len(sh.copies) == 0 {
		return false
	}
	key := copyOf{ext, uint16(pos), slot, tier}
	n := sh.copies[key]
	if n == 0 {
		return false
	}
	if n == 1 {
		delete(sh.copies, key)
	} else {
		sh.copies[key] = n - 1
	}
	return true
}
