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
	r := sh.runs.at(n.run())
	kind, last, kids := n.kind(), n[wLast], n.kids()
	right := nodes.alloc()
	m := nodes.at(right)
	m.ready(wFirst, sh.word(r, at))
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
	m[wRun] = uint64(n.run())<<32 | uint64(kids)
	m.commit(n.end()-at, kind)
	sh.table.insert(m[wFirst], right)

	n.ready(wLast, sh.word(r, at-1))
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
func (sh *shard) join(left, right uint32) bool {
	if left == 0 || right == 0 {
		return false
	}
	nodes := &sh.table.nodes
	n, m := nodes.at(left), nodes.at(right)
	if n.kids() != 0 || n.end() != m.off() || !sh.sameHolders(n, m) {
		return false
	}
	n.ready(wLast, m[wLast])
	n.commit(n.len()+m.len(), n.kind())
	n.setKids(m.kids())
	m.setKids(0)
	sh.drop(right)
	return true
}

// remove takes a fragment and its blocks away. Its run's length is left to the caller.
func (sh *shard) remove(id uint32) {
	l := *sh.table.nodes.links(id)
	sh.loose -= sh.gap(l.prev, id)
	if l.next != 0 {
		sh.loose += sh.gap(l.prev, l.next) - sh.gap(id, l.next)
	}
	sh.loosen(sh.table.nodes.at(id))
	sh.drop(id)
}

// drop takes a fragment out of the table and its run's chain, and frees it.
func (sh *shard) drop(id uint32) {
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
		sh.runs.at(n.run()).tail = l.prev
	}
	nodes.free(id)
}

// publish makes new blocks of a run visible, which one rank holds: as more of the
// last fragment if that is the same rank's alone and nothing branches off there.
func (sh *shard) publish(run uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &sh.table.nodes
	r := sh.runs.at(run)
	r.setLen(to)
	if r.tail != 0 {
		if n := nodes.at(r.tail); n.end() == from && n.kids() == 0 && sh.sole(n, slot, tier) {
			n.ready(wLast, sh.word(r, to-1))
			n.commit(n.len()+to-from, n.kind())
			sh.touch(run)
			return
		}
	}
	id := nodes.alloc()
	n := nodes.at(id)
	n.ready(wFirst, sh.word(r, from))
	n.ready(wLast, sh.word(r, to-1))
	n.ready(wPlace, uint64(r.line)<<32|uint64(from)<<16)
	n.ready(wLow, 0)
	n.ready(wList, 0)
	n.ready(wSets, 0)
	n[wRun] = uint64(run) << 32
	n.commit(to-from, 0)
	sh.addHolder(n, slot, tier)
	*nodes.links(id) = link{prev: r.tail}
	if r.tail != 0 {
		nodes.links(r.tail).next = id
	}
	r.tail = id
	sh.table.insert(n[wFirst], id)
	sh.touch(run)
}

// append puts a block at a position behind the run's end, where no reader looks yet.
// more is how many are to come, with this one.
func (sh *shard) append(r *run, pos int, seq uint64, more int) {
	if pos == int(classes[r.class]) {
		ahead := pos // moved seldom while small, little unused when large
		if ahead >= 256 {
			ahead /= 2
		}
		sh.grow(r, pos, min(pos+max(more, ahead), maxRun))
	}
	p, at := sh.words.page(r.line)
	release(&p[at+uint32(pos)], seq)
}

// grow moves a run's storage to a larger place. Readers who are still led to the
// old one find the fragment changed.
func (sh *shard) grow(r *run, used, blocks int) {
	class := classFor(blocks)
	line := sh.words.alloc(class)
	p, at := sh.words.page(r.line)
	q, into := sh.words.page(line)
	for i := range uint32(used) {
		release(&q[into+i], p[at+i])
	}
	for id := r.tail; id != 0; id = sh.table.nodes.links(id).prev {
		n := sh.table.nodes.at(id)
		n.store(wPlace, n[wPlace]&^genMask|uint64(line)<<32)
		n.changed()
	}
	sh.words.free(r.line, int(r.class))
	r.line, r.class = line, uint8(class)
}

