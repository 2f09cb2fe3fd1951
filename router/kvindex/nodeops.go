package kvindex

import (
	"sluice/router/worker"
)

// Changes of nodes. Each is a sequence of steps that are consistent for readers: every intermediate
// state of a split or join has the same holders for every block.

// split cuts a node before position at, which lies inside it, and returns the right part, a new
// node. The right part is published before the left one is shortened.
func (sh *shard) split(id uint32, at int) uint32 {
	nodes := &sh.table.nodes
	n := nodes.at(id)
	r := sh.extents.at(n.extent())
	kind, last, children := n.kind(), n[wLast], n.children()
	right := nodes.alloc()
	m := nodes.at(right)
	m.ready(wFirst, sh.hashAt(r, at))
	m.ready(wLast, last)
	m.ready(wLow, n[wLow])
	m.ready(wList, n[wList])
	m.ready(wPlace, n[wPlace]&genMask|uint64(at)<<16)
	var sets uint64
	if kind&hasSet != 0 {
		sets = uint64(sh.words.copySet(uint32(n[wSets]>>32), 0, 1)) << 32
	}
	if kind&hasLower != 0 {
		sets |= uint64(sh.words.copySet(uint32(n[wSets]), 0, 2))
	}
	m.ready(wSets, sets)
	m[wExtent] = uint64(n.extent())<<32 | uint64(children)
	m.commit(n.end()-at, kind)
	sh.table.insert(m[wFirst], right)

	n.ready(wLast, sh.hashAt(r, at-1))
	n.commit(at-n.off(), kind)
	n.setChildren(0)
	l := nodes.links(id)
	*nodes.links(right) = link{prev: id, next: l.next}
	if l.next != 0 {
		nodes.links(l.next).prev = right
	} else {
		r.tail = right
	}
	l.next = right
	return right
}

// join merges two adjacent nodes if their holders are equal and nothing branches off between them,
// and reports whether it did. The left node remains: it takes over the blocks before the right one
// is deleted.
func (sh *shard) join(first, right uint32) bool {
	if first == 0 || right == 0 {
		return false
	}
	nodes := &sh.table.nodes
	n, m := nodes.at(first), nodes.at(right)
	if n.children() != 0 || n.end() != m.off() || !sh.sameHolders(n, m) {
		return false
	}
	n.ready(wLast, m[wLast])
	n.commit(n.len()+m.len(), n.kind())
	n.setChildren(m.children())
	m.setChildren(0)
	sh.deleteNode(right)
	return true
}

// remove deletes a node and its blocks. The caller updates the extent's length.
func (sh *shard) remove(id uint32) {
	l := *sh.table.nodes.links(id)
	sh.unanchored -= sh.gapBefore(l.prev, id)
	if l.next != 0 {
		sh.unanchored += sh.gapBefore(l.prev, l.next) - sh.gapBefore(id, l.next)
	}
	sh.detachChildren(sh.table.nodes.at(id))
	sh.deleteNode(id)
}

// deleteNode removes a node from the table and from its extent's list, and frees it.
func (sh *shard) deleteNode(id uint32) {
	nodes := &sh.table.nodes
	n := nodes.at(id)
	sh.table.remove(n[wFirst], id)
	kind := n.kind()
	n.retire()
	if kind&hasSet != 0 {
		sh.words.freeSet(uint32(n[wSets]>>32), 1)
	}
	if kind&hasLower != 0 {
		sh.words.freeSet(uint32(n[wSets]), 2)
	}
	l := *nodes.links(id)
	if l.prev != 0 {
		nodes.links(l.prev).next = l.next
	}
	if l.next != 0 {
		nodes.links(l.next).prev = l.prev
	} else {
		sh.extents.at(n.extent()).tail = l.prev
	}
	nodes.free(id)
}

