package kvindex

import (
	"maps"
	"sync"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Naive is a reference implementation of Index that is correct by inspection: maps of the blocks of
// each (slot, tier). Tests compare other implementations with it. It is unbounded and its Find
// visits every rank, so it is not for production.
type Naive struct {
	mu           sync.Mutex
	engineHashes map[place]map[EngineHash]blockhash.Seq
	// blocks counts the engine hashes under which a block is stored.
	blocks map[place]map[blockhash.Seq]int
	// before is the predecessor of each block; the first block of a prompt has none.
	before map[blockhash.Seq]blockhash.Seq
}

type place struct {
	slot worker.Slot
	tier Tier
}

// NewNaive returns an empty model.
func NewNaive() *Naive {
	return &Naive{
		engineHashes: make(map[place]map[EngineHash]blockhash.Seq),
		blocks:       make(map[place]map[blockhash.Seq]int),
		before:       make(map[blockhash.Seq]blockhash.Seq),
	}
}

// Store implements Index.
func (n *Naive) Store(ev *Stored) (res StoreResult) {
	if !ev.valid() {
		return res
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	at := place{ev.Slot, ev.Tier}
	seq, known := blockhash.Seq(0), false
	if ev.HasParent {
		for _, tier := range []Tier{ev.Tier, Device, Host, Disk} {
			seq, known = n.engineHashes[place{ev.Slot, tier}][ev.Parent]
			if known = known && ev.isParent(seq); known {
				break
			}
		}
		if !known {
			return StoreResult{Orphan: true}
		}
	}
	if n.engineHashes[at] == nil {
		n.engineHashes[at], n.blocks[at] = make(map[EngineHash]blockhash.Seq), make(map[blockhash.Seq]int)
	}
	for i, hash := range ev.Engine {
		parent := seq
		seq = ev.seq(parent, i)
		if i > 0 || ev.HasParent {
			n.before[seq] = parent
		}
		if n.has(at, seq) {
			res.Repeated++
		} else {
			res.Added++
		}
		n.forget(at, hash)
		n.engineHashes[at][hash] = seq
		n.blocks[at][seq]++
	}
	return res
}

func (n *Naive) has(at place, seq blockhash.Seq) bool { return n.blocks[at][seq] > 0 }

// forget removes an engine hash and reports whether it was known.
func (n *Naive) forget(at place, hash EngineHash) bool {
	seq, known := n.engineHashes[at][hash]
	if !known {
		return false
	}
	delete(n.engineHashes[at], hash)
	if n.blocks[at][seq]--; n.blocks[at][seq] == 0 {
		delete(n.blocks[at], seq)
	}
	return true
}

// Remove implements Index.
func (n *Naive) Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, hash := range engine {
		if n.forget(place{slot, tier}, hash) {
			removed++
		} else {
			unknown++
		}
	}
	return removed, unknown
}

// Clear implements Index.
func (n *Naive) Clear(slot worker.Slot) int {
	cached := n.CachedBlocks(slot)
	n.mu.Lock()
	defer n.mu.Unlock()
	for tier := range NumTiers {
		delete(n.engineHashes, place{slot, tier})
		delete(n.blocks, place{slot, tier})
	}
	return cached
}

// Find implements Index.
func (n *Naive) Find(seqs []blockhash.Seq, o *Overlap) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o.Reset()
	if len(seqs) == 0 {
		return
	}
	first := make(map[worker.Slot]bool)
	for at := range n.blocks {
		if n.has(at, seqs[0]) {
			first[at.slot] = true
		}
	}
	for slot := range first {
		var cached [NumTiers]map[blockhash.Seq]int
		for tier := range cached {
			cached[tier] = n.blocks[place{slot, Tier(tier)}]
		}
		depth := 1
		for depth < len(seqs) && (cached[Device][seqs[depth]] > 0 || cached[Host][seqs[depth]] > 0 || cached[Disk][seqs[depth]] > 0) {
			depth++
		}
		o.set(slot, depth)
		addLowerTiers(slot, cached, seqs[:depth], o)
	}
}

// addLowerTiers records, block by block, in which tier a rank has them.
func addLowerTiers(slot worker.Slot, cached [NumTiers]map[blockhash.Seq]int, seqs []blockhash.Seq, o *Overlap) {
	var nobody, alone [worker.MaxSlots / 64]uint64
	none, bit := nobody[:slot/64+1], alone[:slot/64+1]
	bit[slot/64] = 1 << (slot % 64)
	for _, seq := range seqs {
		switch {
		case cached[Device][seq] > 0:
		case cached[Host][seq] > 0:
			o.lower.add(1, bit, none)
		default:
			o.lower.add(1, none, bit)
		}
	}
}

// CachedBlocks implements Index.
func (n *Naive) CachedBlocks(slot worker.Slot) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count(func(at place) bool { return at.slot == slot })
}

// Len implements Index.
func (n *Naive) Len() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count(func(place) bool { return true })
}

// Bytes implements Index. The model does not account for memory.
func (n *Naive) Bytes() int64 { return 0 }

func (n *Naive) count(in func(place) bool) (total int) {
	for at, blocks := range n.blocks {
		if in(at) {
			total += len(blocks)
		}
	}
	return total
}

// Export implements Exporter, block by block.
func (n *Naive) Export(slot worker.Slot, yield func(x *Exported) bool) {
	n.mu.Lock()
	all := make(map[blockhash.Seq][]Exported)
	for at, blocks := range n.engineHashes {
		for hash, seq := range blocks {
			if at.slot == slot {
				all[seq] = append(all[seq], Exported{Tier: at.tier, Engine: []EngineHash{hash}, Seqs: []blockhash.Seq{seq}})
			}
		}
	}
	before := maps.Clone(n.before)
	n.mu.Unlock()
	given := make(map[blockhash.Seq]bool)
	for more := true; more; {
		more = false
		for seq, entries := range all {
			parent, has := before[seq]
			if given[seq] || has && !given[parent] {
				continue
			}
			given[seq], more = true, true
			for i := range entries {
				x := &entries[i]
				if x.HasParent = has; has {
					x.Parent, x.ParentSeq = all[parent][0].Engine[0], parent
				}
				if !yield(x) {
					return
				}
			}
		}
	}
}

// Import implements Importer.
func (n *Naive) Import(slot worker.Slot, x *Exported) StoreResult {
	ev := x.stored(slot)
	return n.Store(&ev)
}
