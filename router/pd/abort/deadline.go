package abort

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/sweeper"
)

// deadlineInterval is the interval of the checks, and so the most by which a call exceeds its
// deadline.
const deadlineInterval = 250 * time.Millisecond

// Deadline cancels a call at a time that becomes known only during the call. One sweeper
// serves all calls of a Runner: a timer per call would allocate, and could fire after the call's
// memory serves another request.
type Deadline struct {
	mu   sync.Mutex
	call *upstream.Call // nil if no deadline is set
	at   time.Time
}

// NewDeadlines returns the sweeper that checks Deadlines. A Deadline must be added to it before Start.
func NewDeadlines() *sweeper.Sweeper[Deadline] {
	return sweeper.New(deadlineInterval, (*Deadline).check)
}

// Start sets the deadline of call. The caller must wake the sweeper.
func (d *Deadline) Start(call *upstream.Call, at time.Time) {
	d.mu.Lock()
	d.call, d.at = call, at
	d.mu.Unlock()
}

// Stop removes the deadline. After it returns, d no longer uses the call.
func (d *Deadline) Stop() {
	d.mu.Lock()
	d.call = nil
	d.mu.Unlock()
}

// check cancels an overdue call. It reports whether a deadline is still set.
func (d *Deadline) check(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.call != nil && now.After(d.at) {
		d.call.Cancel()
		d.call = nil
	}
	return d.call != nil
}
