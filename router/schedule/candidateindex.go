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

// candidateIndex is a large pool prepared for choices: its candidates in the order of their slots,
// divided into blocks by groups of slots, with a lower bound of the loads of each block and the
// slowly changing properties of each Rank. It belongs to one slice of candidates and keeps it
// alive, so no other slice can have its address.
type candidateIndex struct {
	candidates []*worker.Rank // the slice it belongs to
	ranks      []*worker.Rank // by slot
	slots      []worker.Slot
	position   [worker.MaxSlots]int16     // by slot: index in ranks, or -1
	slowStates [worker.MaxSlots]slowState // by slot; zero for slots of other pools
	blockOf    []int16                    // block of each rank
	blocks     []rankBlock

	refreshed atomic.Int64 // ns since the scheduler's start
	mu        sync.Mutex   // held during a refresh
	// lowMemory are the indices of ranks that are short of KV blocks.
	lowMemory atomic.Pointer[[]int32]
	// size is the block size in tokens that all candidates share; 0 if they differ.
	size atomic.Int32
}

// rankBlock is the candidates in one group of slots.
type rankBlock struct {
	from, to int32 // of candidateIndex.ranks
	group    int32
	// minPrice is the lowest price of a token of the prompt in the block.
	minPrice [numLegs]atomic.Uint32
	// minLoad is a lower bound of the loads: the upper 40 bits are the bound in units of
	// 1<<minLoadShift ns, the lower 24 those of the count of decreases in loadCounters when the
	// bound was computed. If the count has changed since, the bound is unknown. (A block that no
	// choice visits while its count passes through all 2^24 values keeps a wrong bound until the
	// next decrease.)
	minLoad [numLegs]atomic.Uint64
}

const (
	minLoadShift = 12 // 4 µs
	decreaseMask = 1<<24 - 1
)

// slowState is what a refresh saw of a rank: the block size in tokens in the upper bits and the
// feed state in the lower four, 0 if the rank is of another pool; and the weighted price of a token
// of the prompt, in ns. The fields are atomics because they are read while a refresh writes them.
type slowState struct {
	v     atomic.Uint32
	price [2]atomic.Uint32 // of tokens computed, pulled
}

const (
	refreshEvery = 20 * time.Millisecond // engines are scraped once a second
	maxIndexes   = 64
	// A record of a large pool shows the best candidates of a few blocks, which costs almost
	// nothing, and the best holders.
	maxShownBlocks  = 2
	maxShownHolders = 2
)

// candidateIndexes are the known indexes, newest first; the list is replaced as a whole.
type candidateIndexes struct {
	mu      sync.Mutex
	indexes atomic.Pointer[[]*candidateIndex]
	// seen are the addresses of slices met once. A slice made for one request does not justify an
	// index.
	seen [16]atomic.Uintptr
	turn atomic.Uint32
}

// find returns the index of a slice, or nil when the slice is new.
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
			return nil // slots outside the fleet's range: choose without an index
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

// refresh reads the slowly changing properties. One request per interval performs it; the others
// use the previous values.
func (x *candidateIndex) refresh(s *Scheduler, now int64) {
	if now-x.refreshed.Load() < int64(refreshEvery) || !x.mu.TryLock() {
		return
	}
	defer x.mu.Unlock()
	var lowMemory []int32
	common := sizeOf(x.ranks[0])
	w := s.currentSettings().weights
	w.others *= s.othersFactor()
	u := s.reuse.at(now)
	for b := range x.blocks {
		bl := &x.blocks[b]
		cheapest := [2]uint32{math.MaxUint32, math.MaxUint32}
		for i := bl.from; i < bl.to; i++ {
			r := x.ranks[i]
			s.rates.expireOwn(r, now)
			prefill := float64(s.rates.price(r, worker.Prefilling))
			price := [2]uint32{uint32(w.computing(r, &u) * prefill), uint32(w.prefill * float64(s.rates.price(r, worker.Pulling)))}
			waiting := int64(w.queue * prefill * float64(tokensOfOthers(r)))
			total := r.Worker.Info().TotalBlocks
			lacking := total > 0 && float64(blocksInUse(r, total)) >= pressureThreshold*float64(total) || r.KVUsage() >= pressureThreshold
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

// computing returns the weight of a token that a rank must compute. In a full cache it displaces
// another; evaluate counts the displaced tokens, but a pass over many ranks knows only whether there
// are any.
func (w *weights) computing(r *worker.Rank, u *reuse) float64 {
	weight := w.prefill
	if total := r.Worker.Info().TotalBlocks; total > 0 && w.eviction > 0 && float64(emptyBlocks(r, total)) < fullThreshold*float64(total) {
		weight += w.eviction * u.chanceOf(r.Slot, total*sizeOf(r))
	}
	return weight * (1 + w.others)
}

// usesIndex reports whether a query can be answered with an index: a large pool, the cost policy,
// no excluded ranks, and no session that decides.
func (s *Scheduler) usesIndex(q *Query) bool {
	return len(q.Candidates) > maxAllRecorded && s.currentSettings().policy == byCost && s.temperature(q) == 0 && q.OverlapWeight == nil && !q.sessionDecides() && !slices.ContainsFunc(q.Excluded, func(r *worker.Rank) bool { return r != nil })
}
