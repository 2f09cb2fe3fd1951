package pd

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/sweeper"
)

// prefillAnswerGrace bounds how long a concurrent prefill leg runs after its decode leg has ended
// well. Prefill has finished its work by then and answers soon. Without the bound an engine that
// never answers would occupy the leg's reservation, its slot of max_requests and its body until
// timeouts.prefill.
const prefillAnswerGrace = 3 * time.Second

// answerDeadlineInterval is the interval of the checks, and so the most by which a call exceeds its
// deadline.
const answerDeadlineInterval = 250 * time.Millisecond

// answerDeadline cancels a call at a time that becomes known only during the call. One sweeper
// serves all calls of a Runner: a timer per call would allocate, and could fire after the call's
// memory serves another request.
type answerDeadline struct {
	mu   sync.Mutex
	call *upstream.Call // nil if no deadline is set
	at   time.Time
}

func newAnswerDeadlines() *sweeper.Sweeper[answerDeadline] {
	return sweeper.New(answerDeadlineInterval, (*answerDeadline).check)
}

// start sets the deadline of call. The caller must wake the sweeper.
func (d *answerDeadline) start(call *upstream.Call, at time.Time) {
	d.mu.Lock()
	d.call, d.at = call, at
	d.mu.Unlock()
}

// stop removes the deadline. After it returns, d no longer uses the call.
func (d *answerDeadline) stop() {
	d.mu.Lock()
	d.call = nil
	d.mu.Unlock()
}

// check cancels an overdue call. It reports whether a deadline is still set.
func (d *answerDeadline) check(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.call != nil && now.After(d.at) {
		d.call.Cancel()
		d.call = nil
	}
	return d.call != nil
}
