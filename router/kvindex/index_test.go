package kvindex

import (
	"runtime"
	"sync"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// chain is the prompt of stream sid, n blocks long: the event that stores it
// from its start and the keys that find it.
func chain(slot worker.Slot, sid, n int) (Stored, []blockhash.Seq) {
	ev := Stored{Slot: slot, Salt: 1}
	var seqs []blockhash.Seq
	seq := blockhash.Seq(ev.Salt)
	for i := range n {
		l := blockhash.Local(sid*1_000_003 + i + 1)
		seq = blockhash.Next(seq, l)
		seqs = append(seqs, seq)
		ev.Local = append(ev.Local, l)
		ev.Engine = append(ev.Engine, EngineHash(seq)^EngineHash(slot))
	}
	return ev, seqs
}

func depthOf(ix interface {
	Find([]blockhash.Seq, *Overlap)
}, slot worker.Slot, seqs []blockhash.Seq) int {
	var o Overlap
	ix.Find(seqs, &o)
	return o.Depth(slot)
}

func TestHoleEndsTheDepth(t *testing.T) {
	ix := New(Options{})
	ev, seqs := chain(5, 1, 4)
	if got := ix.Store(&ev); got != (StoreResult{Added: 4}) {
		t.Fatalf("Store = %+v", got)
	}
	ix.Remove(5, Device, ev.Engine[1:2])
	if got := depthOf(ix, 5, seqs); got != 1 {
		t.Errorf("with block 1 gone the depth is %d, want 1", got)
	}
	middle := Stored{Slot: 5, HasParent: true, Parent: ev.Engine[0], Engine: ev.Engine[1:2], Local: ev.Local[1:2]}
	ix.Store(&middle)
	if got := depthOf(ix, 5, seqs); got != 4 {
		t.Errorf("with block 1 back the depth is %d, want 4", got)
	}
	ix.Remove(5, Device, ev.Engine[:1])
	if got := depthOf(ix, 5, seqs); got != 0 {
		t.Errorf("with block 0 gone the depth is %d, want 0", got)
	}
}

func TestTiersMakeOneDepth(t *testing.T) {
	ix := New(Options{})
	ev, seqs := chain(70, 1, 3)
	host := ev
	host.Tier, host.Engine, host.Local = Host, ev.Engine[:2], ev.Local[:2]
	ix.Store(&host)
	tail := Stored{Slot: 70, HasParent: true, Parent: ev.Engine[1], Engine: ev.Engine[2:], Local: ev.Local[2:]}
	if got := ix.Store(&tail); got.Orphan || got.Added != 1 {
		t.Fatalf("a device block after a host block: %+v, want it placed", got)
	}
	if got := depthOf(ix, 70, seqs); got != 3 {
		t.Errorf("depth over two tiers is %d, want 3", got)
	}
	if removed, unknown := ix.Remove(70, Device, ev.Engine); removed != 1 || unknown != 2 {
		t.Errorf("Remove on the device = %d, %d; want 1 removed, 2 unknown", removed, unknown)
	}
	if got := depthOf(ix, 70, seqs); got != 2 {
		t.Errorf("after the device let go the depth is %d, want 2", got)
	}
}

func TestEngineHashesOfOneBlockCountTogether(t *testing.T) {
	ix := New(Options{})
	ev, seqs := chain(1, 1, 1)
	again := ev
	again.Engine = []EngineHash{12345}
	ix.Store(&ev)
	if got := ix.Store(&again); got != (StoreResult{Repeated: 1}) {
		t.Errorf("the same block by another hash: %+v, want repeated", got)
	}
	ix.Remove(1, Device, ev.Engine)
	if got := depthOf(ix, 1, seqs); got != 1 {
		t.Error("the block went with one of its two engine hashes")
	}
	ix.Remove(1, Device, again.Engine)
	if got := depthOf(ix, 1, seqs); got != 0 || ix.Len() != 0 {
		t.Errorf("depth %d, len %d after both hashes went", got, ix.Len())
	}
}

func TestImpossibleEvents(t *testing.T) {
	ix := New(Options{})
	ev, _ := chain(1, 1, 2)
	for name, change := range map[string]func(*Stored){
		"slot": func(e *Stored) { e.Slot = worker.MaxSlots }, "tier": func(e *Stored) { e.Tier = NumTiers },
		"lengths": func(e *Stored) { e.Local = e.Local[:1] },
	} {
		bad := ev
		change(&bad)
		if got := ix.Store(&bad); got != (StoreResult{}) || ix.Len() != 0 {
			t.Errorf("%s: %+v, %d entries; want nothing stored", name, got, ix.Len())
		}
	}
	if removed, unknown := ix.Remove(worker.MaxSlots, NumTiers, ev.Engine); removed != 0 || unknown != 2 {
		t.Errorf("Remove = %d, %d; want 0, 2", removed, unknown)
	}
	if ix.Clear(60000) != 0 || ix.CachedBlocks(60000) != 0 {
		t.Error("an unknown slot holds something")
	}
}

// TestCachedBlocksByTier: stores, removals and clears count in the tier of the blocks.
func TestCachedBlocksByTier(t *testing.T) {
	ix := New(Options{})
	wantTiers := func(when string, want [NumTiers]int) {
		t.Helper()
		if got := ix.(TierCounter).CachedBlocksByTier(1); got != want || ix.CachedBlocks(1) != want[Device]+want[Host]+want[Disk] {
			t.Errorf("%s: %v, %d together; want %v", when, got, ix.CachedBlocks(1), want)
		}
	}
	ev, _ := chain(1, 1, 8)
	ix.Store(&ev)
	lower := ev
	lower.Tier, lower.Engine, lower.Local = Host, ev.Engine[:5], ev.Local[:5]
	ix.Store(&lower)
	lower.Tier, lower.Engine, lower.Local = Disk, ev.Engine[:3], ev.Local[:3]
	ix.Store(&lower)
	wantTiers("stored", [NumTiers]int{8, 5, 3})
	ix.Remove(1, Device, ev.Engine[6:])
	ix.Remove(1, Host, ev.Engine[4:5])
	wantTiers("after removals", [NumTiers]int{6, 4, 3})
	if n := ix.Clear(1); n != 13 {
		t.Errorf("clear removed %d blocks, want 13", n)
	}
	wantTiers("cleared", [NumTiers]int{})
	if got := ix.(TierCounter).CachedBlocksByTier(worker.MaxSlots); got != ([NumTiers]int{}) {
		t.Errorf("a slot out of range has %v", got)
	}
}

func TestEvictionKeepsTheBound(t *testing.T) {
	const bound = 200_000
	ix, model := New(Options{MaxBytes: bound}), NewNaive()
	var prompts [][]blockhash.Seq
	for sid := range 400 {
		ev, seqs := chain(worker.Slot(sid%3), sid, 20)
		ix.Store(&ev)
		model.Store(&ev)
		prompts = append(prompts, seqs)
		if got := ix.Bytes(); got > bound {
			t.Fatalf("after %d prompts the index takes %d bytes, over its bound of %d", sid+1, got, bound)
		}
	}
	if got := ix.(Evictor).Evicted(); got == 0 || int(got)+ix.Len() != model.Len() {
		t.Errorf("%d evicted and %d held of %d stored", got, ix.Len(), model.Len())
	}
	partial := 0
	for sid, seqs := range prompts {
		got, want := depthOf(ix, worker.Slot(sid%3), seqs), depthOf(model, worker.Slot(sid%3), seqs)
		if got > want {
			t.Fatalf("prompt %d: depth %d, but the rank holds %d", sid, got, want)
		}
		if got > 0 && got < want {
			partial++
		}
		if sid == len(prompts)-1 && got != want {
			t.Errorf("the newest prompt has depth %d, want all %d", got, want)
		}
	}
	if partial > 3 {
		t.Errorf("%d prompts lost a part; eviction should finish a branch before the next", partial)
	}
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

func TestBytesIsAboutTheHeap(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	ix := New(Options{})
	for sid := range 2000 {
		ev, _ := chain(worker.Slot(sid%100), sid, 64)
		ix.Store(&ev)
	}
	got, real := ix.Bytes(), heap()-before
	if got < real/2 || got > 2*real {
		t.Errorf("Bytes says %d, the heap grew by %d", got, real)
	}
	runtime.KeepAlive(ix)
}

func TestFindAllocatesNothing(t *testing.T) {
	ix := New(Options{})
	_, seqs := chain(0, 7, 256)
	for slot := range worker.Slot(300) {
		ev, _ := chain(slot, 7, 1+int(slot)%256)
		ix.Store(&ev)
	}
	var o Overlap
	ix.Find(seqs, &o)
	if n := testing.AllocsPerRun(50, func() { ix.Find(seqs, &o) }); n != 0 {
		t.Errorf("%v allocations a Find, want 0", n)
	}
	if len(o.Holders()) != 300 || o.Max() != 256 || o.Depth(44) != 45 || o.Depth(299) != 44 {
		t.Errorf("holders %d, max %d, depths %d and %d", len(o.Holders()), o.Max(), o.Depth(44), o.Depth(299))
	}
	o.Reset()
	if o.Max() != 0 || o.Depth(44) != 0 || o.Depth(60000) != 0 || len(o.Holders()) != 0 {
		t.Error("Reset left something")
	}
}

// Writers of different ranks, readers of all: every depth seen must be one that
// the rank has had, and at the end all is as the model says.
func TestConcurrent(t *testing.T) {
	ix := New(Options{})
	const ranks, prompts, blocks = 4, 30, 12
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			var o Overlap
			for sid := 0; ; sid = (sid + 1) % prompts {
				select {
				case <-stop:
					return
				default:
				}
				_, seqs := chain(0, sid, blocks)
				ix.Find(seqs, &o)
				for s := range worker.Slot(ranks) {
					if d := o.Depth(s); d != 0 && d != blocks/2 && d != blocks {
						t.Errorf("prompt %d, slot %d: depth %d was never so", sid, s, d)
						return
					}
				}
				ix.CachedBlocks(0)
				ix.Bytes()
			}
		})
	}
	for slot := range worker.Slot(ranks) {
		writers.Go(func() {
			for round := range 20 {
				for sid := range prompts {
					ev, _ := chain(slot, sid, blocks)
					ix.Store(&ev)
					ix.Remove(slot, Device, ev.Engine[blocks/2:])
				}
				if round%5 == 4 && slot > 0 {
					ix.Clear(slot)
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	if got, want := ix.Len(), prompts*blocks/2; got != want {
		t.Errorf("%d entries at the end, want slot 0's %d", got, want)
	}
}

// Blocks for which space was reserved move no table when they are stored.
func TestReserve(t *testing.T) {
	ix := New(Options{}).(*radix)
	ix.Reserve(3, 5000)
	ix.Reserve(worker.MaxSlots, 5000)
	ix.Reserve(3, -1)
	cells := &ix.rank(3).engineTable.cells[0]
	for sid := range 50 {
		ev, seqs := chain(3, sid, 100)
		ix.Store(&ev)
		if got := depthOf(ix, 3, seqs); got != 100 {
			t.Fatalf("prompt %d: depth %d", sid, got)
		}
	}
	if &ix.rank(3).engineTable.cells[0] != cells {
		t.Error("the table moved")
	}
	ix.Clear(3)
	ev, seqs := chain(3, 1, 100)
	ix.Store(&ev)
	if got := depthOf(ix, 3, seqs); got != 100 {
		t.Errorf("depth %d after Clear and Store", got)
	}
	if got := len(ix.rank(3).engineTable.cells); got < 5000 { // an engine that was restarted has as much room as before
		t.Errorf("%d cells after Clear and Store, want room for 5,000", got)
	}
	small := New(Options{MaxBytes: 100_000}).(*radix)
	small.Reserve(1, 1<<40)
	if got := len(small.rank(1).engineTable.cells); got > 100_000/16 {
		t.Errorf("%d cells reserved against the bound", got)
	}
	// One that says too much leaves room for others, and says it twice for nothing.
	fair := New(Options{MaxBytes: 32 << 20}).(*radix)
	for range 5 {
		fair.Reserve(1, 1<<40)
	}
	if got := len(fair.rank(1).engineTable.cells) * 16; got == 0 || got > 6<<20 {
		t.Errorf("%d bytes reserved for one rank, of 16 MiB for all", got)
	}
	for slot := worker.Slot(2); slot < 8; slot++ {
		fair.Reserve(slot, 40_000)
		if got := len(fair.rank(slot).engineTable.cells); got < 40_000 {
			t.Errorf("rank %d: %d cells after one that said too much, want room for 40,000", slot, got)
		}
	}
	if err := ix.check(); err != nil {
		t.Error(err)
	}
}

// A large table is moved a little at a time: nothing is lost on the way, whatever
// is stored, removed and looked for meanwhile.
func TestGrowthInSteps(t *testing.T) {
	ix, model := New(Options{}).(*radix), map[int]bool{}
	moving := 0
	for sid := range 1200 {
		ev, _ := chain(9, sid, 16)
		ix.Store(&ev)
		model[sid] = true
		if sid%3 == 0 {
			old, _ := chain(9, sid/2, 16)
			if removed, _ := ix.Remove(9, Device, old.Engine); removed != 0 != model[sid/2] {
				t.Fatalf("prompt %d: removed %d, held %v", sid/2, removed, model[sid/2])
			}
			delete(model, sid/2)
		}
		if ix.rank(9).engineTable.old != nil {
			moving++
		}
	}
	if moving == 0 {
		t.Error("no table was seen on the move: the test is too small")
	}
	for sid := range 1200 {
		_, seqs := chain(9, sid, 16)
		if got := depthOf(ix, 9, seqs); got != 0 != model[sid] || got != 0 && got != 16 {
			t.Fatalf("prompt %d: depth %d, held %v", sid, got, model[sid])
		}
	}
	if err := ix.check(); err != nil {
		t.Error(err)
	}
	if got := ix.Clear(9); got != 16*len(model) || ix.Len() != 0 {
		t.Errorf("Clear gave %d of %d", got, 16*len(model))
	}
}
