package kvindex

import (
	"fmt"

	"sluice/router/worker"
)

// checkSome extents check from time to time, when it is cheap and no other writer is active. The
// caller holds a rank's lock.
func (ix *radix) checkSome(own *rankState) {
	if ix.checks.Add(1)%256 != 0 || ix.Len() > 4096 {
		return
	}
	ix.ranksMu.Lock() // no rank may be added meanwhile
	defer ix.ranksMu.Unlock()
	for _, slot := range ix.activeRanks {
		if r := ix.ranks[slot].Load(); r != own {
			if !r.mu.TryLock() {
				return
			}
			defer r.mu.Unlock()
		}
	}
	if err := ix.check(); err != nil {
		panic("kvindex: " + err.Error())
	}
}

// tally is the result of checking a shard.
type tally struct {
	cachedBlocks map[worker.Slot][NumTiers]int
	copies       int
	bytes        int64
}

// check verifies the index's invariants. It takes time proportional to the index's size. The caller
// holds every rank's lock or has exclusive use of the index.
func (ix *radix) check() error {
	sum := tally{cachedBlocks: make(map[worker.Slot][NumTiers]int)}
	inShard := make([]int, shardCount)
	for i := range ix.shards {
		sh := &ix.shards[i]
		sh.mu.Lock()
		err := sh.check(&sum)
		inShard[i] = sh.entries
		sh.mu.Unlock()
		if err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	if sum.bytes != ix.bytes.Load() {
		return fmt.Errorf("shards use %d bytes, %d counted", sum.bytes, ix.Bytes())
	}
	entries := 0
	for _, slot := range ix.activeRanks {
		if counted := ix.CachedBlocksByTier(slot); counted != sum.cachedBlocks[slot] {
			return fmt.Errorf("slot %d has %d blocks by tier, %d counted", slot, sum.cachedBlocks[slot], counted)
		}
		delete(sum.cachedBlocks, slot)
		rank := ix.ranks[slot].Load()
		n, left := 0, 0
		for i, cells := range [][]engineCell{rank.engineTable.cells, rank.engineTable.old} {
			for j, c := range cells {
				if c.place == 0 {
					continue
				}
				n += 1
				left += i
				if at, ok := probe(cells, c.hash, placeTier(c.place), ix.factor); !ok || at != j {
					return fmt.Errorf("slot %d: cell %d of table %d is not found by its hash", slot, j, i)
				}
				if !ix.valid(c.place) {
					continue
				}
				entries++
				inShard[placeShard(c.place)]--
				sh := &ix.shards[placeShard(c.place)]
				f := sh.nodeOf(sh.extents.at(placeExtent(c.place)), placePos(c.place))
				if f == 0 || !sh.isHolder(sh.table.nodes.at(f), slot, placeTier(c.place)) {
					return fmt.Errorf("slot %d: hash %d names block %[4]d of extent %[3]d, which the slot does not have", slot, c.hash, placeExtent(c.place), placePos(c.place))
				}
			}
		}
		if n != rank.engineTable.n || left != rank.engineTable.oldUsed && rank.engineTable.old != nil {
			return fmt.Errorf("slot %d: %d cells in use, %d counted", slot, n, rank.engineTable.n)
		}
	}
	if len(sum.cachedBlocks) > 0 {
		return fmt.Errorf("slots without events have blocks: %v", sum.cachedBlocks)
	}
	if ix.ownerPlaces {
		return nil // the owner of places checks the rest
	}
	for i, n := range inShard {
		if n != 0 {
			return fmt.Errorf("shard %d counts %d entries too many", i, n)
		}
	}
	if entries != ix.Len()+sum.copies {
		return fmt.Errorf("%d entries and %d copies of %d blocks", entries, sum.copies, ix.Len())
	}
	return nil
}

// check verifies a shard and adds to the tally.
func (sh *shard) check(sum *tally) error {
	nodes := &sh.table.nodes
	type blockPos struct {
		extent uint32
		pos    int
	}
	covered := make(map[uint64]blockPos)
	unanchored, children, childrenFound, childrenCounted := 0, make(map[uint32]int), 0, 0
	extents, nodeCount, used := 0, 0, int64(0)
	holds := 0 // (rank, tier, block) entries
	for id := uint32(1); id < sh.extents.used; id++ {
		r := sh.extents.at(id)
		if r.storage == 0 {
			continue
		}
		extents++
		used += int64(classes[r.class])
		if r.tail == 0 || r.len() != nodes.at(r.tail).end() || r.len() > int(classes[r.class]) {
			return fmt.Errorf("extent %d: tail %d, length %d, class %d", id, r.tail, r.len(), r.class)
		}
		if leaf := nodes.at(r.tail).children() == 0; leaf != r.inLeafList {
			return fmt.Errorf("extent %d: leaf %v, listed %v", id, leaf, r.inLeafList)
		}
		next := uint32(0)
		for f := r.tail; f != 0; f = nodes.links(f).prev {
			n := nodes.at(f)
			nodeCount++
			childrenCounted += int(n.children())
			switch {
			case n.extent() != id || n[wState]&dead != 0 || uint32(n[wPlace]>>32) != r.storage || n.len() == 0:
				return fmt.Errorf("node %d of extent %d: %x", f, id, *n)
			case nodes.links(f).next != next:
				return fmt.Errorf("node %d of extent %d: next is %d, not %d", f, id, nodes.links(f).next, next)
			case next != 0 && n.end() > nodes.at(next).off():
				return fmt.Errorf("nodes %d and %d of extent %d overlap", f, next, id)
			case next != 0 && n.end() == nodes.at(next).off() && n.children() == 0 && sh.sameHolders(n, nodes.at(next)):
				return fmt.Errorf("nodes %d and %d of extent %d should be joined", f, next, id)
			case n[wFirst] != sh.hashAt(r, n.off()) || n[wLast] != sh.hashAt(r, n.end()-1):
				return fmt.Errorf("node %d of extent %d: first or last hash differs from the storage", f, id)
			case sh.table.find(n[wFirst]) != f:
				return fmt.Errorf("node %d of extent %d is not in the table", f, id)
			}
			if n.kind()&hasSet != 0 {
				used += int64(setWidth(setRef(n)))
				if sh.words.setLen(setRef(n), 1) <= listLen {
					return fmt.Errorf("node %d has a set although a list suffices", f)
				}
			}
			if n.kind()&hasLower != 0 {
				used += 2 * int64(setWidth(lowerRef(n)))
			}
			any := false
			sh.eachHolder(n, func(slot worker.Slot, tier Tier) {
				any = true
				byTier := sum.cachedBlocks[slot]
				byTier[tier] += n.len()
				sum.cachedBlocks[slot] = byTier
				holds += n.len()
			})
			if !any {
				return fmt.Errorf("node %d of extent %d has no holder", f, id)
			}
			for pos := n.off(); pos < n.end(); pos++ {
				if at, twice := covered[sh.hashAt(r, pos)]; twice {
					return fmt.Errorf("block %x is at %v and at position %[4]d of extent %[3]d", sh.hashAt(r, pos), at, id, pos)
				}
				covered[sh.hashAt(r, pos)] = blockPos{id, pos}
			}
			unanchored += sh.gapBefore(nodes.links(f).prev, f)
			next = f
		}
		if p := sh.parentOf(r); p != 0 {
			children[p]++
		} else if !r.root {
			unanchored++
		}
	}
	for f, n := range children {
		if int(nodes.at(f).children()) != n {
			return fmt.Errorf("node %d counts %d children, has %d", f, nodes.at(f).children(), n)
		}
		childrenFound += n
	}
	if unanchored != sh.unanchored || childrenFound != childrenCounted {
		return fmt.Errorf("%d unanchored, %d counted; %d children, %d counted", unanchored, sh.unanchored, childrenFound, childrenCounted)
	}
	if extents != sh.extents.live || nodeCount != nodes.live() || used != sh.words.inUse {
		return fmt.Errorf("%d extents, %d nodes, %d words; %d, %d, %d counted",
			extents, nodeCount, used, sh.extents.live, nodes.live(), sh.words.inUse)
	}
	copies := 0
	for _, n := range sh.copies {
		copies += n
	}
	listed := 0
	for id, older := sh.oldest, uint32(0); id != 0; id = sh.extents.at(id).newer {
		if r := sh.extents.at(id); !r.inLeafList || r.older != older {
			return fmt.Errorf("the leaf list is broken at extent %d", id)
		}
		older = id
		if listed++; listed > extents {
			return fmt.Errorf("the leaf list is circular")
		}
	}
	if holds != sh.len || sh.entries != holds+copies {
		return fmt.Errorf("%d entries counted for %d blocks and %d copies; %d blocks counted", sh.entries, holds, copies, sh.len)
	}
	sum.copies += copies
	sum.bytes += sh.used
	return nil
}
