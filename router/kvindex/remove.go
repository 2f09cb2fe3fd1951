package kvindex

import "sluice/router/worker"

// Remove implements Index.
func (ix *radix) Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int) {
	if tier >= NumTiers || slot >= worker.MaxSlots {
		return 0, len(engine)
	}
	rank := ix.rank(slot)
	rank.mu.Lock()
	b := &rank.b
	for all := engine; len(all) > 0; {
		step := all[:min(len(all), batchMax)]
		all = all[len(step):]
		places := rank.take(step, b, tier, ix.factor)
		for len(places) > 0 {
			sh := &ix.shards[placeShard(places[0])]
			sh.lock()
			n, held := sh.takeAway(places, slot, tier)
			sh.unlock()
			removed += held
			if n > held {
				rank.side.stale.Add(int64(held - n))
			}
			places = places[n:]
		}
	}
	rank.side.shrink(ix.factor, ix.validPlace)
	ix.done(rank)
	return removed, len(engine) - removed
}

// removeAt takes the blocks of stretches of an owner's from a rank.
func (ix *radix) removeAt(slot worker.Slot, going []span) {
	rank := ix.rank(slot)
	rank.mu.Lock()
	for _, x := range going {
		sh := &ix.shards[placeShard(x.place)]
		sh.lock()
		if len(sh.copies) == 0 {
			sh.unhold(placeRun(x.place), placePos(x.place), placePos(x.end()), slot, Device)
			sh.entries -= int(x.n)
		} else {
			for ; x.n > 0; x.n-- {
				sh.takeAway([]uint64{placeAfter(x.place, int(x.n)-1)}, slot, Device)
			}
		}
		sh.unlock()
	}
	ix.done(rank)
}

// take takes engine hashes out of the side table and gives the places they had.
func (r *rankState) take(engine []EngineHash, b *batch, tier Tier, factor uint64) []uint64 {
	if len(engine) > 1 {
		r.sink += touchSide(&r.side, engine, tier, factor)
	}
	n := 0
	for _, hash := range engine {
		if cells, at := r.side.get(uint64(hash), tier, factor); at >= 0 {
			b.place[n] = cells[at].place
			n++
			r.side.remove(cells, at, factor)
		}
	}
	return b.place[:n]
}

// takeAway takes the blocks at the first of some places from a rank, as many as lie
// in this shard, and says how many those are and how many of them were still held.
// Blocks that lie together are taken away together.
func (sh *shard) takeAway(places []uint64, slot worker.Slot, tier Tier) (n, held int) {
	var in uint32
	var from, to int
	for ; n < len(places) && placeShard(places[n]) == sh.no; n++ {
		p := places[n]
		if !sh.ix.valid(p) {
			continue
		}
		held++
		id, pos := placeRun(p), placePos(p)
		if sh.oneCopyLess(id, pos, slot, tier) {
			continue
		}
		switch {
		case in == id && pos == to:
			to++
		case in == id && pos == from-1:
			from--
		default:
			if in != 0 {
				sh.unhold(in, from, to, slot, tier)
			}
			in, from, to = id, pos, pos+1
		}
	}
	if in != 0 {
		sh.unhold(in, from, to, slot, tier)
	}
	sh.entries -= held
	return n, held
}
