package kvindex

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// New makes the index.
func New(opt Options) Index {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = defaultMaxBytes
	}
	ix := &radix{max: opt.MaxBytes, factor: rand.Uint64() | 1, copies: make(map[copyOf]int)}
	ix.table.init(rand.Uint64())
	ix.validPlace = ix.valid
	return ix
}

// radix is a path-compressed radix index over sequence hashes.
//
// A sequence hash names a block and all before it, so a prompt is found without
// walking a tree of children: the reader table leads from the hash of a fragment's
// first block to the fragment (node), whose last hash tells whether the prompt goes
// all through it, and the prompt's next hash is looked up in the table again. A
// rank that stops inside a fragment splits it; neighbours that come to have the same
// holders are joined. A block lies in one fragment at most. Side tables, one a rank,
// lead from engines' hashes to places in runs, which splits and joins leave alone.
//
// Readers take no lock, never wait for a writer and allocate nothing; see node for
// the memory order and find.go for what they are promised. Writers take mu for the
// time of one event (Clear for a part of its work), and a rank's own mutex before
// it. Nothing here but the directories of the slabs holds pointers, so the garbage
// collector passes by.
type radix struct {
	table readTable
	words wordSlab
	hands raised

	_ [cacheLine]byte

	mu         sync.Mutex
	runs       runSlab
	ranks      [worker.MaxSlots]*rankState
	copies     map[copyOf]int // of blocks with several engine hashes: those beyond the first
	factor     uint64         // odd, random: spreads engines' hashes
	validPlace func(uint64) bool
	max        int64
	entries    int    // cells of all side tables that name a block held
	clears     uint32 // numbers the Clears
	clearing   int    // how many are under way
	ops        uint64 // counted for checkSome
	sink       uint64 // what sideTable.touch loads, so that it does
	// The list of runs that end in a leaf, by last use.
	oldest, newest uint32

	len     atomic.Int64
	bytes   atomic.Int64
	evicted atomic.Uint64
	held    [worker.MaxSlots]atomic.Int64
}

// rankState is what the writer knows of one rank.
type rankState struct {
	mu   sync.Mutex // held through a whole Clear; before radix.mu
	side sideTable
}

// copyOf is a block that a rank's tier holds under more than one engine hash.
type copyOf struct {
	run  uint32
	pos  uint16
	slot worker.Slot
	tier Tier
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
	runCost   = 40
	entryCost = 24
	copyCost  = 64
)

// account publishes what the entries take. The caller has mu.
func (ix *radix) account() {
	ix.bytes.Store(ix.used())
}

func (ix *radix) used() int64 {
	return int64(ix.table.nodes.live())*nodeCost + int64(ix.runs.live)*runCost +
		ix.words.inUse*8 + int64(ix.entries)*entryCost + int64(len(ix.copies))*copyCost
}

func (ix *radix) rank(slot worker.Slot) *rankState {
	if ix.ranks[slot] == nil {
		ix.ranks[slot] = new(rankState)
	}
	return ix.ranks[slot]
}

// lock takes the locks of an operation on a rank.
func (ix *radix) lock(slot worker.Slot) *rankState {
	ix.mu.Lock()
	r := ix.rank(slot)
	if !r.mu.TryLock() { // a Clear is under way: it needs mu to go on
		ix.mu.Unlock()
		r.mu.Lock()
		ix.mu.Lock()
	}
	ix.hands.goFirst()
	return r
}

func (ix *radix) unlock(r *rankState) {
	ix.account()
	if invariants {
		ix.checkSome()
	}
	ix.mu.Unlock()
	r.mu.Unlock()
}

// valid says whether a place names a block that its rank holds: what was evicted
// is past the end of its run, or the run is another by now.
func (ix *radix) valid(p uint64) bool {
	r := ix.runs.at(placeRun(p))
	return r.gen == placeGen(p) && placePos(p) < int(r.len)
}

// word is the sequence hash at a position of a run.
func (ix *radix) word(r *run, pos int) uint64 {
	p, at := ix.words.page(r.line)
	return p[at+uint32(pos)]
}

