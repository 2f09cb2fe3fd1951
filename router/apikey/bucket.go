package apikey

import (
	"sync/atomic"
	"time"
)

// rate is a limit of so many units a minute, of which a whole minute's may come at
// once: the nanoseconds that pay for one unit; 0: no limit.
type rate float64

func perMinute(n int64) rate {
	if n <= 0 {
		return 0
	}
	return rate(time.Minute) / rate(n)
}

// usage is what was taken of a rate, as one number: the moment, in nanoseconds of
// the Unix clock, at which all of it will be paid for, each unit at its share of
// the minute (the generic cell rate algorithm of ITU-T I.371, whose one state word
// needs no lock).
type usage struct{ replenishedAt atomic.Int64 }

// untilReplenished is how long it takes to pay for what was taken.
func (d *usage) untilReplenished(now time.Time) time.Duration {
	return max(time.Duration(d.replenishedAt.Load()-now.UnixNano()), 0)
}

// maxBacklog bounds what one who overdrew has to wait.
const maxBacklog = time.Hour

// cost is how long n units take to be paid for, as far as it is waited for.
func (r rate) cost(n int64) int64 { return int64(min(float64(r)*float64(n), float64(maxBacklog))) }

// consume takes n units, whether or not there are so many.
func (d *usage) consume(r rate, now time.Time, n int64) {
	at, cost := now.UnixNano(), r.cost(n)
	for {
		paid := d.replenishedAt.Load()
		if d.replenishedAt.CompareAndSwap(paid, min(max(paid, at)+cost, at+int64(maxBacklog))) {
			return
		}
	}
}

// tryConsume takes n units if there are so many, or if nothing is owed: more than a minute's
// could never be had else. If not it says how long to wait.
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

// refund returns n units that were taken. What it leaves before now is no credit: a
// whole minute's is the most that can be had at once.
func (d *usage) refund(r rate, n int64) { d.replenishedAt.Add(-r.cost(n)) }

// tryConsumeOne takes one unit if there is one, else it says how long to wait for it.
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

// delay says how long to wait until anything may be taken; it takes nothing.
func (d *usage) delay(r rate, now time.Time) time.Duration {
	if r == 0 {
		return 0
	}
	return max(d.untilReplenished(now)-time.Minute+time.Duration(r), 0)
}

// available is how many units may be taken at once now.
func (d *usage) available(r rate, now time.Time) int64 {
	return max(int64(float64(time.Minute-d.untilReplenished(now))/float64(r)), 0)
}
