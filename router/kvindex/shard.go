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

// shard holds all prompts whose first blocks' hashes fall to it.
//
// A sequence hash names a block and all before it, so a prompt is found without
// walking a tree of children: the reader table leads from the hash of a fragment's
// first block to the fragment, whose last hash tells whether the prompt goes
// all through it, and the prompt's next hash is looked up in the table again. A
// rank that stops inside a fragment splits it; neighbours that come to have the same
// holders are joined. A block lies in one fragment at most.
//
// One writer at a time, by mu, changes it; readers come at any time.
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
	copies  map[copyOf]int // of blocks with several engine hashes: those beyond the first
	entries int            // cells of side tables that name a block held here
	used    int64          // what was last published of it
	ops     uint32
	// loose counts what a writer cannot find from the block before it: fragments
	// behind a hole, and runs whose parent is gone.
	unanchored int
	// The list of runs that end in a leaf, by last use.
	oldest, newest uint32
	tidy           []worker.Slot // ranks whose tables are full of what was evicted

	len       int // (rank, tier, block) entries
	hasCopies atomic.Bool
	coldest   atomic.Uint64 // the tick of the oldest leaf's last use
	_         [cacheLine]byte
}

// copyOf is a block that a rank's tier holds under more than one engine hash.
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

// lock takes the shard for one batch of a writer.
func (sh *shard) lock() {
	sh.mu.Lock()
	sh.yielders.yieldToReaders()
}

// ticks is how many batches of a shard make a tick.
const ticks = 4

func (sh *shard) unlock() {
	if sh.ops++; sh.ops%ticks == 0 {
		sh.ix.tick.Add(1)
	}
	sh.account()
	sh.mu.Unlock()
}

// yieldRequests counts the readers that writers keep overtaking and that ask them to hold
// back.
type yieldRequests struct{ atomic.Int32 }

// maxYield is how long a writer lets readers with a raised hand go first.
const maxYield = 200 * time.Microsecond

func (r *yieldRequests) yieldToReaders() {
	if r.Load() == 0 {
		return
	}
	for start := time.Now(); r.Load() > 0 && time.Since(start) < maxYield; {
		yield()
	}
}

// What things are taken to cost beside their own size: a slot of the reader table
// with its share of empty ones, a cell of a side table likewise.
const (
	nodeCost   = 64 + 8 + 16
	extentCost = 44
	entryCost  = 24
	copyCost   = 64
)

// memoryUse is what the entries take.
func (sh *shard) memoryUse() int64 {
	n := int64(sh.table.nodes.live())*nodeCost + int64(sh.extents.live)*extentCost +
		sh.words.inUse*8 + int64(len(sh.copies))*copyCost
	if !sh.ix.ownerPlaces {
		n += int64(sh.entries) * entryCost
	}
	return n
}

// account publishes what the entries take, a grain at a time, and of what age the
// coldest leaf is.
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

// addCounts notes blocks that a rank, whose lock the caller has, has come to hold, or
// lost.
func (sh *shard) addCounts(slot worker.Slot, blocks int) {
	sh.len += blocks
	r := sh.ix.ranks[slot].Load()
	release(&r.netStored, r.netStored+uint64(blocks))
}

// place is where a block lies, as cells of side tables say it.
func (sh *shard) place(ext uint32, pos int, tier Tier) uint64 {
	return placeOf(uint32(sh.number)<<extentBits|ext, pos, tier, sh.extents.at(ext).gen())
}

// hashAt is the sequence hash at a position of a run.
func (sh *shard) hashAt(r *extent, pos int) uint64 {
	p, at := sh.words.page(r.storage)
	return p[at+uint32(pos)]
}

// hashes are the sequence hashes of a stretch, for whoever has the shard's lock.
func (sh *shard) hashes(x span) []uint64 {
	p, at := sh.words.page(sh.extents.at(placeExtent(x.place)).storage)
	return p[at+uint32(placePos(x.place)):][:x.n]
}

// nodeOf finds the fragment of a run that covers a position, 0 in a hole.
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

// removeCopy takes away one of several engine hashes of a block, if there are.
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
