package index

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// cpu is what this thread has used: the box may be busy with other things.
func cpu() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) != nil {
		return time.Duration(time.Now().UnixNano())
	}
	return time.Duration(ts.Nano())
}

// perBlock measures what takes blocks away or brings them, in CPU time.
func perBlock(b *testing.B, blocks int, prepare func() kvindex.Index, do func(kvindex.Index)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var took time.Duration
	rounds := 0
	for b.Loop() {
		ix := prepare()
		runtime.GC()
		start := cpu()
		do(ix)
		took += cpu() - start
		rounds++
	}
	b.ReportMetric(float64(took.Nanoseconds())/float64(rounds)/float64(blocks), "ns/block")
	b.ReportMetric(0, "ns/op")
}

func BenchmarkIndexStore(b *testing.B) {
	grid(b, func(b *testing.B, l *benchWorkload) {
		perBlock(b, l.blocks, func() kvindex.Index { return l.index(true) }, l.store)
	}, concurrentWriters...)
}

func BenchmarkIndexStoreGrowing(b *testing.B) {
	grid(b, func(b *testing.B, l *benchWorkload) {
		perBlock(b, l.blocks, func() kvindex.Index { return l.index(false) }, l.store)
	}, unique64, shared64, shared1000)
}

func BenchmarkIndexRemove(b *testing.B) {
	grid(b, func(b *testing.B, l *benchWorkload) {
		perBlock(b, l.blocks, func() kvindex.Index {
			ix := l.index(true)
			l.store(ix)
			return ix
		}, func(ix kvindex.Index) {
			l.remove(ix)
			if ix.Len() != 0 {
				b.Fatalf("%d entries left", ix.Len())
			}
		})
	}, concurrentWriters...)
}

// BenchmarkIndexSingle is the pattern of decoding: one block an event.
func BenchmarkIndexSingle(b *testing.B) {
	l := newBenchWorkload("shared", 64, 256, total, 1)
	b.Run("do=store/load=shared/workers=64/depth=256", func(b *testing.B) {
		perBlock(b, l.blocks, func() kvindex.Index { return l.index(true) }, l.store)
	})
	b.Run("do=remove/load=shared/workers=64/depth=256", func(b *testing.B) {
		perBlock(b, l.blocks, func() kvindex.Index {
			ix := l.index(true)
			l.store(ix)
			return ix
		}, l.remove)
	})
}

const sampled = 100_000

// lookups measures finds: ns/op over a plain loop, then quantiles, which hold the
// time of the timer, from single calls.
func lookups(b *testing.B, ix kvindex.Index, queries [][]blockhash.Seq, dense bool, check func(*kvindex.Overlap) bool) {
	var o kvindex.Overlap
	one := func(q []blockhash.Seq) {
		ix.Find(q, &o)
		if dense {
			o.Depths()
		}
	}
	for _, q := range queries { // warm, and right
		if one(q); check != nil && !check(&o) {
			b.Fatalf("a wrong answer: depth %d", o.Max())
		}
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		one(queries[i])
		if i++; i == len(queries) {
			i = 0
		}
	}
	b.StopTimer()
	samples := make([]int64, 0, sampled)
	for k := range sampled {
		q := queries[k%len(queries)]
		start := time.Now()
		one(q)
		samples = append(samples, int64(time.Since(start)))
	}
	quantiles(b, samples)
}

func quantiles(b *testing.B, samples []int64) {
	slices.Sort(samples)
	at := func(q float64) float64 { return float64(samples[int(q*float64(len(samples)-1))]) }
	b.ReportMetric(at(0.5), "p50-ns")
	b.ReportMetric(at(0.99), "p99-ns")
	b.ReportMetric(at(0.999), "p999-ns")
}

func reads(b *testing.B, queries func(*benchWorkload) [][]blockhash.Seq, dense bool, check func(*benchWorkload, *kvindex.Overlap) bool, points ...[3]any) {
	grid(b, func(b *testing.B, l *benchWorkload) {
		ix := l.index(true)
		l.store(ix)
		lookups(b, ix, queries(l), dense, func(o *kvindex.Overlap) bool { return check(l, o) })
	}, points...)
}

func hitQueries(l *benchWorkload, o *kvindex.Overlap) bool { return o.Max() == l.depth }
func partialQueries(l *benchWorkload, o *kvindex.Overlap) bool {
	return o.Max() >= l.depth/2 && o.Max() < l.depth
}
func missQueries(_ *benchWorkload, o *kvindex.Overlap) bool { return o.Max() == 0 }
func mixedQueries(l *benchWorkload, o *kvindex.Overlap) bool {
	return o.Max() == 0 || o.Max() == l.prefix
}