// hold adds a rank to blocks from…to of a fragment, none of which it holds there.
func (sh *shard) hold(id uint32, from, to int, slot worker.Slot, tier Tier) {
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

// unhold takes blocks from…to of a run from a rank, which holds all of them.
func (sh *shard) unhold(run uint32, from, to int, slot worker.Slot, tier Tier) {
	sh.counts(slot, from-to)
	r := sh.runs.at(run)
	for id := sh.nodeOf(r, to-1); ; {
		n := sh.table.nodes.at(id)
		prev := sh.table.nodes.links(id).prev
		lo := max(from, n.off())
		sh.unholdIn(id, lo, to, slot, tier)
		if lo == from {
			break
		}
		to, id = lo, prev
	}
	sh.settle(run)
}

// unholdIn is unhold within one fragment. The run's length is the caller's.
func (sh *shard) unholdIn(id uint32, from, to int, slot worker.Slot, tier Tier) {
	nodes := &sh.table.nodes
	n := nodes.at(id)
	if from > n.off() && to == n.end() && sh.sole(n, slot, tier) {
		sh.cut(id, from)
		return
	}
	if to < n.end() {
		sh.split(id, to)
	}
	if from > n.off() {
		id = sh.split(id, from)
		n = nodes.at(id)
	}
	if sh.sole(n, slot, tier) {
		sh.remove(id)
		return
	}
	sh.delHolder(n, slot, tier)
	sh.joinAround(id)
}

// gap is 1 where a fragment does not follow the one before it, 0 for none, in its run.
func (sh *shard) gap(prev, id uint32) int {
	end := 0
	if prev != 0 {
		end = sh.table.nodes.at(prev).end()
	}
	if end != sh.table.nodes.at(id).off() {
		return 1
	}
	return 0
}

// loosen leaves what branches off at a fragment's end to itself. The place stays
// unused, so that it is not taken for the branches' beginning.
func (sh *shard) loosen(n *fragment) {
	if n.kids() != 0 {
		sh.runs.at(n.run()).sealed = true
		sh.loose += int(n.kids())
		n.setKids(0)
	}
}

// cut shortens a fragment.
func (sh *shard) cut(id uint32, end int) {
	n := sh.table.nodes.at(id)
	sh.loosen(n)
	if next := sh.table.nodes.links(id).next; next != 0 {
		sh.loose += 1 - sh.gap(id, next)
	}
	n.ready(wLast, sh.word(sh.runs.at(n.run()), end-1))
	n.commit(end-n.off(), n.kind())
}

// settle brings a run in line with its last fragment, or frees it.
func (sh *shard) settle(run uint32) {
	r := sh.runs.at(run)
	if r.tail == 0 {
		sh.freeRun(run)
		return
	}
	n := sh.table.nodes.at(r.tail)
	r.setLen(n.end())
	if n.kids() != 0 {
		sh.unlist(run)
	} else if !r.listed {
		sh.listOldest(run)
	}
}

// attach makes r a child of the block at a position of another run, whose fragment
// then ends there: so a fragment with children is known not to be a leaf.
func (sh *shard) attach(r *run, parent uint32, pos int) {
	p := sh.runs.at(parent)
	id := sh.nodeOf(p, pos)
	if id == 0 {
		sh.loose++
		return
	}
	r.parent, r.parentGen, r.parentPos = parent, p.gen(), uint16(pos)
	n := sh.table.nodes.at(id)
	if pos+1 < n.end() {
		sh.split(id, pos+1)
	}
	n.setKids(n.kids() + 1)
	if id == p.tail {
		sh.unlist(parent)
	}
}

// freeRun gives a run without fragments back. A parent that becomes a leaf by that
// is next to be evicted, so that a branch is finished before another is begun.
func (sh *shard) freeRun(run uint32) {
	r := sh.runs.at(run)
	parent, pos, root := r.parent, int(r.parentPos), r.root
	id := sh.parentOf(r)
	sh.unlist(run)
	sh.words.free(r.line, int(r.class))
	sh.runs.free(run)
	if root {
		return
	}
	if id == 0 {
		sh.loose--
		return
	}
	n := sh.table.nodes.at(id)
	n.setKids(n.kids() - 1)
	if n.kids() > 0 {
		return
	}
	if id == sh.runs.at(parent).tail {
		sh.listOldest(parent)
	} else if n.end() == pos+1 {
		sh.join(id, sh.table.nodes.links(id).next)
	}
}

// parentOf is the fragment that a run branches off from, 0 if there is none any more.
func (sh *shard) parentOf(r *run) uint32 {
	if r.parent == 0 {
		return 0
	}
	p := sh.runs.at(r.parent)
	if p.gen() != r.parentGen || int(r.parentPos) >= p.len() {
		return 0
	}
	return sh.nodeOf(p, int(r.parentPos))
}
