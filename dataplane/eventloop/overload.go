package eventloop

import "time"

const (
	// A loop that has not found all its streams empty for behindAfter is behind. Engines send the
	// events of a step together, and other processes use the core, so a loop may have work for a
	// while without being behind.
	behindAfter = 100 * time.Millisecond
	// behindBatch is how many events a turn has at least where the loop checks whether it is behind.
	// The check is a system call.
	behindBatch = 16
	// smallReads is the average size of a read below which a pause saves more CPU than the loop
	// loses by it: about five events. A read and a write cost as much as ten events.
	smallReads = 1 << 10
	maxPause   = 5 * time.Millisecond
)

// overload decides when a loop pauses. A loop that always finds some of its streams ready reads and
// writes each of them again after one or two events, and so needs all of its core although it could
// relay the same events with fewer reads and writes. It pauses for half as long as it needs for all
// of its streams once, so that each read returns 1.5 times as many events and a third of the core
// is free. Events wait longer by the pause at most, where they wait for the loop anyway.
//
// A loop that finds nothing ready does not pause. Neither does a loop whose reads do not get larger
// by it, because it has been delayed by something else and catches up faster without.
type overload struct {
	since  time.Time // when the loop began to have work without a break; zero: it has none
	from   time.Time // when the current sweep, the reading of as many streams as there are, began
	reads  int       // in the current sweep
	nbytes int
	usual  int // average size of a read in the last sweep without a pause before it
	paused bool
}

// reset notes that nothing was ready.
func (o *overload) reset() { o.since = time.Time{} }

// read notes a read of n bytes.
func (o *overload) read(n int) {
	o.reads++
	o.nbytes += n
}

// pause returns for how long the loop pauses. It is called when streams are ready and the loop has
// not waited for them.
func (o *overload) pause(now time.Time, tasks int) time.Duration {
	if o.since.IsZero() {
		o.since, o.paused = now, false
		o.begin(now)
		return 0
	}
	if o.reads < tasks {
		return 0
	}
	sweep, size := now.Sub(o.from), o.nbytes/max(o.reads, 1)
	o.begin(now)
	switch {
	case !o.paused:
		o.usual = size
	case size < o.usual+o.usual/4:
		o.since, o.usual = now, size
	}
	if o.paused = size < smallReads && now.Sub(o.since) >= behindAfter; !o.paused {
		return 0
	}
	return min(sweep/2, maxPause)
}

// begin begins a sweep.
func (o *overload) begin(now time.Time) { o.from, o.reads, o.nbytes = now, 0, 0 }
