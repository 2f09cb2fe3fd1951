package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// engineTable is one rank's map from (tier, engine hash) to the place of the block: open addressing
// with linear probing and backward-shift deletion. Only the rank's writer uses it. A key's home is
// its hash scaled to the table's size, so any size works and keys keep their order when the table
// is resized. A resize moves a few clusters at a time, from the front, as part of the operations
// that use the table. A large table is memory-mapped, so that no writer waits while it is zeroed.
//
// During a resize a key is in the old array until the front has passed its home there, and in the
// new array afterwards; this also holds for keys inserted meanwhile. One array is therefore probed,
// and the new one is written from its beginning, page after page. If new keys were spread over it,
// each would wait for the kernel to zero a page.
type engineTable struct {
	cells []engineCell
	n     int          // used cells in both arrays
	stale atomic.Int64 // approximate number of these that name evicted blocks

	old       []engineCell // the array being moved, from moveStart on, wrapping at its end
	moveStart int          // a cell that was empty when the move began
	moveDone  int          // number of cells the front has passed
	oldUsed   int          // used cells of old
	purge     bool         // the move drops cells of evicted blocks
	// hasStrays: a key is in cells although the front has not passed its home in old, because its
	// cell in old would have been behind moveStart.
	hasStrays bool
	floor     int // the table never has fewer cells

	mem, oldMem *mmapCells // of cells and old; nil if they are on the heap
}

// engineCell names a block. place is shard<<60 | extent<<32 | position<<16 | tier<<14 | generation;
// a place of 0 is an empty cell.
type engineCell struct {
	hash  uint64
	place uint64
}

const minEngineCells = 16

// moveStep is the size in cells up to which a table is moved at once. Tests lower it.
var moveStep = 1 << 12

// maxEnginePrefetch is about how many more cells than requested a step moves.
const maxEnginePrefetch = 64

func placeOf(ext uint32, pos int, tier Tier, gen uint16) uint64 {
	return uint64(ext)<<32 | uint64(pos)<<16 | uint64(tier)<<genBits | uint64(gen)
}

// placeAfter returns the place n blocks behind place p.
func placeAfter(p uint64, n int) uint64 { return p + uint64(n)<<16 }

func placeShard(p uint64) uint64  { return p >> (32 + extentBits) }
func placeExtent(p uint64) uint32 { return uint32(p>>32) & (1<<extentBits - 1) }
func placePos(p uint64) int       { return int(p >> 16 & lenMask) }
func placeTier(p uint64) Tier     { return Tier(p >> genBits & 3) }
func placeGen(p uint64) uint16    { return uint16(p & lastGen) }

// extentBits is the width of an extent's number within its shard.
const extentBits = 32 - shardBits

func homeIn(cells []engineCell, hash uint64, tier Tier, factor uint64) int {
	hi, _ := bits.Mul64((hash+uint64(tier))*factor, uint64(len(cells)))
	return int(hi)
}

// probe finds a key's cell, or the empty cell where it would be inserted.
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

// ahead is the distance from moveStart to cell i of old, in the direction of the move.
func (t *engineTable) ahead(i int) int {
	if i -= t.moveStart; i < 0 {
		i += len(t.old)
	}
	return i
}

// get returns the array and index of a key's cell; the index is -1 if there is none.
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

// prefetchEngine loads the cells of keys before they are used one after another: loads that do not
// depend on each other overlap.
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

// put finds a key's cell, or takes an empty one for it, for which ensureRoom has made space. The
// caller sets the place, which is 0 in a new cell. at is an argument for cell and valid until cells
// are removed or moved.
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

// putOld finds the cell of a key in old, or the empty cell where it belongs. isOld is false if the
// key belongs in the new array.
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

// cell returns the cell that put returned as at.
func (t *engineTable) cell(at int32) *engineCell {
	if at < 0 {
		return &t.old[^at]
	}
	return &t.cells[at]
}

// remove empties a cell that get returned.
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

// sizeFor is the number of cells for n keys: three quarters of them are used. A fuller table saves
// little memory and has long clusters.
func sizeFor(n int) int { return n + n/3 + 2 }

// reserve makes space for n keys in total, permanently. The pages of an empty table are allocated
// now. A table with keys has an active writer, which must not wait for that.
func (t *engineTable) reserve(n int, factor uint64, valid func(uint64) bool) {
	t.floor = max(t.floor, sizeFor(n))
	if len(t.cells) < t.floor {
		t.startMove(t.floor, factor, valid)
		if t.n == 0 {
			t.mem.populate()
		}
	}
}

// from calls do for every key whose home is at or after point in the order of homes, for about that
// many cells, and returns the next point.
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

// ensureRoom makes space for more keys and performs a share of a resize that is in progress.
func (t *engineTable) ensureRoom(more int, factor uint64, valid func(uint64) bool) {
	if t.advanceMove(more, factor, valid); t.old != nil {
		return
	}
	// Many cells name evicted blocks. stale is an estimate, so only n, which is exact, decides
	// whether the table shrinks.
	size := max(t.floor, sizeFor(2*(t.n+more)), minEngineCells)
	if 2*size >= len(t.cells) {
		full := 4*(t.n+more) > 3*len(t.cells)
		if !full && t.stale.Load() <= int64(t.n/4+64) {
			return
		}
		size = len(t.cells)
		if live := max(0, t.n-int(t.stale.Load())); 3*(live+more) > 2*size {
			size = max(grownSize(size), sizeFor(live+2*more), minEngineCells, t.floor) // the floor matters after a Clear
		}
	}
	t.startMove(size, factor, valid)
	t.advanceMove(more, factor, valid)
	if t.old == nil && 4*(t.n+more) > 3*len(t.cells) { // stale was an estimate
		t.ensureRoom(more, factor, valid)
	}
}

// grownSize is the next size of a full table. Small tables double, which moves a key once on
// average; large ones grow by half, which leaves fewer cells unused.
func grownSize(size int) int {
	if size < 1<<15 {
		return 2 * size
	}
	return size + size/2
}

// advanceMove performs the share of a resize that corresponds to more new keys, so that the resize
// ends before either array is more than seven eighths full. Cells that are not moved yet count for
// the new array as well: stale only estimates how many of them the move will drop.
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

// shrink frees memory when few cells are in use.
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

// reset removes all keys and frees all memory that is not reserved.
func (t *engineTable) reset() {
	t.mem.free()
	t.oldMem.free()
	t.clear()
}

// clear empties the table without freeing its memory, which the caller has taken over.
func (t *engineTable) clear() {
	t.cells, t.n, t.old, t.moveStart, t.moveDone, t.oldUsed = nil, 0, nil, 0, 0, 0
	t.mem, t.oldMem = nil, nil
	t.stale.Store(0)
}

// startMove starts a resize and completes it at once if the table is small.
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

// moveCells moves at least the given number of cells, up to the end of a cluster.
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
			// valid is a random memory access per cell.
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

// finishMove completes a resize.
func (t *engineTable) finishMove() {
	t.oldMem.free()
	t.old, t.oldMem = nil, nil
}
