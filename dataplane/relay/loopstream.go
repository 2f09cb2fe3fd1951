package relay

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/upstream"
)

// attachToLoop attaches the stream to an event loop where that is possible. From then on no
// goroutine owns the stream until the loop detaches it. over: the stream was attached before, and
// its call has been cancelled.
func (s *stream) attachToLoop() (attached, over bool) {
	if s.loops == nil || !s.chunked || s.resp.Buffered() > 0 || !s.resp.CanDetach() {
		return false, false
	}
	if s.detachConns() {
		return true, false
	}
	if s.detached {
		s.endCancelled()
	}
	return false, s.detached
}

// endCancelled ends the reading from an engine whose call was cancelled. It passes on the bytes
// that had arrived, if Options.DrainOnCancel wants them.
func (s *stream) endCancelled() {
	if drain := s.extras.drainOnCancel; drain != nil && drain() && s.drain() {
		return
	}
	s.readEnded(s.resp.DetachedError(upstream.ErrCancelled))
}

// drain passes on what the connection still holds; it is shut down but open. It returns whether the
// stream has ended by that.
func (s *stream) drain() bool {
	buf := membudget.Default.Get(largeRead)
	defer func() { membudget.Default.Put(buf) }()
	for {
		n, errno := rawsocket.Recv(int(s.engineFD), buf.B)
		if n <= 0 || errno != 0 {
			return false
		}
		if s.forward(buf.B[:n], time.Now()) && !s.migrating {
			return true
		}
		s.migrating = false
	}
}

// detachConns hands both descriptors to a loop, which may call back before detachConns returns.
func (s *stream) detachConns() bool {
	state := new(loopState)
	t, ok := &state.task, false
	t.Handler, t.WriteTimeout, t.Idle = (*loopStream)(s), s.writeTimeout, s.idleTimeout
	if t.Out, t.Sink, ok = s.dst.LoopOutput(); !ok {
		return false
	}
	t.NotifySent = s.scanning || s.editor != nil
	var deadline time.Time
	if t.In, deadline, ok = s.resp.Detach(&state.detached, t); !ok {
		return false
	}
	if by := time.Now().Add(lastGrace); s.scan.answered() && (deadline.IsZero() || by.Before(deadline)) {
		deadline = by
	}
	t.SetDeadline(deadline)
	if !s.deadlineSetAt.IsZero() {
		s.deadlineSetAt = 0
		_ = s.dst.SetWriteDeadline(time.Time{})
	}
	s.detached, s.engineFD = true, int32(t.In)
	if s.firstByte.IsZero() {
		s.lastByte = monotime.Of(time.Now())
	}
	s.loops.Attach(t)
	return true
}

// loopState is what a loop needs of a stream. There are thousands, so it fills a size class.
type loopState struct {
	task     eventloop.Task
	detached upstream.Detachment
}

// engineCloser cancels a stream whose engine connection is detached but used by no loop.
type engineCloser stream

// Cancel implements upstream.Canceller.
func (s *engineCloser) Cancel() { (*stream)(s).shutdownEngine() }

// loopStream is a stream as its loop sees it.
type loopStream stream

// Process implements eventloop.Handler.
func (l *loopStream) Process(p []byte, t time.Time) (out []byte, done bool) {
	s := (*stream)(l)
	before, events := s.lastByte, s.scan.events // before the first byte: the response head came just before the attach
	out = s.process(p, t)
	if s.scan.events > events+1 {
		s.resp.NoteDelayedEvents(time.Duration(s.lastByte - before))
	}
	if s.engineDone() {
		s.dst.BeforeEnd()
		return out, true
	}
	s.migrating = s.shouldMigrate()
	return out, s.migrating
}

// Sent implements the optional method of an eventloop.Handler.
func (l *loopStream) Sent() (most time.Duration) {
	l.editor.releaseSent()
	if l.scan.answered() {
		most = lastGrace
	}
	return most
}

// Ended implements eventloop.Handler.
func (l *loopStream) Ended(e eventloop.End) {
	s := (*stream)(l)
	s.dst.Resume(func() (Result, bool) { return s.resumeAfterLoop(e) })
}

// shutdownEngine shuts the engine's connection down while no loop uses it, so that the engine
// notices at once.
func (s *stream) shutdownEngine() { _ = unix.Shutdown(int(s.engineFD), unix.SHUT_RDWR) }

// errClientBudget: a client reads slowly and no more memory may be held for it.
var errClientBudget = errors.New("the client reads slowly and the memory budget (limits.memory_budget) is exhausted")

// resumeAfterLoop continues the stream on a goroutine after the loop has detached it.
func (s *stream) resumeAfterLoop(e eventloop.End) (res Result, ended bool) {
	s.bytes += e.Sent
	var failed error
	if e.Reason == eventloop.SinkFull {
		// The client accepts no more bytes for now. This goroutine waits for it, and no loop reads
		// that a cancellation could end. So a cancellation shuts down the connection, which stays
		// open until Release.
		if _, _, ok := s.resp.Detach(new(upstream.Detachment), (*engineCloser)(s)); !ok {
			s.shutdownEngine()
		}
		if failed = s.writeAt(nil, time.Now()); failed == nil && !s.engineDone() && !s.migrating {
			return s.relay()
		}
		e.Reason = eventloop.Done
	}
	if (e.Reason == eventloop.ReadIdle || e.Reason == eventloop.DeadlineExceeded || e.Reason == eventloop.Cancelled) && !s.firstByte.IsZero() {
		s.shutdownEngine() // a slow client that takes the rest must not keep the engine busy
	}
	if e.Unsent != nil {
		switch e.Reason {
		case eventloop.SendFailed, eventloop.SendStalled, eventloop.BudgetExhausted, eventloop.Panicked:
		default:
			s.dst.BeforeEnd()
			failed = s.writeAt(e.Unsent.B, time.Now())
		}
		e.Release()
	}
	switch {
	case e.Reason == eventloop.Panicked:
		s.releasePartialBudget()
		panic(e.Err)
	case e.Reason == eventloop.SendFailed:
		_ = s.clientFailed(ClientGone, e.Err)
	case e.Reason == eventloop.SendStalled:
		_ = s.clientFailed(ClientStalled, ErrStalled)
	case e.Reason == eventloop.BudgetExhausted:
		_ = s.clientFailed(ClientStalled, errClientBudget)
	case failed != nil:
	case e.Reason == eventloop.Done && s.migrating:
	case e.Reason == eventloop.Done:
		s.recordEnd()
	case e.Reason == eventloop.ReadIdle || e.Reason == eventloop.DeadlineExceeded:
		s.readEnded(s.resp.DetachedError(upstream.ErrTimeout))
	case e.Reason == eventloop.Cancelled:
		s.endCancelled()
	default:
		s.readEnded(s.resp.DetachedError(e.Err))
	}
	s.migrating = s.migrating && e.Reason == eventloop.Done && failed == nil
	if s.migrate() {
		return s.relay()
	}
	return s.finish(), true
}
