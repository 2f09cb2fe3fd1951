package kvindex

import "sluice/router/worker"

// Remove implements Index.
func (ix *radix) Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int) {
	if tier >= NumTiers || slot >= worker.MaxSlots {
		return 0, len(engine)
	}
	rank := ix.rank(slot)
	rank.mu.Lock()
	b := &rank.batch
	for all := engine; len(all) > 0; {
		step := all[:min(len(all), batchMax)]
		all = all[len(step):]
		places := rank.removeHashes(step, b, tier, ix.factor)
		for len(places) > 0 {
			sh := &ix.shards[placeShard(places[0])]
			sh.lock()
			n, cached := sh.removeBlocks(places, slot, tier)
			sh.unlock()
			removed += cached
			if n > cached {
				rank.engineTable.stale.Add(int64(cached - n))
			}
			places = places[n:]
		}
	}
	rank.engineTable.shrink(ix.factor, ix.validPlace)
	ix.unlockRank(rank)
	return removed, len(engine) - removed
}

// removeSpans removes spans of an owner's blocks from a rank.
func (ix *radix) removeSpans(slot worker.Slot, spans []span) {
	rank := ix.rank(slot)
	rank.mu.Lock()
	for _, x := range spans {
		sh := &ix.shards[placeShard(x.place)]
		sh.lock()
		if len(sh.copies) == 0 {
			sh.removeRange(placeExtent(x.place), placePos(x.place), placePos(x.end()), slot, Device)
			sh.entries -= int(x.n)
		} else {
			for ; x.n > 0; x.n-- {
				sh.removeBlocks([]uint64{placeAfter(x.place, int(x.n)-1)}, slot, Device)
			}
		}
		sh.unlock()
	}
	ix.unlockRank(rank)
}

// removeHashes removes engine hashes from the engine table and returns the places they had.
func (r *rankState) removeHashes(engine []EngineHash, b *batch, tier Tier, factor uint64) []uint64 {
	if len(engine) > 1 {
		r.sink += prefetchEngine(&r.engineTable, engine, tier, factor)
	}
	n := 0
	for _, hash := range engine {
		if cells, at := r.engineTable.get(uint64(hash), tier, factor); at >= 0 {
			b.place[n] = cells[at].place
			n++
			r.engineTable.remove(cells, at, factor)
		}
	}
	return b.place[:n]
}

// removeBlocks removes from a rank the blocks at the leading places that lie in this shard. It
// returns how many places those are and how many of their blocks the rank still had. Adjacent
// blocks are removed together.
func (sh *shard) removeBlocks(places []uint64, slot worker.Slot, tier Tier) (n, cached int) {
	var in uint32
	var from, to int
	for ; n < len(places) && placeShard(places[n]) == sh.number; n++ {
		p := places[n]
		if !sh.ix.valid(p) {
			continue
		}
		cached++
		id, pos := placeExtent(p), placePos(p)
		if sh.removeCopy(id, pos, slot, tier) {
			continue
		}
		switch {
		case in == id && pos == to:
			to++
		case in == id && pos == from-1:
			from--
		default:
			if in != 0 {
				sh.removeRange(in, from, to, slot, tier)
			}
			in, from, to = id, pos, pos+1
		}
	}
	if in != 0 {
		sh.removeRange(in, from, to, slot, tier)
	}
	sh.entries -= cached
	return n, cached
}
