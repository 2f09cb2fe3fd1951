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

// debt is what was taken of a rate, as one number: the moment, in nanoseconds of
// the Unix clock, at which all of it will be paid for, each unit at its share of
// the minute (the generic cell rate algorithm of ITU-T I.371, whose one state word
// needs no lock).
type debt struct{ paid atomic.Int64 }

// left is how long it takes to pay for what was taken.
func (d *debt) left(now time.Time) time.Duration {
	return max(time.Duration(d.paid.Load()-now.UnixNano()), 0)
}

// maxDebt bounds what one who overdrew has to wait.
const maxDebt = time.Hour

// cost is how long n units take to be paid for, as far as it is waited for.
func (r rate) cost(n int64) int64 { return int64(min(float64(r)*float64(n), float64(maxDebt))) }

// take takes n units, whether or not there are so many.
func (d *debt) take(r rate, now time.Time, n int64) {
	at, cost := now.UnixNano(), r.cost(n)
	for {
		paid := d.paid.Load()
		if d.paid.CompareAndSwap(paid, min(max(paid, at)+cost, at+int64(maxDebt))) {
			return
		}
	}
}

// tryMany takes n units if there are so many, or if nothing is owed: more than a minute's
// could never be had else. If not it says how long to wait.
func (d *debt) tryMany(r rate, now time.Time, n int64) (after time.Duration) {
	at, cost := now.UnixNano(), r.cost(n)
	for {
		paid := d.paid.Load()
		from := max(paid, at)
		if over := time.Duration(from + cost - at - int64(time.Minute)); over > 0 && from > at {
			return min(over, time.Duration(from-at))
		}
		if d.paid.CompareAndSwap(paid, from+cost) {
			return 0
		}
	}
}

// giveBack returns n units that were taken. What it leaves before now is no credit: a
// whole minute's is the most that can be had at once.
func (d *debt) giveBack(r rate, n int64) { d.paid.Add(-r.cost(n)) }

// tryOne takes one unit if there is one, else it says how long to wait for it.
func (d *debt) tryOne(r rate, now time.Time) (after time.Duration) {
	at := now.UnixNano()
	for {
		paid := d.paid.Load()
		next := max(paid, at) + int64(r)
		if over := time.Duration(next-at) - time.Minute; r > 0 && over > 0 {
			return over
		}
		if d.paid.CompareAndSwap(paid, next) {
			return 0
		}
	}
}

// ready says how long to wait until anything may be taken; it takes nothing.
func (d *debt) ready(r rate, now time.Time) time.Duration {
	if r == 0 {
		return 0
	}
	return max(d.left(now)-time.Minute+time.Duration(r), 0)
}

// room is how many units may be taken at once now.
func (d *debt) room(r rate, now time.Time) int64 {
	return max(int64(float64(time.Minute-d.left(now))/float64(r)), 0)
}
