package pd

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// prefillAbort keeps a prefill leg going for a while after its client has left.
//
// A prefill engine pins the blocks of a prompt when its core has finished it. Its API
// server answers a moment later, and that answer is the only thing that names the blocks.
// A server that sees the end of the connection in between drops the answer: the blocks
// stay pinned until the lease ends, and nobody can release them. So the router waits for
// the answer and releases the blocks with it (see releaseKV).
//
// The wait is bounded, because a prefill that has not begun should not run for nobody.
// Beyond the bound the leg is hung up: what is pinned in that very moment is lost to the
// lease, which is rare, because the bound is not related to the engine's end.
type prefillAbort struct {
	call        *upstream.Call
	reservation *schedule.Reservation

	onGone  func()      // start, made once
	timer   *time.Timer // hangs the call up; nil until the client has left
	started atomic.Bool // start was called
}

const (
	// abortWait is how long a prefill leg goes on at least for a client that has left.
	abortWait = time.Second
	// maxAbortExtension is the most time that a prefill is expected to need from then on, for
	// which the wait is extended.
	maxAbortExtension = 2 * time.Second
)

// start is called when the client has left, and returns at once.
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

// wasStarted says that the client has left during the leg. A nil prefillAbort takes it.
func (l *prefillAbort) wasStarted() bool { return l != nil && l.started.Load() }

// armPrefillAbort has the prefill leg answer for a client that leaves; see prefillAbort. It is
// ended by disarmPrefillAbort.
func (q *request) armPrefillAbort(call *upstream.Call, res *schedule.Reservation) {
	if q.prefillAbort == nil {
		q.prefillAbort = new(prefillAbort)
		q.prefillAbort.onGone = q.prefillAbort.start
	}
	q.prefillAbort.call, q.prefillAbort.reservation = call, res
	q.x.OnClientGone(q.prefillAbort.onGone)
}

// disarmPrefillAbort ends armPrefillAbort and says whether the client has left meanwhile.
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
