package kvindex

import (
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Export implements Exporter. A block's engine hash is its sequence hash.
func (a *Approx) Export(slot worker.Slot, yield func(x *Exported) bool) {
	if slot >= worker.MaxSlots || a.index.CachedBlocks(slot) == 0 {
		return
	}
	c := chainExporter{yield: yield, follows: a.index.parentPos}
	for i := range a.shards {
		s := &a.shards[i]
		for from, last := uint64(0), false; !last; {
			s.mu.Lock()
			last = int(slot) >= len(s.ranks)
			if !last {
				from, last = s.ranks[slot].from(from, exportStep/maxSpan, func(cell cell) {
					for x, i := s.seen.at(cell.ref), 0; i < int(x.n); i++ {
						c.entries = append(c.entries, exportEntry{at: exportPosOf(placeAfter(x.place, i))})
					}
				})
			}
			s.mu.Unlock()
		}
	}
	c.read = func(line []exportEntry) { a.index.readExported(line, slot) }
	c.exportAll()
}

// readExported is chainExporter.read for a rank with an owner of places. A block's engine hash is
// its sequence hash.
func (ix *radix) readExported(line []exportEntry, slot worker.Slot) {
	sh, _ := ix.extentOf(line[0].at.extent())
	sh.mu.Lock()
	defer sh.mu.Unlock()
	_, r := ix.extentOf(line[0].at.extent())
	f := r.tail
	if r.gen() != uint16(line[0].at.extent()&lastGen) {
		f = 0 // now another extent's
	}
	nodes := &sh.table.nodes
	for i := len(line) - 1; i >= 0; i-- { // nodes are linked from the end on
		h := &line[i]
		for f != 0 && nodes.at(f).off() > h.at.pos() {
			f = nodes.links(f).prev
		}
		if f == 0 || h.at.pos() >= nodes.at(f).end() || !sh.isHolder(nodes.at(f), slot, Device) {
			h.at |= posGone
			continue
		}
		h.seq = blockhash.Seq(sh.hashAt(r, h.at.pos()))
		h.hash = EngineHash(h.seq)
	}
}

// Import implements Importer. The blocks count as seen now.
func (a *Approx) Import(slot worker.Slot, x *Exported) (res StoreResult) {
	if slot >= worker.MaxSlots || len(x.Seqs) == 0 {
		return res
	}
	now := a.clock.Now()
	s := a.shard(x.Seqs[0])
	s.mu.Lock()
	var parent uint32
	for i := 0; x.HasParent; i++ { // the hash does not tell which shard has the parent
		s.expire(now)
		if int(slot) < len(s.ranks) {
			if parent = s.ranks[slot].get(uint64(x.ParentSeq)); parent != 0 {
				s.split(parent, 1)
				break
			}
		}
		s.unlock()
		if i == approxShards {
			return StoreResult{Orphan: true}
		}
		s = &a.shards[i]
		s.mu.Lock()
	}
	s.markGaps() // the parent keeps its position in s.seen, before these blocks
	res.Added, _ = s.observe(slot, x.Seqs, now, seenImported, parent)
	res.Repeated = len(x.Seqs) - res.Added
	s.unlock()
	a.trim(now)
	return res
}
