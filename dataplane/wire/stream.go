package wire

import (
	"errors"
	"net/netip"
	"time"

	"sluice/dataplane/membudget"
)

// The errors of Stream.Send.
var (
	ErrKilled     = errors.New("wire: the caller killed the stream")
	ErrConnClosed = errors.New("wire: the caller's connection is closed")
	ErrStalled    = errors.New("wire: the caller does not read")
	ErrDeadline   = errors.New("wire: the stream's deadline has passed and the caller has no credit left")
	ErrEnded      = errors.New("wire: the stream has ended")
)

// Stream is one request and its items, at the server. Send and End are called by one goroutine at a
// time, the other methods by any.
type Stream struct {
	ID uint32
	// Payload of the REQUEST frame, borrowed until ServeStream returns or ReleasePayload is called.
	Payload []byte

	conn  *Conn
	lease membudget.Lease

	// Guarded by conn.out.mu.
	credit       int64
	sendErr      error // why nothing can be sent any more; nil: it can
	stopped      bool
	deadline     time.Time // of SetDeadline
	stopDeadline time.Time // the deadline of what is left to be sent after a STOP
	ended        bool      // END has been sent, or cannot be
	wake         chan struct{}
	onStop       func()
	onKill       func()
}

// ReleasePayload releases Payload's memory before ServeStream returns.
func (s *Stream) ReleasePayload() {
	s.Payload = nil
	s.lease.Release()
}

// Budget returns the budget from which LeaseMemory leases.
func (s *Stream) Budget() *membudget.Budget { return s.conn.srv.budget }

// LeaseMemory leases n bytes, counted like requests' payloads, for what a request becomes; false:
// the budget is exhausted. The caller releases the lease.
func (s *Stream) LeaseMemory(n int) (membudget.Lease, bool) {
	return membudget.Default.Lease(s.conn.srv.budget, n)
}

// Peer returns the caller's address. It is loopback for a unix socket, where file permissions
// decide who may call.
func (s *Stream) Peer() netip.Addr { return s.conn.peer }

// Agent returns the caller's name in its HELLO.
func (s *Stream) Agent() string { return s.conn.agent }

// Unix reports whether the caller uses a unix socket.
func (s *Stream) Unix() bool { return s.conn.unix }

// Key returns the key in the caller's HELLO, which Options.Admit has accepted. It must not be
// modified or logged.
func (s *Stream) Key() []byte { return s.conn.key }

// Watch registers callbacks. onStop is called once when the caller asks to stop, onKill once when
// it kills the stream or is lost, each on any goroutine, and at once if that has happened already.
// They must not block.
func (s *Stream) Watch(onStop, onKill func()) {
	o := &s.conn.out
	o.mu.Lock()
	stopped, killed := s.stopped, s.sendErr == ErrKilled || s.sendErr == ErrConnClosed
	s.onStop, s.onKill = onStop, onKill
	o.mu.Unlock()
	switch {
	case killed && onKill != nil:
		onKill()
	case !killed && stopped && onStop != nil:
		onStop()
	}
}

// Stopped reports whether the caller has asked to stop.
func (s *Stream) Stopped() bool {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	return s.stopped
}

// Err returns why nothing can be sent any more; nil: it can.
func (s *Stream) Err() error {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	return s.sendErr
}

// SetDeadline bounds the waits of Send in addition to StallTimeout; zero: no bound. After it items
// for which the caller has given credit are still sent without waiting.
func (s *Stream) SetDeadline(t time.Time) {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	s.deadline = t
	s.signal()
}

// Send sends one item and copies payload. It waits while the caller has given no credit or the
// connection's queue is full: at most StallTimeout, and after a STOP at most that for all remaining
// items together. Then it fails with ErrStalled, or at the deadline with ErrDeadline, and the
// stream is over. An item that exceeds the credit is sent as long as some credit is left, so that
// no item is too large for a window.
func (s *Stream) Send(payload []byte) error {
	o := &s.conn.out
	o.mu.Lock()
	if s.sendErr == nil && (s.credit <= 0 || o.pending > o.maxPending) {
		o.mu.Unlock()
		if err := s.waitSendable(); err != nil {
			return err
		}
		o.mu.Lock()
	}
	if s.sendErr != nil {
		err := s.sendErr
		o.mu.Unlock()
		return err
	}
	s.credit -= int64(len(payload))
	o.queue = appendFrame(o.queue, Item, s.ID, payload)
	o.flushAppended(headerSize + len(payload))
	return nil
}

