package schedule

import (
	"math"
	"math/bits"
	"slices"
	"sync/atomic"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// scanHit is a candidate of the index with its cost in ns, load included.
type scanHit struct {
	index int
	cost  int64
	load  int64
	depth int32 // overlap in the index, -1 unknown
}

var noHit = scanHit{index: -1, cost: math.MaxInt64, depth: -1}

// scan is one pass over an index.
type scan struct {
	index     *candidateIndex
	scheduler *Scheduler
	ctx       *choiceContext
	load      *[worker.MaxSlots]atomic.Int64
	kind      int // index of slowState.price
	rng       *uint64
	ties      int
	// minBlocks is how many blocks are visited at least, for the record.
	minBlocks  int
	minLoad    int64 // lowest bound of all blocks' loads
	minPrice   int64 // lowest price of all blocks
	blockBest  [maxShownBlocks]scanHit
	holderBest [maxShownHolders]scanHit
}

// chooseIndexed finds and reserves the lowest cost in the index; it returns false if the race was
// lost too often.
func (s *Scheduler) chooseIndexed(x *candidateIndex, f *choiceContext, sc *scratch, rng *uint64, res *Reservation) (lost int, ok bool) {
	x.refresh(s, f.now)
	p := &sc.scan
	*p = scan{index: x, scheduler: s, ctx: f, load: &s.load.load[f.leg], rng: rng}
	if f.leg == DecodeLeg {
		p.kind = 1
	}
	if sc.recorded {
		p.minBlocks = maxShownBlocks
	}
	for lost = 0; lost <= retries; lost++ {
		best := p.cheapest()
		r := x.ranks[best.index]
		f.evaluateAt(r, &sc.best, int(best.depth))
		res.fill(s, f, &sc.best)
		if s.load.compareAndAdd(f.leg, r.Slot, best.load, res.ns[0], res.ns[1]) {
			res.publish()
			if sc.recorded {
				p.recordRivals(best.index, sc)
			}
			sc.usable = len(x.ranks)
			return lost, true
		}
	}
	return lost, false
}

// recordRivals adds the rivals that were seen and the chosen rank to the record.
func (p *scan) recordRivals(chosen int, sc *scratch) {
	add := func(list []scanHit) {
		for _, o := range list {
			if o.index >= 0 && o.index != chosen && !slices.ContainsFunc(sc.candidates, func(t candidateState) bool { return t.rank == p.index.ranks[o.index] }) {
				sc.candidates = append(sc.candidates, candidateState{})
				p.ctx.evaluateAt(p.index.ranks[o.index], &sc.candidates[len(sc.candidates)-1], int(o.depth))
			}
		}
	}
	add(p.blockBest[:])
	add(p.holderBest[:])
	sc.candidates = append(sc.candidates, sc.best)
}

// cheapest finds the lowest cost in three passes: all ranks as if they had none of the prompt, then
// the holders, then the ranks short of KV blocks.
func (p *scan) cheapest() scanHit {
	for i := range p.blockBest {
		p.blockBest[i] = noHit
	}
	for i := range p.holderBest {
		p.holderBest[i] = noHit
	}
	best := p.scanUncached()
	p.scanHolders()
	if p.holderBest[0].index >= 0 && p.holderBest[0].cost <= best.cost {
		best = p.holderBest[0]
	}
	if p.ctx.leg == PrefillLeg {
		return best
	}
	return p.scanLowMemory(best)
}

// scanUncached finds the lowest cost of all ranks as if none had any of the prompt. Blocks whose
// bound is above the best are skipped; those with an unknown bound are visited.
func (p *scan) scanUncached() scanHit {
	x, leg := p.index, p.ctx.leg
	decreases := &p.scheduler.load.decreases[leg]
	prompt := int64(p.ctx.prompt)
	var bound [worker.MaxSlots / groupSize]int64
	// The first block is drawn in proportion to its number of ranks; otherwise the ranks of a small
	// block would be chosen more often than others.
	start := int(x.blockOf[randomBelow(p.rng, len(x.blockOf))])
	lowest, at := int64(math.MaxInt64), start
	p.minLoad, p.minPrice = math.MaxInt64, math.MaxInt64
	for i := range x.blocks {
		b := &x.blocks[i]
		v := b.minLoad[leg].Load()
		load := int64(v >> 24 << minLoadShift)
		if uint32(v)&decreaseMask != decreases[b.group].Load()&decreaseMask {
			load = 0
		}
		price := int64(b.minPrice[leg].Load())
		p.minLoad, p.minPrice = min(p.minLoad, load), min(p.minPrice, price)
		c := load + prompt*price
		bound[i] = c
		if c < lowest || c == lowest && (at < start && i >= start) {
			lowest, at = c, i
		}
	}
	best := noHit
	p.ties = 0
	n := len(x.blocks)
	p.scanBlock(at, &best, 0)
	seen := 1
	for k := 1; k < n; k++ {
		i := at + k
		if i >= n {
			i -= n
		}
		// Ties are sought in other blocks too while few have been found: among many, any of this
		// block's is as good.
		if bound[i] < best.cost || bound[i] <= best.cost && p.ties <= groupSize/4 {
			p.scanBlock(i, &best, seen)
			seen++
		}
	}
	// A few more, for the record and to keep the bounds fresh.
	for k := n / maxShownBlocks; seen < p.minBlocks && k > 0 && k < n; k += n / maxShownBlocks {
		other := best
		ties := p.ties
		p.scanBlock((at+k)%n, &other, seen)
		if other.cost < best.cost {
			best = other
		} else {
			p.ties = ties
		}
		seen++
	}
	return best
}

// scanBlock evaluates every rank of a block, keeps the lowest in best, with a draw among ties, and
// the block's own in open; and updates the block's minLoad.
func (p *scan) scanBlock(i int, best *scanHit, seen int) {
	x := p.index
	b := &x.blocks[i]
	decreases := p.scheduler.load.decreases[p.ctx.leg][b.group].Load()
	prompt := int64(p.ctx.prompt)
	slots := x.slots[b.from:b.to]
	costOf := func(s worker.Slot, load int64) int64 {
		return load + prompt*int64(x.slowStates[slotAt(s)].price[p.kind].Load())
	}
	minLoad, least := int64(math.MaxInt64), int64(math.MaxInt64)
	ties, at := 0, 0
	load := int64(0) // of at
	for k, s := range slots {
		has := p.load[slotAt(s)].Load()
		c := costOf(s, has)
		minLoad = min(minLoad, has)
		if c < least {
			least, ties, at, load = c, 1, k, has
		} else if c == least {
			ties++
		}
	}
	if ties > 1 && least <= best.cost {
		// The draw scans again: keeping all costs would be more expensive, because ties are rare
		// under load. If one has changed meanwhile the last one found is used.
		nth := randomBelow(p.rng, ties)
		for k := at + 1; k < len(slots) && nth > 0; k++ {
			if has := p.load[slotAt(slots[k])].Load(); costOf(slots[k], has) == least {
				at, load = k, has
				nth--
			}
		}
	}
	own := scanHit{int(b.from) + at, least, load, -1}
	b.minLoad[p.ctx.leg].Store(uint64(max(0, minLoad))>>minLoadShift<<24 | uint64(decreases&decreaseMask))
	switch {
	case own.cost < best.cost:
		*best, p.ties = own, ties
	case own.cost == best.cost:
		p.ties += ties
		if randomBelow(p.rng, p.ties) < ties {
			*best = own
		}
	}
	if seen < maxShownBlocks {
		p.blockBest[seen] = own
	} else if last := &p.blockBest[maxShownBlocks-1]; own.cost < last.cost {
		*last = own
	}
}

// scanHolders evaluates the ranks that have some of the prompt and keeps the best, lowest first;
// ties for the first place are drawn.
func (p *scan) scanHolders() {
	f := p.ctx
	if f.exact != nil {
		p.visitHolders(f.exact, 0)
	}
	for i := range f.sized {
		if f.sized[i].Overlap.Max() > 0 {
			p.visitHolders(&f.sized[i].Overlap, f.sized[i].BlockSize)
		}
	}
	if f.approx != nil {
		feeds := uint32(feedNoneBit | feedSyncingBit | feedBrokenBit | feedSilentBit)
		if f.textOnly {
			feeds |= feedLiveBit
		}
		for _, s := range f.approx.Holders() {
			p.evaluateHolder(s, f.approx.Depth(s)*f.approxTokens, feeds)
		}
	}
	for i := range f.inFlight {
		p.evaluateHolder(f.inFlight[i].slot, int(f.weights.inFlight*float64(f.inFlight[i].tokens)), feedNoneBit|feedSyncingBit|feedLiveBit|feedBrokenBit|feedSilentBit)
	}
}

// Feed states as a set.
const (
	feedNoneBit    = 1 << worker.FeedNone
	feedSyncingBit = 1 << worker.FeedSyncing
	feedLiveBit    = 1 << worker.FeedLive
	feedBrokenBit  = 1 << worker.FeedBroken
	feedSilentBit  = 1 << worker.FeedSilent
)

// visitHolders visits the holders of an overlap group by group. size is 0 for blocks of each rank's
// own size, otherwise the block size that applies.
func (p *scan) visitHolders(o *kvindex.Overlap, size int) {
	x, f := p.index, p.ctx
	slower := o.AnyLowerTier()
	kind, load := p.kind, p.load
	guess := size
	if guess == 0 {
		guess = int(x.size.Load())
	}
	// The deepest groups come last in the list; visiting them first makes most others unnecessary.
	for i := o.DepthGroups() - 1; i >= 0; i-- {
		depth, words := o.DepthGroup(i)
		last, todo := guess, f.uncachedTokens(depth*guess)
		if guess != 0 && !slower && todo*p.minPrice+p.minLoad > p.holderBest[maxShownHolders-1].cost {
			continue // none of them can be among the best
		}
		// most is the load above which a rank of this group cannot be among the best: of most ranks
		// only the load is read.
		most := int64(math.MaxInt64)
		if guess != 0 && !slower {
			most = p.holderBest[maxShownHolders-1].cost - todo*p.minPrice
		}
		for w, set := range words {
			for ; set != 0; set &= set - 1 {
				s := worker.Slot(w<<6 + bits.TrailingZeros64(set))
				has := load[slotAt(s)].Load()
				if has > most {
					continue
				}
				fa := &x.slowStates[slotAt(s)]
				v := fa.v.Load()
				own := int(v >> 4)
				if (feedLiveBit|feedSyncingBit)>>(v&15)&1 == 0 || own == 0 || size != 0 && own != size {
					continue // its overlap is not trusted, or it is not of this pool
				}
				if own != last {
					last, todo = own, f.uncachedTokens(depth*own)
				}
				if slower {
					host, disk := o.LowerTiers(s)
					p.evaluateHolder(s, int(max(0, float64(min(depth*own, f.prompt))-f.weights.lowerTierLoss(host, disk, own))), feedLiveBit|feedSyncingBit)
					continue
				}
				if cost := todo*int64(fa.price[kind].Load()) + has; cost <= p.holderBest[maxShownHolders-1].cost {
					p.insertHolder(int(x.position[slotAt(s)]), cost, has, int32(depth))
					if guess != 0 {
						most = p.holderBest[maxShownHolders-1].cost - f.uncachedTokens(depth*guess)*p.minPrice
					}
				}
			}
		}
	}
}

// uncachedTokens returns how many of the prompt's tokens remain to be computed with that many
// cached, by the overlap weight.
func (f *choiceContext) uncachedTokens(cached int) int64 {
	return max(0, int64(f.prompt)-int64(min(cached, f.prompt))*f.weights.overlap16>>16)
}

// evaluateHolder evaluates one rank that saves credit tokens, if its feed state is in feeds.
func (p *scan) evaluateHolder(s worker.Slot, credit int, feeds uint32) {
	fa := &p.index.slowStates[slotAt(s)]
	v := fa.v.Load()
	if v == 0 || feeds>>(v&15)&1 == 0 {
		return
	}
	has := p.load[slotAt(s)].Load()
	p.insertHolder(int(p.index.position[slotAt(s)]), p.ctx.uncachedTokens(credit)*int64(fa.price[p.kind].Load())+has, has, -1)
}

// insertHolder inserts a holder before its first equal, or after it according to the draw, and
// drops the last. A rank that is already there, from another overlap, keeps its better cost.
func (p *scan) insertHolder(index int, cost, load int64, depth int32) {
	cached := &p.holderBest
	if cached[0].index >= 0 && cost == cached[0].cost {
		if p.ties++; randomBelow(p.rng, p.ties) != 0 {
			return
		}
	} else if cost < cached[0].cost {
		p.ties = 1
	}
	at := 0
	for at < maxShownHolders && cached[at].index >= 0 && cached[at].cost < cost {
		if cached[at].index == index {
			return
		}
		at++
	}
	if at == maxShownHolders {
		return
	}
	copy(cached[at+1:], cached[at:])
	cached[at] = scanHit{index, cost, load, depth}
}

// scanLowMemory evaluates the ranks short of KV blocks, which the other passes place last.
func (p *scan) scanLowMemory(best scanHit) scanHit {
	lowMemory := p.index.lowMemory.Load()
	if lowMemory == nil {
		return best
	}
	var t candidateState
	for _, i := range *lowMemory {
		p.ctx.evaluate(p.index.ranks[i], &t)
		if cost := int64(t.cost * nsPerMS); cost < best.cost {
			best = scanHit{int(i), cost, p.load[slotAt(p.index.slots[i])].Load(), -1}
		}
	}
	return best
}
