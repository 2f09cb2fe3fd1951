package schedule

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// board is a big pool prepared for choosing: the slots of its candidates side
// by side, and what of a Rank changes slowly. It belongs to one slice of
// candidates and holds it, so no other slice can come to lie at its address.
type board struct {
	ranks []*worker.Rank
	slots []worker.Slot
	place [worker.MaxSlots]int16 // by slot: index in ranks, -1
	facts [worker.MaxSlots]fact  // by slot; zero for slots of other pools

	refreshed atomic.Int64 // ns since the scheduler's start
	mu        sync.Mutex   // of a refresh
	// crowded are the indices of ranks short of KV blocks.
	crowded atomic.Pointer[[]int32]
}

// fact is what a refresh saw of a rank: block size in tokens in the upper bits,
// feed state in the lower four. One atomic, for it is read while written.
type fact struct{ v atomic.Uint32 }

func (f *fact) get() (size int, feed worker.FeedState) {
	v := f.v.Load()
	return int(v >> 4), worker.FeedState(v & 15)
}

const (
	refreshEvery = 20 * time.Millisecond // engines are scraped once a second
	maxBoards    = 64
	// A record of a big pool shows the best of each group of
	// candidates, which costs nothing, and the best holders.
	groups   = 4
	bestHeld = 3
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
			if &x.ranks[0] == &c[0] && len(x.ranks) == len(c) {
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
	x := &board{ranks: c, slots: make([]worker.Slot, len(c))}
	for i := range x.place {
		x.place[i] = -1
	}
	for i, r := range c {
		x.slots[i] = r.Slot
		if int(r.Slot) >= worker.MaxSlots || x.place[at(r.Slot)] >= 0 {
			return nil // slots that are not the fleet's: the plain way copes
		}
		x.place[at(r.Slot)] = int16(i)
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
func (x *board) refresh(s *Scheduler) {
	now := int64(time.Since(s.started))
	if now-x.refreshed.Load() < int64(refreshEvery) || !x.mu.TryLock() {
		return
	}
	defer x.mu.Unlock()
	var crowded []int32
	for i, r := range x.ranks {
		x.facts[at(r.Slot)].v.Store(uint32(min(sizeOf(r), 1<<27))<<4 | r.Feed.Load()&15)
		waiting := int64(s.weights.waiting * nsPerMS * float64(max(0, r.Waiting.Load()-r.Requests.Load())))
		short := r.KVUsage() >= pressureFrom
		if short {
			crowded = append(crowded, int32(i))
		}
		s.ledger.refresh(r.Slot, waiting, short)
	}
	x.crowded.Store(&crowded)
	x.refreshed.Store(now)
}

// found is a candidate of the board with its cost in ns, load included.
type found struct {
	index int
	cost  int64
	load  int64
}

// choose finds and books the least cost on the board; nil when the race was
// lost too often.
func (s *Scheduler) choose(x *board, f *frame, sc *scratch, rng *uint64, res *Reservation) (lost int, ok bool) {
	x.refresh(s)
	for lost = 0; lost <= retries; lost++ {
		var others [groups + bestHeld]found
		best := x.least(&s.ledger.load[f.leg], f, rng, others[:])
		if best.index < 0 {
			return lost, false
		}
		r := x.ranks[best.index]
		f.look(r, &sc.best)
		res.fill(s.ledger, f, &sc.best)
		if s.ledger.swap(f.leg, r.Slot, best.load, res.prefill, res.blocks) {
			res.show()
			for _, o := range others {
				if o.index >= 0 && o.index != best.index {
					sc.kept = append(sc.kept, term{})
					f.look(x.ranks[o.index], &sc.kept[len(sc.kept)-1])
				}
			}
			sc.kept = append(sc.kept, sc.best)
			sc.usable = len(x.ranks)
			return lost, true
		}
	}
	return lost, false
}

// least finds the least cost in three passes: all ranks as if they held
// nothing, then the holders, then those short of blocks.
func (x *board) least(load *[worker.MaxSlots]atomic.Int64, f *frame, rng *uint64, others []found) found {
	nobody := found{index: -1, cost: math.MaxInt64}
	best := nobody
	ties := 0
	base := int64(f.uncached * nsPerMS)
	n := len(x.slots)
	for g := range groups {
		lo, hi := g*n/groups, (g+1)*n/groups
		least, count, index := x.scan(load, lo, hi)
		others[g] = found{index: index, cost: base + least, load: least}
		switch {
		case base+least < best.cost:
			best, ties = others[g], count
		case base+least == best.cost:
			ties += count
		}
	}
	if ties > 1 {
		best.index = x.draw(load, best, ties, rng)
	}
	held := others[groups:]
	for i := range held {
		held[i] = nobody
	}
	x.holders(load, f, rng, held)
	if held[0].index >= 0 && held[0].cost <= best.cost {
		best = held[0]
	}
	if f.leg == PrefillLeg {
		return best
	}
	return x.tight(load, f, best)
}

// scan is the pass that counts: two loads and a comparison a rank.
func (x *board) scan(load *[worker.MaxSlots]atomic.Int64, lo, hi int) (least int64, count, index int) {
	least, index = math.MaxInt64, lo
	for i, s := range x.slots[lo:hi] {
		if c := load[at(s)].Load(); c < least {
			least, count, index = c, 1, lo+i
		} else if c == least {
			count++
		}
	}
	return least, count, index
}

// draw gives one of the ranks that share the least load, the nth where they are
// few; where they are many, the next from a random place on, which is as good
// and needs no second pass. Loads that moved meanwhile leave it at the first.
func (x *board) draw(load *[worker.MaxSlots]atomic.Int64, best found, ties int, rng *uint64) int {
	n := len(x.slots)
	start, nth := best.index, 0
	if ties > n/4 {
		start = below(rng, n)
	} else {
		nth = below(rng, ties)
	}
	for i := range n {
		k := start + i
		if k >= n {
			k -= n
		}
		if load[at(x.slots[k])].Load() == best.load {
			if nth == 0 {
				return k
			}
			nth--
		}
	}
	return best.index
}

// holders looks at the ranks that hold some of the prompt and keeps the best,
// least first; equals at the head are drawn.
func (x *board) holders(load *[worker.MaxSlots]atomic.Int64, f *frame, rng *uint64, held []found) {
	if f.exact != nil {
		x.holdersOf(f.exact, 0, live|syncing, load, f, rng, held)
	}
	for i := range f.sized {
		x.holdersOf(&f.sized[i].Overlap, f.sized[i].BlockSize, live|syncing, load, f, rng, held)
	}
	if f.approx != nil {
		feeds := uint32(none | syncing | broken)
		if f.textOnly {
			feeds |= live
		}
		x.holdersOf(f.approx, -f.approxTokens, feeds, load, f, rng, held)
	}
}

// Feed states as a set, for holdersOf.
const (
	none    = 1 << worker.FeedNone
	syncing = 1 << worker.FeedSyncing
	live    = 1 << worker.FeedLive
	broken  = 1 << worker.FeedBroken
)

// holdersOf does so for one overlap and the ranks whose feed is among feeds.
// size is 0 for blocks of each rank's own size, positive for ranks of that size
// only, negative for blocks that stand for so many tokens on every rank.
func (x *board) holdersOf(o *kvindex.Overlap, size int, feeds uint32, load *[worker.MaxSlots]atomic.Int64, f *frame, rng *uint64, held []found) {
	ties := 0
	base := f.uncached * nsPerMS
	credit := f.rate * f.w.overlap * nsPerMS
	worst := int64(math.MaxInt64)
	for _, s := range o.Holders() {
		k := at(s)
		own, feed := x.facts[k].get()
		if feeds>>feed&1 == 0 || own == 0 {
			continue // its overlap is not to be believed, or it is not of this pool
		}
		switch {
		case size < 0:
			own = -size
		case size > 0 && size != own:
			continue
		}
		has := load[k].Load()
		cost := max(0, int64(base-credit*float64(min(o.Depth(s)*own, f.prompt)))) + has
		if cost > worst {
			continue
		}
		switch {
		case held[0].index < 0 || cost < held[0].cost:
			ties = 1
		case cost == held[0].cost:
			if ties++; below(rng, ties) != 0 {
				continue
			}
		}
		insert(held, found{int(x.place[k]), cost, has})
		if last := &held[len(held)-1]; last.index >= 0 {
			worst = last.cost
		}
	}
}

// insert puts c before its first equal, and lets the last one fall out. A rank
// that is there already, by another overlap, stays at its better cost.
func insert(held []found, c found) {
	at := 0
	for at < len(held) && held[at].index >= 0 && held[at].cost < c.cost {
		if held[at].index == c.index {
			return
		}
		at++
	}
	if at == len(held) {
		return
	}
	copy(held[at+1:], held[at:])
	held[at] = c
}

// tight weighs the ranks short of blocks, which the passes before put last.
func (x *board) tight(load *[worker.MaxSlots]atomic.Int64, f *frame, best found) found {
	crowded := x.crowded.Load()
	if crowded == nil {
		return best
	}
	var t term
	for _, i := range *crowded {
		f.look(x.ranks[i], &t)
		if cost := int64(t.cost * nsPerMS); cost < best.cost {
			best = found{int(i), cost, load[at(x.slots[i])].Load()}
		}
	}
	return best
}

// fits says whether a query can be chosen on a board: a big pool, by cost, with
// nothing excluded.
func (s *Scheduler) fits(q *Query) bool {
	return len(q.Candidates) > keepAll && s.policy == byCost && s.temperature == 0 && !slices.ContainsFunc(q.Excluded, func(r *worker.Rank) bool { return r != nil })
}
