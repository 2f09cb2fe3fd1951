package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// engineTable is one rank's map from (tier, engine hash) to the place of the block:
// open addressing with linear probing and back-shift, seen by the writer only.
// The home of a key is its hash scaled to the size, so any size will do and cells
// keep their order when the table is moved to another size: it is moved a few
// clusters at a time, from the front, by the operations that use it. A large one is
// mapped, so that nobody waits while it is zeroed.
//
// While a table is moved a key is in the old array until the front has passed its
// home there, and in the new one from then on, also if it comes meanwhile: so one
// array is probed, and the new one is written from its beginning on, page after page.
// Were new keys strewn over it, each would wait for the kernel to zero a page.
type engineTable struct {
	cells []engineCell
	n     int          // cells in use, in both arrays
	stale atomic.Int64 // of those, how many name blocks that were evicted; about

	old       []engineCell // what is being moved, from begun on, round its end
	moveStart int          // an empty cell when the move began
	moveDone  int          // how many cells the front has passed
	oldUsed   int          // cells of old still in use
	purge     bool         // what was evicted is left behind
	// strays: a key is in cells before its home in old was passed, because it would
	// have gone behind begun there.
	hasStrays bool
	floor     int // cells never to go below

	mem, oldMem *mmapCells // of cells and old, nil where they are on the heap
}

// engineCell names a block: shard<<60 | run<<32 | position<<16 | tier<<14 | generation.
// A place of 0 is an empty cell.
type engineCell struct {
	hash  uint64
	place uint64
}

const minEngineCells = 16 // cells

// moveStep is the most cells of a table that is moved at once; tests make it less.
var moveStep = 1 << 12

// maxEnginePrefetch is about how many cells more than asked for a step moves.
const maxEnginePrefetch = 64

func placeOf(ext uint32, pos int, tier Tier, gen uint16) uint64 {
	return uint64(ext)<<32 | uint64(pos)<<16 | uint64(tier)<<genBits | uint64(gen)
}

// placeAfter is where the block lies that is n behind the one at p.
func placeAfter(p uint64, n int) uint64 { return p + uint64(n)<<16 }

func placeShard(p uint64) uint64  { return p >> (32 + extentBits) }
func placeExtent(p uint64) uint32 { return uint32(p>>32) & (1<<extentBits - 1) }
func placePos(p uint64) int       { return int(p >> 16 & lenMask) }
func placeTier(p uint64) Tier     { return Tier(p >> genBits & 3) }
func placeGen(p uint64) uint16    { return uint16(p & lastGen) }

// extentBits are those of a run's number within its shard.
const extentBits = 32 - shardBits

func homeIn(cells []engineCell, hash uint64, tier Tier, factor uint64) int {
	hi, _ := bits.Mul64((hash+uint64(tier))*factor, uint64(len(cells)))
	return int(hi)
}

// probe finds a key's cell, or the empty one where it would go.
func probe(cells []engineCell, hash uint64, tier Tier, factor uint64) (int, bool) {
	return probeFrom(cells, homeIn(cells, hash, tier, factor), hash, tier)
}

func probeFrom(cells []engineCell, i int, hash uint64, tier Tier) (int, bool) {
	for {
		c := &cells[i]
		if c.place == 0 {
			return i, false
		}
		if c.hash == hash && placeTier(c.place) == tier {
			return i, true
		}
		if i++; i == len(cells) {
			i = 0
		}
	}
}

// ahead is how far the front has to go from begun to come to a cell of old.
func (t *engineTable) ahead(i int) int {
	if i -= t.moveStart; i < 0 {
		i += len(t.old)
	}
	return i
}

// get finds a key's cell, by its array and its index there; -1 when there is none.
func (t *engineTable) get(hash uint64, tier Tier, factor uint64) (cells []engineCell, i int) {
	if t.n == 0 {
		return nil, -1
	}
	if t.old != nil {
		if home := homeIn(t.old, hash, tier, factor); t.ahead(home) >= t.moveDone {
			if i, ok := probeFrom(t.old, home, hash, tier); ok {
				return t.old, i
			}
			if !t.hasStrays {
				return nil, -1
			}
		}
	}
	if i, ok := probe(t.cells, hash, tier, factor); ok {
		return t.cells, i
	}
	return nil, -1
}

// prefetchEngine looks at the cells of keys before they are needed one after another: loads
// that do not wait for each other take the time of one.
func prefetchEngine[H ~uint64](t *engineTable, hashes []H, tier Tier, factor uint64) (sink uint64) {
	if len(t.cells) == 0 {
		return 0
	}
	if t.old != nil {
		for _, hash := range hashes {
			if home := homeIn(t.old, uint64(hash), tier, factor); t.ahead(home) >= t.moveDone {
				sink += t.old[home].place
			} else {
				sink += t.cells[homeIn(t.cells, uint64(hash), tier, factor)].place
			}
		}
		return sink
	}
	for _, hash := range hashes {
		sink += t.cells[homeIn(t.cells, uint64(hash), tier, factor)].place
	}
	return sink
}