// nodeOf finds the fragment of a run that covers a position, 0 in a hole.
func (ix *radix) nodeOf(r *run, pos int) uint32 {
	for id := r.tail; id != 0; id = ix.table.nodes.links(id).prev {
		if n := ix.table.nodes.at(id); n.off() <= pos {
			if pos < n.end() {
				return id
			}
			return 0
		}
	}
	return 0
}

// Reserve implements Reserver. What is reserved for all ranks together is bounded
// by half of Options.MaxBytes.
func (ix *radix) Reserve(slot worker.Slot, blocks int) {
	if slot >= worker.MaxSlots || blocks <= 0 {
		return
	}
	r := ix.lock(slot)
	defer ix.unlock(r)
	reserved := int64(0)
	for _, other := range &ix.ranks {
		if other != nil && other != r {
			reserved += int64(other.side.floor) * 16
		}
	}
	if room := (ix.max/2 - reserved) / 20; int64(blocks) > room {
		blocks = int(max(0, room))
	}
	r.side.reserve(blocks, ix.factor, ix.validPlace)
}

// Held implements Index.
func (ix *radix) Held(slot worker.Slot) int {
	if slot >= worker.MaxSlots {
		return 0
	}
	return int(ix.held[slot].Load())
}

// Len implements Index.
func (ix *radix) Len() int { return int(ix.len.Load()) }

// Bytes implements Index: what the entries take now. Memory once taken for nodes
// and runs is kept for later ones and not counted twice.
func (ix *radix) Bytes() int64 { return ix.bytes.Load() }

// Evicted implements Evictor.
func (ix *radix) Evicted() uint64 { return ix.evicted.Load() }

// counts notes blocks that a rank has come to hold, or lost.
func (ix *radix) counts(slot worker.Slot, blocks int) {
	ix.len.Add(int64(blocks))
	ix.held[slot].Add(int64(blocks))
}

// Remove implements Index.
func (ix *radix) Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int) {
	if tier >= NumTiers || slot >= worker.MaxSlots {
		return 0, len(engine)
	}
	rank := ix.lock(slot)
	defer ix.unlock(rank)
	// Blocks that lie together are taken away together.
	var in uint32
	var from, to int
	flush := func() {
		if in != 0 {
			ix.unhold(in, from, to, slot, tier)
			in = 0
		}
	}
	ix.sink += rank.side.touch(engine, tier, ix.factor)
	for _, hash := range engine {
		cells, at := rank.side.get(uint64(hash), tier, ix.factor)
		if at < 0 {
			unknown++
			continue
		}
		p := cells[at].place
		ok := ix.valid(p)
		rank.side.remove(cells, at, ix.factor)
		if !ok {
			rank.side.stale = max(0, rank.side.stale-1)
			unknown++
			continue
		}
		removed++
		ix.entries--
		id, pos := placeRun(p), placePos(p)
		if ix.oneCopyLess(id, pos, slot, tier) {
			continue
		}
		switch {
		case in == id && pos == to:
			to++
		case in == id && pos == from-1:
			from--
		default:
			flush()
			in, from, to = id, pos, pos+1
		}
	}
	flush()
	rank.side.shrink(ix.factor, ix.validPlace)
	return removed, unknown
}

// oneCopyLess takes away one of several engine hashes of a block, if there are.
func (ix *radix) oneCopyLess(run uint32, pos int, slot worker.Slot, tier Tier) bool {
	if len(ix.copies) == 0 {
		return false
	}
	key := copyOf{run, uint16(pos), slot, tier}
	n := ix.copies[key]
	if n == 0 {
		return false
	}
	if n == 1 {
		delete(ix.copies, key)
	} else {
		ix.copies[key] = n - 1
	}
	return true
}

// Store implements Index.
func (ix *radix) Store(ev *Stored) (res StoreResult) {
	if !ev.valid() {
		return res
	}
	rank := ix.lock(ev.Slot)
	s := storing{ix: ix, ev: ev, side: &rank.side}
	if ev.HasParent && !s.findParent() {
		res.Orphan = true
	} else {
		s.store()
		res = s.res
		ix.evict()
	}
	ix.unlock(rank)
	return res
}
