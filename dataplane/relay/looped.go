package relay

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/loop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
	"sluice/dataplane/upstream"
)

// lend gives the stream to a loop, where that is possible: from here on no goroutine
// is the stream's until left. over says that it was in a loop before and can not go
// on, having been cut.
func (s *stream) lend() (lent, over bool) {
	if s.loops == nil || !s.chunked || s.resp.Buffered() > 0 || !s.resp.Lendable() {
		return false, false
	}
	if s.attach() {
		return true, false
	}
	if s.lent {
		s.wasCut()
	}
	return false, s.lent
}

// wasCut ends the reading from an engine that was cut, with what had come of it where
// that is wanted.
func (s *stream) wasCut() {
	if drains := s.rare.drains; drains != nil && drains() && s.drain() {
		return
	}
	s.readEnded(s.resp.Return(upstream.ErrCut))
}

// drain passes on what lies in the connection, which is shut and still open; true when
// the stream has ended by that.
func (s *stream) drain() bool {
	buf := membudget.Default.Get(largeRead)
	defer func() { membudget.Default.Put(buf) }()
	for {
		n, errno := sock.Recv(int(s.in), buf.B)
		if n <= 0 || errno != 0 {
			return false
		}
		if s.pass(buf.B[:n], time.Now()) && !s.leaving {
			return true
		}
		s.leaving = false
	}
}

// attach hands both descriptors to a loop, which may call back before it returns.
func (s *stream) attach() bool {
	lending := new(lending)
	t, ok := &lending.task, false
	t.Handler, t.WriteTimeout, t.Idle = (*looped)(s), s.writeTimeout, s.idleTimeout
	switch client := s.dst.(type) {
	case loop.Sink:
		t.Out, t.Sink = -1, client
	case Descriptor:
		if t.Out, ok = client.Descriptor(); !ok {
			return false
		}
	default:
		return false
	}
	t.Tells = s.scanning || s.edit != nil
	var until time.Time
	if t.In, until, ok = s.resp.Lend(&lending.place, t); !ok {
		return false
	}
	if by := time.Now().Add(lastGrace); s.scan.ended && (until.IsZero() || by.Before(until)) {
		until = by
	}
	t.EndBy(until)
	if !s.armed.never() {
		s.armed = 0
		_ = s.dst.SetWriteDeadline(time.Time{})
	}
	s.lent, s.in = true, int32(t.In)
	if s.firstByte.never() {
		s.lastByte = at(time.Now())
	}
	s.loops.Attach(t)
	return true
}

// lending is what a loop needs of a stream, and what the engine's connection does while
// it is lent. There are thousands: it fills a size class.
type lending struct {
	task  loop.Task
	place upstream.Lending
}

// shutter is a stream whose engine's connection no loop has.
type shutter stream

// Cut implements upstream.Cutter.
func (s *shutter) Cut() { (*stream)(s).shut() }

// looped is a stream as its loop sees it.
type looped stream

// Take implements loop.Handler.
func (l *looped) Take(p []byte, t time.Time) (out []byte, done bool) {
	s := (*stream)(l)
	before, events := s.lastByte, s.scan.events // where nothing has come, the head came just before it was lent
	out = s.look(p, t)
	if s.scan.events > events+1 {
		s.resp.HeldBack(time.Duration(s.lastByte - before))
	}
	if s.isOver() {
		s.ending()
		return out, true
	}
	s.leaving = s.mayLeave()
	return out, s.leaving
}

// Passed implements loop.Passer.
func (l *looped) Passed() (most time.Duration) {
	l.edit.passed()
	if l.scan.ended {
		most = lastGrace
	}
	return most
}

// Left implements loop.Handler.
func (l *looped) Left(e loop.End) {
	s := (*stream)(l)
	s.dst.(Resumer).Resume(func() (Result, bool) { return s.left(e) })
}

// shut ends the reading from an engine whose connection no loop has; the engine learns
// of it at once.
func (s *stream) shut() { _ = unix.Shutdown(int(s.in), unix.SHUT_RDWR) }

// errNoRoom is the detail of a slow client for whom nothing more may be held.
var errNoRoom = errors.New("the client reads slowly, and the memory for request bodies and slow clients (limits.body_budget) is spent")

// left goes on, on a goroutine, where the loop has left off.
func (s *stream) left(e loop.End) (res Result, ended bool) {
	s.bytes += e.Sent
	var failed error
	if e.Why == loop.Full {
		// The client takes no more for now: that is waited for here, where no loop reads
		// that a Cut could end. So it shuts the connection, which stays open until Release.
		if _, _, ok := s.resp.Lend(new(upstream.Lending), (*shutter)(s)); !ok {
			s.shut()
		}
		if failed = s.writeAt(nil, time.Now()); failed == nil && !s.isOver() && !s.leaving {
			return s.drive()
		}
		e.Why = loop.Done
	}
	if (e.Why == loop.ReadIdle || e.Why == loop.ReadLate || e.Why == loop.WasCut) && !s.firstByte.never() {
		s.shut() // the engine is not kept at work while a slow client takes what is left
	}
	if e.Held != nil {
		switch e.Why {
		case loop.SendFailed, loop.SendStalled, loop.NoRoom, loop.Panicked:
		default:
			s.ending()
			failed = s.writeAt(e.Held.B, time.Now())
		}
		e.Release()
	}
	switch {
	case e.Why == loop.Panicked:
		s.uncountParts()
		panic(e.Err)
	case e.Why == loop.SendFailed:
		_ = s.clientFailed(ClientGone, e.Err)
	case e.Why == loop.SendStalled:
		_ = s.clientFailed(ClientStalled, ErrStalled)
	case e.Why == loop.NoRoom:
		_ = s.clientFailed(ClientStalled, errNoRoom)
	case failed != nil:
	case e.Why == loop.Done && s.leaving:
	case e.Why == loop.Done:
		s.settle()
	case e.Why == loop.ReadIdle || e.Why == loop.ReadLate:
		s.readEnded(s.resp.Return(upstream.ErrTimeout))
	case e.Why == loop.WasCut:
		s.wasCut()
	default:
		s.readEnded(s.resp.Return(e.Err))
	}
	s.leaving = s.leaving && e.Why == loop.Done && failed == nil
	if s.carryOn() {
		return s.drive()
	}
	return s.finish(), true
}
