package loop

import (
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

const (
	// leastHeld is what may be held for any stream, whatever the budget says: what one
	// read brings.
	leastHeld = 64 << 10
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
	Take(p []byte, now time.Time) (out []byte, done bool)
	// Left tells that the loop has let go of the Task; it is the last call.
	Left(End)
}

// Sink takes a stream's bytes in place of a descriptor: what becomes of them is its own
// business. Put is called on the loop's thread and must not wait.
type Sink interface {
	// Put takes all of p. full says that it wants no more for now: the Task leaves with
	// Full. due, where not nil, is what sends: the loop flushes it once, when what else
	// it has read is passed on too.
	Put(p []byte) (due Flusher, full bool, err error)
}

// Flusher is something to be done once for many Puts. It must not wait.
type Flusher interface{ Flush() }

// Why a Task left its loop.
type Why uint8

// The reasons.
const (
	Done        Why = iota // Take said so
	ReadFailed             // End.Err; io.EOF when In was closed
	ReadIdle               // nothing came for Idle
	ReadLate               // Until has come
	SendFailed             // End.Err
	SendStalled            // Out took next to nothing for WriteTimeout
	Full                   // Sink said so; nothing is lost, and another Task may go on
	NoRoom                 // Out is slow, and Options.Budget spent
	WasCut                 // Cut was called, or the loops were closed
	Panicked               // the Handler did; End.Err
)

// End is how a Task left.
type End struct {
	Why  Why
	Err  error
	Sent int64 // bytes written to Out
	// Held is what Out has not taken yet, nil for nothing. The receiver gives it
	// back by Release.
	Held *membudget.Buffer

	counted int64
	budget  *membudget.Budget
}

// Task is one stream. The caller fills the exported fields; both descriptors are
// non-blocking, belong to nobody else's poller for reading, and stay open until Left.
//
// A Task is attached once.
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
	Until        time.Time     // zero: none

	loop     atomic.Pointer[Loop]
	cut      atomic.Bool
	attached bool // the loop has begun with it, once

	slot    uint32
	gen     uint32
	state   state
	sent    int64
	paused  bool // In is not read: Out takes no more, and something is held
	polling bool // Out is in the poller
	queued  bool // stands in the loop's outbox
	again   bool // stands in the loop's list of those to be read once more
	reading bool // In is in the poller

	lastIn  time.Time
	held    *membudget.Buffer // held.B[from:] is to be sent
	from    int
	counted int64     // of Options.Budget
	blocked time.Time // since then Out has taken less than MinProgress
	unsent  int       // of the socket at that time; -1: not looked at
}

type state uint8

const (
	outside state = iota // not attached yet, or left
	inside
)

// Cut ends the Task, from any goroutine and at any time: before Attach it ends it as
// soon as that is called, after Left it does nothing.
func (t *Task) Cut() {
	if t.cut.Swap(true) {
		return
	}
	if l := t.loop.Load(); l != nil { // else enter sees cut
		l.post(t)
	}
}

// heldBytes is how much Out has not taken yet.
func (t *Task) heldBytes() int {
	if t.held == nil {
		return 0
	}
	return len(t.held.B) - t.from
}

// hold keeps a copy of p for Out; false when the budget is spent. It takes as much room
// as it needs, since what follows is not read before this has gone.
func (t *Task) hold(p []byte, now time.Time, budget *membudget.Budget) bool {
	have := t.heldBytes()
	if have == 0 {
		t.blocked, t.unsent = now, -1
	}
	size := int64(membudget.SizeOf(have + len(p)))
	if budget != nil && !budget.Acquire(size) {
		if size > leastHeld {
			return false
		}
		size = 0 // any client may be a moment late
	}
	room := membudget.Default.Get(have + len(p))
	if t.held != nil {
		copy(room.B, t.held.B[t.from:])
		t.drop(budget)
	}
	copy(room.B[have:], p)
	t.held, t.from, t.counted = room, 0, size
	return true
}

// drop gives the held bytes' memory back.
func (t *Task) drop(budget *membudget.Budget) {
	if t.held == nil {
		return
	}
	membudget.Default.Put(t.held)
	if budget != nil {
		budget.Release(t.counted)
	}
	t.held, t.from, t.counted = nil, 0, 0
}

// sendSome writes what Out takes of p at once; errno is 0 when that was not all
// because Out is full.
func (t *Task) sendSome(p []byte) (n int, errno syscall.Errno) {
	if n, errno = sock.Send(t.Out, p); errno == syscall.EAGAIN {
		errno = 0
	}
	return n, errno
}
