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

// board is a big pool prepared for choosing: its candidates in the order of
// their slots, cut into blocks of a group's slots, with a lower bound of the
// loads of each block, and what of a Rank changes slowly. It belongs to one
// slice of candidates and holds it, so no other slice can come to lie at its
// address.
type board struct {
	given  []*worker.Rank // the slice it belongs to
	ranks  []*worker.Rank // by slot
	slots  []worker.Slot
	place  [worker.MaxSlots]int16 // by slot: index in ranks, -1
	facts  [worker.MaxSlots]fact  // by slot; zero for slots of other pools
	in     []int16                // block of each rank
	blocks []block

	refreshed atomic.Int64 // ns since the scheduler's start
	mu        sync.Mutex   // of a refresh
	// crowded are the indices of ranks short of KV blocks.
	crowded atomic.Pointer[[]int32]
	// size is the block size that all have, in tokens; 0 when they differ.
	size atomic.Int32
}

// block is the candidates of one group of slots.
type block struct {
	from, to int32 // of board.ranks
	group    int32
	// cheapest is the least price of a token there, of a prompt's own tokens.
	cheapest [legs]atomic.Uint32
	// floor is a lower bound of the loads: in its upper 40 bits the bound in
	// units of floorUnit ns, in the lower 24 those of the ledger's count of falls
	// when it was found. Another count now, and nothing is known. (A block that
	// nobody looked at while its count went through all 2^24 values would be
	// misjudged until the next fall.)
	floor [legs]atomic.Uint64
}

const (
	floorShift = 12 // 4 µs
	fellMask   = 1<<24 - 1
)

// fact is what a refresh saw of a rank: block size in tokens in the upper bits,
// feed state in the lower four, 0 where the rank is of another pool; and the
// weighted price of a token of the prompt's own, in ns. Atomics, for they are read
// while written.
type fact struct {
	v     atomic.Uint32
	price [2]atomic.Uint32 // of tokens computed, pulled
}

const (
	refreshEvery = 20 * time.Millisecond // engines are scraped once a second
	maxBoards    = 64
	// A record of a big pool shows the best of a few blocks, which costs next to
	// nothing, and the best holders.
	bestOpen = 2
	bestHeld = 2
)

// boards are the pools known, newest first; replaced as a whole.
type boards struct {
	mu    sync.Mutex
	known atomic.Pointer[[]*board]
	// seen are addresses of slices met once. A slice made for one request is
	// not worth a board.
	seen [16]atomic.Uintptr
	turn atomic.Uint32
}

// find gives the board of a slice, nil at its first sight.
func (b *boards) find(c []*worker.Rank) *board {
	if known := b.known.Load(); known != nil {
		for _, x := range *known {
			if &x.given[0] == &c[0] && len(x.given) == len(c) {
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

func (b *boards) make(c []*worker.Rank) *board {
	x := &board{given: c, ranks: slices.Clone(c), slots: make([]worker.Slot, len(c))}
	slices.SortFunc(x.ranks, func(a, b *worker.Rank) int { return int(a.Slot) - int(b.Slot) })
	for i := range x.place {
		x.place[i] = -1
	}
	n := 0
	for i, r := range x.ranks {
		if int(r.Slot) >= worker.MaxSlots || x.place[r.Slot] >= 0 {
			return nil // slots that are not the fleet's: the plain way copes
		}
		x.slots[i] = r.Slot
		x.place[r.Slot] = int16(i)
		if i == 0 || r.Slot/group != x.ranks[i-1].Slot/group {
			n++
		}
	}
	x.blocks, x.in = make([]block, 0, n), make([]int16, len(x.ranks))
	for i, r := range x.ranks {
		if i == 0 || r.Slot/group != x.ranks[i-1].Slot/group {
			x.blocks = append(x.blocks, block{from: int32(i), group: int32(r.Slot / group)})
		}
		x.in[i] = int16(len(x.blocks) - 1)
		x.blocks[len(x.blocks)-1].to = int32(i + 1)
	}
	for i := range x.blocks {
		for leg := range legs {
			x.blocks[i].floor[leg].Store(0) // a load is never below 0
		}
	}
	x.refreshed.Store(math.MinInt64 / 2)
	b.mu.Lock()
	defer b.mu.Unlock()
	all := []*board{x}
	if known := b.known.Load(); known != nil {
		all = append(all, (*known)[:min(len(*known), maxBoards-1)]...)
	}
	b.known.Store(&all)
	return x
}

// refresh reads what changes slowly; one request in a while pays for it, the
// others go on with what was.
func (x *board) refresh(s *Scheduler, now int64) {
	if now-x.refreshed.Load() < int64(refreshEvery) || !x.mu.TryLock() {
		return
	}
	defer x.mu.Unlock()
	var crowded []int32
	common := sizeOf(x.ranks[0])
	w := &s.tuned().weights
	for b := range x.blocks {
		bl := &x.blocks[b]
		cheapest := [2]uint32{math.MaxUint32, math.MaxUint32}
		for i := bl.from; i < bl.to; i++ {
			r := x.ranks[i]
			s.rates.fade(r, now)
			prefill := float64(s.rates.of(r, worker.Prefilling))
			price := [2]uint32{uint32(w.prefill * prefill), uint32(w.prefill * float64(s.rates.of(r, worker.Pulling)))}
			waiting := int64(w.queue * prefill * float64(foreignTokens(r)))
			short := r.KVUsage() >= pressureFrom
			if short {
				crowded = append(crowded, i)
			}
			f := &x.facts[slotAt(r.Slot)]
			for k, p := range price {
				f.price[k].Store(p)
				cheapest[k] = min(cheapest[k], p)
			}
			size := sizeOf(r)
			if size != common {
				common = 0
			}
			f.v.Store(uint32(min(size, 1<<27))<<4 | r.Feed.Load()&15)
			s.ledger.refresh(r.Slot, waiting, short)
		}
		bl.cheapest[Whole].Store(cheapest[0])
		bl.cheapest[PrefillLeg].Store(cheapest[0])
		bl.cheapest[DecodeLeg].Store(cheapest[1])
	}
	x.size.Store(int32(common))
	x.crowded.Store(&crowded)
	x.refreshed.Store(now)
}

// fits says whether a query can be chosen on a board: a big pool, by cost, with
// nothing excluded.
func (s *Scheduler) fits(q *Query) bool {
	return len(q.Candidates) > keepAll && s.tuned().policy == byCost && s.warmth(q) == 0 && q.OverlapWeight == nil && q.Session == 0 && !slices.ContainsFunc(q.Excluded, func(r *worker.Rank) bool { return r != nil })
}