// publish makes new blocks of an extent visible with one holder. It extends the last node if that
// has the same single holder and nothing branches off there.
func (sh *shard) publish(ext uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &sh.table.nodes
	r := sh.extents.at(ext)
	r.setLen(to)
	if r.tail != 0 {
		if n := nodes.at(r.tail); n.end() == from && n.children() == 0 && sh.isSoleHolder(n, slot, tier) {
			n.ready(wLast, sh.hashAt(r, to-1))
			n.commit(n.len()+to-from, n.kind())
			sh.markUsed(ext)
			return
		}
	}
	id := nodes.alloc()
	n := nodes.at(id)
	n.ready(wFirst, sh.hashAt(r, from))
	n.ready(wLast, sh.hashAt(r, to-1))
	n.ready(wPlace, uint64(r.storage)<<32|uint64(from)<<16)
	n.ready(wLow, 0)
	n.ready(wList, 0)
	n.ready(wSets, 0)
	n[wExtent] = uint64(ext) << 32
	n.commit(to-from, 0)
	sh.addHolder(n, slot, tier)
	*nodes.links(id) = link{prev: r.tail}
	if r.tail != 0 {
		nodes.links(r.tail).next = id
	}
	r.tail = id
	sh.table.insert(n[wFirst], id)
	sh.markUsed(ext)
}

// append stores a block at a position beyond the extent's end, where no reader looks yet. more is
// the number of blocks to come, including this one.
func (sh *shard) append(r *extent, pos int, seq uint64, more int) {
	if pos == int(classes[r.class]) {
		ahead := pos // few moves while small, little unused space when large
		if ahead >= 256 {
			ahead /= 2
		}
		sh.grow(r, pos, min(pos+max(more, ahead), maxExtent))
	}
	p, at := sh.words.page(r.storage)
	release(&p[at+uint32(pos)], seq)
}

// grow moves an extent to larger storage. Readers that the old place still leads there find the
// node changed.
func (sh *shard) grow(r *extent, used, blocks int) {
	class := classFor(blocks)
	line := sh.words.alloc(class)
	p, at := sh.words.page(r.storage)
	q, into := sh.words.page(line)
	for i := range uint32(used) {
		release(&q[into+i], p[at+i])
	}
	for id := r.tail; id != 0; id = sh.table.nodes.links(id).prev {
		n := sh.table.nodes.at(id)
		n.store(wPlace, n[wPlace]&^genMask|uint64(line)<<32)
		n.changed()
	}
	sh.words.free(r.storage, int(r.class))
	r.storage, r.class = line, uint8(class)
}

// addRange adds a holder to blocks from…to of a node, none of which it has.
func (sh *shard) addRange(id uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &sh.table.nodes
	if from > nodes.at(id).off() {
		id = sh.split(id, from)
	}
	if to < nodes.at(id).end() {
		sh.split(id, to)
	}
	sh.addHolder(nodes.at(id), slot, tier)
	sh.joinAround(id)
}

// joinAround joins a node with its neighbours where possible.
func (sh *shard) joinAround(id uint32) {
	l := *sh.table.nodes.links(id)
	sh.join(id, l.next)
	sh.join(l.prev, id)
}

// removeRange removes a holder from blocks from…to of an extent, all of which it has.
func (sh *shard) removeRange(ext uint32, from, to int, slot worker.Slot, tier Tier) {
	sh.addCounts(slot, tier, from-to)
	r := sh.extents.at(ext)
	for id := sh.nodeOf(r, to-1); ; {
		n := sh.table.nodes.at(id)
		prev := sh.table.nodes.links(id).prev
		lo := max(from, n.off())
		sh.removeRangeIn(id, lo, to, slot, tier)
		if lo == from {
			break
		}
		to, id = lo, prev
	}
	sh.finishExtent(ext)
}

