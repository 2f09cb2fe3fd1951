package pd

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// prefillAbort implements cancelAfterAnswer: it lets a prefill leg continue for a while after its
// client has disconnected.
//
// A prefill engine pins the blocks of a prompt when its core has finished the prompt. Its API
// server answers a moment later, and only that response names the blocks. A server that sees the
// end of the connection in between drops the response: the blocks stay pinned until the lease ends,
// and the router cannot release them. The router therefore waits for the response and releases the
// blocks with it (see releaseKV).
//
// The wait is bounded, because a prefill that has not begun should not run without a client. At the
// bound the router half-closes the call. Blocks that are pinned at that very moment stay pinned
// until the lease ends; this is rare.
type prefillAbort struct {
	call        *upstream.Call
	reservation *schedule.Reservation

	onGone  func()      // the method start; allocated once
	timer   *time.Timer // half-closes the call; nil until the client has disconnected
	started atomic.Bool // start was called
}

const (
	// abortWait is the minimum time that a prefill leg continues after a disconnect.
	abortWait = time.Second
	// maxAbortExtension bounds the predicted rest of a prefill by which the wait is extended. A
	// prefill with a longer predicted rest gets no extension.
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

// armPrefillAbort arms cancelAfterAnswer for a prefill leg until disarmPrefillAbort.
func (q *request) armPrefillAbort(call *upstream.Call, res *schedule.Reservation) {
	if q.prefillAbort == nil {
		q.prefillAbort = new(prefillAbort)
		q.prefillAbort.onGone = q.prefillAbort.start
	}
	q.prefillAbort.call, q.prefillAbort.reservation = call, res
	q.x.OnClientGone(q.prefillAbort.onGone)
}

// disarmPrefillAbort disarms the rule of a prefill leg. It reports whether the rule was armed and
// the client has disconnected.
func (q *request) disarmPrefillAbort() (aborted bool) {
	q.x.OnClientGone(nil)
	l := q.prefillAbort
	if !l.wasStarted() {
		return false
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	q.call, q.prefillAbort = nil, nil // the timer may still use them
	return true
}
