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

// blockPos is the place of a block in a shard.
type blockPos struct {
	extent uint32
	pos    int
}

// shardCheck counts what a shard contains while check visits it.
type shardCheck struct {
	sh         *shard
	sum        *tally
	covered    map[uint64]blockPos // all blocks by hash
	children   map[uint32]int      // number of extents below each node that has any
	extents    int
	nodes      int
	links      int   // sum of the nodes' counts of children
	unanchored int   // nodes behind a gap, and extents without a parent
	used       int64 // words of storage
	entries    int   // (rank, tier, block) entries
}

// check verifies a shard and adds to the tally.
func (sh *shard) check(sum *tally) error {
	c := shardCheck{sh: sh, sum: sum, covered: make(map[uint64]blockPos), children: make(map[uint32]int)}
	for id := uint32(1); id < sh.extents.used; id++ {
		if r := sh.extents.at(id); r.storage != 0 {
			if err := c.checkExtent(id, r); err != nil {
				return err
			}
		}
	}
	if err := c.checkCounts(); err != nil {
		return err
	}
	if err := c.checkLeafList(); err != nil {
		return err
	}
	copies := 0
	for _, n := range sh.copies {
		copies += n
	}
	if c.entries != sh.len || sh.entries != c.entries+copies {
		return fmt.Errorf("%d entries counted for %d blocks and %d copies; %d blocks counted", sh.entries, c.entries, copies, sh.len)
	}
	sum.copies += copies
	sum.bytes += sh.used
	return nil
}

// checkExtent verifies an extent and its nodes, from the last to the first.
func (c *shardCheck) checkExtent(id uint32, r *extent) error {
	sh, nodes := c.sh, &c.sh.table.nodes
	c.extents++
	c.used += int64(classes[r.class])
	if r.tail == 0 || r.len() != nodes.at(r.tail).end() || r.len() > int(classes[r.class]) {
		return fmt.Errorf("extent %d: tail %d, length %d, class %d", id, r.tail, r.len(), r.class)
	}
	if leaf := nodes.at(r.tail).children() == 0; leaf != r.inLeafList {
		return fmt.Errorf("extent %d: leaf %v, listed %v", id, leaf, r.inLeafList)
	}
	next := uint32(0)
	for f := r.tail; f != 0; f = nodes.links(f).prev {
		if err := c.checkNode(f, next, id, r); err != nil {
			return err
		}
		c.unanchored += sh.gapBefore(nodes.links(f).prev, f)
		next = f
	}
	if p := sh.parentOf(r); p != 0 {
		c.children[p]++
	} else if !r.root {
		c.unanchored++
	}
	return nil
}

// checkNode verifies the node f of an extent. next is the node after it, 0 for none.
func (c *shardCheck) checkNode(f, next, id uint32, r *extent) error {
	sh, nodes := c.sh, &c.sh.table.nodes
	n := nodes.at(f)
	c.nodes++
	c.links += int(n.children())
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
		c.used += int64(setWidth(setRef(n)))
		if sh.words.setLen(setRef(n), 1) <= listLen {
			return fmt.Errorf("node %d has a set although a list suffices", f)
		}
	}
	if n.kind()&hasLower != 0 {
		c.used += 2 * int64(setWidth(lowerRef(n)))
	}
	any := false
	sh.eachHolder(n, func(slot worker.Slot, tier Tier) {
		any = true
		byTier := c.sum.cachedBlocks[slot]
		byTier[tier] += n.len()
		c.sum.cachedBlocks[slot] = byTier
		c.entries += n.len()
	})
	if !any {
		return fmt.Errorf("node %d of extent %d has no holder", f, id)
	}
	for pos := n.off(); pos < n.end(); pos++ {
		hash := sh.hashAt(r, pos)
		if at, twice := c.covered[hash]; twice {
			return fmt.Errorf("block %x is at %v and at position %d of extent %d", hash, at, pos, id)
		}
		c.covered[hash] = blockPos{id, pos}
	}
	return nil
}

// checkCounts compares what checkExtent has counted with the shard's own counts.
func (c *shardCheck) checkCounts() error {
	sh, nodes, found := c.sh, &c.sh.table.nodes, 0
	for f, n := range c.children {
		if int(nodes.at(f).children()) != n {
			return fmt.Errorf("node %d counts %d children, has %d", f, nodes.at(f).children(), n)
		}
		found += n
	}
	if c.unanchored != sh.unanchored || found != c.links {
		return fmt.Errorf("%d unanchored, %d counted; %d children, %d counted", c.unanchored, sh.unanchored, found, c.links)
	}
	if c.extents != sh.extents.live || c.nodes != nodes.live() || c.used != sh.words.inUse {
		return fmt.Errorf("%d extents, %d nodes, %d words; %d, %d, %d counted",
			c.extents, c.nodes, c.used, sh.extents.live, nodes.live(), sh.words.inUse)
	}
	return nil
}

// checkLeafList verifies that the list of leaves is connected in both directions and ends.
func (c *shardCheck) checkLeafList() error {
	listed := 0
	for id, older := c.sh.oldest, uint32(0); id != 0; id = c.sh.extents.at(id).newer {
		if r := c.sh.extents.at(id); !r.inLeafList || r.older != older {
			return fmt.Errorf("the leaf list is broken at extent %d", id)
		}
		older = id
		if listed++; listed > c.extents {
			return fmt.Errorf("the leaf list is circular")
		}
	}
	return nil
}
