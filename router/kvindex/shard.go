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
	table readTable
	words wordSlab
	hands raised
	seen  readers
	_     [cacheLine]byte

	mu      sync.Mutex
	ix      *radix
	no      uint64
	runs    runSlab
	copies  map[copyOf]int // of blocks with several engine hashes: those beyond the first
	entries int            // cells of side tables that name a block held here
	used    int64          // what was last published of it
	ops     uint32
	// loose counts what a writer cannot find from the block before it: fragments
	// behind a hole, and runs whose parent is gone.
	loose int
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
	run  uint32
	pos  uint16
	slot worker.Slot
	tier Tier
}

func (sh *shard) init(ix *radix, no uint64) {
	sh.ix, sh.no, sh.copies = ix, no, make(map[copyOf]int)
	sh.table.init(ix.spread)
	sh.coldest.Store(math.MaxUint64)
}

// lock takes the shard for one batch of a writer.
func (sh *shard) lock() {
	sh.mu.Lock()
	sh.hands.goFirst()
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

// raised counts the readers that writers keep overtaking and that ask them to hold
// back.
type raised struct{ atomic.Int32 }

// holdBack is how long a writer lets readers with a raised hand go first.
const holdBack = 200 * time.Microsecond

func (r *raised) goFirst() {
	if r.Load() == 0 {
		return
	}
	for start := time.Now(); r.Load() > 0 && time.Since(start) < holdBack; {
		yield()
	}
}

// What things are taken to cost beside their own size: a slot of the reader table
// with its share of empty ones, a cell of a side table likewise.
const (
	nodeCost  = 64 + 8 + 16
	runCost   = 44
	entryCost = 24
	copyCost  = 64
)

// takes is what the entries take.
func (sh *shard) takes() int64 {
	n := int64(sh.table.nodes.live())*nodeCost + int64(sh.runs.live)*runCost +
		sh.words.inUse*8 + int64(len(sh.copies))*copyCost
	if !sh.ix.owned {
		n += int64(sh.entries) * entryCost
	}
	return n
}

// account publishes what the entries take, a grain at a time, and of what age the
// coldest leaf is.
func (sh *shard) account() {
	if d := sh.takes() - sh.used; d > sh.ix.grain || d < -sh.ix.grain {
		sh.ix.bytes.Add(d)
		sh.used += d
	}
	cold := uint64(math.MaxUint64)
	if sh.oldest != 0 {
		cold = uint64(sh.runs.at(sh.oldest).used)
	}
	if sh.coldest.Load() != cold {
		sh.coldest.Store(cold)
	}
	if has := len(sh.copies) > 0; has != sh.hasCopies.Load() {
		sh.hasCopies.Store(has)
	}
}

// counts notes blocks that a rank, whose lock the caller has, has come to hold, or
// lost.
func (sh *shard) counts(slot worker.Slot, blocks int) {
	sh.len += blocks
	r := sh.ix.ranks[slot].Load()
	release(&r.own, r.own+uint64(blocks))
}

// place is where a block lies, as cells of side tables say it.
func (sh *shard) place(run uint32, pos int, tier Tier) uint64 {
	return placeOf(uint32(sh.no)<<runBits|run, pos, tier, sh.runs.at(run).gen())
}

// word is the sequence hash at a position of a run.
func (sh *shard) word(r *run, pos int) uint64 {
	p, at := sh.words.page(r.line)
	return p[at+uint32(pos)]
}

// hashes are the sequence hashes of a stretch, for whoever has the shard's lock.
func (sh *shard) hashes(x span) []uint64 {
	p, at := sh.words.page(sh.runs.at(placeRun(x.place)).line)
	return p[at+uint32(placePos(x.place)):][:x.n]
}

// nodeOf finds the fragment of a run that covers a position, 0 in a hole.
func (sh *shard) nodeOf(r *run, pos int) uint32 {
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

// oneCopyLess takes away one of several engine hashes of a block, if there are.
func (sh *shard) oneCopyLess(run uint32, pos int, slot worker.Slot, tier Tier) bool {
	if len(sh.copies) == 0 {
		return false
	}
	key := copyOf{run, uint16(pos), slot, tier}
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
