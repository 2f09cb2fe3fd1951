package kvindex

import (
	"fmt"

	"sluice/router/worker"
)

// checkSome is check every so often, where it costs little. A Clear under way
// keeps entries in its own hands, so the sums would not agree.
func (ix *radix) checkSome() {
	if ix.ops++; ix.ops%256 != 0 || ix.Len() > 4096 || ix.clearing > 0 {
		return
	}
	if err := ix.check(); err != nil {
		panic("kvindex: " + err.Error())
	}
}

// check verifies what the index believes of itself. It takes time in proportion
// to all it holds; the caller has mu, or the index alone.
func (ix *radix) check() error {
	nodes := &ix.table.nodes
	type spot struct {
		run uint32
		pos int
	}
	covered := make(map[uint64]spot)
	held := make(map[worker.Slot]int)
	runs, frags, used := 0, 0, int64(0)
	holds := 0 // (rank, tier, block)
	for id := uint32(1); id < ix.runs.used; id++ {
		r := ix.runs.at(id)
		if r.line == 0 {
			continue
		}
		runs++
		used += int64(classes[r.class])
		if r.tail == 0 || int(r.len) != nodes.at(r.tail).end() || r.len > classes[r.class] {
			return fmt.Errorf("run %d: tail %d, length %d, class %d", id, r.tail, r.len, r.class)
		}
		if leaf := nodes.at(r.tail).kids() == 0; leaf != r.listed {
			return fmt.Errorf("run %d: leaf %v, listed %v", id, leaf, r.listed)
		}
		next := uint32(0)
		for f := r.tail; f != 0; f = nodes.links(f).prev {
			n := nodes.at(f)
			frags++
			switch {
			case n.run() != id || n[wState]&dead != 0 || uint32(n[wPlace]>>32) != r.line || n.len() == 0:
				return fmt.Errorf("fragment %d of run %d: %x", f, id, *n)
			case nodes.links(f).next != next:
				return fmt.Errorf("fragment %d of run %d: next is %d, not %d", f, id, nodes.links(f).next, next)
			case next != 0 && n.end() > nodes.at(next).off():
				return fmt.Errorf("fragments %d and %d of run %d overlap", f, next, id)
			case next != 0 && n.end() == nodes.at(next).off() && n.kids() == 0 && ix.sameHolders(n, nodes.at(next)):
				return fmt.Errorf("fragments %d and %d of run %d should be one", f, next, id)
			case n[wFirst] != ix.word(r, n.off()) || n[wLast] != ix.word(r, n.end()-1):
				return fmt.Errorf("fragment %d of run %d: its ends are not the storage's", f, id)
			case ix.table.find(n[wFirst]) != f:
				return fmt.Errorf("fragment %d of run %d is not in the table", f, id)
			}
			if n.kind()&hasSet != 0 {
				used += int64(setWidth(setRef(n)))
				if ix.words.setLen(setRef(n), 1) <= listLen {
					return fmt.Errorf("fragment %d has a set where a list would do", f)
				}
			}
			if n.kind()&hasLower != 0 {
				used += 2 * int64(setWidth(lowerRef(n)))
			}
			any := false
			ix.eachHolder(n, func(slot worker.Slot, tier Tier) {
				any = true
				held[slot] += n.len()
				holds += n.len()
			})
			if !any {
				return fmt.Errorf("fragment %d of run %d is held by nobody", f, id)
			}
			for pos := n.off(); pos < n.end(); pos++ {
				if at, twice := covered[ix.word(r, pos)]; twice {
					return fmt.Errorf("block %x is at %v and at run %d, %d", ix.word(r, pos), at, id, pos)
				}
				covered[ix.word(r, pos)] = spot{id, pos}
			}
			next = f
		}
	}
	if runs != ix.runs.live || frags != nodes.live() || used != ix.words.inUse {
		return fmt.Errorf("%d runs, %d fragments, %d words found; %d, %d, %d counted",
			runs, frags, used, ix.runs.live, nodes.live(), ix.words.inUse)
	}
	entries, copies := 0, 0
	for slot, rank := range &ix.ranks {
		slot := worker.Slot(slot)
		if ix.Held(slot) != held[slot] {
			return fmt.Errorf("slot %d holds %d, counted %d", slot, held[slot], ix.Held(slot))
		}
		if rank == nil {
			continue
		}
		n, left := 0, 0
		for i, cells := range [][]sideCell{rank.side.cells, rank.side.old} {
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
				f := ix.nodeOf(ix.runs.at(placeRun(c.place)), placePos(c.place))
				if f == 0 || !ix.holds(nodes.at(f), slot, placeTier(c.place)) {
					return fmt.Errorf("slot %d: hash %d names run %d, %d, which it does not hold", slot, c.hash, placeRun(c.place), placePos(c.place))
				}
			}
		}
		if n != rank.side.n || left != rank.side.left && rank.side.old != nil {
			return fmt.Errorf("slot %d: %d cells in use, %d counted", slot, n, rank.side.n)
		}
	}
	for _, n := range ix.copies {
		copies += n
	}
	listed := 0
	for id, older := ix.oldest, uint32(0); id != 0; id = ix.runs.at(id).newer {
		if r := ix.runs.at(id); !r.listed || r.older != older {
			return fmt.Errorf("the list is broken at run %d", id)
		}
		older = id
		if listed++; listed > runs {
			return fmt.Errorf("the list does not end")
		}
	}
	if entries != ix.entries || holds != ix.Len() || entries != holds+copies {
		return fmt.Errorf("%d entries and %d copies of %d blocks held; counted %d entries, %d blocks", entries, copies, holds, ix.entries, ix.Len())
	}
	return nil
}
