package kvindex

import (
	"sync/atomic"

	"sluice/router/worker"
)

// Changes of fragments. Each is a sequence of steps that are whole for readers:
// what splits and joins show on the way says the same of every block.

// split cuts a fragment before position at, which lies inside it, and returns the
// right part, a new node. The right part is published before the left one ends.
func (ix *radix) split(id uint32, at int) uint32 {
	nodes := &ix.table.nodes
	n := nodes.at(id)
	r := ix.runs.at(n.run())
	kind, last, kids := n.kind(), n[wLast], n.kids()
	right := nodes.alloc()
	m := nodes.at(right)
	m.store(wFirst, ix.word(r, at))
	m.store(wLast, last)
	m.store(wLow, n[wLow])
	m.store(wList, n[wList])
	m.store(wPlace, n[wPlace]&genMask|uint64(at)<<16)
	var sets uint64
	if kind&hasSet != 0 {
		sets = uint64(ix.words.copySet(uint32(n[wSets]>>32), 0, 1)) << 32
	}
	if kind&hasLower != 0 {
		sets |= uint64(ix.words.copySet(uint32(n[wSets]), 0, 2))
	}
	m.store(wSets, sets)
	m[wRun] = uint64(n.run())<<32 | uint64(kids)
	m.commit(n.end()-at, kind)
	ix.table.insert(m[wFirst], right)

	n.store(wLast, ix.word(r, at-1))
	n.commit(at-n.off(), kind)
	n.setKids(0)
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
func (ix *radix) join(left, right uint32) bool {
	if left == 0 || right == 0 {
		return false
	}
	nodes := &ix.table.nodes
	n, m := nodes.at(left), nodes.at(right)
	if n.kids() != 0 || n.end() != m.off() || !ix.sameHolders(n, m) {
		return false
	}
	n.store(wLast, m[wLast])
	n.commit(n.len()+m.len(), n.kind())
	n.setKids(m.kids())
	m.setKids(0)
	ix.remove(right)
	return true
}

// remove takes a fragment away. Its run's length is left to the caller.
func (ix *radix) remove(id uint32) {
	nodes := &ix.table.nodes
	n := nodes.at(id)
	ix.table.remove(n[wFirst], id)
	kind := n.kind()
	n.retire()
	ix.loosen(n)
	if kind&hasSet != 0 {
		ix.words.freeSet(uint32(n[wSets]>>32), 1)
	}
	if kind&hasLower != 0 {
		ix.words.freeSet(uint32(n[wSets]), 2)
	}
	l := *nodes.links(id)
	if l.prev != 0 {
		nodes.links(l.prev).next = l.next
	}
	if l.next != 0 {
		nodes.links(l.next).prev = l.prev
	} else {
		ix.runs.at(n.run()).tail = l.prev
	}
	nodes.free(id)
}

// publish makes new blocks of a run visible, which one rank holds: as more of the
// last fragment if that is the same rank's alone and nothing branches off there.
func (ix *radix) publish(run uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &ix.table.nodes
	r := ix.runs.at(run)
	if r.tail != 0 {
		if n := nodes.at(r.tail); n.end() == from && n.kids() == 0 && ix.sole(n, slot, tier) {
			n.store(wLast, ix.word(r, to-1))
			n.commit(n.len()+to-from, n.kind())
			ix.touch(run)
			return
		}
	}
	id := nodes.alloc()
	n := nodes.at(id)
	n.store(wFirst, ix.word(r, from))
	n.store(wLast, ix.word(r, to-1))
	n.store(wPlace, uint64(r.line)<<32|uint64(from)<<16)
	n.store(wLow, 0)
	n.store(wList, 0)
	n.store(wSets, 0)
	n[wRun] = uint64(run) << 32
	n.commit(to-from, 0)
	ix.addHolder(n, slot, tier)
	*nodes.links(id) = link{prev: r.tail}
	if r.tail != 0 {
		nodes.links(r.tail).next = id
	}
	r.tail = id
	ix.table.insert(n[wFirst], id)
	ix.touch(run)
}

// append puts a block behind the run's end, where no reader looks yet. more is how
// many are to come, with this one.
func (ix *radix) append(run uint32, r *run, seq uint64, more int) {
	if r.len == classes[r.class] {
		ahead := int(r.len) // moved seldom while small, little unused when large
		if ahead >= 256 {
			ahead /= 2
		}
		ix.grow(r, min(int(r.len)+max(more, ahead), maxRun))
	}
	p, at := ix.words.page(r.line)
	atomic.StoreUint64(&p[at+uint32(r.len)], seq)
	r.len++
}

// grow moves a run's storage to a larger place. Readers who are still led to the
// old one find the fragment changed.
func (ix *radix) grow(r *run, blocks int) {
	class := classFor(blocks)
	line := ix.words.alloc(class)
	p, at := ix.words.page(r.line)
	q, into := ix.words.page(line)
	for i := range uint32(r.len) {
		atomic.StoreUint64(&q[into+i], p[at+i])
	}
	for id := r.tail; id != 0; id = ix.table.nodes.links(id).prev {
		n := ix.table.nodes.at(id)
		n.store(wPlace, n[wPlace]&^genMask|uint64(line)<<32)
		n.changed()
	}
	ix.words.free(r.line, int(r.class))
	r.line, r.class = line, uint8(class)
}

// hold adds a rank to blocks from…to of a fragment, none of which it holds there.
func (ix *radix) hold(id uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &ix.table.nodes
	if from > nodes.at(id).off() {
		id = ix.split(id, from)
	}
	if to < nodes.at(id).end() {
		ix.split(id, to)
	}
	ix.addHolder(nodes.at(id), slot, tier)
	ix.joinAround(id)
}

// joinAround joins a fragment with its neighbours where it can.
func (ix *radix) joinAround(id uint32) {
	l := *ix.table.nodes.links(id)
	ix.join(id, l.next)
	ix.join(l.prev, id)
}

// unhold takes blocks from…to of a run from a rank, which holds all of them.
func (ix *radix) unhold(run uint32, from, to int, slot worker.Slot, tier Tier) {
	ix.counts(slot, from-to)
	r := ix.runs.at(run)
	for id := ix.nodeOf(r, to-1); ; {
		n := ix.table.nodes.at(id)
		prev := ix.table.nodes.links(id).prev
		lo := max(from, n.off())
		ix.unholdIn(id, lo, to, slot, tier)
		if lo == from {
			break
		}
		to, id = lo, prev
	}
	ix.settle(run)
}

// unholdIn is unhold within one fragment. The run's length is the caller's.
func (ix *radix) unholdIn(id uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &ix.table.nodes
	n := nodes.at(id)
	if from > n.off() && to == n.end() && ix.sole(n, slot, tier) {
		ix.cut(id, from)
		return
	}
	if to < n.end() {
		ix.split(id, to)
	}
	if from > n.off() {
		id = ix.split(id, from)
		n = nodes.at(id)
	}
	if ix.sole(n, slot, tier) {
		ix.remove(id)
		return
	}
	ix.delHolder(n, slot, tier)
	ix.joinAround(id)
}

// loosen leaves what branches off at a fragment's end to itself. The place stays
// unused, so that it is not taken for the branches' beginning.
func (ix *radix) loosen(n *fragment) {
	if n.kids() != 0 {
		ix.runs.at(n.run()).sealed = true
		n.setKids(0)
	}
}

// cut shortens a fragment.
func (ix *radix) cut(id uint32, end int) {
	n := ix.table.nodes.at(id)
	ix.loosen(n)
	n.store(wLast, ix.word(ix.runs.at(n.run()), end-1))
	n.commit(end-n.off(), n.kind())
}

// settle brings a run in line with its last fragment, or frees it.
func (ix *radix) settle(run uint32) {
	r := ix.runs.at(run)
	if r.tail == 0 {
		ix.freeRun(run)
		return
	}
	n := ix.table.nodes.at(r.tail)
	r.len = uint16(n.end())
	if n.kids() != 0 {
		ix.unlist(run)
	} else if !r.listed {
		ix.listOldest(run)
	}
}

// attach makes r a child of the block at a position of another run, whose fragment
// then ends there: so a fragment with children is known not to be a leaf.
func (ix *radix) attach(r *run, parent uint32, pos int) {
	p := ix.runs.at(parent)
	id := ix.nodeOf(p, pos)
	if id == 0 {
		return
	}
	r.parent, r.parentGen, r.parentPos = parent, p.gen, uint16(pos)
	n := ix.table.nodes.at(id)
	if pos+1 < n.end() {
		ix.split(id, pos+1)
	}
	n.setKids(n.kids() + 1)
	if id == p.tail {
		ix.unlist(parent)
	}
}

// freeRun gives a run without fragments back. A parent that becomes a leaf by that
// is next to be evicted, so that a branch is finished before another is begun.
func (ix *radix) freeRun(run uint32) {
	r := *ix.runs.at(run)
	ix.unlist(run)
	ix.words.free(r.line, int(r.class))
	ix.runs.free(run)
	if r.parent == 0 {
		return
	}
	p := ix.runs.at(r.parent)
	if p.gen != r.parentGen || r.parentPos >= p.len {
		return
	}
	id := ix.nodeOf(p, int(r.parentPos))
	if id == 0 {
		return
	}
	n := ix.table.nodes.at(id)
	if n.kids() == 0 || n.end() != int(r.parentPos)+1 {
		return
	}
	n.setKids(n.kids() - 1)
	if n.kids() > 0 {
		return
	}
	if id == p.tail {
		ix.listOldest(r.parent)
	} else {
		ix.join(id, ix.table.nodes.links(id).next)
	}
}
