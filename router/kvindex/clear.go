package kvindex

import "sluice/router/worker"

// Clear implements Index. It takes time proportional to the rank's entries and to the nodes of the
// extents that contain them. Readers and writers of other ranks continue, because each shard is
// locked for one extent at a time. Writers of this rank wait.
func (ix *radix) Clear(slot worker.Slot) (lost int) {
	if slot >= worker.MaxSlots || ix.CachedBlocks(slot) == 0 {
		return 0
	}
	rank := ix.rank(slot)
	rank.mu.Lock()
	tables := [][]engineCell{rank.engineTable.cells, rank.engineTable.old}
	memory := []*mmapCells{rank.engineTable.mem, rank.engineTable.oldMem}
	rank.engineTable.clear()
	mark := ix.clears.Add(1)
	for _, cells := range tables {
		for i := range cells {
			p := cells[i].place
			if p == 0 {
				continue
			}
			sh := &ix.shards[placeShard(p)]
			// The first entry of an extent clears the whole extent.
			if sh.extents.read(placeExtent(p)).clearMark.Load() == mark && !sh.hasCopies.Load() {
				continue
			}
			sh.lock()
			lost += sh.clearAt(p, slot, mark)
			sh.unlock()
		}
	}
	for _, m := range memory {
		m.free()
	}
	rank.engineTable.stale.Store(0)
	ix.unlockRank(rank)
	return lost
}

// clearAt removes a rank from the whole extent that contains place p.
func (sh *shard) clearAt(p uint64, slot worker.Slot, mark uint32) (lost int) {
	ext := placeExtent(p)
	if len(sh.copies) > 0 {
		key := copyOf{ext, uint16(placePos(p)), slot, placeTier(p)}
		sh.entries -= sh.copies[key]
		delete(sh.copies, key)
	}
	r := sh.extents.at(ext)
	if r.clearMark.Load() == mark || !sh.ix.valid(p) {
		return 0
	}
	r.clearMark.Store(mark)
	nodes := &sh.table.nodes
	var byTier [NumTiers]int
	for id := r.tail; id != 0; {
		prev := nodes.links(id).prev
		n := nodes.at(id)
		for tier := range NumTiers {
			if !sh.isHolder(n, slot, tier) {
				continue
			}
			byTier[tier] += n.len()
			if sh.isSoleHolder(n, slot, tier) {
				sh.remove(id)
				break
			}
			sh.delHolder(n, slot, tier)
		}
		id = prev
	}
	for id := r.tail; id != 0; {
		prev := nodes.links(id).prev
		sh.join(prev, id)
		id = prev
	}
	for tier, n := range byTier {
		sh.addCounts(slot, Tier(tier), -n)
		lost += n
	}
	sh.entries -= lost
	sh.finishExtent(ext)
	return lost
}
