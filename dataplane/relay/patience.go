package relay

import (
	"fmt"
	"os"
	"time"

	"sluice/dataplane/loop"
)

// ErrStalled is the detail of a client that took next to nothing in WriteTimeout. A
// ClientConn whose Write cannot be gone on with, since it changes bytes on their way,
// waits itself for a client that is slow (Patience), and fails with this.
var ErrStalled = fmt.Errorf("the client took less than %d bytes of what it was sent: %w", loop.MinProgress, os.ErrDeadlineExceeded)

// Patience tells a client that reads slowly, which it may, from one that has stopped. A
// socket takes bytes again only when a third of it is free, so what it still holds is
// looked at as well as what it takes: after each part of the time-out, while a write is
// not done.
type Patience struct {
	since  time.Time // it has taken next to nothing
	taken  int       // by the socket, since unsent was looked at
	unsent int       // -1: not looked at
}

// NewPatience is that of a write that begins at t.
func NewPatience(t time.Time) Patience { return Patience{since: t, unsent: -1} }

// Lasts says whether to wait on behind a write that took n bytes and then failed for its
// deadline. unsent is what the socket holds, -1 where that is not known: then one
// deadline is all there is. most is for how long next to nothing may be taken.
func (p *Patience) Lasts(n, unsent int, now time.Time, most time.Duration) bool {
	p.taken += n
	switch {
	case p.taken >= loop.MinProgress || unsent >= 0 && p.unsent >= 0 && p.unsent+p.taken-unsent >= loop.MinProgress:
		p.since, p.taken, p.unsent = now, 0, unsent
	case unsent < 0 || now.Sub(p.since) >= most:
		return false
	case p.unsent < 0:
		p.taken, p.unsent = 0, unsent
	}
	return true
}
