package kvindex

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

func TestApproxObservesAndExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewApprox(ApproxOptions{TTL: time.Minute})
		_, seqs := chain(0, 1, 10)
		a.Observe(3, seqs[:6])
		if got := depthOf(a, 3, seqs); got != 6 {
			t.Fatalf("depth %d after Observe, want 6", got)
		}
		time.Sleep(40 * time.Second)
		a.Observe(3, seqs[:4]) // keeps the first four
		time.Sleep(40 * time.Second)
		if got := depthOf(a, 3, seqs); got != 4 {
			t.Errorf("depth %d after the time of the last two, want 4", got)
		}
		time.Sleep(time.Hour)
		if got := depthOf(a, 3, seqs); got != 0 || a.Len() != 0 || a.Bytes() != 0 {
			t.Errorf("depth %d, %d entries, %d bytes after all had passed", got, a.Len(), a.Bytes())
		}
	})
}

func TestApproxTTLChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewApprox(ApproxOptions{TTL: time.Hour})
		_, seqs := chain(0, 1, 10)
		a.Observe(3, seqs)
		time.Sleep(time.Minute)
		if got := depthOf(a, 3, seqs); got != 10 {
			t.Fatalf("depth %d within the hour, want 10", got)
		}
		a.SetTTL(30 * time.Second)
		if got := depthOf(a, 3, seqs); got != 0 || a.Len() != 0 {
			t.Errorf("depth %d, %d entries of what is older than the new time", got, a.Len())
		}
		a.SetTTL(0) // the default, two minutes
		a.Observe(3, seqs)
		time.Sleep(90 * time.Second)
		if got := depthOf(a, 3, seqs); got != 10 {
			t.Errorf("depth %d, want 10: the time is longer again", got)
		}
		time.Sleep(time.Minute)
		if got := depthOf(a, 3, seqs); got != 0 {
			t.Errorf("depth %d after the default time", got)
		}
	})
}

func TestApproxConfirm(t *testing.T) {
	_, seqs := chain(0, 1, 10)
	_, other := chain(0, 2, 10)
	a := NewApprox(ApproxOptions{})
	a.Observe(1, seqs[:6])
	a.Confirm(1, seqs[:6], 0) // a first request finds nothing, and leaves its own blocks
	if got := depthOf(a, 1, seqs); got != 6 {
		t.Errorf("depth %d after the first request, want 6", got)
	}
	a.Observe(1, seqs)
	a.Confirm(1, seqs, 2) // the second had counted on six, the engine had two
	if got := depthOf(a, 1, seqs); got != 2 {
		t.Errorf("depth %d after the engine reported 2, want 2", got)
	}
	a.Confirm(1, other, 5) // blocks that the engine had are held, from whichever source
	if got := depthOf(a, 1, other); got != 5 {
		t.Errorf("depth %d of a prompt the engine reported, want 5", got)
	}
	a.Confirm(1, other, -3)
	a.Confirm(1, other[:2], 99)
	if got := depthOf(a, 1, other); got != 2 {
		t.Errorf("depth %d, want 2", got)
	}
	if a.Clear(1) == 0 || a.Len() != 0 || a.check() != nil {
		t.Errorf("Clear left %d entries, %v", a.Len(), a.check())
	}
	if a.Clear(1) != 0 || a.Clear(4000) != 0 {
		t.Error("Clear of an empty rank found something")
	}
	a.Observe(worker.MaxSlots, seqs)
	a.Confirm(worker.MaxSlots, seqs, 3)
	if a.Len() != 0 {
		t.Error("a slot out of range was stored")
	}
}

// Nothing keeps a block from hashing to 0, which is also what freed memory holds.
func TestZeroHash(t *testing.T) {
	a := NewApprox(ApproxOptions{})
	gone := []blockhash.Seq{5, 6}
	a.Observe(1, gone)
	a.Observe(1, gone)
	a.Confirm(1, gone, 1) // 6 is freed; 5 remembers it as its child
	seqs := []blockhash.Seq{5, 0, 7}
	a.Observe(1, seqs)
	if got := depthOf(a, 1, seqs); got != 3 {
		t.Errorf("depth %d, want 3", got)
	}
	if err := a.check(); err != nil {
		t.Error(err)
	}
}

// A block that follows itself is stored once, and what comes after it too.
func TestApproxRepeatedBlock(t *testing.T) {
	a := NewApprox(ApproxOptions{})
	a.Observe(1, []blockhash.Seq{5, 5, 6, 7})
	if err := a.check(); err != nil || a.Len() != 3 {
		t.Errorf("%d entries, want 3: %v", a.Len(), err)
	}
}

