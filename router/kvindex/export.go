package kvindex

import (
	"cmp"
	"slices"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Exported is a chain of consecutive blocks that a rank has in one tier. Engine and Seqs have equal
// length. If the first block does not begin a prompt, HasParent is set, Parent is an engine hash of
// the preceding block, which the same rank has in some tier, and ParentSeq is that block's sequence
// hash. The slices are borrowed for the call.
type Exported struct {
	Tier      Tier
	HasParent bool
	Parent    EngineHash
	ParentSeq blockhash.Seq
	Engine    []EngineHash
	Seqs      []blockhash.Seq
}

// Exporter is implemented by an index whose content can be exported.
type Exporter interface {
	// Export calls yield for each chain of blocks that a rank has, parents before children, until
	// yield returns false. It copies in bounded steps, between which writers continue, and calls
	// yield without any lock, so yield may be slow. A block that the rank has during the whole call
	// is yielded exactly once per engine hash; a block that is stored or removed meanwhile may or
	// may not be yielded. The result must therefore be corrected with the events since the call
	// began: a replay from the sequence number noted before Export. Blocks behind a hole are
	// omitted, because they add no depth; blocks that were once behind one may be omitted too.
	// Export needs 24 bytes per block during the call.
	Export(slot worker.Slot, yield func(x *Exported) bool)
}

// Importer is implemented by an index that can import what an Exporter has exported.
type Importer interface {
	// Import stores a chain by its sequence hashes, as Store stores an event: a known engine hash
	// gets the new content, and a chain whose parent the rank does not have is an orphan. Import a
	// rank's chains in the order of Export and before its first event, so that old state does not
	// replace new.
	Import(slot worker.Slot, x *Exported) StoreResult
}

// stored returns the event that stores the chain.
func (x *Exported) stored(slot worker.Slot) Stored {
	ev := Stored{Slot: slot, Tier: x.Tier, HasParent: x.HasParent, Parent: x.Parent, Engine: x.Engine, seqs: x.Seqs, parentSeq: x.ParentSeq}
	if ev.seqs == nil {
		ev.seqs = []blockhash.Seq{}
	}
	return ev
}

// exportEntry is one entry of a rank during an export.
type exportEntry struct {
	at   exportPos
	hash EngineHash
	seq  blockhash.Seq
}

// exportPos is the position of a block: line<<18 | position<<2 | tier. A line is an extent in one
// generation.
type exportPos uint64

const (
	posUnknown exportPos = 0 // the line's parent is unknown
	posRoot    exportPos = 1 // the line begins a prompt
	posGone    exportPos = lenMask<<2 | 3
)

func newExportPos(extent uint64, pos int, tier Tier) exportPos {
	return exportPos(extent<<18 | uint64(pos)<<2 | uint64(tier))
}

func (s exportPos) extent() uint64 { return uint64(s >> 18) }
func (s exportPos) pos() int       { return int(s >> 2 & lenMask) }
func (s exportPos) tier() Tier     { return Tier(s & 3) }

// exportLimit is the largest number of blocks of an Exported.
const exportLimit = 512

// chainExporter builds chains from a rank's entries.
type chainExporter struct {
	entries []exportEntry // sorted by position
	yield   func(x *Exported) bool
	// follows returns the parent of a line: the position of a block in any tier.
	follows func(line uint64) exportPos
	// read sets the hashes of the entries of a line that still exist and marks the others as gone,
	// so that a whole line is read at one moment.
	read func(line []exportEntry)
	// By the index of a line's first entry: how many of its blocks are contiguous from its
	// beginning and were exported; 0 while it is being exported.
	done     map[int]int
	stack    []int
	exported []bool
	x        Exported
}

// exportAll exports all chains.
func (c *chainExporter) exportAll() {
	slices.SortFunc(c.entries, byPos)
	c.done = make(map[int]int)
	for i := 0; i < len(c.entries); i = c.extentEnd(i) {
		if !c.exportWithParents(i) {
			return
		}
	}
}

func byPos(a, b exportEntry) int { return cmp.Compare(a.at, b.at) }

// extentEnd returns the index behind the line that contains entry i.
func (c *chainExporter) extentEnd(i int) int {
	return i + c.search(c.entries[i:], newExportPos(c.entries[i].at.extent()+1, 0, 0))
}

func (c *chainExporter) search(in []exportEntry, s exportPos) int {
	n, _ := slices.BinarySearchFunc(in, s, func(h exportEntry, s exportPos) int { return cmp.Compare(h.at, s) })
	return n
}

// exportWithParents exports the line that begins at entry i, after the lines it depends on, and
// reports whether to continue.
func (c *chainExporter) exportWithParents(i int) bool {
	c.stack = append(c.stack[:0], i)
	for len(c.stack) > 0 {
		i := c.stack[len(c.stack)-1]
		from := c.follows(c.entries[i].at.extent())
		if _, seen := c.done[i]; !seen {
			c.done[i] = 0
			if first, ok := c.extentStart(from); ok {
				if _, seen := c.done[first]; !seen {
					c.stack = append(c.stack, first)
					continue
				}
			}
		}
		c.stack = c.stack[:len(c.stack)-1]
		if c.done[i] == 0 && !c.exportExtent(i, from) {
			return false
		}
	}
	return true
}

// extentStart returns the index at which a position's line begins.
func (c *chainExporter) extentStart(s exportPos) (int, bool) {
	i := c.search(c.entries, newExportPos(s.extent(), 0, 0))
	return i, s > posRoot && i < len(c.entries) && c.entries[i].at.extent() == s.extent()
}

// exportExtent exports the contiguous blocks, from its first on, of the line that begins at entry i
// and whose parent is from.
func (c *chainExporter) exportExtent(i int, from exportPos) bool {
	var before *exportEntry // the preceding block, in any tier
	if first, ok := c.extentStart(from); ok && from.pos() < c.done[first] {
		before = &c.entries[c.search(c.entries, from&^3)]
	} else if from != posRoot {
		return true
	}
	line := c.entries[i:c.extentEnd(i)]
	c.read(line)
	slices.SortFunc(line, byPos)
	end := 0
	for ; end < len(line) && line[end].at.pos() <= c.done[i]; end++ {
		c.done[i] = line[end].at.pos() + 1
	}
	line = line[:end]
	// A chain begins where the rank's blocks in a tier begin, and comes before all chains that
	// begin later.
	c.exported = slices.Grow(c.exported[:0], end)[:end]
	clear(c.exported)
	for k := range line {
		if k > 0 && line[k-1].at.pos() < line[k].at.pos() {
			before = &line[k-1]
		}
		if c.exported[k] {
			continue
		}
		c.x = Exported{Tier: line[k].at.tier(), Engine: c.x.Engine[:0], Seqs: c.x.Seqs[:0]}
		if before != nil {
			c.x.HasParent, c.x.Parent, c.x.ParentSeq = true, before.hash, before.seq
		}
		next := line[k].at
		for j := k; j < len(line) && line[j].at <= next && len(c.x.Seqs) < exportLimit; j++ {
			if line[j].at == next && !c.exported[j] {
				c.exported[j] = true
				c.x.Engine, c.x.Seqs = append(c.x.Engine, line[j].hash), append(c.x.Seqs, line[j].seq)
				next = newExportPos(next.extent(), next.pos()+1, next.tier())
			}
		}
		if !c.yield(&c.x) {
			return false
		}
	}
	return true
}

// exportStep is about how many cells of an engine table are copied at once.
const exportStep = 1 << 10

// Export implements Exporter.
func (ix *radix) Export(slot worker.Slot, yield func(x *Exported) bool) {
	if slot >= worker.MaxSlots || ix.CachedBlocks(slot) == 0 {
		return
	}
	c := chainExporter{yield: yield, follows: ix.parentPos}
	rank := ix.rank(slot)
	// A key's position in the order of homes depends on the key alone, not on shifts of its cell or
	// on the table's size, so no entry is skipped.
	for from, last := uint64(0), false; !last; {
		rank.mu.Lock()
		from, last = rank.engineTable.from(from, exportStep, ix.factor, func(cell engineCell) {
			if p := cell.place; ix.valid(p) {
				c.entries = append(c.entries, exportEntry{at: exportPosOf(p), hash: EngineHash(cell.hash)})
			}
		})
		rank.mu.Unlock()
	}
	c.read = func(line []exportEntry) {
		rank.mu.Lock()
		defer rank.mu.Unlock()
		sh, _ := ix.extentOf(line[0].at.extent())
		sh.mu.Lock()
		defer sh.mu.Unlock()
		for i := range line {
			h := &line[i]
			cells, at := rank.engineTable.get(uint64(h.hash), h.at.tier(), ix.factor)
			if at < 0 || exportPosOf(cells[at].place) != h.at || !ix.valid(cells[at].place) {
				h.at |= posGone
				continue
			}
			p := cells[at].place
			h.seq = blockhash.Seq(sh.hashAt(sh.extents.at(placeExtent(p)), placePos(p)))
		}
	}
	c.exportAll()
}

// exportPosOf returns the position of a place.
func exportPosOf(p uint64) exportPos {
	return newExportPos(p>>32<<genBits|uint64(placeGen(p)), placePos(p), placeTier(p))
}

// extentOf returns the extent of a line.
func (ix *radix) extentOf(line uint64) (*shard, *extent) {
	p := line >> genBits << 32
	sh := &ix.shards[placeShard(p)]
	return sh, sh.extents.read(placeExtent(p))
}

// parentPos returns the position from which a line branches off.
func (ix *radix) parentPos(line uint64) exportPos {
	sh, r := ix.extentOf(line)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if r.gen() != uint16(line&lastGen) {
		return posUnknown
	}
	if r.root {
		return posRoot
	}
	if sh.parentOf(r) == 0 {
		return posUnknown
	}
	return exportPosOf(sh.place(r.parent, int(r.parentPos), 0))
}

// Import implements Importer.
func (ix *radix) Import(slot worker.Slot, x *Exported) StoreResult {
	ev := x.stored(slot)
	return ix.Store(&ev)
}
