// Package monotime has a monotonic time of 8 bytes, for structures of which a process has thousands.
//
// There are two ways to measure time in a few bytes. A Time counts from the start of the process;
// streams, legs and connections keep theirs in it. A Clock counts from its own start, inside a
// synctest bubble too, where the time of the process lies decades ahead. Neither has a meaning
// outside of its process, and neither may be stored or sent.
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

// Since returns the time elapsed since t.
func (t Time) Since() time.Duration { return Uptime() - time.Duration(t) }

// A Clock measures the time since it was started. The zero value has not been started.
type Clock struct{ started time.Time }

// StartClock returns a Clock that starts now.
func StartClock() Clock { return Clock{time.Now()} }

// Now returns the time since the start.
func (c Clock) Now() time.Duration { return time.Since(c.started) }

// At returns the point in time at which Now was d.
func (c Clock) At(d time.Duration) time.Time { return c.started.Add(d) }
