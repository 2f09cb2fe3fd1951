package pd

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// prefillAbort carries cancelAfterAnswer out: it lets a prefill leg go on for a while after
// its client has disconnected.
//
// A prefill engine pins the blocks of a prompt when its core has finished it. Its API
// server answers a moment later, and only that answer names the blocks. A server that sees
// the end of the connection in between drops the answer: the blocks stay pinned until the
// lease ends, and the router cannot release them. So the router waits for the answer and
// releases the blocks with it (see releaseKV).
//
// The wait is bounded, because a prefill that has not begun should not run without a
// client. At the bound the router half-closes the call. Blocks that are pinned in that very
// moment stay until the lease ends, which is rare.
type prefillAbort struct {
	call        *upstream.Call
	reservation *schedule.Reservation

	onGone  func()      // start; made once
	timer   *time.Timer // half-closes the call; nil until the client has disconnected
	started atomic.Bool // start was called
}

const (
	// abortWait is the least time that a prefill leg goes on after a disconnect.
	abortWait = time.Second
	// maxAbortExtension bounds the predicted rest of a prefill by which the wait is extended.
	// A prefill that is predicted to need more gets no extension.
	maxAbortExtension = 2 * time.Second
)

// start is called when the client has disconnected. It does not block.
func (l *prefillAbort) start() {
	l.started.Store(true)
	if !l.call.Sent() {
		l.call.HalfClose()
		return
	}
	wait := abortWait
	if remaining := l.reservation.Remaining(); remaining > 0 && remaining <= maxAbortExtension {
		wait += remaining
	}
	l.timer = time.AfterFunc(wait, l.call.HalfClose)
}

// wasStarted reports whether the client has disconnected during the leg. It works on nil.
func (l *prefillAbort) wasStarted() bool { return l != nil && l.started.Load() }

// armPrefillAbort arms cancelAfterAnswer for a prefill leg, until disarmPrefillAbort.
func (q *request) armPrefillAbort(call *upstream.Call, res *schedule.Reservation) {
	if q.prefillAbort == nil {
		q.prefillAbort = new(prefillAbort)
		q.prefillAbort.onGone = q.prefillAbort.start
	}
	q.prefillAbort.call, q.prefillAbort.reservation = call, res
	q.x.OnClientGone(q.prefillAbort.onGone)
}

// disarmPrefillAbort ends the rule of a prefill leg. It reports whether armPrefillAbort was in
// effect and the client has disconnected.
func (q *request) disarmPrefillAbort() (aborted bool) {
	q.x.OnClientGone(nil)
	l := q.prefillAbort
	if !l.wasStarted() {
		return false
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	q.call, q.prefillAbort = nil, nil // the timer may be at work with them
	return true
}
