package schedule

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/worker"
)

// candidateIndex is a big pool prepared for choosing: its candidates in the order of
// their slots, cut into blocks of a group's slots, with a lower bound of the
// loads of each block, and what of a Rank changes slowly. It belongs to one
// slice of candidates and holds it, so no other slice can come to lie at its
// address.
type candidateIndex struct {
	candidates []*worker.Rank // the slice it belongs to
	ranks      []*worker.Rank // by slot
	slots      []worker.Slot
	position   [worker.MaxSlots]int16     // by slot: index in ranks, -1
	slowStates [worker.MaxSlots]slowState // by slot; zero for slots of other pools
	blockOf    []int16                    // block of each rank
	blocks     []rankBlock

	refreshed atomic.Int64 // ns since the scheduler's start
	mu        sync.Mutex   // of a refresh
	// crowded are the indices of ranks short of KV blocks.
	lowMemory atomic.Pointer[[]int32]
	// size is the block size that all have, in tokens; 0 when they differ.
	size atomic.Int32
}

// rankBlock is the candidates of one group of slots.
type rankBlock struct {
	from, to int32 // of board.ranks
	group    int32
	// cheapest is the least price of a token there, of a prompt's own tokens.
	minPrice [numLegs]atomic.Uint32
	// floor is a lower bound of the loads: in its upper 40 bits the bound in
	// units of floorUnit ns, in the lower 24 those of the ledger's count of falls
	// when it was found. Another count now, and nothing is known. (A block that
	// nobody looked at while its count went through all 2^24 values would be
	// misjudged until the next fall.)
	minLoad [numLegs]atomic.Uint64
}

const (
	minLoadShift = 12 // 4 µs
	decreaseMask = 1<<24 - 1
)

// slowState is what a refresh saw of a rank: block size in tokens in the upper bits,
// feed state in the lower four, 0 where the rank is of another pool; and the
// weighted price of a token of the prompt's own, in ns. Atomics, for they are read
// while written.
type slowState struct {
	v     atomic.Uint32
	price [2]atomic.Uint32 // of tokens computed, pulled
}

const (
	refreshEvery = 20 * time.Millisecond // engines are scraped once a second
	maxIndexes   = 64
	// A record of a big pool shows the best of a few blocks, which costs next to
	// nothing, and the best holders.
	maxShownBlocks  = 2
	maxShownHolders = 2
)

// candidateIndexes are the pools known, newest first; replaced as a whole.
type candidateIndexes struct {
	mu      sync.Mutex
	indexes atomic.Pointer[[]*candidateIndex]
	// seen are addresses of slices met once. A slice made for one request is
	// not worth a board.
	seen [16]atomic.Uintptr
	turn atomic.Uint32
}

// find gives the board of a slice, nil at its first sight.
func (b *candidateIndexes) find(c []*worker.Rank) *candidateIndex {
	if known := b.indexes.Load(); known != nil {
		for _, x := range *known {
			if &x.candidates[0] == &c[0] && len(x.candidates) == len(c) {
				return x
			}
		}
	}
	addr := uintptr(unsafe.Pointer(&c[0]))
	for i := range b.seen {
		if b.seen[i].Load() == addr {
			return b.make(c)
		}
	}
	b.seen[b.turn.Add(1)%uint32(len(b.seen))].Store(addr)
	return nil
}

func (b *candidateIndexes) make(c []*worker.Rank) *candidateIndex {
	x := &candidateIndex{candidates: c, ranks: slices.Clone(c), slots: make([]worker.Slot, len(c))}
	slices.SortFunc(x.ranks, func(a, b *worker.Rank) int { return int(a.Slot) - int(b.Slot) })
	for i := range x.position {
		x.position[i] = -1
	}
	n := 0
	for i, r := range x.ranks {
		if int(r.Slot) >= worker.MaxSlots || x.position[r.Slot] >= 0 {
			return nil // slots that are not the fleet's: the plain way copes
		}
		x.slots[i] = r.Slot
		x.position[r.Slot] = int16(i)
		if i == 0 || r.Slot/groupSize != x.ranks[i-1].Slot/groupSize {
			n++
		}
	}
	x.blocks, x.blockOf = make([]rankBlock, 0, n), make([]int16, len(x.ranks))
	for i, r := range x.ranks {
		if i == 0 || r.Slot/groupSize != x.ranks[i-1].Slot/groupSize {
			x.blocks = append(x.blocks, rankBlock{from: int32(i), group: int32(r.Slot / groupSize)})
		}
		x.blockOf[i] = int16(len(x.blocks) - 1)
		x.blocks[len(x.blocks)-1].to = int32(i + 1)
	}
	for i := range x.blocks {
		for leg := range numLegs {
			x.blocks[i].minLoad[leg].Store(0) // a load is never below 0
		}
	}
	x.refreshed.Store(math.MinInt64 / 2)
	b.mu.Lock()
	defer b.mu.Unlock()
	all := []*candidateIndex{x}
	if known := b.indexes.Load(); known != nil {
		all = append(all, (*known)[:min(len(*known), maxIndexes-1)]...)
	}
	b.indexes.Store(&all)
	return x
}

// refresh reads what changes slowly; one request in a while pays for it, the
// others go on with what was.
func (x *candidateIndex) refresh(s *Scheduler, now int64) {
	if now-x.refreshed.Load() < int64(refreshEvery) || !x.mu.TryLock() {
		return
	}
	defer x.mu.Unlock()
	var lowMemory []int32
	common := sizeOf(x.ranks[0])
	w := &s.currentSettings().weights
	for b := range x.blocks {
		bl := &x.blocks[b]
		cheapest := [2]uint32{math.MaxUint32, math.MaxUint32}
		for i := bl.from; i < bl.to; i++ {
			r := x.ranks[i]
			s.rates.expireOwn(r, now)
			prefill := float64(s.rates.price(r, worker.Prefilling))
			price := [2]uint32{uint32(w.prefill * prefill), uint32(w.prefill * float64(s.rates.price(r, worker.Pulling)))}
			waiting := int64(w.queue * prefill * float64(tokensOfOthers(r)))
			lacking := r.KVUsage() >= pressureThreshold
			if lacking {
				lowMemory = append(lowMemory, i)
			}
			f := &x.slowStates[slotAt(r.Slot)]
			for k, p := range price {
				f.price[k].Store(p)
				cheapest[k] = min(cheapest[k], p)
			}
			size := sizeOf(r)
			if size != common {
				common = 0
			}
			f.v.Store(uint32(min(size, 1<<27))<<4 | r.Feed.Load()&15)
			s.load.refresh(r.Slot, waiting, lacking)
		}
		bl.minPrice[WholeLeg].Store(cheapest[0])
		bl.minPrice[PrefillLeg].Store(cheapest[0])
		bl.minPrice[DecodeLeg].Store(cheapest[1])
	}
	x.size.Store(int32(common))
	x.lowMemory.Store(&lowMemory)
	x.refreshed.Store(now)
}

// usesIndex says whether a query can be chosen on a board: a big pool, by cost, with
// nothing excluded.
func (s *Scheduler) usesIndex(q *Query) bool {
	return len(q.Candidates) > maxAllRecorded && s.currentSettings().policy == byCost && s.temperature(q) == 0 && q.OverlapWeight == nil && q.Session == 0 && !slices.ContainsFunc(q.Excluded, func(r *worker.Rank) bool { return r != nil })
}