// put finds a key's cell or takes an empty one for it, for which room has made
// room; the caller fills the place in, which is 0 in a new one. at is for cell, and
// good until cells are removed or moved.
func (t *engineTable) put(hash uint64, tier Tier, factor uint64) (c *engineCell, at int32) {
	var i int
	var ok, isOld bool
	if t.old != nil {
		i, ok, isOld = t.putOld(hash, tier, factor)
	}
	if isOld {
		c, at = &t.old[i], ^int32(i)
	} else {
		i, ok = probe(t.cells, hash, tier, factor)
		c, at = &t.cells[i], int32(i)
	}
	if !ok {
		if t.n++; isOld {
			t.oldUsed++
		}
		c.hash = hash
	}
	return c, at
}

// putOld finds the cell of a key in old, or the empty one where it should go, unless
// its place is in the new array.
func (t *engineTable) putOld(hash uint64, tier Tier, factor uint64) (i int, ok, isOld bool) {
	home := homeIn(t.old, hash, tier, factor)
	if t.ahead(home) < t.moveDone {
		return 0, false, false
	}
	if i, ok = probeFrom(t.old, home, hash, tier); ok {
		return i, true, true
	}
	if t.ahead(i) < t.ahead(home) {
		t.hasStrays = true
	}
	if t.hasStrays {
		if _, strayed := probe(t.cells, hash, tier, factor); strayed || t.ahead(i) < t.ahead(home) {
			return 0, false, false
		}
	}
	return i, false, true
}

// cell is what put has found.
func (t *engineTable) cell(at int32) *engineCell {
	if at < 0 {
		return &t.old[^at]
	}
	return &t.cells[at]
}

// remove empties a cell that get has found.
func (t *engineTable) remove(cells []engineCell, i int, factor uint64) {
	t.n--
	if t.old != nil && &cells[0] == &t.old[0] {
		t.oldUsed--
	}
	closeGap(cells, i, factor)
}

// closeGap moves later cells of the cluster forward over an emptied one.
func closeGap(cells []engineCell, gap int, factor uint64) {
	size := len(cells)
	for i := gap; ; {
		if i++; i == size {
			i = 0
		}
		c := cells[i]
		if c.place == 0 {
			break
		}
		// c moves if its home is not between the gap and itself.
		fromHome, fromGap := i-homeIn(cells, c.hash, placeTier(c.place), factor), i-gap
		if fromHome < 0 {
			fromHome += size
		}
		if fromGap < 0 {
			fromGap += size
		}
		if fromHome >= fromGap {
			cells[gap] = c
			gap = i
		}
	}
	cells[gap] = engineCell{}
}

// sizeFor is how many cells n keys are given: three quarters of them will be full.
// Fuller tables would save little memory and cost long clusters.
func sizeFor(n int) int { return n + n/3 + 2 }

// reserve makes room for n keys in all, and keeps it. The kernel gives an empty table's
// pages now; where keys are there already, somebody is writing, who is not to wait.
func (t *engineTable) reserve(n int, factor uint64, valid func(uint64) bool) {
	t.floor = max(t.floor, sizeFor(n))
	if len(t.cells) < t.floor {
		t.startMove(t.floor, factor, valid)
		if t.n == 0 {
			t.mem.populate()
		}
	}
}

// from calls do for every key whose home comes at or after a point in the order of
// homes, for about so many cells, and returns the point to go on from.
func (t *engineTable) from(point uint64, cells int, factor uint64, do func(engineCell)) (next uint64, last bool) {
	next, last = pointBehind(point, len(t.cells), cells)
	for _, in := range [][]engineCell{t.cells, t.old} {
		if len(in) == 0 {
			continue
		}
		i, _ := bits.Mul64(point, uint64(len(in)))
		end, _ := bits.Mul64(next, uint64(len(in)))
		for n := range uint64(len(in)) {
			at := i + n
			if at >= uint64(len(in)) {
				at -= uint64(len(in))
			}
			c := in[at]
			if c.place == 0 {
				if i+n > end {
					break
				}
				continue
			}
			if x := (c.hash + uint64(placeTier(c.place))) * factor; x >= point && (x < next || last) {
				do(c)
			}
		}
	}
	return next, last
}

