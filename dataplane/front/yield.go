package front

import (
	"runtime"
	"time"
)

const (
	// yieldEvery connections are accepted, or cut, and then who waits for something that has
	// come goes first. With all of them in a row, requests waited 30 ms where 11,000
	// clients came at once; with 4, half a millisecond (TestSlowloris as a soak).
	yieldEvery = 4
	// slowYield is when those who went first took so long that the processors have more to do
	// than there is time: with a few goroutines that compute, each wait is for 10 ms of
	// every one of them. Then as long is the polite one's own, but for maxNoYield at the most,
	// which is what Go gives anybody in a row.
	slowYield  = time.Millisecond
	maxNoYield = 10 * time.Millisecond
)

// yielder is how a goroutine that always finds more to do, with others' connections,
// has requests go first: those that can run, and each yieldEvery times those for which
// something has come, too. For the latter Go looks by itself once nobody can run, or each
// 10 ms: where it has one processor, a request that came behind a thousand connections
// waited for all of them. It is one goroutine's; the zero value has no bell.
type yielder struct {
	pollYielder  pollYielder
	unyielded    int
	noYieldUntil time.Time // until then nobody goes first
}

// yield is called between one piece of work and the next.
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