func TestApproxBound(t *testing.T) {
	const bound = 100_000
	a := NewApprox(ApproxOptions{MaxBytes: bound})
	var last []blockhash.Seq
	for sid := range 300 {
		_, last = chain(0, sid, 20)
		a.Observe(worker.Slot(sid%5), last)
		if got := a.Bytes(); got > bound {
			t.Fatalf("%d bytes after %d prompts, over the bound of %d", got, sid+1, bound)
		}
	}
	if got := depthOf(a, worker.Slot(299%5), last); got != 20 {
		t.Errorf("the newest prompt has depth %d, want 20", got)
	}
	if a.Evicted() == 0 || int(a.Evicted())+a.Len() != 300*20 {
		t.Errorf("%d evicted, %d held of %d", a.Evicted(), a.Len(), 300*20)
	}
	if err := a.check(); err != nil {
		t.Error(err)
	}
}

func TestApproxConcurrent(t *testing.T) {
	a := NewApprox(ApproxOptions{MaxBytes: 50_000, TTL: time.Millisecond})
	var wg sync.WaitGroup
	for slot := range worker.Slot(4) {
		wg.Go(func() {
			var o Overlap
			for sid := range 300 {
				_, seqs := chain(slot, sid%20, 10)
				a.Observe(slot, seqs)
				a.Find(seqs, &o)
				a.Confirm(slot, seqs, sid%11)
				if sid%50 == 0 {
					a.Clear(slot)
				}
			}
		})
	}
	wg.Wait()
	if err := a.check(); err != nil {
		t.Error(err)
	}
}

// check checks every shard, its list and its tables, and that the index holds what
// they say and no more. Nobody writes meanwhile.
func (a *Approx) check() error {
	blocks, sightings := 0, 0
	var inShard [shardCount]int
	for i := range a.shards {
		s := &a.shards[i]
		n, of, cells := 0, 0, 0
		for e := s.first; e != 0; e, n = s.seen.at(e).newer, n+1 {
			x := s.seen.at(e)
			if x.newer == 0 && s.last != e || x.newer != 0 && s.seen.at(x.newer).older != e {
				return fmt.Errorf("shard %d: its list is broken at entry %d", i, e)
			}
			if x.n < 1 || x.n > maxSpan || s.ranks[x.slot].get(uint64(x.first)) != e {
				return fmt.Errorf("shard %d: entry %d, of %d blocks, is not found by its hash", i, e, x.n)
			}
			sh := &a.index.shards[placeShard(x.place)]
			for k := range int(x.n) {
				p := placeAfter(x.place, k)
				if x.place == 0 || !a.index.valid(p) {
					return fmt.Errorf("shard %d: block %d of entry %d is not in the index", i, k, e)
				}
				r, pos := sh.extents.at(placeExtent(p)), placePos(p)
				if f := sh.nodeOf(r, pos); f == 0 || !sh.isHolder(sh.table.nodes.at(f), x.slot, Device) || k == 0 && sh.hashAt(r, pos) != uint64(x.first) {
					return fmt.Errorf("shard %d: block %d of entry %d lies where its rank does not hold it", i, k, e)
				}
				if s.seen.at(s.first).at > s.gapsSince && !sh.isReached(r, pos, x.slot) {
					return fmt.Errorf("shard %d: entry %d, block %d: the one before has gone, and nothing says so", i, e, k)
				}
			}
			of += int(x.n)
			inShard[sh.number] += int(x.n)
		}
		for r := range s.ranks {
			cells += s.ranks[r].n
		}
		if n != s.published || n != s.seen.live() || n != cells || len(s.expired)+len(s.evicting) > 0 {
			return fmt.Errorf("shard %d: %d in its list, %d published, %d live, %d in the tables", i, n, s.published, s.seen.live(), cells)
		}
		if of != s.blocks || of != s.publishedBlocks {
			return fmt.Errorf("shard %d: %d blocks, %d and %d counted", i, of, s.blocks, s.publishedBlocks)
		}
		blocks, sightings = blocks+of, sightings+n
	}
	if int(a.observations.Load()) != sightings || a.Len() != blocks || a.index.Len() != blocks {
		return fmt.Errorf("%d sightings of %d blocks, %d in the index, %d and %d counted", sightings, blocks, a.index.Len(), a.observations.Load(), a.Len())
	}
	for i, n := range inShard {
		if sh := &a.index.shards[i]; n != sh.entries || len(sh.copies) > 0 {
			return fmt.Errorf("shard %d of the index: %d entries lie there, %d and %d copies counted", i, n, sh.entries, len(sh.copies))
		}
	}
	return a.index.check()
}

// The bits that say which shard a prompt is in must not be those that say where in its
// tables a block is: one block a prompt, and all of a shard's would stand in one row.
func TestApproxTablesStaySparse(t *testing.T) {
	a := NewApprox(ApproxOptions{})
	for sid := range 64_000 {
		_, seqs := chain(0, sid, 1)
		a.Observe(0, seqs)
	}
	for i := range a.shards {
		cells, row := a.shards[i].ranks[0].cells, 0
		for _, c := range cells {
			if row++; c.ref == 0 {
				row = 0
			}
			if row > 300 {
				t.Fatalf("shard %d: %d of %d cells stand in one row", i, a.shards[i].ranks[0].n, len(cells))
			}
		}
	}
}

