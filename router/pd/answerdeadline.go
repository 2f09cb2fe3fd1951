package pd

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/sweeper"
)

// prefillAnswerGrace is how long a concurrent prefill leg may go on when its decode leg has
// ended well. Prefill has done its work by then and answers in a moment. An engine that
// never does would otherwise keep the leg's reservation, its slot of max_requests and its
// body until timeouts.prefill.
const prefillAnswerGrace = 3 * time.Second

// answerDeadlineInterval is how often the deadlines are checked; a call may exceed its
// deadline by as much.
const answerDeadlineInterval = 250 * time.Millisecond

// answerDeadline cancels a call at a time that is known only while the call is under way.
// One sweeper serves all of a Runner, because a timer for each would cost allocations and
// could fire after the call's memory serves another request.
type answerDeadline struct {
	mu   sync.Mutex
	call *upstream.Call // nil: no deadline is set
	at   time.Time
}

func newAnswerDeadlines() *sweeper.Sweeper[answerDeadline] {
	return sweeper.New(answerDeadlineInterval, (*answerDeadline).check)
}

// start sets the deadline of call. The caller wakes the sweeper.
func (d *answerDeadline) start(call *upstream.Call, at time.Time) {
	d.mu.Lock()
	d.call, d.at = call, at
	d.mu.Unlock()
}

// stop removes the deadline. When it returns, d does not touch the call any more.
func (d *answerDeadline) stop() {
	d.mu.Lock()
	d.call = nil
	d.mu.Unlock()
}

// check cancels an overdue call. It returns whether a deadline is still set.
func (d *answerDeadline) check(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.call != nil && now.After(d.at) {
		d.call.Cancel()
		d.call = nil
	}
	return d.call != nil
}
