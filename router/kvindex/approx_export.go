package kvindex

import (
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Export implements Exporter; an engine hash is the block's own. It copies a rank's
// entries of a shard in one step, for Approx holds little.
func (a *Approx) Export(slot worker.Slot, yield func(x *Exported) bool) {
	type held struct {
		seq, before blockhash.Seq
		root        bool
	}
	var all []held
	for i := range a.shards {
		s := &a.shards[i]
		s.mu.RLock()
		g := &s.graph
		if int(slot) < len(g.ranks) {
			for _, c := range g.ranks[slot].byHash[Device].cells {
				if c.ref == 0 {
					continue
				}
				n := g.nodes.at(g.entries.at(c.ref).node)
				h := held{seq: n.seq, root: n.parent == 0}
				if !h.root {
					h.before = g.nodes.at(n.parent).seq
				}
				all = append(all, h)
			}
		}
		s.mu.RUnlock()
	}

	after := make(map[blockhash.Seq][]blockhash.Seq)
	var first []blockhash.Seq
	for _, h := range all {
		if h.root {
			first = append(first, h.seq)
		} else {
			after[h.before] = append(after[h.before], h.seq)
		}
	}
	var x Exported
	give := func(seq blockhash.Seq) (kids []blockhash.Seq, more bool) {
		x.Engine, x.Seqs = x.Engine[:0], x.Seqs[:0]
		for {
			x.Engine, x.Seqs = append(x.Engine, EngineHash(seq)), append(x.Seqs, seq)
			kids = after[seq]
			if len(kids) != 1 || len(x.Seqs) == exportLimit {
				return kids, yield(&x)
			}
			seq = kids[0]
		}
	}
	// Branches whose beginning has been given: the block, and what it follows.
	type branch struct {
		seq, before blockhash.Seq
		has         bool
	}
	var open []branch
	for _, seq := range first {
		open = append(open, branch{seq: seq})
	}
	for len(open) > 0 {
		b := open[len(open)-1]
		open = open[:len(open)-1]
		x.HasParent, x.Parent, x.ParentSeq = b.has, EngineHash(b.before), b.before
		kids, more := give(b.seq)
		if !more {
			return
		}
		last := x.Seqs[len(x.Seqs)-1]
		for _, k := range kids {
			open = append(open, branch{k, last, true})
		}
	}
}

// Import implements Importer: the blocks are believed as if they had been seen now.
func (a *Approx) Import(slot worker.Slot, x *Exported) (res StoreResult) {
	if slot >= worker.MaxSlots || len(x.Seqs) == 0 {
		return res
	}
	now := time.Since(a.start)
	if x.HasParent {
		// Which shard has the parent its hash does not say.
		for i := range a.shards {
			s := &a.shards[i]
			s.mu.Lock()
			s.expire(now)
			if parent := s.graph.bySeq.get(uint64(x.ParentSeq)); parent != 0 {
				res = s.take(parent, slot, x, now)
				a.trim(now)
				return res
			}
			s.unlock()
		}
		return StoreResult{Orphan: true}
	}
	s := a.shard(x.Seqs[0])
	s.mu.Lock()
	s.expire(now)
	res = s.take(0, slot, x, now)
	a.trim(now)
	return res
}

// take is Import's end; it unlocks the shard.
func (s *approxShard) take(parent uint32, slot worker.Slot, x *Exported, now time.Duration) (res StoreResult) {
	defer s.unlock()
	before := s.graph.len
	s.observeAfter(parent, slot, x.Seqs, now, false)
	res.Added = max(0, s.graph.len-before)
	res.Repeated = len(x.Seqs) - res.Added
	return res
}
