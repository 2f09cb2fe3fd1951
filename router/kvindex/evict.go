package kvindex

import "sluice/router/worker"

// evictStep is the most blocks that go from the end of a branch at a time.
const evictStep = 64

// evict drops the coldest leaves until the index is in its bounds. Runs that end
// in a leaf stand in a list by their last use by a Store, and lose their ends first.
func (ix *radix) evict() {
	for ix.used() > ix.max && ix.oldest != 0 {
		ix.evictFrom(ix.oldest)
	}
}

func (ix *radix) evictFrom(run uint32) {
	r := ix.runs.at(run)
	id := r.tail
	n := ix.table.nodes.at(id)
	from, to := max(n.off(), n.end()-evictStep), n.end()
	// The engines' hashes cannot be found from here. Their cells remain for
	// now: they name a place past the end of a run that grows no more.
	r.sealed, r.len = true, uint16(from)
	ix.eachHolder(n, func(slot worker.Slot, tier Tier) {
		lost, cells := to-from, to-from
		if len(ix.copies) > 0 {
			for pos := from; pos < to; pos++ {
				key := copyOf{run, uint16(pos), slot, tier}
				cells += ix.copies[key]
				delete(ix.copies, key)
			}
		}
		ix.counts(slot, -lost)
		ix.evicted.Add(uint64(lost))
		ix.entries -= cells
		side := &ix.ranks[slot].side
		if side.stale += cells; side.stale > side.n/2+64 {
			side.room(0, ix.factor, ix.validPlace)
		}
	})
	if from > n.off() {
		ix.cut(id, from)
	} else {
		ix.remove(id)
	}
	ix.settle(run)
}

// touch makes a run that ends in a leaf the one used last.
func (ix *radix) touch(run uint32) {
	if ix.newest == run {
		return
	}
	r := ix.runs.at(run)
	if r.listed {
		ix.unlist(run)
	} else if r.tail == 0 || ix.table.nodes.at(r.tail).kids() != 0 {
		return
	}
	r.listed, r.older, r.newer = true, ix.newest, 0
	if ix.newest != 0 {
		ix.runs.at(ix.newest).newer = run
	} else {
		ix.oldest = run
	}
	ix.newest = run
}

func (ix *radix) listOldest(run uint32) {
	ix.unlist(run)
	r := ix.runs.at(run)
	r.listed, r.older, r.newer = true, 0, ix.oldest
	if ix.oldest != 0 {
		ix.runs.at(ix.oldest).older = run
	} else {
		ix.newest = run
	}
	ix.oldest = run
}

func (ix *radix) unlist(run uint32) {
	r := ix.runs.at(run)
	if !r.listed {
		return
	}
	if r.older != 0 {
		ix.runs.at(r.older).newer = r.newer
	} else {
		ix.oldest = r.newer
	}
	if r.newer != 0 {
		ix.runs.at(r.newer).older = r.older
	} else {
		ix.newest = r.older
	}
	r.listed, r.older, r.newer = false, 0, 0
}
