package eventloop

import (
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
)

const (
	readSize = 32 << 10 // the most that one read returns
	// minUnsent is what may be held for any stream, whatever the budget: the data of one read.
	minUnsent = 64 << 10
	// MinProgress is how many bytes a client must read within WriteTimeout to count as slow and not
	// as stalled.
	MinProgress = 1 << 10
)

// Handler processes the bytes of one stream. Its methods are called on the loop's thread, one at a
// time, and must not block.
type Handler interface {
	// Process takes bytes from In, cut anywhere, and returns the bytes for Out: a part of p, or
	// memory that stays unchanged until the next Process. done: nothing more is read.
	Process(p []byte, now time.Time) (out []byte, done bool)
	// Ended is the last call: the loop has detached the Task.
	Ended(End)
}

// SentObserver is implemented by the Handler of a Task with NotifySent. Sent is called when the
// output of Process is no longer needed, unless the Task has ended by then. It returns a bound on
// the rest of the Task's life; 0: unchanged.
type SentObserver interface{ Sent() (most time.Duration) }

// Sink receives a stream's bytes in place of a descriptor. Send is called on the loop's thread and
// must not block.
type Sink interface {
	// Send accepts all of p. full: it wants no more for now, and the Task ends with SinkFull. due,
	// unless nil, does the actual sending: the loop flushes it once after it has handled everything
	// that it has read.
	Send(p []byte) (due Flusher, full bool, err error)
}

// Flusher sends what several calls of Send have accepted. It must not block.
type Flusher interface{ Flush() }

// Reason is why a Task has ended.
type Reason uint8

// The reasons.
const (
	Done             Reason = iota // Process returned done
	ReadFailed                     // End.Err; io.EOF if In was closed
	ReadIdle                       // no byte came for Idle
	DeadlineExceeded               // SetDeadline
	SendFailed                     // End.Err
	SendStalled                    // Out accepted less than MinProgress for WriteTimeout
	SinkFull                       // the Sink was full; nothing is lost and another Task may continue
	BudgetExhausted                // Out is slow and Options.Budget is exhausted
	Cancelled                      // Cancel was called, or the Loops were closed
	Panicked                       // the Handler or Sink panicked; End.Err
)

// End describes how a Task has ended.
type End struct {
	Reason Reason
	Err    error
	Sent   int64 // bytes written to Out
	// Unsent are the bytes that Out has not accepted; nil: none. The receiver releases them by
	// Release.
	Unsent *membudget.Buffer

	budgeted int64
	budget   *membudget.Budget
}

// Task is one stream. The caller sets the exported fields. Both descriptors are non-blocking, are
// read by no other poller, and stay open until Ended is called. A Task is attached once.
//
// There are thousands of Tasks. With what package relay stores beside it, a Task fills a size class
// of 144 bytes exactly.
//
// Memory order: Attach passes the Task to the loop's thread through the inbox's lock, and Ended
// passes it back. Between them the loop owns every field but loop and cancelled. Cancel stores
// cancelled before it loads loop, and admit stores loop before enqueue loads cancelled, so one of
// the two sees the other.
type Task struct {
	In, Out      int
	Sink         Sink // in place of Out, which is -1 then
	Handler      Handler
	WriteTimeout time.Duration
	Idle         time.Duration // 0: none

	deadline monotime.Time // SetDeadline
	lastIn   monotime.Time
	sent     int64
	unsent   *unsentState // while Out has not accepted everything
	loop     atomic.Pointer[Loop]
	slot     uint32
	gen      uint32

	NotifySent bool // the Handler is a SentObserver
	cancelled  atomic.Bool
	attached   bool // the loop has started the Task
	state      taskState
	paused     bool  // In is not read until Out accepts more
	polling    bool  // Out is in the poller
	queued     bool  // in the loop's outbox
	readAgain  bool  // in the loop's list of tasks to read again
	reading    bool  // In is in the poller
	roomChecks uint8 // reads until Out's space is checked again; roomCheckReads until the first
}

// unsentState is the state of a Task while its Out has not accepted everything, or has no space for
// data that has come.
type unsentState struct {
	buf          *membudget.Buffer // bytes to be sent; nil: none
	off          int
	budgeted     int64         // of Options.Budget
	stalledSince monotime.Time // Out has accepted less than MinProgress since then
	socketUnsent int           // bytes in the socket at that time; -1: not checked
}

// SetDeadline bounds the Task's life; zero: no bound. It is called before the Task is attached.
func (t *Task) SetDeadline(by time.Time) {
	if !by.IsZero() {
		t.deadline = max(monotime.Of(by), 1)
	}
}

type taskState uint8

const (
	taskDetached taskState = iota // not attached yet, or ended
	taskAttached
)

// Cancel ends the Task. It may be called from any goroutine at any time. Before Attach it takes
// effect as soon as the Task is attached; after Ended it has no effect.
func (t *Task) Cancel() {
	if t.cancelled.Swap(true) {
		return
	}
	if l := t.loop.Load(); l != nil { // else enqueue sees cancelled
		l.notifyCancelled(t)
	}
}

// unsentBytes returns how many bytes Out has not accepted yet.
func (t *Task) unsentBytes() int {
	if t.unsent == nil || t.unsent.buf == nil {
		return 0
	}
	return len(t.unsent.buf.B) - t.unsent.off
}

// readLimit returns how many bytes to read at a time now; 0: none until Out has been reported
// writable. full: the last read was as long as its limit.
func (t *Task) readLimit(full bool) int {
	if t.Sink != nil {
		return readSize
	}
	if !full && t.roomChecks == 0 {
		return smallRead
	}
	space, writable := rawsocket.SendSpace(t.Out)
	if !writable && t.roomChecks < roomCheckReads { // else it has just been reported
		return 0
	}
	if t.roomChecks > 0 {
		t.roomChecks--
	}
	// The kernel counts its overhead too: at worst, with network packets, as much again.
	return min(max(space/2, smallRead), readSize)
}

// queueUnsent copies p for Out; false: the budget is exhausted. It allocates no more than needed,
// because nothing is read before these bytes have been sent.
func (t *Task) queueUnsent(p []byte, now monotime.Time, budget *membudget.Budget) bool {
	have := t.unsentBytes()
	size := int64(membudget.SizeOf(have + len(p)))
	if budget != nil && !budget.Acquire(size) {
		if size > minUnsent {
			return false
		}
		size = 0 // any client may be briefly late
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

// releaseUnsent releases the held bytes.
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

// sendSome writes what Out accepts of p at once. errno is 0 if Out is full.
func (t *Task) sendSome(p []byte) (n int, errno syscall.Errno) {
	if n, errno = rawsocket.Send(t.Out, p); errno == syscall.EAGAIN {
		errno = 0
	}
	return n, errno
}
