package kvindex

import (
	"sluice/router/worker"
)

// Changes of fragments. Each is a sequence of steps that are whole for readers:
// what splits and joins show on the way says the same of every block.

// split cuts a fragment before position at, which lies inside it, and returns the
// right part, a new node. The right part is published before the left one ends.
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

// join makes one fragment of two neighbours if nothing keeps them apart, and says
// whether it did. The left one remains: it takes the blocks over before the right
// one goes.
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

// remove takes a fragment and its blocks away. Its run's length is left to the caller.
func (sh *shard) remove(id uint32) {
	l := *sh.table.nodes.links(id)
	sh.unanchored -= sh.gapBefore(l.prev, id)
	if l.next != 0 {
		sh.unanchored += sh.gapBefore(l.prev, l.next) - sh.gapBefore(id, l.next)
	}
	sh.detachChildren(sh.table.nodes.at(id))
	sh.deleteNode(id)
}

// deleteNode takes a fragment out of the table and its run's chain, and frees it.
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

// publish makes new blocks of a run visible, which one rank holds: as more of the
// last fragment if that is the same rank's alone and nothing branches off there.
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

// append puts a block at a position behind the run's end, where no reader looks yet.
// more is how many are to come, with this one.
func (sh *shard) append(r *extent, pos int, seq uint64, more int) {
	if pos == int(classes[r.class]) {
		ahead := pos // moved seldom while small, little unused when large
		if ahead >= 256 {
			ahead /= 2
		}
		sh.grow(r, pos, min(pos+max(more, ahead), maxExtent))
	}
	p, at := sh.words.page(r.storage)
	release(&p[at+uint32(pos)], seq)
}

// grow moves a run's storage to a larger place. Readers who are still led to the
// old one find the fragment changed.
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

// addRange adds a rank to blocks from…to of a fragment, none of which it holds there.
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

// joinAround joins a fragment with its neighbours where it can.
func (sh *shard) joinAround(id uint32) {
	l := *sh.table.nodes.links(id)
	sh.join(id, l.next)
	sh.join(l.prev, id)
}

// removeRange takes blocks from…to of a run from a rank, which holds all of them.
func (sh *shard) removeRange(ext uint32, from, to int, slot worker.Slot, tier Tier) {
	sh.addCounts(slot, from-to)
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

// removeRangeIn is unhold within one fragment. The run's length is the caller's.
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

// gapBefore is 1 where a fragment does not follow the one before it, 0 for none, in its run.
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

// detachChildren leaves what branches off at a fragment's end to itself. The place stays
// unused, so that it is not taken for the branches' beginning.
func (sh *shard) detachChildren(n *node) {
	if n.children() != 0 {
		sh.extents.at(n.extent()).sealed = true
		sh.unanchored += int(n.children())
		n.setChildren(0)
	}
}

// truncate shortens a fragment.
func (sh *shard) truncate(id uint32, end int) {
	n := sh.table.nodes.at(id)
	sh.detachChildren(n)
	if next := sh.table.nodes.links(id).next; next != 0 {
		sh.unanchored += 1 - sh.gapBefore(id, next)
	}
	n.ready(wLast, sh.hashAt(sh.extents.at(n.extent()), end-1))
	n.commit(end-n.off(), n.kind())
}

// finishExtent brings a run in line with its last fragment, or frees it.
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

// attach makes r a child of the block at a position of another run, whose fragment
// then ends there: so a fragment with children is known not to be a leaf.
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

// freeExtent gives a run without fragments back. A parent that becomes a leaf by that
// is next to be evicted, so that a branch is finished before another is begun.
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

// parentOf is the fragment that a run branches off from, 0 if there is none any more.
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
