package front

import (
	"runtime"
	"time"

	"sluice/dataplane/epoll"
)

const (
	// After yieldEvery connections the goroutine lets Go's poller run, so that goroutines
	// with new input go first. With 11,000 clients at once requests waited 30 ms without it
	// and 0.5 ms with it (TestSlowloris as a soak).
	//
	// The p99 of a page while many clients connect was 0.2 to 0.9 ms with the yield, 1.4 to
	// 2.5 ms with runtime.Gosched every four connections, and 2.3 to 2.6 ms without any
	// yield. These figures and that of slowYield are medians of 3 to 6 alternating runs on a
	// loaded machine.
	yieldEvery = 4
	// A yield that takes longer than slowYield means that the processors are busy: with a
	// few computing goroutines each yield waits 10 ms for each of them. Then the goroutine
	// does not yield for as long as that took, at most maxNoYield, Go's own time slice.
	// While bodies are decoded the last of 300 pages arrives after 0.1 to 0.2 s with this
	// rule, and after about 2 s with runtime.Gosched and without the rule
	// (TestBurstDuringDecoding).
	slowYield  = time.Millisecond
	maxNoYield = 10 * time.Millisecond
)

// yielder lets requests go before a goroutine that always has more work, such as accepting or
// closing connections. Each yield lets runnable goroutines run, and every yieldEvery-th also
// those whose input has arrived. Go itself polls for input only when no goroutine can run,
// or every 10 ms, so that with one processor a request behind a thousand new connections
// would wait for all of them. A yielder belongs to one goroutine. The zero value works, but
// polls only after poll.Open.
type yielder struct {
	poll         epoll.Yielder
	unyielded    int       // yields since the last poll
	noYieldUntil time.Time // yield does nothing before this time
}

// yield lets other goroutines run. The owner calls it between two pieces of work.
func (y *yielder) yield() {
	start := time.Now()
	if start.Before(y.noYieldUntil) {
		return
	}
	if y.unyielded++; y.unyielded < yieldEvery {
		runtime.Gosched()
	} else {
		y.unyielded = 0
		y.poll.Yield()
	}
	if now := time.Now(); now.Sub(start) > slowYield {
		y.noYieldUntil = now.Add(min(now.Sub(start), maxNoYield))
	}
}
