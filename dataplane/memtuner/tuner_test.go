package memtuner

import (
	"context"
	"runtime"
	"runtime/metrics"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
)

func TestObserve(t *testing.T) {
	const mib = 1 << 20
	c := tuner{percent: defaultPercent, smallHeapPercent: defaultPercent}
	for i, step := range []struct {
		cycles, live, held, made, goroutines uint64
		percent                              int
		quiet                                bool
	}{
		{1, 0, minSystemMemory, 9 * mib, 10, defaultPercent, false}, // Go has just collected
		{1, 0, minSystemMemory, 9 * mib, 10, defaultPercent, false},
		{1, 0, minSystemMemory, 9 * mib, 10, defaultPercent, false},
		{1, 0, minSystemMemory - 1, 9 * mib, 10, defaultPercent, false}, // little is held
		{1, 0, minSystemMemory, 9 * mib, 10, defaultPercent, true},      // a quiet moment, and it was not asked for before
		{3, 1 * mib, minSystemMemory, 9 * mib, 10, defaultPercent, false},
		{3, 1 * mib, minSystemMemory, 9 * mib, 10, defaultPercent, false},
		{3, 1 * mib, minSystemMemory, 9 * mib, 10, defaultPercent, false}, // nothing has been made since
		{3, 1 * mib, minSystemMemory, 16 * mib, 10, defaultPercent, false},
		{3, 1 * mib, minSystemMemory, 17 * mib, 10, defaultPercent, true}, // now there has
		{5, largeHeapMin, minSystemMemory, 20 * mib, 2 * minEndedGoroutines, largeHeapPercent, false},
		{5, largeHeapMin, minSystemMemory, 20 * mib, 2 * minEndedGoroutines, largeHeapPercent, false},
		{5, largeHeapMin, minSystemMemory, 20 * mib, 2 * minEndedGoroutines, largeHeapPercent, false}, // goroutines came, and are there
		{5, largeHeapMin, minSystemMemory, 20 * mib, minEndedGoroutines, largeHeapPercent, true},      // half of them have ended
		{7, largeHeapExit, minSystemMemory, 20 * mib, minEndedGoroutines, largeHeapPercent, false},
		{8, largeHeapExit - 1, minSystemMemory, 20 * mib, minEndedGoroutines, defaultPercent, false}, // the heap is small again
	} {
		s := sample{cycles: step.cycles, live: step.live, systemMemory: step.held, allocated: step.made, goroutines: step.goroutines}
		quiet := c.observe(s)
		if quiet != step.quiet || c.percent != step.percent {
			t.Errorf("step %d: quiet %v, %d %%; want %v, %d", i, quiet, c.percent, step.quiet, step.percent)
		}
		if quiet {
			s.cycles += 2
			c.collected(s)
		}
	}
}

// TestObserveSecondCollect: what is kept for use again ends without a sign, so a collection is
// asked for once more behind the one that traffic has brought, and then no more.
func TestObserveSecondCollect(t *testing.T) {
	c := tuner{percent: defaultPercent, smallHeapPercent: defaultPercent}
	s := sample{cycles: 1, systemMemory: minSystemMemory, allocated: minAllocated}
	var asked []int
	for i := range 10 * secondCollectAfter {
		if c.observe(s) {
			asked = append(asked, i)
			s.cycles += 2
			c.collected(s)
		}
	}
	if len(asked) != 2 || asked[1]-asked[0] != secondCollectAfter {
		t.Errorf("asked at the looks %v, want two, %d apart", asked, secondCollectAfter)
	}
}

// TestObserveBacksOff: behind a collection that took long there is none for long.
func TestObserveBacksOff(t *testing.T) {
	c := tuner{percent: defaultPercent, backOff: 10}
	for i := range 10 {
		if quiet := c.observe(sample{cycles: 1, systemMemory: minSystemMemory, allocated: minAllocated}); quiet != (i == 9) {
			t.Errorf("look %d: quiet %v", i, quiet)
		}
	}
}

// TestRun holds Keep to its word in this process: what a burst has left goes back to
// the system in a quiet moment, without a word from who made it.
func TestRun(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	ctx, end := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { defer close(over); Run(ctx, Options{}) }()
	defer func() { end(); <-over }()
	var burst atomic.Pointer[[][]byte]
	blocks := make([][]byte, 4096)
	for i := range blocks {
		blocks[i] = make([]byte, 16<<10)
		blocks[i][0], blocks[i][4096], blocks[i][8192], blocks[i][12288] = 1, 1, 1, 1
	}
	burst.Store(&blocks)
	runtime.GC() // Go's own: it finds all of it in use, and has no reason to look again
	blocks = nil
	burst.Store(nil)
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	testwait.UntilWithin(t, time.Minute, "at most 48 MiB of a burst of 64 are held", func() bool {
		metrics.Read(samples)
		return samples[0].Value.Uint64()-samples[1].Value.Uint64() < 48<<20
	})
}
