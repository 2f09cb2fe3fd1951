package kvindex

import (
	"sync"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// New makes the index.
func New(opt Options) Index {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = defaultMaxBytes
	}
	return &locked{max: opt.MaxBytes}
}

// locked is the first index: one graph under one lock. Readers share it, a
// writer has it alone for the time of one event. Clear holds it for the whole
// rank, about 0.1 µs a block.
type locked struct {
	mu      sync.RWMutex
	graph   graph
	max     int64
	evicted uint64
}

func (ix *locked) Store(ev *Stored) StoreResult {
	if !ev.valid() {
		return StoreResult{}
	}
	ix.mu.Lock()
	defer ix.mu.Unlock()
	g := &ix.graph
	var res StoreResult
	parent, seq := uint32(0), blockhash.Seq(ev.Salt)
	if ev.HasParent {
		if parent = g.parentOf(ev); parent == 0 {
			res.Orphan = true
			return res
		}
		seq = g.nodes.at(parent).seq
	}
	for i, hash := range ev.Engine {
		if parent == 0 {
			seq = blockhash.First(ev.Salt, ev.Local[i])
		} else {
			seq = blockhash.Next(seq, ev.Local[i])
		}
		old := g.entryOf(ev.Slot, ev.Tier, hash)
		ref := g.nodeFor(seq, parent)
		parent = ref
		if old != 0 && g.entries.at(old).node == ref {
			g.touch(ref)
			res.Repeated++
			continue
		}
		if _, isNew := g.add(ev.Slot, ev.Tier, hash, ref); isNew {
			res.Added++
		} else {
			res.Repeated++
		}
		g.touch(ref)
		if old != 0 {
			g.drop(old) // last, lest it free the node just linked to
		}
	}
	for g.bytes() > ix.max {
		n := g.evictLeaf()
		if n == 0 {
			break
		}
		ix.evicted += uint64(n)
	}
	return res
}

// parentOf finds the node an event continues, in its own tier first.
func (g *graph) parentOf(ev *Stored) uint32 {
	if e := g.entryOf(ev.Slot, ev.Tier, ev.Parent); e != 0 {
		return g.entries.at(e).node
	}
	for tier := range NumTiers {
		if e := g.entryOf(ev.Slot, tier, ev.Parent); e != 0 {
			return g.entries.at(e).node
		}
	}
	return 0
}

func (ix *locked) Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int) {
	if tier >= NumTiers {
		return 0, len(engine)
	}
	ix.mu.Lock()
	defer ix.mu.Unlock()
	for _, hash := range engine {
		if e := ix.graph.entryOf(slot, tier, hash); e != 0 {
			ix.graph.drop(e)
			removed++
		} else {
			unknown++
		}
	}
	return removed, unknown
}

func (ix *locked) Clear(slot worker.Slot) int {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	return ix.graph.clear(slot)
}

func (ix *locked) Find(seqs []blockhash.Seq, o *Overlap) {
	ix.mu.RLock()
	ix.graph.find(seqs, o)
	ix.mu.RUnlock()
}

func (ix *locked) Held(slot worker.Slot) int {
	ix.mu.RLock()
	defer ix.mu.RUnlock()
	if int(slot) >= len(ix.graph.ranks) {
		return 0
	}
	return ix.graph.ranks[slot].held
}

func (ix *locked) Len() int {
	ix.mu.RLock()
	defer ix.mu.RUnlock()
	return ix.graph.len
}

func (ix *locked) Bytes() int64 {
	ix.mu.RLock()
	defer ix.mu.RUnlock()
	return ix.graph.bytes()
}

func (ix *locked) Evicted() uint64 {
	ix.mu.RLock()
	defer ix.mu.RUnlock()
	return ix.evicted
}
