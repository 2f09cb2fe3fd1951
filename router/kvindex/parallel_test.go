package kvindex

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Writers of several ranks at once, over prompts that share beginnings and over
// others, with the same answers at the end as if they had come one after another.
func TestParallelWritersEqualTheModel(t *testing.T) {
	jitters.Store(50)
	defer jitters.Store(0)
	const ranks = 6
	for seed := range envInt("KVINDEX_SEEDS", 4) {
		ix, model := New(Options{}), NewNaive()
		var writers sync.WaitGroup
		var finds []op
		for i := range ranks {
			var own []op
			for _, o := range traffic(rand.New(rand.NewPCG(uint64(seed), uint64(i))), 400, 1) {
				slot := worker.Slot(i * 61)
				o.slot, o.ev.Slot = slot, slot
				if o.kind == "find" {
					finds = append(finds, o)
				} else {
					own = append(own, o)
					apply(model, o)
				}
			}
			writers.Go(func() {
				for _, o := range own {
					switch o.kind {
					case "store":
						ix.Store(&o.ev)
					case "remove":
						ix.Remove(o.slot, o.tier, o.engine)
					case "clear":
						ix.Clear(o.slot)
					}
				}
			})
		}
		writers.Wait()
		for _, o := range finds {
			if got, want := everyDepth(ix, o.seqs), everyDepth(model, o.seqs); got != want {
				t.Fatalf("seed %d: %v\n got %s\nwant %s", seed, o, got, want)
			}
		}
		if err := ix.(*radix).check(); err != nil || ix.Len() != model.Len() {
			t.Fatalf("seed %d: %d entries, want %d: %v", seed, ix.Len(), model.Len(), err)
		}
	}
}

// The bound holds whenever no writer is in the middle of an event, and meanwhile is
// passed by no more than what the events in progress may bring.
func TestBoundUnderParallelWriters(t *testing.T) {
	const bound, writers, blocks = 400_000, 4, 20
	ix := New(Options{MaxBytes: bound})
	over := int64(writers * 8192) // the storage of a run, twice, and the rest
	var wg, watch sync.WaitGroup
	var stop atomic.Bool
	watch.Go(func() {
		for !stop.Load() {
			if got := ix.Bytes(); got > bound+over {
				t.Errorf("%d bytes, over the bound of %d by more than %d", got, bound, over)
				return
			}
			runtime.Gosched()
		}
	})
	stored := atomic.Int64{}
	for w := range writers {
		wg.Go(func() {
			for sid := range 1500 {
				// Some prompts are several ranks', most are one's.
				id := sid + 10_000*w
				if sid%5 == 0 {
					id = sid
				}
				ev, _ := chain(worker.Slot(w*90), id, blocks)
				stored.Add(int64(ix.Store(&ev).Added))
			}
		})
	}
	wg.Wait()
	stop.Store(true)
	watch.Wait()
	if got := ix.Bytes(); got > bound || got < bound/2 {
		t.Errorf("%d bytes at rest, the bound is %d", got, bound)
	}
	if got := ix.(Evictor).Evicted(); got == 0 || int64(got)+int64(ix.Len()) != stored.Load() {
		t.Errorf("%d evicted and %d held of %d stored", got, ix.Len(), stored.Load())
	}
	cells := 0
	for i := range ix.(*radix).ranks {
		if r := ix.(*radix).ranks[i].Load(); r != nil {
			cells += len(r.engineTable.cells) + len(r.engineTable.old)
		}
	}
	if most := 20 * ix.Len(); cells > most {
		t.Errorf("%d cells kept for %d entries", cells, ix.Len())
	}
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

// Blocks that are often looked up outlive blocks that were stored later and are not.
func TestReadsKeepALeafWarm(t *testing.T) {
	ix := New(Options{MaxBytes: 300_000})
	ev, warm := chain(1, 0, 30)
	ix.Store(&ev)
	_, cold := chain(1, 1, 30)
	ev, _ = chain(1, 1, 30)
	ix.Store(&ev)
	var o Overlap
	for sid := 2; ix.(Evictor).Evicted() < 30_000; sid++ {
		ev, _ := chain(worker.Slot(sid%5), sid, 30)
		ix.Store(&ev)
		for range 2 * sampleFinds {
			ix.Find(warm, &o)
		}
	}
	if got := depthOf(ix, 1, warm); got != 30 {
		t.Errorf("the prompt that was read has depth %d, want 30", got)
	}
	if got := depthOf(ix, 1, cold); got != 0 {
		t.Errorf("the prompt that was not read has depth %d, want 0", got)
	}
}

// An index starts nothing and keeps nothing: neither goroutines, nor memory of what
// came and went, nor of ranks that were cleared.
func TestNothingLeaks(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	empty := heap()
	ix := New(Options{})
	round := func(k int) {
		var o Overlap
		for sid := range 300 {
			ev, seqs := chain(worker.Slot((sid+k)%40), 1000*k+sid, 50)
			ix.Store(&ev)
			ix.Find(seqs, &o)
			if sid%2 == 0 {
				ix.Remove(ev.Slot, Device, ev.Engine)
			}
		}
		for slot := range worker.Slot(40) {
			ix.Clear(slot)
		}
	}
	round(1)
	after := heap()
	for k := range 20 {
		round(2 + k)
	}
	if ix.Len() != 0 || ix.Bytes() != 0 {
		t.Errorf("%d entries, %d bytes", ix.Len(), ix.Bytes())
	}
	if got := heap(); got > after+(after-empty)/4+100_000 {
		t.Errorf("the heap grew from %d to %d over 20 rounds that left nothing", after, got)
	}
	if got := runtime.NumGoroutine(); got > goroutines {
		t.Errorf("%d goroutines, were %d", got, goroutines)
	}
	runtime.KeepAlive(ix)
	var none []blockhash.Seq
	if depthOf(ix, 1, none) != 0 {
		t.Error("an empty prompt is held")
	}
}
