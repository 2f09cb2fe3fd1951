package abort

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
)

// Prefill implements CancelAfterAnswer: it lets a prefill leg continue for a while after its
// client has disconnected.
//
// A prefill engine leases the blocks of a prompt when its core has finished the prompt. Its API
// server answers a moment later, and only that response names the blocks. A server that sees the
// end of the connection in between drops the response: the blocks stay allocated until the lease ends,
// and the router cannot release them. The router therefore waits for the response and releases the
// blocks with it (see releaseKV).
//
// The wait is bounded, because a prefill that has not begun should not run without a client. At the
// bound the router half-closes the call. Blocks that are leased at that very moment stay allocated
// until the lease ends; this is rare.
type Prefill struct {
	call        *upstream.Call
	reservation PrefillLoad

	onGone  func()      // the method start; allocated once
	timer   *time.Timer // calls elapsed; nil until the client has disconnected
	started atomic.Bool // start was called
	// Of the goroutines of start and of the timer, which follow each other.
	wait   time.Duration
	unsent bool // the call had not been sent when the client disconnected
}

const (
	// abortWait is the minimum time that a prefill leg continues after a disconnect.
	abortWait = time.Second
	// sendGrace is how long a leg that has not been sent may still be sent. An engine can have read a
	// request, and have leased its blocks, before the router's write has returned.
	sendGrace = 50 * time.Millisecond
	// maxAbortExtension bounds the predicted rest of a prefill by which the wait is extended. A
	// prefill with a longer predicted rest gets no extension.
	maxAbortExtension = 2 * time.Second
)

// start is called when the client has disconnected. It does not block.
func (l *Prefill) start() {
	l.started.Store(true)
	l.wait = abortWait
	if remaining := l.reservation.Remaining(); remaining > 0 && remaining <= maxAbortExtension {
		l.wait += remaining
	}
	first := l.wait
	if l.unsent = !l.call.Sent(); l.unsent {
		first = sendGrace
	}
	l.timer = time.AfterFunc(maxAbortExtension, l.elapsed) // set before elapsed can run: it uses timer
	l.timer.Reset(first)
}

// elapsed is called when the timer fires.
func (l *Prefill) elapsed() {
	if l.unsent && l.call.Sent() {
		l.unsent = false
		l.timer.Reset(l.wait)
		return
	}
	l.call.HalfClose()
}

// WasStarted reports whether the client has disconnected during the leg. It works on nil.
func (l *Prefill) WasStarted() bool { return l != nil && l.started.Load() }

// NewPrefill returns a Prefill for one leg at a time: see Arm. It may serve the next leg unless it was
// started (WasStarted), because its timer may still use it then.
func NewPrefill() *Prefill {
	l := new(Prefill)
	l.onGone = l.start
	return l
}

// PrefillLoad is the load that a prefill leg is expected to cause. schedule.Reservation implements it.
type PrefillLoad interface {
	// Remaining returns the predicted rest of the prefill, 0 if unknown.
	Remaining() time.Duration
}

// Arm returns the function to call when the client disconnects during call.
func (l *Prefill) Arm(call *upstream.Call, res PrefillLoad) (onGone func()) {
	l.call, l.reservation = call, res
	return l.onGone
}

// Stop ends the wait of an abort that was started.
func (l *Prefill) Stop() {
	if l.timer != nil {
		l.timer.Stop()
	}
}