// removeRangeIn is removeRange within one node. The caller updates the extent's length.
func (sh *shard) removeRangeIn(id uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &sh.table.nodes
	n := nodes.at(id)
	if from > n.off() && to == n.end() && sh.isSoleHolder(n, slot, tier) {
		sh.truncate(id, from)
		return
	}
	if to < n.end() {
		sh.split(id, to)
	}
	if from > n.off() {
		id = sh.split(id, from)
		n = nodes.at(id)
	}
	if sh.isSoleHolder(n, slot, tier) {
		sh.remove(id)
		return
	}
	sh.delHolder(n, slot, tier)
	sh.joinAround(id)
}

// gapBefore is 1 if a node does not directly follow the previous one in its extent, else 0. A prev
// of 0 means the extent's beginning.
func (sh *shard) gapBefore(prev, id uint32) int {
	end := 0
	if prev != 0 {
		end = sh.table.nodes.at(prev).end()
	}
	if end != sh.table.nodes.at(id).off() {
		return 1
	}
	return 0
}

// detachChildren detaches the extents that branch off at a node's end. The extent is sealed, so
// that its next block does not become the branches' parent.
func (sh *shard) detachChildren(n *node) {
	if n.children() != 0 {
		sh.extents.at(n.extent()).sealed = true
		sh.unanchored += int(n.children())
		n.setChildren(0)
	}
}

// truncate shortens a node.
func (sh *shard) truncate(id uint32, end int) {
	n := sh.table.nodes.at(id)
	sh.detachChildren(n)
	if next := sh.table.nodes.links(id).next; next != 0 {
		sh.unanchored += 1 - sh.gapBefore(id, next)
	}
	n.ready(wLast, sh.hashAt(sh.extents.at(n.extent()), end-1))
	n.commit(end-n.off(), n.kind())
}

// finishExtent sets an extent's length to the end of its last node, or frees the extent.
func (sh *shard) finishExtent(ext uint32) {
	r := sh.extents.at(ext)
	if r.tail == 0 {
		sh.freeExtent(ext)
		return
	}
	n := sh.table.nodes.at(r.tail)
	r.setLen(n.end())
	if n.children() != 0 {
		sh.unlist(ext)
	} else if !r.inLeafList {
		sh.listOldest(ext)
	}
}

// attach makes r a child of the block at a position of another extent and makes that block's node
// end there, so that a node with children is known not to be a leaf.
func (sh *shard) attach(r *extent, parent uint32, pos int) {
	p := sh.extents.at(parent)
	id := sh.nodeOf(p, pos)
	if id == 0 {
		sh.unanchored++
		return
	}
	r.parent, r.parentGen, r.parentPos = parent, p.gen(), uint16(pos)
	n := sh.table.nodes.at(id)
	if pos+1 < n.end() {
		sh.split(id, pos+1)
	}
	n.setChildren(n.children() + 1)
	if id == p.tail {
		sh.unlist(parent)
	}
}

// freeExtent frees an extent without nodes. A parent that becomes a leaf is the next to be evicted,
// so that one branch is finished before another is begun.
func (sh *shard) freeExtent(ext uint32) {
	r := sh.extents.at(ext)
	parent, pos, root := r.parent, int(r.parentPos), r.root
	id := sh.parentOf(r)
	sh.unlist(ext)
	sh.words.free(r.storage, int(r.class))
	sh.extents.free(ext)
	if root {
		return
	}
	if id == 0 {
		sh.unanchored--
		return
	}
	n := sh.table.nodes.at(id)
	n.setChildren(n.children() - 1)
	if n.children() > 0 {
		return
	}
	if id == sh.extents.at(parent).tail {
		sh.listOldest(parent)
	} else if n.end() == pos+1 {
		sh.join(id, sh.table.nodes.links(id).next)
	}
}

// parentOf returns the node from which an extent branches off, or 0 if it is gone.
func (sh *shard) parentOf(r *extent) uint32 {
	if r.parent == 0 {
		return 0
	}
	p := sh.extents.at(r.parent)
	if p.gen() != r.parentGen || int(r.parentPos) >= p.len() {
		return 0
	}
	return sh.nodeOf(p, int(r.parentPos))
}
