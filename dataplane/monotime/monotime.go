// Package monotime has a monotonic time of 8 bytes, for structures of which a process has thousands.
//
// Packages relay and eventloop keep the times of streams in it; fleet and kvevents use its clock. A
// Time has no meaning outside of its process and must not be stored or sent.
package monotime

import "time"

// Time is a monotonic time in nanoseconds since the package was initialised. The zero value means
// never.
type Time int64

var epoch = time.Now()

// Of returns t as a Time. It returns 0 for no time that a caller can see, because epoch is before all
// of them.
func Of(t time.Time) Time { return Time(t.Sub(epoch)) }

// Uptime returns the time since the package was initialised: a monotonic clock that fits an atomic
// integer.
func Uptime() time.Duration { return time.Since(epoch) }

// IsZero reports whether t is never.
func (t Time) IsZero() bool { return t == 0 }

// Time returns t as a time.Time; the zero Time for never.
func (t Time) Time() time.Time {
	if t == 0 {
		return time.Time{}
	}
	return epoch.Add(time.Duration(t))
}
