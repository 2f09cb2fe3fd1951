package kvindex

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

// mapSmallTables has tables of a page and more mapped, and given back by the page.
func mapSmallTables(t *testing.T) {
	from, back := mmapMinCells, mmapReturnBytes
	t.Cleanup(func() { mmapMinCells, mmapReturnBytes = from, back })
	mmapMinCells, mmapReturnBytes = 256, 256
}

// A table that grows and shrinks through many moves, each of which is long in progress,
// is compared with a map at each step.
func TestTablesThatMove(t *testing.T) {
	mapSmallTables(t)
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 64
	const factor = 0x9E3779B97F4A7C15
	valid := func(uint64) bool { return true }
	_, m := newCells(mmapMinCells) // nil where nothing can be mapped
	defer m.free()
	strayed := 0
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 8))
		var side engineTable
		want := make(map[uint64]uint64)
		var keys []uint64
		moves, passed, strays := 0, 0, 0
		for step := range 60_000 {
			// Up to some thousands of keys and down to few, again and again.
			if grows := step%15_000 < 9_000; rng.IntN(10) < 7 == grows || len(keys) == 0 {
				side.ensureRoom(1, factor, valid)
				hash := rng.Uint64()
				if len(keys) > 0 && rng.IntN(8) == 0 {
					hash = keys[rng.IntN(len(keys))]
				}
				at := rng.Uint64() | 1
				at = placeOf(uint32(at>>40), int(at>>8&1023), Device, 1)
				c, _ := side.put(hash, Device, factor)
				if had, ok := want[hash]; c.place != had {
					t.Fatalf("seed %d, step %d: %x is at %x, want %x (%v)", seed, step, hash, c.place, had, ok)
				} else if !ok {
					keys = append(keys, hash)
				}
				c.place, want[hash] = at, at
			} else {
				i := rng.IntN(len(keys))
				cells, at := side.get(keys[i], Device, factor)
				if at < 0 || cells[at].place != want[keys[i]] {
					t.Fatalf("seed %d, step %d: %x is not found", seed, step, keys[i])
				}
				side.remove(cells, at, factor)
				side.shrink(factor, valid)
				delete(want, keys[i])
				keys[i] = keys[len(keys)-1]
				keys = keys[:len(keys)-1]
			}
			if _, at := side.get(rng.Uint64(), Device, factor); at >= 0 {
				t.Fatalf("seed %d, step %d: what is not there is found", seed, step)
			}
			if side.old != nil {
				moves++
			}
			if side.oldMem != nil && side.oldMem.returned > 0 {
				passed++
			}
			if side.old != nil && side.hasStrays {
				strays++
			}
			if side.n != len(want) {
				t.Fatalf("seed %d, step %d: %d keys, want %d", seed, step, side.n, len(want))
			}
		}
		for hash, place := range want {
			if cells, at := side.get(hash, Device, factor); at < 0 || cells[at].place != place {
				t.Fatalf("seed %d: %x is lost", seed, hash)
			}
		}
		if moves < 400 || m != nil && passed < 100 {
			t.Errorf("seed %d: %d steps within moves, %d after pages were given back: this test shows little", seed, moves, passed)
		}
		strayed += strays
		side.reset()
	}
	if strayed < 20 {
		t.Errorf("%d steps with a key beyond the end: this test shows little", strayed)
	}
}

// Room that is made for what is there already leaves that alone.
func TestReserveAfterStores(t *testing.T) {
	mapSmallTables(t)
	ix := New(Options{})
	ev, seqs := chain(3, 1, 150)
	ix.Store(&ev)
	ix.(Reserver).Reserve(3, 50_000)
	if removed, unknown := ix.Remove(3, Device, ev.Engine[100:]); removed != 50 || unknown != 0 {
		t.Errorf("%d removed, %d unknown of 50 after Reserve", removed, unknown)
	}
	if got := depthOf(ix, 3, seqs); got != 100 {
		t.Errorf("depth %d after Reserve, want 100", got)
	}
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

// The mappings of a dropped index are unmapped with it.
func TestMappedTablesAreCollected(t *testing.T) {
	mapSmallTables(t)
	freed := make(chan struct{})
	func() {
		cells, m := newCells(mmapMinCells)
		if m == nil {
			t.Skip("nothing can be mapped here")
		}
		cells[mmapMinCells-1].place = 1
		runtime.AddCleanup(m, func(c chan struct{}) { close(c) }, freed)
		if cells[mmapMinCells-1].place != 1 {
			t.Error("a cell was lost")
		}
		runtime.KeepAlive(m)
	}()
	for range 100 {
		runtime.GC()
		select {
		case <-freed:
			return
		default:
			runtime.Gosched()
		}
	}
	t.Error("the mapping is kept")
}

// A full table of which a part was evicted is moved in steps too, though what is left
// behind still counts until then.
func TestFullTableIsPurgedInSteps(t *testing.T) {
	mapSmallTables(t)
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 64
	const factor, size = 0x9E3779B97F4A7C15, 1 << 14
	gone := func(hash uint64) bool { return hash%5 == 0 }
	place := func(hash uint64) uint64 { return placeOf(uint32(hash+1), 0, Device, 1) }
	valid := func(p uint64) bool { return !gone(p>>32 - 1) }
	var side engineTable
	defer side.reset()
	side.cells, side.mem = newCells(size)
	hash, evicted := uint64(0), 0
	put := func() {
		c, _ := side.put(hash, Device, factor)
		c.place = place(hash)
		if gone(hash) && side.old == nil {
			evicted++
		}
		hash++
	}
	for 4*(side.n+1) <= 3*size {
		put()
	}
	side.stale.Store(int64(evicted))
	live := hash
	steps := 0
	for side.ensureRoom(1, factor, valid); side.old != nil; side.ensureRoom(1, factor, valid) {
		if done := side.moveDone; done > steps*200+1000 {
			t.Fatalf("%d cells were passed in %d steps", done, steps)
		}
		steps++
		put()
	}
	if steps < 20 || len(side.cells) != size {
		t.Errorf("%d steps, %d cells; want many, and as many as before", steps, len(side.cells))
	}
	for h := range hash {
		cells, at := side.get(h, Device, factor)
		if want := !gone(h); h < live && (at >= 0) != want || at >= 0 && cells[at].place != place(h) {
			t.Fatalf("key %d: found %v, want %v", h, at >= 0, want)
		}
	}
}

// A table that is moved to a much smaller one, since most of it has gone, has room there
// for what is left and for what comes meanwhile: else no search for a new key would end.
func TestEngineTableDoesNotFill(t *testing.T) {
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 64
	const factor = 0x9E3779B97F4A7C15
	valid := func(uint64) bool { return true }
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 9))
		var side engineTable
		put := func(more int) (keys []uint64) {
			side.ensureRoom(more, factor, valid)
			if in := side.n - side.oldUsed + more; in >= len(side.cells) {
				t.Fatalf("seed %d: %d of %d cells would be full, with %d keys to be moved into them yet", seed, in, len(side.cells), side.oldUsed)
			}
			for range more {
				keys = append(keys, rng.Uint64())
				c, _ := side.put(keys[len(keys)-1], Device, factor)
				c.place = placeOf(1, 1, Device, 1)
			}
			return keys
		}
		keys := put(8_000)
		for _, key := range keys[:len(keys)-100-rng.IntN(400)] {
			cells, at := side.get(key, Device, factor)
			side.remove(cells, at, factor)
		}
		for range 100 {
			put(1 + rng.IntN(20))
		}
	}
}
