package apikey

import (
	"sync/atomic"
	"time"
)

// rate is a limit of n units a minute, with a burst of up to n units. Its value is the time that
// one unit takes to replenish, in nanoseconds; 0: no limit.
type rate float64

func perMinute(n int64) rate {
	if n <= 0 {
		return 0
	}
	return rate(time.Minute) / rate(n)
}

// usage is the state of one limit: the time, in nanoseconds of the Unix clock, at which all
// consumed units will be replenished. This is the generic cell rate algorithm of ITU-T I.371,
// whose state is one word and needs no lock.
type usage struct{ replenishedAt atomic.Int64 }

// untilReplenished returns the time until all consumed units are replenished.
func (d *usage) untilReplenished(now time.Time) time.Duration {
	return max(time.Duration(d.replenishedAt.Load()-now.UnixNano()), 0)
}

// maxBacklog bounds how long a holder who exceeded a limit has to wait.
const maxBacklog = time.Hour

// cost returns the time in nanoseconds that n units take to replenish, at most maxBacklog.
func (r rate) cost(n int64) int64 { return int64(min(float64(r)*float64(n), float64(maxBacklog))) }

// consume consumes n units, even if fewer are available.
func (d *usage) consume(r rate, now time.Time, n int64) {
	at, cost := now.UnixNano(), r.cost(n)
	for {
		paid := d.replenishedAt.Load()
		if d.replenishedAt.CompareAndSwap(paid, min(max(paid, at)+cost, at+int64(maxBacklog))) {
			return
		}
	}
}

// tryConsume consumes n units if they are available, and returns 0. Otherwise it returns how long
// to wait. If all units are replenished it consumes any number, because a request for more than
// one minute's units could otherwise never succeed.
func (d *usage) tryConsume(r rate, now time.Time, n int64) (after time.Duration) {
	at, cost := now.UnixNano(), r.cost(n)
	for {
		paid := d.replenishedAt.Load()
		from := max(paid, at)
		if exceeded := time.Duration(from + cost - at - int64(time.Minute)); exceeded > 0 && from > at {
			return min(exceeded, time.Duration(from-at))
		}
		if d.replenishedAt.CompareAndSwap(paid, from+cost) {
			return 0
		}
	}
}

// refund returns n consumed units. A result before now gives no extra credit: one minute's units
// are the most that are available at once.
func (d *usage) refund(r rate, n int64) { d.replenishedAt.Add(-r.cost(n)) }

// tryConsumeOne consumes one unit if it is available, and returns 0. Otherwise it returns how long
// to wait for it.
func (d *usage) tryConsumeOne(r rate, now time.Time) (after time.Duration) {
	at := now.UnixNano()
	for {
		paid := d.replenishedAt.Load()
		next := max(paid, at) + int64(r)
		if exceeded := time.Duration(next-at) - time.Minute; r > 0 && exceeded > 0 {
			return exceeded
		}
		if d.replenishedAt.CompareAndSwap(paid, next) {
			return 0
		}
	}
}

// delay returns how long to wait until one unit is available. It consumes nothing.
func (d *usage) delay(r rate, now time.Time) time.Duration {
	if r == 0 {
		return 0
	}
	return max(d.untilReplenished(now)-time.Minute+time.Duration(r), 0)
}

// available returns the number of units that are available now.
func (d *usage) available(r rate, now time.Time) int64 {
	return max(int64(float64(time.Minute-d.untilReplenished(now))/float64(r)), 0)
}
