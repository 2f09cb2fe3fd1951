package kvindex

import (
	"math"

	"sluice/router/worker"
)

// evictStep is the largest number of blocks that one step removes from the end of a branch.
const evictStep = 64

// maxEvictLock is the largest number of steps while a shard's lock is held once.
const maxEvictLock = 8

// evict drops the coldest leaves until the index is within its bounds. Each shard lists its extents
// that end in a leaf by last use and publishes the tick of the coldest. The shard with the coldest
// leaf goes first, and an extent loses its end first. own is the rank whose lock the caller holds.
func (ix *radix) evict(own *rankState) {
	for ix.overLimit() {
		sh := ix.coldest()
		if sh == nil {
			return
		}
		sh.lock()
		sh.applyReadSamples()
		for range maxEvictLock {
			if sh.oldest == 0 || ix.overLimit() && sh.coldest.Load() > ix.coldest().coldest.Load() {
				break
			}
			sh.evictFrom(sh.oldest)
			sh.account()
			if !ix.overLimit() {
				break
			}
		}
		tidy := sh.tidy
		sh.tidy = nil
		sh.unlock()
		for _, slot := range tidy {
			rank := ix.ranks[slot].Load()
			// A rank whose lock is taken does this itself on its next write.
			if rank == own {
				rank.tidy(ix)
			} else if rank.mu.TryLock() {
				rank.tidy(ix)
				rank.mu.Unlock()
			}
		}
	}
}

// coldest returns the shard with the coldest leaf, or nil if there are no leaves.
func (ix *radix) coldest() (coldest *shard) {
	oldest := uint64(math.MaxUint64)
	for i := range ix.shards {
		if at := ix.shards[i].coldest.Load(); at < oldest {
			coldest, oldest = &ix.shards[i], at
		}
	}
	return coldest
}

func (sh *shard) evictFrom(ext uint32) {
	r := sh.extents.at(ext)
	id := r.tail
	n := sh.table.nodes.at(id)
	from, to := max(n.off(), n.end()-evictStep), n.end()
	// The engine hashes cannot be found from here. Their cells remain for now; they name places
	// beyond the end of an extent that does not grow again.
	r.sealed = true
	r.setLen(from)
	sh.eachHolder(n, func(slot worker.Slot, tier Tier) {
		lost, cells := to-from, to-from
		if len(sh.copies) > 0 {
			for pos := from; pos < to; pos++ {
				key := copyOf{ext, uint16(pos), slot, tier}
				cells += sh.copies[key]
				delete(sh.copies, key)
			}
		}
		sh.len -= lost
		sh.ix.ranks[slot].Load().evicted[tier].Add(int64(lost))
		sh.ix.evicted.Add(uint64(lost))
		sh.entries -= cells
		rank := sh.ix.ranks[slot].Load()
		if stale := rank.engineTable.stale.Add(int64(cells)); stale > rank.cells.Load()/2+64 && len(sh.tidy) < 64 {
			sh.tidy = append(sh.tidy, slot)
		}
	})
	if from > n.off() {
		sh.truncate(id, from)
	} else {
		sh.remove(id)
	}
	sh.finishExtent(ext)
}

// markUsed makes an extent that ends in a leaf the most recently used.
func (sh *shard) markUsed(ext uint32) {
	r := sh.extents.at(ext)
	r.used = sh.ix.tick.Load()
	if sh.newest == ext {
		return
	}
	if r.inLeafList {
		sh.unlist(ext)
	} else if r.tail == 0 || sh.table.nodes.at(r.tail).children() != 0 {
		return
	}
	r.inLeafList, r.older, r.newer = true, sh.newest, 0
	if sh.newest != 0 {
		sh.extents.at(sh.newest).newer = ext
	} else {
		sh.oldest = ext
	}
	sh.newest = ext
}

// listOldest makes an extent the next to be evicted.
func (sh *shard) listOldest(ext uint32) {
	sh.unlist(ext)
	r := sh.extents.at(ext)
	r.inLeafList, r.older, r.newer = true, 0, sh.oldest
	if sh.oldest != 0 {
		sh.extents.at(sh.oldest).older = ext
		r.used = sh.extents.at(sh.oldest).used
	} else {
		sh.newest = ext
	}
	sh.oldest = ext
}

func (sh *shard) unlist(ext uint32) {
	r := sh.extents.at(ext)
	if !r.inLeafList {
		return
	}
	if r.older != 0 {
		sh.extents.at(r.older).newer = r.newer
	} else {
		sh.oldest = r.newer
	}
	if r.newer != 0 {
		sh.extents.at(r.newer).older = r.older
	} else {
		sh.newest = r.older
	}
	r.inLeafList, r.older, r.newer = false, 0, 0
}
