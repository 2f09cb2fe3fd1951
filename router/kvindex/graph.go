package kvindex

import (
	"unsafe"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// graph is the state under Approx's lock: a node per block with who holds it and
// which block it follows, and an entry per (slot, tier, engine hash). A node lives
// while it has an entry or a child, so parents never dangle when a block is dropped
// from the middle of a chain.
type graph struct {
	bySeq   table // blockhash.Seq -> node
	nodes   slab[node]
	entries slab[entry]
	ranks   []rank // by slot

	// copies counts, for the few (node, slot, tier) with more than one engine
	// hash, those beyond the first.
	copies map[copyKey]int

	chunkBytes int64 // memory of all holders.more
	len        int
}

type node struct {
	seq     blockhash.Seq
	parent  uint32 // 0 at the start of a prompt
	kids    uint32
	entries uint32 // the list of its entries
	child   uint32 // the latest child, a guess: it may be gone or another's
	holders holders
}

type entry struct {
	hash       EngineHash
	node       uint32
	prev, next uint32 // neighbours in the node's list
	slot       worker.Slot
	tier       Tier
}

type rank struct {
	byHash [NumTiers]table // EngineHash -> entry
	held   int
}

type copyKey struct {
	node uint32
	slot worker.Slot
	tier Tier
}

// What a node and an entry are taken to cost: the record and a half-full table.
const (
	nodeBytes  = int64(unsafe.Sizeof(node{}) + 2*unsafe.Sizeof(cell{}))
	entryBytes = int64(unsafe.Sizeof(entry{}) + 2*unsafe.Sizeof(cell{}))
	copyBytes  = 64
)

func (g *graph) bytes() int64 {
	return int64(g.nodes.live())*nodeBytes + int64(g.entries.live())*entryBytes +
		int64(len(g.copies))*copyBytes + g.chunkBytes
}

func (g *graph) rank(slot worker.Slot) *rank {
	if int(slot) >= len(g.ranks) {
		g.ranks = append(g.ranks, make([]rank, int(slot)+1-len(g.ranks))...)
	}
	return &g.ranks[slot]
}

// entryOf finds a rank's entry in one tier; 0 when it has none.
func (g *graph) entryOf(slot worker.Slot, tier Tier, hash EngineHash) uint32 {
	if int(slot) >= len(g.ranks) {
		return 0
	}
	return g.ranks[slot].byHash[tier].get(uint64(hash))
}

// follow finds the node of seq, 0 when there is none. It tries the latest child
// of parent first: along a chain the nodes then lie side by side in memory, and
// the table, a cache miss for each block, is not needed. A guess that was given
// out anew has another seq, one that was freed has nothing that keeps it.
func (g *graph) follow(parent uint32, seq blockhash.Seq) uint32 {
	if parent != 0 {
		c := g.nodes.at(parent).child
		if n := g.nodes.at(c); n.seq == seq && (n.entries != 0 || n.kids != 0) {
			return c
		}
	}
	return g.bySeq.get(uint64(seq))
}

// nodeFor finds or makes the node of seq after parent (0: none). A new node has
// no entry yet: the caller adds one at once.
func (g *graph) nodeFor(seq blockhash.Seq, parent uint32) uint32 {
	if ref := g.follow(parent, seq); ref != 0 {
		return ref
	}
	ref := g.nodes.alloc()
	n := g.nodes.at(ref)
	n.seq, n.parent = seq, parent
	if parent != 0 {
		p := g.nodes.at(parent)
		p.kids++
		p.child = ref
	}
	g.bySeq.put(uint64(seq), ref)
	return ref
}

// add gives a node an entry, whose number it returns, and says whether the
// rank did not hold the block in that tier before. It overwrites the engine
// hash in the side table; an entry that had it must be dropped by the caller.
func (g *graph) add(slot worker.Slot, tier Tier, hash EngineHash, ref uint32) (e uint32, isNew bool) {
	e = g.entries.alloc()
	n := g.nodes.at(ref)
	*g.entries.at(e) = entry{hash: hash, node: ref, next: n.entries, slot: slot, tier: tier}
	if n.entries != 0 {
		g.entries.at(n.entries).prev = e
	}
	n.entries = e
	r := g.rank(slot)
	r.byHash[tier].put(uint64(hash), e)
	if n.holders.has(slot, tier) {
		if g.copies == nil {
			g.copies = make(map[copyKey]int)
		}
		g.copies[copyKey{ref, slot, tier}]++
		return e, false
	}
	g.holdersChanged(n, func() { n.holders.add(slot, tier) })
	r.held++
	g.len++
	return e, true
}

// drop takes an entry away, and with the last of its (slot, tier) the hold.
func (g *graph) drop(e uint32) {
	old := *g.entries.at(e)
	n := g.nodes.at(old.node)
	if old.prev != 0 {
		g.entries.at(old.prev).next = old.next
	} else {
		n.entries = old.next
	}
	if old.next != 0 {
		g.entries.at(old.next).prev = old.prev
	}
	r := &g.ranks[old.slot]
	if side := &r.byHash[old.tier]; side.get(uint64(old.hash)) == e {
		side.remove(uint64(old.hash))
	}
	g.entries.free(e)
	if key := (copyKey{old.node, old.slot, old.tier}); g.copies[key] > 0 {
		if g.copies[key]--; g.copies[key] == 0 {
			delete(g.copies, key)
		}
		return
	}
	g.holdersChanged(n, func() { n.holders.remove(old.slot, old.tier) })
	r.held--
	g.len--
	g.release(old.node)
}

// release frees a node that nothing keeps, then its parent if that was all that
// kept it.
func (g *graph) release(ref uint32) {
	for ref != 0 {
		n := g.nodes.at(ref)
		if n.entries != 0 || n.kids != 0 {
			return
		}
		parent := n.parent
		g.bySeq.remove(uint64(n.seq))
		g.nodes.free(ref)
		if parent != 0 {
			g.nodes.at(parent).kids--
		}
		ref = parent
	}
}

// clear drops all of a rank's entries.
func (g *graph) clear(slot worker.Slot) int {
	if int(slot) >= len(g.ranks) {
		return 0
	}
	r := &g.ranks[slot]
	held := r.held
	for tier := range r.byHash {
		cells := r.byHash[tier].cells
		r.byHash[tier] = table{} // drop then finds nothing to remove from it
		for _, c := range cells {
			if c.ref != 0 {
				g.drop(c.ref)
			}
		}
	}
	return held
}

// find is Index.Find without the lock.
func (g *graph) find(seqs []blockhash.Seq, o *Overlap) {
	o.Reset()
	if len(seqs) == 0 {
		return
	}
	ref := g.bySeq.get(uint64(seqs[0]))
	if ref == 0 {
		return
	}
	var a alive
	words, depth := g.nodes.at(ref).holders.fill(&a), 1
	for ; depth < len(seqs) && words > 0; depth++ {
		if ref = g.follow(ref, seqs[depth]); ref == 0 {
			break
		}
		words = g.nodes.at(ref).holders.narrow(&a, words, depth, o)
	}
	for w := range words {
		o.setWord(w, a[w], depth)
	}
}

func (g *graph) holdersChanged(n *node, change func()) {
	before := cap(n.holders.more)
	change()
	g.chunkBytes += int64(cap(n.holders.more)-before) * int64(unsafe.Sizeof(chunk{}))
}
