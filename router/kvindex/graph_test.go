package kvindex

import "fmt"

// check verifies what the graph believes of itself.
func (g *graph) check() error {
	kids, entries, held := map[uint32]uint32{}, 0, 0
	for _, c := range g.bySeq.cells {
		if c.ref == 0 {
			continue
		}
		n := g.nodes.at(c.ref)
		if uint64(n.seq) != c.key || g.bySeq.get(c.key) != c.ref {
			return fmt.Errorf("node %d is filed under %x, its hash is %x", c.ref, c.key, n.seq)
		}
		if n.parent != 0 {
			kids[n.parent]++
		}
		if n.kids == 0 && n.entries == 0 {
			return fmt.Errorf("node %d is kept by nothing", c.ref)
		}
		prev := uint32(0)
		for e := n.entries; e != 0; e = g.entries.at(e).next {
			x := g.entries.at(e)
			if x.node != c.ref || x.prev != prev || g.entryOf(x.slot, x.tier, x.hash) != e || !n.holders.has(x.slot, x.tier) {
				return fmt.Errorf("entry %d of node %d does not hang together: %+v", e, c.ref, *x)
			}
			prev = e
			entries++
		}
	}
	for ref, n := range kids {
		if g.nodes.at(ref).kids != n {
			return fmt.Errorf("node %d counts %d children, has %d", ref, g.nodes.at(ref).kids, n)
		}
	}
	for i := range g.ranks {
		held += g.ranks[i].held
	}
	switch {
	case g.nodes.live() != g.bySeq.n:
		return fmt.Errorf("%d nodes live, %d filed", g.nodes.live(), g.bySeq.n)
	case entries != g.entries.live():
		return fmt.Errorf("%d entries reachable, %d live", entries, g.entries.live())
	case held != g.len:
		return fmt.Errorf("ranks hold %d, the index counts %d", held, g.len)
	}
	return nil
}