// ensureRoom makes room for more keys, and does a share of a move that is under way.
func (t *engineTable) ensureRoom(more int, factor uint64, valid func(uint64) bool) {
	if t.advanceMove(more, factor, valid); t.old != nil {
		return
	}
	// Much was evicted. Only what is counted for sure says how little will do: stale
	// is an estimate.
	size := max(t.floor, sizeFor(2*(t.n+more)), minEngineCells)
	if 2*size >= len(t.cells) {
		full := 4*(t.n+more) > 3*len(t.cells)
		if !full && t.stale.Load() <= int64(t.n/4+64) {
			return
		}
		size = len(t.cells)
		if live := max(0, t.n-int(t.stale.Load())); 3*(live+more) > 2*size {
			size = max(grownSize(size), sizeFor(live+2*more), minEngineCells, t.floor) // the floor: after a Clear
		}
	}
	t.startMove(size, factor, valid)
	t.advanceMove(more, factor, valid)
	if t.old == nil && 4*(t.n+more) > 3*len(t.cells) { // stale was an estimate
		t.ensureRoom(more, factor, valid)
	}
}

// grownSize is the next size of a table that is full. Small ones are doubled, which
// moves a key once on the average; large ones leave less unused.
func grownSize(size int) int {
	if size < 1<<15 {
		return 2 * size
	}
	return size + size/2
}

// advanceMove does the part of a move that so many new keys owe, so that it ends before
// either array is more than seven eighths full. What is not moved yet counts for the new
// one as well: how much of it was evicted and is left behind, stale only estimates.
func (t *engineTable) advanceMove(more int, factor uint64, valid func(uint64) bool) {
	if t.old == nil {
		return
	}
	free := min(7*len(t.old)/8-t.oldUsed, 7*len(t.cells)/8-t.n) - more
	if free > 0 {
		t.moveCells(64+(len(t.old)-t.moveDone)*more/free, factor, valid)
		return
	}
	for t.old != nil {
		t.moveCells(len(t.old), factor, valid)
	}
}

// shrink gives memory back when few cells are left in use.
func (t *engineTable) shrink(factor uint64, valid func(uint64) bool) {
	if t.old != nil {
		t.moveCells(64, factor, valid)
		return
	}
	if t.n == 0 && t.floor == 0 {
		t.reset()
	} else if size := max(t.floor, 2*t.n, minEngineCells); 3*size < len(t.cells) {
		t.startMove(size, factor, valid)
	}
}

// reset forgets all keys, and gives all memory back but what was reserved.
func (t *engineTable) reset() {
	t.mem.free()
	t.oldMem.free()
	t.clear()
}

// clear is empty for whoever has taken the tables and their memory.
func (t *engineTable) clear() {
	t.cells, t.n, t.old, t.moveStart, t.moveDone, t.oldUsed = nil, 0, nil, 0, 0, 0
	t.mem, t.oldMem = nil, nil
	t.stale.Store(0)
}

// startMove begins to move the table to another size, and ends it if it is small.
func (t *engineTable) startMove(size int, factor uint64, valid func(uint64) bool) {
	for t.old != nil {
		t.moveCells(len(t.old), factor, valid)
	}
	t.purge = t.stale.Swap(0) != 0
	t.old, t.oldMem, t.oldUsed = t.cells, t.mem, t.n
	t.moveStart, t.moveDone, t.hasStrays = 0, 0, false
	t.cells, t.mem = newCells(size)
	// Begin at an empty cell, so that whole clusters are moved.
	for t.moveStart < len(t.old) && t.old[t.moveStart].place != 0 {
		t.moveStart++
	}
	if t.oldUsed == 0 {
		t.finishMove()
	} else if len(t.old) <= moveStep {
		t.moveCells(len(t.old), factor, valid)
	}
}

// moveCells moves at least the given number of cells on, to the end of a cluster.
func (t *engineTable) moveCells(cells int, factor uint64, valid func(uint64) bool) {
	if t.mem != nil {
		scale := float64(len(t.cells)) / float64(len(t.old))
		t.mem.fill(int(scale*float64(t.moveStart)), int(scale*float64(t.moveDone+cells+maxEnginePrefetch)))
	}
	at := t.moveStart + t.moveDone
	if at >= len(t.old) {
		at -= len(t.old)
	}
	for ; t.oldUsed > 0; cells-- {
		c := &t.old[at]
		if c.place == 0 && cells <= 0 {
			return
		}
		if c.place != 0 {
			t.oldUsed--
			// To ask about each cell is a load from anywhere.
			if !t.purge || valid(c.place) {
				i, _ := probe(t.cells, c.hash, placeTier(c.place), factor)
				t.cells[i] = *c
			} else {
				t.n--
			}
			*c = engineCell{}
		}
		t.moveDone++
		if at++; at == len(t.old) {
			at = 0
		} else if at&(mmapReturnBytes-1) == 0 && at > t.moveStart {
			t.oldMem.returnPages(t.moveStart, at)
		}
	}
	t.finishMove()
}

// finishMove ends a move.
func (t *engineTable) finishMove() {
	t.oldMem.free()
	t.old, t.oldMem = nil, nil
}
