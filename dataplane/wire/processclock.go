package wire

import (
	"sync/atomic"
	"time"
)

// processClock measures the time in which this process could run. Silence of a peer is measured by
// it: a process that was stopped, or had no CPU for a while, has not read, and what came meanwhile
// is unread in its sockets. So a tick counts for at most one and a half steps, however late it
// comes, and silence is only detected over several ticks, each of which was a chance to read.
//
// One goroutine calls tick; any may call now.
type processClock struct {
	step time.Duration // time between two ticks that come in time
	last time.Time
	ns   atomic.Int64
}

// start starts the clock. step is the interval of the calls of tick.
func (a *processClock) start(step time.Duration) { a.step, a.last = step, time.Now() }

// tick advances the clock and returns its time.
func (a *processClock) tick(at time.Time) time.Duration {
	elapsed := min(at.Sub(a.last), a.step+a.step/2)
	a.last = at
	return time.Duration(a.ns.Add(int64(max(elapsed, 0))))
}

// now returns the clock's time, that of the last tick.
func (a *processClock) now() time.Duration { return time.Duration(a.ns.Load()) }
