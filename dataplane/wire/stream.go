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
	ErrStalled    = errors.New("wire: the caller takes nothing")
	ErrDeadline   = errors.New("wire: the stream's time is over, and the caller has taken too little to be told so")
	ErrEnded      = errors.New("wire: the stream has ended")
)

// Stream is one request and its answer, at the server. Send and End belong to
// one goroutine at a time; the rest may be called from anywhere.
type Stream struct {
	ID uint32
	// Payload of the REQUEST frame, borrowed until ServeStream returns, or Taken.
	Payload []byte

	conn  *Conn
	lease membudget.Lease

	// Guarded by conn.out.mu.
	credit       int64
	sendErr      error // why nothing may be sent any more; nil: it may
	stopped      bool
	deadline     time.Time // SetDeadline's
	stopDeadline time.Time // the end of what a STOP has left to be sent
	ended        bool      // END has been sent, or cannot be
	wake         chan struct{}
	onStop       func()
	onKill       func()
}

// ReleasePayload gives Payload's memory back before ServeStream returns.
func (s *Stream) ReleasePayload() {
	s.Payload = nil
	s.lease.Release()
}

// Budget is what Lend counts in.
func (s *Stream) Budget() *membudget.Budget { return s.conn.srv.budget }

// LeaseMemory gives n bytes counted like requests' payloads, for what a request becomes; false
// when the memory for requests is spent. The caller releases them.
func (s *Stream) LeaseMemory(n int) (membudget.Lease, bool) {
	return membudget.Default.Lease(s.conn.srv.budget, n)
}

// Peer is the caller's address; loopback for a unix socket, whose file's
// permissions say who may call.
func (s *Stream) Peer() netip.Addr { return s.conn.peer }

// Agent is what the caller called itself in its HELLO.
func (s *Stream) Agent() string { return s.conn.agent }

// Unix says whether the caller came over a unix socket.
func (s *Stream) Unix() bool { return s.conn.unix }

// Key is what the caller showed in its HELLO, which Options.Admit has seen. It must
// not be changed, nor logged.
func (s *Stream) Key() []byte { return s.conn.key }

// Watch arranges that onStop is called once when the caller asks to stop, and
// onKill once when it kills the stream or is lost; each on a goroutine of its own
// choosing, at once where that has happened already. They must not block.
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

// Stopped says whether the caller has asked to stop.
func (s *Stream) Stopped() bool {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	return s.stopped
}

// Err says why nothing can be sent any more, nil while it can.
func (s *Stream) Err() error {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	return s.sendErr
}

// SetDeadline bounds what Send waits for, beside StallTimeout; zero takes the bound
// away. Behind it what the caller has credit for is still sent, and nothing is waited
// for.
func (s *Stream) SetDeadline(t time.Time) {
	o := &s.conn.out
	o.mu.Lock()
	defer o.mu.Unlock()
	s.deadline = t
	s.signal()
}

// Send sends one item; it copies payload. It waits while the caller has given no
// credit or the connection's queue is full, for the server's StallTimeout at
// most, from a STOP on for all that is left to be sent, and then fails with ErrStalled;
// at the deadline with ErrDeadline: the stream is over. An item over the client's credit
// goes out as long as some credit is left, so that none is too large for a window.
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

// TrySend is Send for who must not wait: taken is false where Send would wait, and
// nothing was done then. What was taken goes out with other streams' items; where due
// is true the caller must see to that, by a Flush soon, of which one is enough for all
// that was offered before it.
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

// Flush sends what was offered; only after an Offer that said it was due. It does not
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

// waitDeadline is the end of a wait that may last to the given time; late: it is the stream's
// deadline. Called under conn.out.mu.
func (s *Stream) waitDeadline(by time.Time) (_ time.Time, late bool) {
	if !s.stopDeadline.IsZero() && s.stopDeadline.Before(by) {
		by = s.stopDeadline
	}
	if !s.deadline.IsZero() && s.deadline.Before(by) {
		return s.deadline, true
	}
	return by, false
}

// endStalled ends a stream whose caller has not taken enough in time.
func (s *Stream) endStalled(late bool) error {
	if late {
		s.finish(&Error{CodeDeadline, "the request's time is over, and the caller has no credit left to be told so by an item"}, ErrDeadline)
		return ErrDeadline
	}
	s.conn.srv.stalled.Add(1)
	message := "nothing was taken for "
	if s.Stopped() {
		message = "what was left at the STOP was not taken within "
	}
	s.finish(&Error{CodeStalled, message + s.conn.srv.opt.StallTimeout.String()}, ErrStalled)
	return ErrStalled
}

// signal wakes await; called under conn.out.mu.
func (s *Stream) signal() {
	if s.wake == nil {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// End ends the stream, well with nil; a second end does nothing. END takes no
// credit.
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

// kill ends the stream from the caller's side.
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

// stop notes that the caller wants the stream's clean end.
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
