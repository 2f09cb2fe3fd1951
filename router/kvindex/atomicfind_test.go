package kvindex

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// The guarantees to readers are tested where every answer can be checked: a rank's
// depth moves through values known to the test, which brackets each Find by what
// was done before it began and what had begun before it ended.

// Readers that raise their hand at once are promised the same.
func TestDepthWithWritersHeldBack(t *testing.T) {
	defer func(p int) { maxScans = p }(maxScans)
	maxScans = 0
	TestDepthOfOneWhileWriting(t)
}

// A rank that only stores, and then only removes: depths rise and fall, and never
// leave the bracket.
func TestDepthOfOneWhileWriting(t *testing.T) {
	jitters.Store(50)
	defer jitters.Store(0)
	const ranks, blocks, step = 6, 240, 12
	ix := New(Options{})
	// Ranks apart in slot number, so that lists and sets are in play too.
	slotOf := func(i int) worker.Slot { return worker.Slot(i * 80) }
	events := make([]Stored, ranks)
	var seqs []blockhash.Seq
	for i := range events {
		events[i], seqs = chain(slotOf(i), 1, blocks)
	}
	piece := func(i, from, to int) Stored {
		ev := events[i]
		ev.Engine, ev.Local = ev.Engine[from:to], ev.Local[from:to]
		if from > 0 {
			ev.HasParent, ev.Parent = true, events[i].Engine[from-1]
		}
		return ev
	}
	for range 5 {
		// before and after: depths that had been reached, and that were begun.
		var before, after [ranks]atomic.Int64
		var writers, readers sync.WaitGroup
		var stop atomic.Bool
		phase := func(down bool, read func(o *Overlap, was, is *[ranks]int64) bool) {
			stop.Store(false)
			for range 2 {
				readers.Go(func() {
					var o Overlap
					var was, is [ranks]int64
					for !stop.Load() {
						for i := range ranks {
							was[i] = before[i].Load()
						}
						ix.Find(seqs, &o)
						for i := range ranks {
							is[i] = after[i].Load()
						}
						if !read(&o, &was, &is) {
							return
						}
					}
				})
			}
			for i := range ranks {
				writers.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(i), 5))
					if !down {
						for at := 0; at < blocks; {
							to := min(blocks, at+1+rng.IntN(step))
							after[i].Store(int64(to))
							ev := piece(i, at, to)
							if res := ix.Store(&ev); res.Added != to-at {
								t.Errorf("slot %d, %d…%d: %+v", slotOf(i), at, to, res)
							}
							before[i].Store(int64(to))
							at = to
						}
						return
					}
					for at := blocks; at > 0; {
						to := max(0, at-1-rng.IntN(step))
						after[i].Store(int64(to))
						ix.Remove(slotOf(i), Device, events[i].Engine[to:at])
						before[i].Store(int64(to))
						at = to
					}
				})
			}
			writers.Wait()
			stop.Store(true)
			readers.Wait()
		}
		phase(false, func(o *Overlap, was, is *[ranks]int64) bool {
			for i := range ranks {
				if d := int64(o.Depth(slotOf(i))); d < was[i] || d > is[i] {
					t.Errorf("storing: slot %d has depth %d, not within %d…%d", slotOf(i), d, was[i], is[i])
					return false
				}
			}
			return true
		})
		phase(true, func(o *Overlap, was, is *[ranks]int64) bool {
			for i := range ranks {
				if d := int64(o.Depth(slotOf(i))); d > was[i] || d < is[i] {
					t.Errorf("removing: slot %d has depth %d, not within %d…%d", slotOf(i), d, is[i], was[i])
					return false
				}
			}
			return true
		})
		if ix.Len() != 0 || t.Failed() {
			t.Fatalf("%d entries left", ix.Len())
		}
	}
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

