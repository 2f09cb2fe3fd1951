package lean

import (
	"context"
	"runtime"
	"runtime/metrics"
	"sync/atomic"
	"testing"
	"time"
)

func TestLook(t *testing.T) {
	const mib = 1 << 20
	c := collector{percent: roomy, small: roomy}
	for i, step := range []struct {
		cycles, live, held, made, goroutines uint64
		percent                              int
		quiet                                bool
	}{
		{1, 0, held, 9 * mib, 10, roomy, false}, // Go has just collected
		{1, 0, held, 9 * mib, 10, roomy, false},
		{1, 0, held, 9 * mib, 10, roomy, false},
		{1, 0, held - 1, 9 * mib, 10, roomy, false}, // little is held
		{1, 0, held, 9 * mib, 10, roomy, true},      // a quiet moment, and it was not asked for before
		{3, 1 * mib, held, 9 * mib, 10, roomy, false},
		{3, 1 * mib, held, 9 * mib, 10, roomy, false},
		{3, 1 * mib, held, 9 * mib, 10, roomy, false}, // nothing has been made since
		{3, 1 * mib, held, 16 * mib, 10, roomy, false},
		{3, 1 * mib, held, 17 * mib, 10, roomy, true}, // now there has
		{5, tightFrom, held, 20 * mib, 2 * ended, tight, false},
		{5, tightFrom, held, 20 * mib, 2 * ended, tight, false},
		{5, tightFrom, held, 20 * mib, 2 * ended, tight, false}, // goroutines came, and are there
		{5, tightFrom, held, 20 * mib, ended, tight, true},      // half of them have ended
		{7, tightUntil, held, 20 * mib, ended, tight, false},
		{8, tightUntil - 1, held, 20 * mib, ended, roomy, false}, // the heap is small again
	} {
		s := sample{cycles: step.cycles, live: step.live, held: step.held, made: step.made, goroutines: step.goroutines}
		quiet := c.look(s)
		if quiet != step.quiet || c.percent != step.percent {
			t.Errorf("step %d: quiet %v, %d %%; want %v, %d", i, quiet, c.percent, step.quiet, step.percent)
		}
		if quiet {
			s.cycles += 2
			c.collected(s)
		}
	}
}

// TestLookOnceMore: what is kept for use again ends without a sign, so a collection is
// asked for once more behind the one that traffic has brought, and then no more.
func TestLookOnceMore(t *testing.T) {
	c := collector{percent: roomy, small: roomy}
	s := sample{cycles: 1, held: held, made: made}
	var asked []int
	for i := range 10 * late {
		if c.look(s) {
			asked = append(asked, i)
			s.cycles += 2
			c.collected(s)
		}
	}
	if len(asked) != 2 || asked[1]-asked[0] != late {
		t.Errorf("asked at the looks %v, want two, %d apart", asked, late)
	}
}

// TestLookRests: behind a collection that took long there is none for long.
func TestLookRests(t *testing.T) {
	c := collector{percent: roomy, rest: 10}
	for i := range 10 {
		if quiet := c.look(sample{cycles: 1, held: held, made: made}); quiet != (i == 9) {
			t.Errorf("look %d: quiet %v", i, quiet)
		}
	}
}

// TestKeep holds Keep to its word in this process: what a burst has left goes back to
// the system in a quiet moment, without a word from who made it.
func TestKeep(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	ctx, end := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { defer close(over); Keep(ctx, Options{}) }()
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
	told := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	for by := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		metrics.Read(told)
		if told[0].Value.Uint64()-told[1].Value.Uint64() < 48<<20 {
			return
		}
		if time.Now().After(by) {
			t.Fatalf("%d MiB of a burst of 64 are held a minute later", (told[0].Value.Uint64()-told[1].Value.Uint64())>>20)
		}
	}
}
