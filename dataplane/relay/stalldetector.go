package relay

import (
	"fmt"
	"os"
	"time"

	"sluice/dataplane/eventloop"
)

// ErrStalled is the detail of a client that took next to nothing in WriteTimeout; a
// Patient's Write fails with it.
var ErrStalled = fmt.Errorf("the client took less than %d bytes of what it was sent: %w", eventloop.MinProgress, os.ErrDeadlineExceeded)

// checksPerTimeout is how often in WriteTimeout a write that is not done looks at its client: a
// stopped one may live so much longer.
const checksPerTimeout = 32

// StallCheckInterval is how long a write that is not done waits before it looks at its client.
func StallCheckInterval(timeout time.Duration) time.Duration { return timeout / checksPerTimeout }

// StallDetector tells a client that reads slowly, which it may, from one that has stopped, for
// as long as a stream lasts. What counts is what the client's side has acknowledged: a
// socket that was full takes some KiB more when it is asked again, of a client that takes
// nothing, and becomes writable only when a third of it is free, of one that does. The
// zero value has not looked yet.
type StallDetector struct {
	progressAt time.Time // the client was last seen to take something, or looked at first
	written    int       // by the socket since then
	unsent     int       // what it held then; -1: not known
}

// Wrote notes that the socket took n bytes.
func (p *StallDetector) Wrote(n int) { p.written += n }

// Observe is told now and then, while writes succeed too, what the socket holds: it fills for
// seconds when its client has stopped. unsent is -1 where that is not known; then what the
// socket takes counts.
func (p *StallDetector) Observe(unsent int, now time.Time) {
	progress := p.written
	if unsent >= 0 && p.unsent >= 0 {
		progress += p.unsent - unsent
	}
	if p.progressAt.IsZero() || progress >= eventloop.MinProgress || unsent >= 0 && unsent < eventloop.MinProgress {
		*p = StallDetector{progressAt: now, unsent: unsent}
	}
}

// Check looks behind a write that has failed for its deadline, and says whether to wait on,
// and until when before the next look. most is for how long next to nothing may be taken.
func (p *StallDetector) Check(unsent int, now time.Time, timeout time.Duration) (next time.Time, ok bool) {
	if p.Observe(unsent, now); now.Sub(p.progressAt) >= timeout {
		return now, false
	}
	if next = now.Add(StallCheckInterval(timeout)); next.After(p.progressAt.Add(timeout)) {
		next = p.progressAt.Add(timeout)
	}
	return next, true
}
