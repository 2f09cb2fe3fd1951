package eventloop

import (
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

const (
	readSize = 32 << 10 // what one read brings at most
	// minUnsent is what may be held for any stream, whatever the budget says: what one
	// read brings.
	minUnsent = 64 << 10
	// MinProgress is what a client must take in WriteTimeout to count as slow, not
	// as stalled.
	MinProgress = 1 << 10
)

// Handler is what a stream does with its bytes. Its methods are called on the loop's
// thread, one at a time, and must not block.
type Handler interface {
	// Take looks at what came from In, in pieces cut anywhere, and gives what goes
	// to Out: a part of p, or memory that stays as it is until the next Take. done
	// says that nothing more is to be read.
	Process(p []byte, now time.Time) (out []byte, done bool)
	// Left tells that the loop has let go of the Task; it is the last call.
	Ended(End)
}

// SentObserver is what the Handler of a Task that Tells is besides: Passed is called once what
// Take gave is not needed any more, unless the Task has left by then. It gives how long the
// Task may last from then on at the most, 0 where that is as it was before.
type SentObserver interface{ Sent() (most time.Duration) }

// Sink takes a stream's bytes in place of a descriptor: what becomes of them is its own
// business. Put is called on the loop's thread and must not wait.
type Sink interface {
	// Put takes all of p. full says that it wants no more for now: the Task leaves with
	// Full. due, where not nil, is what sends: the loop flushes it once, when what else
	// it has read is passed on too.
	Send(p []byte) (due Flusher, full bool, err error)
}

// Flusher is something to be done once for many Puts. It must not wait.
type Flusher interface{ Flush() }

// Reason a Task left its loop.
type Reason uint8

// The reasons.
const (
	Done             Reason = iota // Take said so
	ReadFailed                     // End.Err; io.EOF when In was closed
	ReadIdle                       // nothing came for Idle
	DeadlineExceeded               // Until has come
	SendFailed                     // End.Err
	SendStalled                    // Out took next to nothing for WriteTimeout
	SinkFull                       // Sink said so; nothing is lost, and another Task may go on
	BudgetExhausted                // Out is slow, and Options.Budget spent
	Cancelled                      // Cut was called, or the loops were closed
	Panicked                       // the Handler did; End.Err
)

// End is how a Task left.
type End struct {
	Reason Reason
	Err    error
	Sent   int64 // bytes written to Out
	// Held is what Out has not taken yet, nil for nothing. The receiver gives it
	// back by Release.
	Unsent *membudget.Buffer

	budgeted int64
	budget   *membudget.Budget
}

// Task is one stream. The caller fills the exported fields; both descriptors are
// non-blocking, belong to nobody else's poller for reading, and stay open until Left.
//
// A Task is attached once. There are thousands: with what package relay lays beside it, it
// just fills a size class of 144 bytes.
//
// Memory order: Attach hands the Task to the loop's thread through the inbox's lock,
// Left hands it back. Between them everything but loop and cut is the loop's. Cut
// stores cut before it loads loop, admit stores loop before enter loads cut: one of
// the two sees the other.
type Task struct {
	In, Out      int
	Sink         Sink // in place of Out, which is -1 then
	Handler      Handler
	WriteTimeout time.Duration
	Idle         time.Duration // 0: none

	deadline monoTime // SetDeadline
	lastIn   monoTime
	sent     int64
	unsent   *unsentState // while Out has not taken all
	loop     atomic.Pointer[Loop]
	slot     uint32
	gen      uint32

	NotifySent bool // the Handler is a Passer
	cancelled  atomic.Bool
	attached   bool // the loop has begun with it, once
	state      taskState
	paused     bool  // In is not read: Out takes no more
	polling    bool  // Out is in the poller
	queued     bool  // stands in the loop's outbox
	readAgain  bool  // stands in the loop's list of those to be read once more
	reading    bool  // In is in the poller
	roomChecks uint8 // before so many reads more it is asked whether Out has room; roomCheckReads until the first
}

// unsentState is what a Task has besides while its Out has not taken all that it was given, or
// has no room for more that has come.
type unsentState struct {
	buf          *membudget.Buffer // held.B[from:] is to be sent; nil: nothing
	off          int
	budgeted     int64    // of Options.Budget
	stalledSince monoTime // since then Out has taken less than MinProgress
	socketUnsent int      // of the socket at that time; -1: not looked at
}

// monoTime is a time counted from the package's start, in ns; 0 for none.
type monoTime int64

var epoch = time.Now()

// monoTimeOf is 0 at no time a Task can see: epoch is past by then.
func monoTimeOf(t time.Time) monoTime { return monoTime(t.Sub(epoch)) }

// SetDeadline says until when the Task may last at the most; zero for ever. It is called
// before the Task is attached.
func (t *Task) SetDeadline(by time.Time) {
	if !by.IsZero() {
		t.deadline = max(monoTimeOf(by), 1)
	}
}

type taskState uint8

const (
	taskDetached taskState = iota // not attached yet, or left
	taskAttached
)

// Cancel ends the Task, from any goroutine and at any time: before Attach it ends it as
// soon as that is called, after Left it does nothing.
func (t *Task) Cancel() {
	if t.cancelled.Swap(true) {
		return
	}
	if l := t.loop.Load(); l != nil { // else enter sees cut
		l.notifyCancelled(t)
	}
}

// unsentBytes is how much Out has not taken yet.
func (t *Task) unsentBytes() int {
	if t.unsent == nil || t.unsent.buf == nil {
		return 0
	}
	return len(t.unsent.buf.B) - t.unsent.off
}

// readLimit is how many bytes are to be read at a time now; 0: none before Out is told to
// take more. full: the read before has brought as many as it was to.
func (t *Task) readLimit(full bool) int {
	if t.Sink != nil {
		return readSize
	}
	if !full && t.roomChecks == 0 {
		return smallRead
	}
	space, writable := rawsocket.SendSpace(t.Out)
	if !writable && t.roomChecks < roomCheckReads { // else it has just been told
		return 0
	}
	if t.roomChecks > 0 {
		t.roomChecks--
	}
	// The kernel counts its own books of what lies there as well: at worst, with packets of a
	// network's size, as many bytes again.
	return min(max(space/2, smallRead), readSize)
}

// queueUnsent keeps a copy of p for Out; false when the budget is spent. It takes as much room
// as it needs, since what follows is not read before this has gone.
func (t *Task) queueUnsent(p []byte, now monoTime, budget *membudget.Budget) bool {
	have := t.unsentBytes()
	size := int64(membudget.SizeOf(have + len(p)))
	if budget != nil && !budget.Acquire(size) {
		if size > minUnsent {
			return false
		}
		size = 0 // any client may be a moment late
	}
	buf := membudget.Default.Get(have + len(p))
	next := &unsentState{buf: buf, budgeted: size, stalledSince: now, socketUnsent: -1}
	if prev := t.unsent; prev != nil {
		copy(buf.B, prev.buf.B[prev.off:])
		if have > 0 {
			next.stalledSince, next.socketUnsent = prev.stalledSince, prev.socketUnsent
		}
		t.releaseUnsent(budget)
	}
	copy(buf.B[have:], p)
	t.unsent = next
	return true
}

// releaseUnsent gives the held bytes' memory back.
func (t *Task) releaseUnsent(budget *membudget.Budget) {
	s := t.unsent
	if s == nil {
		return
	}
	membudget.Default.Put(s.buf)
	if budget != nil {
		budget.Release(s.budgeted)
	}
	t.unsent = nil
}

// sendSome writes what Out takes of p at once; errno is 0 when that was not all
// because Out is full.
func (t *Task) sendSome(p []byte) (n int, errno syscall.Errno) {
	if n, errno = rawsocket.Send(t.Out, p); errno == syscall.EAGAIN {
		errno = 0
	}
	return n, errno
}