func BenchmarkIndexHit(b *testing.B) {
	reads(b, (*benchWorkload).hits, false, hitQueries, unique64, shared64, uniqueDeep, sharedDeep, shared8, shared1000)
}

func BenchmarkIndexHitDense(b *testing.B) {
	reads(b, (*benchWorkload).hits, true, hitQueries, shared64, sharedDeep, shared1000)
}

func BenchmarkIndexPartial(b *testing.B) {
	reads(b, (*benchWorkload).partials, false, partialQueries, sharedDeep, shared1000)
}

func BenchmarkIndexMiss(b *testing.B) {
	reads(b, (*benchWorkload).misses, false, missQueries, unique64, shared64, shared16, shared1000)
}

func BenchmarkIndexMix(b *testing.B) {
	reads(b, (*benchWorkload).mixes, false, mixedQueries, shared64, sharedDeep, shared1000)
}

// BenchmarkIndexMixUnderWrites is the mix while a writer stores 100,000 blocks a
// second and removes as many.
func BenchmarkIndexMixUnderWrites(b *testing.B) {
	grid(b, func(b *testing.B, l *benchWorkload) {
		ix := l.index(true)
		l.store(ix)
		stop, stopped := make(chan struct{}), make(chan int)
		go func() {
			type stored struct {
				slot worker.Slot
				sequence
			}
			var live []stored
			written := 0
			d := queryPicker(7)
			start := time.Now()
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					stopped <- written
					return
				case <-tick.C:
				}
				for due := int(time.Since(start).Seconds() * 100_000); written < due; {
					s := stored{worker.Slot(d.below(l.workers)), newSequence(d.next(), l.depth, l.prefix)}
					for from := l.prefix; from < l.depth; from += 16 {
						ev := s.event(s.slot, from, min(l.depth, from+16))
						if res := ix.Store(&ev); res.Orphan { // this rank has no common prefix
							break
						}
						written += len(ev.Engine)
					}
					if live = append(live, s); len(live) > 64 {
						old := live[0]
						live = live[1:]
						for to := l.depth; to > l.prefix; to -= 16 {
							ix.Remove(old.slot, kvindex.Device, old.engine[to-16:to])
						}
					}
				}
			}
		}()
		lookups(b, ix, l.mixes(), false, func(o *kvindex.Overlap) bool { return mixedQueries(l, o) })
		close(stop)
		if <-stopped == 0 {
			b.Log("the writer never ran")
		}
	}, shared64, shared1000)
}

// BenchmarkIndexWorst: every rank holds the same prompt to a depth of its own.
func BenchmarkIndexWorst(b *testing.B) {
	const ranks, depth = 1000, 2048
	s := newSequence(1, depth, 0)
	ix := kvindex.New(kvindex.Options{})
	d := newQueryPicker()
	for slot := range ranks {
		for from, to := 0, 16*(1+d.below(depth/16)); from < to; from += 16 {
			ev := s.event(worker.Slot(slot), from, from+16)
			ix.Store(&ev)
		}
	}
	queries := [][]blockhash.Seq{s.seqs}
	b.Run("ranks=1000/depth=2048", func(b *testing.B) {
		lookups(b, ix, queries, false, func(o *kvindex.Overlap) bool { return len(o.Holders()) == ranks })
	})
}

// BenchmarkIndexMemory takes the heap that a filled index needs, all in all: at these
// points no rank's table is so large that it lies off the heap.
func BenchmarkIndexMemory(b *testing.B) {
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	grid(b, func(b *testing.B, l *benchWorkload) {
		var per, reported float64
		for b.Loop() {
			before := heap()
			ix := l.index(true)
			l.store(ix)
			per = float64(heap()-before) / float64(ix.Len())
			reported = float64(ix.Bytes()) / float64(ix.Len())
			runtime.KeepAlive(ix)
		}
		b.ReportMetric(per, "B/entry")
		b.ReportMetric(reported, "B/entry-said")
		b.ReportMetric(0, "ns/op")
	}, unique16, unique64, shared64, sharedDeep, shared1000, branches8)
}

