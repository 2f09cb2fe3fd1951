package relay

import (
	"fmt"
	"os"
	"time"

	"sluice/dataplane/loop"
)

// ErrStalled is the detail of a client that took next to nothing in WriteTimeout; a
// Patient's Write fails with it.
var ErrStalled = fmt.Errorf("the client took less than %d bytes of what it was sent: %w", loop.MinProgress, os.ErrDeadlineExceeded)

// looks is how often in WriteTimeout a write that is not done looks at its client: a
// stopped one may live so much longer.
const looks = 32

// LookAfter is how long a write that is not done waits before it looks at its client.
func LookAfter(most time.Duration) time.Duration { return most / looks }

// Patience tells a client that reads slowly, which it may, from one that has stopped, for
// as long as a stream lasts. What counts is what the client's side has acknowledged: a
// socket that was full takes some KiB more when it is asked again, of a client that takes
// nothing, and becomes writable only when a third of it is free, of one that does. The
// zero value has not looked yet.
type Patience struct {
	since  time.Time // the client was last seen to take something, or looked at first
	taken  int       // by the socket since then
	unsent int       // what it held then; -1: not known
}

// Took notes that the socket took n bytes.
func (p *Patience) Took(n int) { p.taken += n }

// Look is told now and then, while writes succeed too, what the socket holds: it fills for
// seconds when its client has stopped. unsent is -1 where that is not known; then what the
// socket takes counts.
func (p *Patience) Look(unsent int, now time.Time) {
	took := p.taken
	if unsent >= 0 && p.unsent >= 0 {
		took += p.unsent - unsent
	}
	if p.since.IsZero() || took >= loop.MinProgress || unsent >= 0 && unsent < loop.MinProgress {
		*p = Patience{since: now, unsent: unsent}
	}
}

// Lasts looks behind a write that has failed for its deadline, and says whether to wait on,
// and until when before the next look. most is for how long next to nothing may be taken.
func (p *Patience) Lasts(unsent int, now time.Time, most time.Duration) (by time.Time, ok bool) {
	if p.Look(unsent, now); now.Sub(p.since) >= most {
		return now, false
	}
	if by = now.Add(LookAfter(most)); by.After(p.since.Add(most)) {
		by = p.since.Add(most)
	}
	return by, true
}