// Observations without further requests are removed too, by calls for other prompts.
func TestApproxExpiresInIdleShards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewApprox(ApproxOptions{TTL: time.Minute})
		for sid := range 500 {
			_, seqs := chain(0, sid, 5)
			a.Observe(1, seqs)
		}
		time.Sleep(time.Hour)
		_, seqs := chain(0, 1, 5)
		for range approxShards {
			a.Observe(1, seqs)
		}
		if a.Len() != 5 {
			t.Errorf("%d entries, want the latest 5", a.Len())
		}
	})
}

// After a pause all there was is past its time at once. No request forgets all of it.
func TestApproxClearsInSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewApprox(ApproxOptions{TTL: time.Minute})
		fill := func() (seqs []blockhash.Seq) {
			_, head := chain(0, 1, 1)
			for sid := range 100 {
				_, tail := chain(0, 100+sid, 49)
				seqs = append(head[:1:1], tail...)
				a.Observe(worker.Slot(sid%3), seqs)
			}
			return seqs
		}
		seqs := fill()
		all := a.Len()
		time.Sleep(time.Hour)
		a.sweeping.Store(true) // as if another goroutine had begun
		for name, do := range map[string]func(){
			"Find":    func() { a.Find(seqs, new(Overlap)) },
			"Observe": func() { a.Observe(1, seqs) },
			"Confirm": func() { a.Confirm(2, seqs, 0) },
		} {
			before := a.Len()
			if do(); before-a.Len() > 2*approxStep+len(seqs) || before == a.Len() {
				t.Errorf("%s forgot %d of %d", name, before-a.Len(), all)
			}
		}
		a.sweeping.Store(false)
		a.Find(seqs, new(Overlap))
		synctest.Wait()
		if a.Len() > len(seqs) { // what Observe has just brought
			t.Errorf("%d of %d blocks are left", a.Len(), all)
		}
		fill()
		if n, want := a.Clear(1)+a.Clear(0)+a.Clear(2), all; n < want {
			t.Errorf("Clear forgot %d, want %d", n, want)
		}
		for i := range a.shards {
			for slot, r := range a.shards[i].ranks {
				if r.cells != nil {
					t.Fatalf("rank %d keeps a table of %d cells for nothing", slot, len(r.cells))
				}
			}
		}
		if err := a.check(); err != nil {
			t.Error(err)
		}
	})
}

// Find answers while every lock there is is taken.
func TestApproxFindTakesNoLock(t *testing.T) {
	a := NewApprox(ApproxOptions{TTL: time.Nanosecond})
	_, seqs := chain(0, 1, 10)
	a.Observe(1, seqs)
	for i := range a.shards {
		a.shards[i].mu.Lock()
		defer a.shards[i].mu.Unlock()
	}
	for i := range a.index.shards {
		a.index.shards[i].mu.Lock()
		defer a.index.shards[i].mu.Unlock()
	}
	a.index.rank(1).mu.Lock()
	defer a.index.rank(1).mu.Unlock()
	if got := depthOf(a, 1, seqs); got != 10 {
		t.Errorf("depth %d, want 10", got)
	}
}

// oneLock is an Approx under one lock, as a baseline.
type oneLock struct {
	sync.RWMutex
	*Approx
}

func (l *oneLock) Find(seqs []blockhash.Seq, o *Overlap) {
	l.RLock()
	defer l.RUnlock()
	l.Approx.Find(seqs, o)
}

func (l *oneLock) Observe(slot worker.Slot, seqs []blockhash.Seq) {
	l.Lock()
	defer l.Unlock()
	l.Approx.Observe(slot, seqs)
}

// BenchmarkApprox is a request's part of it, from all processors: prompts of 64
// blocks that begin alike or not, found and observed.
func BenchmarkApprox(b *testing.B) {
	type approximate interface {
		Find([]blockhash.Seq, *Overlap)
		Observe(worker.Slot, []blockhash.Seq)
	}
	for _, lock := range []string{"one", "shards"} {
		for _, beginnings := range []int{1, 512} {
			b.Run(fmt.Sprintf("lock=%s/beginnings=%d", lock, beginnings), func(b *testing.B) {
				var a approximate = NewApprox(ApproxOptions{})
				if lock == "one" {
					a = &oneLock{Approx: a.(*Approx)}
				}
				var prompts [][]blockhash.Seq
				for i := range 512 {
					_, head := chain(0, i%beginnings, 16)
					_, tail := chain(0, 1000+i, 48)
					prompts = append(prompts, append(head[:16:16], tail...))
				}
				var next atomic.Int64
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					var o Overlap
					for i := int(next.Add(1)) * 97; pb.Next(); i++ {
						seqs := prompts[i%len(prompts)]
						a.Find(seqs, &o)
						a.Observe(worker.Slot(i%8), seqs)
					}
				})
			})
		}
	}
}