// BenchmarkIndexLarge is 8.4 million entries: tables that live in main memory.
// gc-ns is what the index adds to a whole collection.
func BenchmarkIndexLarge(b *testing.B) {
	if testing.Short() {
		b.Skip("takes a gigabyte")
	}
	l := newBenchWorkload("shared", 64, 2048, large, 16)
	without := collection()
	ix := l.index(true)
	once := func(b *testing.B, n int, do func(i int)) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var sum, most time.Duration
		for i := range n {
			start := cpu()
			do(i)
			took := cpu() - start
			sum, most = sum+took, max(most, took)
		}
		b.ReportMetric(float64(sum.Nanoseconds())/float64(l.blocks), "ns/block")
		b.ReportMetric(float64(most.Nanoseconds()), "max-event-ns")
		b.ReportMetric(0, "ns/op")
	}
	b.Run("do=store", func(b *testing.B) { once(b, len(l.stores), func(i int) { ix.Store(&l.stores[i]) }) })
	b.Run("do=hit", func(b *testing.B) { lookups(b, ix, l.hits(), false, nil) })
	b.Run("do=collect", func(b *testing.B) {
		b.ReportMetric(float64((collection() - without).Nanoseconds()), "gc-ns")
		b.ReportMetric(0, "ns/op")
	})
	b.Run("do=remove", func(b *testing.B) {
		once(b, len(l.removes), func(i int) { ix.Remove(l.removes[i].Slot, kvindex.Device, l.removes[i].Engine) })
	})
	b.Run("do=grow", func(b *testing.B) {
		ix := l.index(false)
		once(b, len(l.stores), func(i int) { ix.Store(&l.stores[i]) })
	})
}

// BenchmarkIndexGrowPause is one rank that grows from nothing to two million blocks:
// the longest that one event of 16 blocks took, in CPU time, in the middle one of
// growRounds rounds; p9999-ns is what one of ten thousand did. Every round has fresh
// memory, so what the kernel takes to give it counts. noise-ns is the same of as many
// turns of a loop that only counts: what a machine that is busy, or not its own master,
// puts into such a figure.
func BenchmarkIndexGrowPause(b *testing.B) {
	const growRounds = 5
	b.Run("load=unique/workers=1/depth=2048", func(b *testing.B) {
		l := newBenchWorkload("unique", 1, 2048, 1<<21, 16)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		took := make([]int64, len(l.stores))
		longest := func(do func(i int)) (most, rare int64) {
			runtime.GC()
			for i := range took {
				start := cpu()
				do(i)
				took[i] = int64(cpu() - start)
			}
			slices.Sort(took)
			return took[len(took)-1], took[len(took)*9999/10000]
		}
		var most, rare, noise []int64
		sum := uint64(0)
		for b.Loop() {
			for range growRounds {
				ix := l.index(false)
				m, r := longest(func(i int) { ix.Store(&l.stores[i]) })
				most, rare = append(most, m), append(rare, r)
				m, _ = longest(func(int) {
					for k := range uint64(1000) {
						sum = mix(sum + k)
					}
				})
				noise = append(noise, m)
			}
		}
		if sum == 0 {
			b.Log(sum)
		}
		middle := func(of []int64) float64 {
			slices.Sort(of)
			return float64(of[len(of)/2])
		}
		b.ReportMetric(middle(rare), "p9999-ns")
		b.ReportMetric(middle(most), "max-event-ns")
		b.ReportMetric(middle(noise), "noise-ns")
		b.ReportMetric(0, "ns/op")
	})
}

// collection is the time of a whole garbage collection.
func collection() time.Duration {
	least := time.Hour
	for range 4 {
		start := time.Now()
		runtime.GC()
		least = min(least, time.Since(start))
	}
	return least
}

// BenchmarkCalibrate is a fixed loop of dependent loads over 16 MiB and of hashes,
// so that runs on different machines can be compared.
func BenchmarkCalibrate(b *testing.B) {
	ring := make([]uint32, 1<<22)
	at, d := uint32(0), newQueryPicker()
	for i := range ring {
		ring[i] = uint32(i)
	}
	for i := len(ring) - 1; i > 0; i-- { // one cycle through all (Sattolo)
		j := d.below(i)
		ring[i], ring[j] = ring[j], ring[i]
	}
	h := uint64(1)
	for b.Loop() {
		at = ring[at]
		h = mix(h ^ uint64(at))
	}
	if h == 0 {
		b.Log(h)
	}
}

// BenchmarkCalibrateTimer is what the quantiles of lookups hold of the timer: the same
// samples of nothing.
func BenchmarkCalibrateTimer(b *testing.B) {
	samples := make([]int64, 0, sampled)
	for b.Loop() {
		samples = samples[:0]
		for range sampled {
			start := time.Now()
			samples = append(samples, int64(time.Since(start)))
		}
	}
	quantiles(b, samples)
	b.ReportMetric(0, "ns/op")
}
