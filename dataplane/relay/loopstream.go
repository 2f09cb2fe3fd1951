package relay

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/upstream"
)

// attachToLoop gives the stream to a loop, where that is possible: from here on no goroutine
// is the stream's until left. over says that it was in a loop before and can not go
// on, having been cut.
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

// endCancelled ends the reading from an engine that was cut, with what had come of it where
// that is wanted.
func (s *stream) endCancelled() {
	if drain := s.extras.drainOnCancel; drain != nil && drain() && s.drain() {
		return
	}
	s.readEnded(s.resp.DetachedError(upstream.ErrCancelled))
}

// drain passes on what lies in the connection, which is shut and still open; true when
// the stream has ended by that.
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

// detachConns hands both descriptors to a loop, which may call back before it returns.
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
	if by := time.Now().Add(lastGrace); s.scan.ended && (deadline.IsZero() || by.Before(deadline)) {
		deadline = by
	}
	t.SetDeadline(deadline)
	if !s.deadlineSetAt.isZero() {
		s.deadlineSetAt = 0
		_ = s.dst.SetWriteDeadline(time.Time{})
	}
	s.detached, s.engineFD = true, int32(t.In)
	if s.firstByte.isZero() {
		s.lastByte = monoTimeOf(time.Now())
	}
	s.loops.Attach(t)
	return true
}

// loopState is what a loop needs of a stream, and what the engine's connection does while
// it is lent. There are thousands: it fills a size class.
type loopState struct {
	task     eventloop.Task
	detached upstream.Detachment
}

// engineCloser is a stream whose engine's connection no loop has.
type engineCloser stream

// Cancel implements upstream.Cutter.
func (s *engineCloser) Cancel() { (*stream)(s).shutdownEngine() }

// loopStream is a stream as its loop sees it.
type loopStream stream

// Process implements loop.Handler.
func (l *loopStream) Process(p []byte, t time.Time) (out []byte, done bool) {
	s := (*stream)(l)
	before, events := s.lastByte, s.scan.events // where nothing has come, the head came just before it was lent
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

// Sent implements loop.Passer.
func (l *loopStream) Sent() (most time.Duration) {
	l.editor.releaseSent()
	if l.scan.ended {
		most = lastGrace
	}
	return most
}

// Ended implements loop.Handler.
func (l *loopStream) Ended(e eventloop.End) {
	s := (*stream)(l)
	s.dst.Resume(func() (Result, bool) { return s.resumeAfterLoop(e) })
}

// shutdownEngine ends the reading from an engine whose connection no loop has; the engine learns
// of it at once.
func (s *stream) shutdownEngine() { _ = unix.Shutdown(int(s.engineFD), unix.SHUT_RDWR) }

// errClientBudget is the detail of a slow client for whom nothing more may be held.
var errClientBudget = errors.New("the client reads slowly, and the memory for request bodies and slow clients (limits.memory_budget) is spent")

// resumeAfterLoop goes on, on a goroutine, where the loop has left off.
func (s *stream) resumeAfterLoop(e eventloop.End) (res Result, ended bool) {
	s.bytes += e.Sent
	var failed error
	if e.Reason == eventloop.SinkFull {
		// The client takes no more for now: that is waited for here, where no loop reads
		// that a Cut could end. So it shuts the connection, which stays open until Release.
		if _, _, ok := s.resp.Detach(new(upstream.Detachment), (*engineCloser)(s)); !ok {
			s.shutdownEngine()
		}
		if failed = s.writeAt(nil, time.Now()); failed == nil && !s.engineDone() && !s.migrating {
			return s.relay()
		}
		e.Reason = eventloop.Done
	}
	if (e.Reason == eventloop.ReadIdle || e.Reason == eventloop.DeadlineExceeded || e.Reason == eventloop.Cancelled) && !s.firstByte.isZero() {
		s.shutdownEngine() // the engine is not kept at work while a slow client takes what is left
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
