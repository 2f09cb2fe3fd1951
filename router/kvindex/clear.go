package kvindex

import "sluice/router/worker"

// clearStep is how many cells a Clear looks at before it lets other writers in.
const clearStep = 1 << 12

// Clear implements Index. It takes time in proportion to the rank's entries and
// the fragments of the runs they lie in. Readers go on, and so do writers of other
// ranks between its steps; those of this rank wait.
func (ix *radix) Clear(slot worker.Slot) (lost int) {
	if slot >= worker.MaxSlots || ix.Held(slot) == 0 {
		return 0
	}
	rank := ix.lock(slot)
	side := rank.side
	rank.side = sideTable{floor: side.floor}
	ix.clears++
	mark := ix.clears
	ix.clearing++
	for _, cells := range [][]sideCell{side.cells, side.old} {
		for len(cells) > 0 {
			step := cells[:min(len(cells), clearStep)]
			cells = cells[len(step):]
			for _, c := range step {
				if c.place != 0 {
					lost += ix.clearAt(c.place, slot, mark)
				}
			}
			ix.account()
			ix.mu.Unlock()
			ix.mu.Lock()
			ix.hands.goFirst()
		}
	}
	rank.side.stale = 0
	ix.clearing--
	ix.unlock(rank)
	return lost
}

// clearAt takes a rank away from the whole run that one of its entries lies in.
func (ix *radix) clearAt(p uint64, slot worker.Slot, mark uint32) (lost int) {
	run := placeRun(p)
	if len(ix.copies) > 0 {
		key := copyOf{run, uint16(placePos(p)), slot, placeTier(p)}
		ix.entries -= ix.copies[key]
		delete(ix.copies, key)
	}
	r := ix.runs.at(run)
	if r.mark == mark || !ix.valid(p) {
		return 0
	}
	r.mark = mark
	nodes := &ix.table.nodes
	for id := r.tail; id != 0; {
		prev := nodes.links(id).prev
		n := nodes.at(id)
		for tier := range NumTiers {
			if !ix.holds(n, slot, tier) {
				continue
			}
			lost += n.len()
			if ix.sole(n, slot, tier) {
				ix.remove(id)
				break
			}
			ix.delHolder(n, slot, tier)
		}
		id = prev
	}
	for id := r.tail; id != 0; {
		prev := nodes.links(id).prev
		ix.join(prev, id)
		id = prev
	}
	ix.counts(slot, -lost)
	ix.entries -= lost
	ix.settle(run)
	return lost
}
