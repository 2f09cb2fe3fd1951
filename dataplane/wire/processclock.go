package wire

import (
	"sync/atomic"
	"time"
)

// processClock is a clock of the time in which this process was there to hear anything.
// Silence is measured by it: a process that was stopped, or got no processor for a
// while, has not listened, and what came meanwhile lies unread in its sockets. So a
// tick counts for one and a half steps at most, however late it comes, and whatever
// is found silent has been so over a number of ticks, each of which was a chance to
// read.
//
// One goroutine ticks; anybody may read.
type processClock struct {
	step time.Duration // between two ticks, when they come in time
	last time.Time
	ns   atomic.Int64
}

// start sets the clock going; step is how often tick will be called.
func (a *processClock) start(step time.Duration) { a.step, a.last = step, time.Now() }

// tick moves the clock on and gives its time.
func (a *processClock) tick(at time.Time) time.Duration {
	elapsed := min(at.Sub(a.last), a.step+a.step/2)
	a.last = at
	return time.Duration(a.ns.Add(int64(max(elapsed, 0))))
}

// now is the clock's time, that of the last tick.
func (a *processClock) now() time.Duration { return time.Duration(a.ns.Load()) }