// Two parts of one prompt are stored and removed in turn so that the rank never
// holds both: a reader that put a moment of the one to a moment of the other would
// see the whole. Others come and go meanwhile, which splits and joins what is read.
func TestDepthIsAtomic(t *testing.T) {
	jitters.Store(50)
	defer jitters.Store(0)
	const blocks, rounds = 60, 2000
	ix := New(Options{})
	first, seqs := chain(1, 1, blocks)
	other, _ := chain(100, 1, blocks)
	// Another holds all, so that the fragments outlive the rank's holding.
	keeper, _ := chain(2, 1, blocks)
	ix.Store(&keeper)
	part := func(ev *Stored, from, to int) Stored {
		p := *ev
		p.Engine, p.Local = ev.Engine[from:to], ev.Local[from:to]
		if from > 0 {
			p.HasParent, p.Parent = true, ev.Engine[from-1]
		}
		return p
	}
	const cut = 20
	var stop atomic.Bool
	var readers, writers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			var o Overlap
			for !stop.Load() {
				ix.Find(seqs, &o)
				if d := o.Depth(1); d > cut {
					t.Errorf("depth %d was never so", d)
					return
				}
				if d := o.Depth(2); d != blocks {
					t.Errorf("depth %d of the rank that holds all %d", d, blocks)
					return
				}
			}
		})
	}
	writers.Go(func() {
		head, tail := part(&first, 0, cut), part(&first, cut, blocks)
		for range rounds {
			ix.Store(&head)
			// A block near the cut goes before the tail comes, and the tail goes
			// before that block is back: the depth is never above the cut.
			ix.Remove(1, Device, first.Engine[cut-2:cut-1])
			ix.Store(&tail)
			ix.Remove(1, Device, first.Engine[:cut-2])
			ix.Remove(1, Device, first.Engine[cut:])
			ix.Remove(1, Device, first.Engine[cut-1:cut])
		}
		stop.Store(true)
	})
	writers.Go(func() {
		rng := rand.New(rand.NewPCG(1, 1))
		for !stop.Load() {
			to := 1 + rng.IntN(blocks)
			p := part(&other, 0, to)
			ix.Store(&p)
			ix.Remove(100, Device, other.Engine[rng.IntN(to):to])
			if rng.IntN(10) == 0 {
				ix.Clear(100)
			}
		}
	})
	writers.Wait()
	readers.Wait()
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

// Prompts come and go by the hundred, so that fragments, runs and storage are used
// again under readers, tables grow, and the bound evicts. One prompt stays.
func TestReuseUnderReaders(t *testing.T) {
	jitters.Store(50)
	defer jitters.Store(0)
	ix := New(Options{MaxBytes: 400_000})
	stay, staying := chain(7, 1, 500)
	var stop atomic.Bool
	var readers, writers sync.WaitGroup
	for k := range 2 {
		readers.Go(func() {
			var o Overlap
			rng := rand.New(rand.NewPCG(uint64(k), 3))
			for !stop.Load() {
				sid := 2 + rng.IntN(300)
				_, seqs := chain(0, sid, 40)
				ix.Find(seqs, &o)
				for _, slot := range o.Holders() {
					// Slot s stores the first 10, 20, 30 or 40 of a prompt, by its number.
					if d, most := o.Depth(slot), 10*(1+int(slot)%4); int(slot)%9 != sid%9 || d > most {
						t.Errorf("prompt %d: slot %d has depth %d of at most %d", sid, slot, d, most)
						return
					}
				}
				ix.Find(staying[:1+rng.IntN(len(staying))], &o)
				if len(o.Holders()) > 1 || o.Max() > 500 {
					t.Errorf("prompt of one rank: holders %v, depth %d", o.Holders(), o.Max())
				}
			}
		})
	}
	for k := range 2 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(k), 4))
			for i := range 3000 {
				sid := 2 + rng.IntN(300)
				slot := worker.Slot(sid%9 + 9*(rng.IntN(30)*2+k))
				ev, _ := chain(slot, sid, 10*(1+int(slot)%4))
				ix.Store(&ev)
				if rng.IntN(3) == 0 {
					ix.Remove(slot, Device, ev.Engine[rng.IntN(len(ev.Engine)):])
				}
				if rng.IntN(60) == 0 {
					ix.Clear(slot)
				}
				if i%40 == 0 {
					ix.Store(&stay)
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
	if ix.(Evictor).Evicted() == 0 {
		t.Error("nothing was evicted: the test is too small")
	}
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}
