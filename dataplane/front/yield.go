package front

import (
	"runtime"
	"time"
)

const (
	// After yieldEvery connections the goroutine lets Go's poller run, so that goroutines
	// with new input go first. With 11,000 clients at once requests waited 30 ms without it
	// and 0.5 ms with it (TestSlowloris as a soak). With 1,000 clients, medians of three
	// alternating runs, p99 of a page while they connect: 0.5 ms with it, 1.6 ms with
	// runtime.Gosched alone, 2.3 ms without yielding.
	yieldEvery = 4
	// A yield that takes longer than slowYield means that the processors are busy: with a
	// few computing goroutines each yield waits 10 ms for each of them. Then the goroutine
	// does not yield for as long as that took, at most maxNoYield, Go's own time slice.
	// Without this rule 300 pages beside four decodings of bodies took 2.3 s instead of
	// 0.2 s (TestBurstDuringDecoding).
	slowYield  = time.Millisecond
	maxNoYield = 10 * time.Millisecond
)

// yielder lets requests go before a goroutine that always has more work, such as accepting or
// closing connections. Each yield lets runnable goroutines run, and every yieldEvery-th also
// those whose input has arrived. Go itself polls for input only when no goroutine can run,
// or every 10 ms, so that with one processor a request behind a thousand new connections
// would wait for all of them. A yielder belongs to one goroutine. The zero value works, but
// polls only after pollYielder.open.
type yielder struct {
	pollYielder  pollYielder
	unyielded    int       // yields since the last poll
	noYieldUntil time.Time // do not yield before
}

// yield is called between two pieces of work.
func (y *yielder) yield() {
	start := time.Now()
	if start.Before(y.noYieldUntil) {
		return
	}
	if y.unyielded++; y.unyielded < yieldEvery {
		runtime.Gosched()
	} else {
		y.unyielded = 0
		y.pollYielder.yield()
	}
	if now := time.Now(); now.Sub(start) > slowYield {
		y.noYieldUntil = now.Add(min(now.Sub(start), maxNoYield))
	}
}
