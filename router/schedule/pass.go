package schedule

import (
	"math"
	"math/bits"
	"slices"
	"sync/atomic"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// found is a candidate of the board with its cost in ns, load included.
type found struct {
	index int
	cost  int64
	load  int64
	depth int32 // of the index's overlap, -1 not known
}

var nobody = found{index: -1, cost: math.MaxInt64, depth: -1}

// pass is one look over a board.
type pass struct {
	x    *board
	s    *Scheduler
	f    *frame
	load *[worker.MaxSlots]atomic.Int64
	kind int // of fact.price
	rng  *uint64
	ties int
	// rivals is how many blocks are looked into at least, for the record.
	rivals int
	floor  int64 // least bound of all blocks' loads
	price  int64 // least price of all
	open   [bestOpen]found
	held   [bestHeld]found
}

// choose finds and books the least cost on the board; false when the race was
// lost too often.
func (s *Scheduler) choose(x *board, f *frame, sc *scratch, rng *uint64, res *Reservation) (lost int, ok bool) {
	x.refresh(s, f.now)
	p := &sc.pass
	*p = pass{x: x, s: s, f: f, load: &s.ledger.load[f.leg], rng: rng}
	if f.leg == DecodeLeg {
		p.kind = 1
	}
	if sc.recorded {
		p.rivals = bestOpen
	}
	for lost = 0; lost <= retries; lost++ {
		best := p.least()
		r := x.ranks[best.index]
		f.lookAt(r, &sc.best, int(best.depth))
		res.fill(s, f, &sc.best)
		if s.ledger.swap(f.leg, r.Slot, best.load, res.ns[0], res.ns[1]) {
			res.show()
			if sc.recorded {
				p.show(best.index, sc)
			}
			sc.usable = len(x.ranks)
			return lost, true
		}
	}
	return lost, false
}

// show puts the rivals seen on the way into the record, then the chosen.
func (p *pass) show(chosen int, sc *scratch) {
	add := func(list []found) {
		for _, o := range list {
			if o.index >= 0 && o.index != chosen && !slices.ContainsFunc(sc.kept, func(t term) bool { return t.rank == p.x.ranks[o.index] }) {
				sc.kept = append(sc.kept, term{})
				p.f.lookAt(p.x.ranks[o.index], &sc.kept[len(sc.kept)-1], int(o.depth))
			}
		}
	}
	add(p.open[:])
	add(p.held[:])
	sc.kept = append(sc.kept, sc.best)
}

// least finds the least cost in three passes: all ranks as if they held
// nothing, then the holders, then those short of blocks.
func (p *pass) least() found {
	for i := range p.open {
		p.open[i] = nobody
	}
	for i := range p.held {
		p.held[i] = nobody
	}
	best := p.emptyHanded()
	p.holders()
	if p.held[0].index >= 0 && p.held[0].cost <= best.cost {
		best = p.held[0]
	}
	if p.f.leg == PrefillLeg {
		return best
	}
	return p.tight(best)
}

// emptyHanded finds the least cost of all ranks as if none held anything. Blocks
// whose bound lies above the best are not looked into; those whose bound is not
// known are.
func (p *pass) emptyHanded() found {
	x, leg := p.x, p.f.leg
	fell := &p.s.ledger.fell[leg]
	prompt := int64(p.f.prompt)
	var bound [worker.MaxSlots / group]int64
	// Blocks are drawn by how many ranks they have, or those of a small one would
	// be taken more often than others.
	start := int(x.in[below(p.rng, len(x.in))])
	lowest, at := int64(math.MaxInt64), start
	p.floor, p.price = math.MaxInt64, math.MaxInt64
	for i := range x.blocks {
		b := &x.blocks[i]
		v := b.floor[leg].Load()
		load := int64(v >> 24 << floorShift)
		if uint32(v)&fellMask != fell[b.group].Load()&fellMask {
			load = 0
		}
		price := int64(b.cheapest[leg].Load())
		p.floor, p.price = min(p.floor, load), min(p.price, price)
		c := load + prompt*price
		bound[i] = c
		if c < lowest || c == lowest && (at < start && i >= start) {
			lowest, at = c, i
		}
	}
	best := nobody
	p.ties = 0
	n := len(x.blocks)
	p.scan(at, &best, 0)
	seen := 1
	for k := 1; k < n; k++ {
		i := at + k
		if i >= n {
			i -= n
		}
		// Equals are sought in other blocks too while few have been found: among
		// many any of this block's is as good.
		if bound[i] < best.cost || bound[i] <= best.cost && p.ties <= group/4 {
			p.scan(i, &best, seen)
			seen++
		}
	}
	// A few more, for the record and to keep the bounds fresh.
	for k := n / bestOpen; seen < p.rivals && k > 0 && k < n; k += n / bestOpen {
		other := best
		ties := p.ties
		p.scan((at+k)%n, &other, seen)
		if other.cost < best.cost {
			best = other
		} else {
			p.ties = ties
		}
		seen++
	}
	return best
}

// scan looks at every rank of a block, keeps the least in best, drawing among
// equals, and the block's own in open; and notes the block's floor.
func (p *pass) scan(i int, best *found, seen int) {
	x := p.x
	b := &x.blocks[i]
	fell := p.s.ledger.fell[p.f.leg][b.group].Load()
	prompt := int64(p.f.prompt)
	slots := x.slots[b.from:b.to]
	costOf := func(s worker.Slot, load int64) int64 {
		return load + prompt*int64(x.facts[slotAt(s)].price[p.kind].Load())
	}
	floor, least := int64(math.MaxInt64), int64(math.MaxInt64)
	ties, at := 0, 0
	load := int64(0) // of at
	for k, s := range slots {
		has := p.load[slotAt(s)].Load()
		c := costOf(s, has)
		floor = min(floor, has)
		if c < least {
			least, ties, at, load = c, 1, k, has
		} else if c == least {
			ties++
		}
	}
	if ties > 1 && least <= best.cost {
		// The draw looks again: to keep all costs would cost more than this, as ties
		// are rare under load. Where one has moved meanwhile the last found is taken.
		nth := below(p.rng, ties)
		for k := at + 1; k < len(slots) && nth > 0; k++ {
			if has := p.load[slotAt(slots[k])].Load(); costOf(slots[k], has) == least {
				at, load = k, has
				nth--
			}
		}
	}
	own := found{int(b.from) + at, least, load, -1}
	b.floor[p.f.leg].Store(uint64(max(0, floor))>>floorShift<<24 | uint64(fell&fellMask))
	switch {
	case own.cost < best.cost:
		*best, p.ties = own, ties
	case own.cost == best.cost:
		p.ties += ties
		if below(p.rng, p.ties) < ties {
			*best = own
		}
	}
	if seen < bestOpen {
		p.open[seen] = own
	} else if last := &p.open[bestOpen-1]; own.cost < last.cost {
		*last = own
	}
}

// holders looks at the ranks that hold some of the prompt and keeps the best,
// least first; equals at the head are drawn.
func (p *pass) holders() {
	f := p.f
	if f.exact != nil {
		p.runs(f.exact, 0)
	}
	for i := range f.sized {
		if f.sized[i].Overlap.Max() > 0 {
			p.runs(&f.sized[i].Overlap, f.sized[i].BlockSize)
		}
	}
	if f.approx != nil {
		feeds := uint32(none | syncing | broken | silent)
		if f.textOnly {
			feeds |= live
		}
		for _, s := range f.approx.Holders() {
			p.holder(s, f.approx.Depth(s)*f.approxTokens, feeds)
		}
	}
	for i := range f.awaited {
		p.holder(f.awaited[i].slot, int(f.w.awaited*float64(f.awaited[i].tokens)), none|syncing|live|broken|silent)
	}
}

// Feed states as a set.
const (
	none    = 1 << worker.FeedNone
	syncing = 1 << worker.FeedSyncing
	live    = 1 << worker.FeedLive
	broken  = 1 << worker.FeedBroken
	silent  = 1 << worker.FeedSilent
)

// runs visits the holders of an overlap run by run. size is 0 for blocks of each
// rank's own size, else the one size that counts.
func (p *pass) runs(o *kvindex.Overlap, size int) {
	x, f := p.x, p.f
	slower := o.AnyBelow()
	kind, load := p.kind, p.load
	guess := size
	if guess == 0 {
		guess = int(x.size.Load())
	}
	// The deepest come last, and make most of the others not worth a look.
	for i := o.Runs() - 1; i >= 0; i-- {
		depth, words := o.Run(i)
		last, todo := guess, f.left(depth*guess)
		if guess != 0 && !slower && todo*p.price+p.floor > p.held[bestHeld-1].cost {
			continue // none of them can be among the best
		}
		// most is the load above which a rank of this run cannot be among the best:
		// of most ranks nothing else is read.
		most := int64(math.MaxInt64)
		if guess != 0 && !slower {
			most = p.held[bestHeld-1].cost - todo*p.price
		}
		for w, set := range words {
			for ; set != 0; set &= set - 1 {
				s := worker.Slot(w<<6 + bits.TrailingZeros64(set))
				has := load[slotAt(s)].Load()
				if has > most {
					continue
				}
				fa := &x.facts[slotAt(s)]
				v := fa.v.Load()
				own := int(v >> 4)
				if (live|syncing)>>(v&15)&1 == 0 || own == 0 || size != 0 && own != size {
					continue // its overlap is not to be believed, or it is not of this pool
				}
				if own != last {
					last, todo = own, f.left(depth*own)
				}
				if slower {
					host, disk := o.Below(s)
					p.holder(s, int(max(0, float64(min(depth*own, f.prompt))-f.w.below(host, disk, own))), live|syncing)
					continue
				}
				if cost := todo*int64(fa.price[kind].Load()) + has; cost <= p.held[bestHeld-1].cost {
					p.keep(int(x.place[slotAt(s)]), cost, has, int32(depth))
					if guess != 0 {
						most = p.held[bestHeld-1].cost - f.left(depth*guess)*p.price
					}
				}
			}
		}
	}
}

// left is what is left of the prompt's tokens when so many are held, by the
// weight of overlap.
func (f *frame) left(held int) int64 {
	return max(0, int64(f.prompt)-int64(min(held, f.prompt))*f.w.overlap16>>16)
}

// holder weighs one rank that saves credit tokens, if its feed is among feeds.
func (p *pass) holder(s worker.Slot, credit int, feeds uint32) {
	fa := &p.x.facts[slotAt(s)]
	v := fa.v.Load()
	if v == 0 || feeds>>(v&15)&1 == 0 {
		return
	}
	has := p.load[slotAt(s)].Load()
	p.keep(int(p.x.place[slotAt(s)]), p.f.left(credit)*int64(fa.price[p.kind].Load())+has, has, -1)
}

// keep puts a holder before its first equal, or after it as the draw has it, and
// lets the last one fall out. A rank that is there already, by another overlap,
// stays at its better cost.
func (p *pass) keep(index int, cost, load int64, depth int32) {
	held := &p.held
	if held[0].index >= 0 && cost == held[0].cost {
		if p.ties++; below(p.rng, p.ties) != 0 {
			return
		}
	} else if cost < held[0].cost {
		p.ties = 1
	}
	at := 0
	for at < bestHeld && held[at].index >= 0 && held[at].cost < cost {
		if held[at].index == index {
			return
		}
		at++
	}
	if at == bestHeld {
		return
	}
	copy(held[at+1:], held[at:])
	held[at] = found{index, cost, load, depth}
}

// tight weighs the ranks short of blocks, which the passes before put last.
func (p *pass) tight(best found) found {
	crowded := p.x.crowded.Load()
	if crowded == nil {
		return best
	}
	var t term
	for _, i := range *crowded {
		p.f.look(p.x.ranks[i], &t)
		if cost := int64(t.cost * nsPerMS); cost < best.cost {
			best = found{int(i), cost, p.load[slotAt(p.x.slots[i])].Load(), -1}
		}
	}
	return best
}
