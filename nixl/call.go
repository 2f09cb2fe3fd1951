package nixl

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// call submits a command and waits for its answer until the context ends or CallTimeout
// has passed.
func (a *Agent) call(ctx context.Context, c *command, operation string) (callResult, error) {
	if a.closing.Load() {
		return callResult{}, &Error{Operation: operation, Status: Closed}
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.cfg.CallTimeout)
		defer cancel()
	}
	return a.roundTrip(ctx, c, operation)
}

func (a *Agent) roundTrip(ctx context.Context, c *command, operation string) (callResult, error) {
	w := a.addWaiter(c)
	if err := a.submit(ctx, c); err != nil {
		a.removeWaiter(c.token)
		return callResult{}, &Error{Operation: operation, Status: statusOf(err), Hint: a.stuckHint()}
	}
	select {
	case ans := <-w.result:
		if ans.status != Success {
			return ans, &Error{Operation: operation, Status: ans.status, Hint: statusHint(c.op, ans.status, a.library)}
		}
		return ans, nil
	case <-ctx.Done():
		a.abandonWaiter(c.token)
		return callResult{}, &Error{Operation: operation, Status: statusOf(ctx.Err()), Hint: a.stuckHint()}
	}
}

// addWaiter reserves a token for c.
func (a *Agent) addWaiter(c *command) *waiter {
	w := &waiter{result: make(chan callResult, 1)}
	switch c.op {
	case opRegister:
		w.lateCleanup = opDeregister
	case opLoad:
		w.lateCleanup = opInvalidate
	}
	c.token = a.token.Add(1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closing.Load() && c.op != opStop {
		w.deliver(callResult{status: Closed}) // Close may have answered all others already
		return w
	}
	select {
	case <-a.processEnded:
		w.deliver(callResult{status: Died})
	default:
		a.waiters[c.token] = w
	}
	return w
}

// submit pushes a command; while the ring is full it retries until the context ends.
func (a *Agent) submit(ctx context.Context, c *command) error {
	for {
		err := a.driver.push(c)
		if !errors.Is(err, ErrFull) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Millisecond):
		}
	}
}

func (a *Agent) removeWaiter(token uint64) {
	a.mu.Lock()
	delete(a.waiters, token)
	a.mu.Unlock()
}

// abandonWaiter stops waiting. If a late answer brings a handle, receive releases it.
func (a *Agent) abandonWaiter(token uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.waiters[token]; w != nil && w.lateCleanup != 0 {
		w.abandoned = true
		return
	}
	delete(a.waiters, token)
}

// processDied is called once when the process of an isolated agent has ended; it ends
// all waits.
func (a *Agent) processDied(why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.exitReason = why
	close(a.processEnded)
	for _, w := range a.waiters {
		w.deliver(callResult{status: Died})
	}
	clear(a.waiters)
}

func (w *waiter) deliver(ans callResult) {
	select {
	case w.result <- ans:
	default:
	}
}

// receive is the sink of the driver's events.
func (a *Agent) receive(e *event) {
	switch e.op {
	case evNotif:
		a.notified(e)
	case evBoard:
		a.mu.Lock()
		var b *CompletionBoard
		if e.arg[0] < uint64(len(a.completionBoards)) {
			b = a.completionBoards[e.arg[0]]
		}
		a.mu.Unlock()
		if b != nil && len(e.data) == recordBytes {
			b.recordWritten(int(e.handle), rawRecordOf(e.data))
		}
	case evPeerDown:
		a.mu.Lock()
		p := a.peers[e.handle]
		a.mu.Unlock()
		if p != nil && p.down.CompareAndSwap(false, true) && a.cfg.OnPeerDown != nil {
			a.cfg.OnPeerDown(p)
		}
	case evDone:
		a.completeCall(e)
	}
}

func (a *Agent) completeCall(e *event) {
	if e.token == 0 {
		if uint32(e.handle) == opPoll {
			a.pollStatus.Store(int32(e.status))
		}
		return
	}
	a.mu.Lock()
	w := a.waiters[e.token]
	delete(a.waiters, e.token)
	a.mu.Unlock()
	switch {
	case w == nil:
	case w.abandoned:
		if e.status == Success {
			_ = a.driver.push(&command{op: w.lateCleanup, handle: e.handle}) // if the ring is full, the handle stays until Close
		}
	default:
		w.deliver(callResult{status: e.status, handle: e.handle, arg: e.arg, aux: e.aux, data: append([]byte(nil), e.data...)})
	}
}

func statusOf(err error) Status {
	switch {
	case err == nil:
		return Success
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, ErrFull):
		return Full
	case errors.Is(err, ErrClosed):
		return Closed
	case errors.Is(err, errTooLong):
		return InvalidParam
	}
	return Hung
}

func timedOut(err error) bool { return errors.Is(err, ErrHung) || errors.Is(err, ErrCanceled) }

// stuckHint names the call in which the agent's thread hangs.
func (a *Agent) stuckHint() string {
	op, since := a.driver.busy()
	if since < time.Millisecond || int(op) >= len(opNames) {
		return ""
	}
	return fmt.Sprintf("its thread has been in a library call (%s) for %s", opNames[op], since.Round(time.Millisecond))
}

// statusHint adds what NIXL's few status codes leave open.
func statusHint(op uint32, s Status, l *Library) string {
	if op == opLoad && (s == BackendError || s == InvalidParam || s == NotFound || s == VersionMismatch || s < ucxBase) {
		return "the metadata is damaged, the agent's own, or of an incompatible NIXL or UCX: " + versionsOf(l) + "; use the engine's own wheel"
	}
	return ""
}

// explain adds to the error of a send what is known about the peer's version.
func (p *Peer) explain(err error, l *Library) error {
	var e *Error
	if p.versions == "" || !errors.As(err, &e) || e.Status != BackendError && e.Status != PeerDead {
		return err
	}
	if l == nil || p.versions == "NIXL "+l.NIXL {
		return err
	}
	e.Hint = fmt.Sprintf("the peer has ended, or its version is incompatible: it has %s, %s; use the engine's own wheel", p.versions, versionsOf(l))
	return e
}

func versionsOf(l *Library) string {
	if l == nil {
		return "this router has the fake"
	}
	if l.NIXL == "" {
		return "this router has UCX " + l.UCX
	}
	return fmt.Sprintf("this router has NIXL %s with UCX %s", l.NIXL, l.UCX)
}