// TrySend is Send without waiting. sent is false if Send would wait; nothing is done then. Sent
// items leave together with those of other streams. If flush is true the caller must call Flush
// soon; one Flush is enough for all items before it.
func (s *Stream) TrySend(payload []byte) (sent, flush bool, err error) {
	o := &s.conn.out
	o.mu.Lock()
	if s.sendErr != nil || s.credit <= 0 || o.pending > o.maxPending {
		err := s.sendErr
		o.mu.Unlock()
		return false, false, err
	}
	s.credit -= int64(len(payload))
	o.queue = appendFrame(o.queue, Item, s.ID, payload)
	o.pending += headerSize + len(payload)
	flush = !o.delivering
	o.delivering = true
	o.mu.Unlock()
	return true, flush, nil
}

// Flush sends the items of TrySend. It is called only after TrySend returned flush. It does not
// wait.
func (s *Stream) Flush() { s.conn.out.transport.scheduleDelivery(&s.conn.out, true) }

// waitSendable waits until an item may be sent.
func (s *Stream) waitSendable() error {
	o, limit := &s.conn.out, s.conn.srv.opt.StallTimeout
	began := time.Now()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		o.mu.Lock()
		switch {
		case s.sendErr != nil:
			err := s.sendErr
			o.mu.Unlock()
			return err
		case s.credit > 0 && o.pending <= o.maxPending:
			o.mu.Unlock()
			return nil
		}
		by, late := s.waitDeadline(began.Add(limit))
		left := time.Until(by)
		if left <= 0 {
			o.mu.Unlock()
			return s.endStalled(late)
		}
		if s.wake == nil {
			s.wake = make(chan struct{}, 1)
		}
		if s.credit > 0 {
			o.waiters = append(o.waiters, s)
		}
		o.mu.Unlock()
		timer.Reset(left)
		select {
		case <-s.wake:
		case <-timer.C:
		}
	}
}

// waitDeadline returns the end of a wait that may last until by. late: that is the stream's
// deadline. conn.out.mu must be held.
func (s *Stream) waitDeadline(by time.Time) (_ time.Time, late bool) {
	if !s.stopDeadline.IsZero() && s.stopDeadline.Before(by) {
		by = s.stopDeadline
	}
	if !s.deadline.IsZero() && s.deadline.Before(by) {
		return s.deadline, true
	}
	return by, false
}

// endStalled ends a stream whose caller has not read enough in time.
func (s *Stream) endStalled(late bool) error {
	if late {
		s.finish(&Error{CodeDeadline, "the request's deadline has passed and the caller has no credit left"}, ErrDeadline)
		return ErrDeadline
	}
	s.conn.srv.stalled.Add(1)
	message := "the caller has read nothing for "
	if s.Stopped() {
		message = "items sent before the STOP were not read within "
	}
	s.finish(&Error{CodeStalled, message + s.conn.srv.opt.StallTimeout.String()}, ErrStalled)
	return ErrStalled
}

// signal wakes waitSendable. conn.out.mu must be held.
func (s *Stream) signal() {
	if s.wake == nil {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// End ends the stream; why is nil for success. A second End has no effect. END takes no credit.
func (s *Stream) End(why *Error) { s.finish(why, ErrEnded) }

func (s *Stream) finish(why *Error, over error) {
	var scratch [256]byte
	payload := scratch[:0]
	if why != nil {
		payload = appendError(payload, why)
	}
	o := &s.conn.out
	o.mu.Lock()
	if s.ended || o.closed {
		s.ended = true
		if s.sendErr == nil {
			s.sendErr = over
		}
		o.mu.Unlock()
		return
	}
	s.ended = true
	if s.sendErr == nil {
		s.sendErr = over
	}
	s.signal()
	delete(s.conn.streams, s.ID)
	o.streams.Add(-1)
	o.appendOwnFrame(End, s.ID, payload)
}

// kill ends the stream on the caller's side.
func (s *Stream) kill(why error) {
	o := &s.conn.out
	o.mu.Lock()
	if s.sendErr != nil {
		o.mu.Unlock()
		return
	}
	s.sendErr = why
	s.signal()
	f := s.onKill
	o.mu.Unlock()
	if f != nil {
		f()
	}
}

// stop records that the caller asks for a clean end.
func (s *Stream) stop() {
	o := &s.conn.out
	o.mu.Lock()
	if s.stopped || s.sendErr != nil {
		o.mu.Unlock()
		return
	}
	s.stopped, s.stopDeadline = true, time.Now().Add(s.conn.srv.opt.StallTimeout)
	s.signal()
	f := s.onStop
	o.mu.Unlock()
	if f != nil {
		f()
	}
}
