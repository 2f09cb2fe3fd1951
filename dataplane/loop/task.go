package loop

import (
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

const (
	readSize = 32 << 10 // what one read brings at most
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

// Passer is what the Handler of a Task that Tells is besides: Passed is called once what
// Take gave is not needed any more, unless the Task has left by then. It gives how long the
// Task may last from then on at the most, 0 where that is as it was before.
type Passer interface{ Passed() (most time.Duration) }

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

	until  instant // EndBy
	lastIn instant
	sent   int64
	slow   *slow // while Out has not taken all
	loop   atomic.Pointer[Loop]
	slot   uint32
	gen    uint32

	Tells    bool // the Handler is a Passer
	cut      atomic.Bool
	attached bool // the loop has begun with it, once
	state    state
	paused   bool  // In is not read: Out takes no more
	polling  bool  // Out is in the poller
	queued   bool  // stands in the loop's outbox
	again    bool  // stands in the loop's list of those to be read once more
	reading  bool  // In is in the poller
	wary     uint8 // before so many reads more it is asked whether Out has room; waryReads until the first
}

// slow is what a Task has besides while its Out has not taken all that it was given, or
// has no room for more that has come.
type slow struct {
	held    *membudget.Buffer // held.B[from:] is to be sent; nil: nothing
	from    int
	counted int64   // of Options.Budget
	blocked instant // since then Out has taken less than MinProgress
	unsent  int     // of the socket at that time; -1: not looked at
}

// instant is a time counted from the package's start, in ns; 0 for none.
type instant int64

var epoch = time.Now()

// at is 0 at no time a Task can see: epoch is past by then.
func at(t time.Time) instant { return instant(t.Sub(epoch)) }

// EndBy says until when the Task may last at the most; zero for ever. It is called
// before the Task is attached.
func (t *Task) EndBy(by time.Time) {
	if !by.IsZero() {
		t.until = max(at(by), 1)
	}
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
	if t.slow == nil || t.slow.held == nil {
		return 0
	}
	return len(t.slow.held.B) - t.slow.from
}

// mayRead is how many bytes are to be read at a time now; 0: none before Out is told to
// take more. full: the read before has brought as many as it was to.
func (t *Task) mayRead(full bool) int {
	if t.Sink != nil {
		return readSize
	}
	if !full && t.wary == 0 {
		return smallRead
	}
	room, writable := sock.Room(t.Out)
	if !writable && t.wary < waryReads { // else it has just been told
		return 0
	}
	if t.wary > 0 {
		t.wary--
	}
	// The kernel counts its own books of what lies there as well: at worst, with packets of a
	// network's size, as many bytes again.
	return min(max(room/2, smallRead), readSize)
}

// hold keeps a copy of p for Out; false when the budget is spent. It takes as much room
// as it needs, since what follows is not read before this has gone.
func (t *Task) hold(p []byte, now instant, budget *membudget.Budget) bool {
	have := t.heldBytes()
	size := int64(membudget.SizeOf(have + len(p)))
	if budget != nil && !budget.Acquire(size) {
		if size > leastHeld {
			return false
		}
		size = 0 // any client may be a moment late
	}
	room := membudget.Default.Get(have + len(p))
	next := &slow{held: room, counted: size, blocked: now, unsent: -1}
	if was := t.slow; was != nil {
		copy(room.B, was.held.B[was.from:])
		if have > 0 {
			next.blocked, next.unsent = was.blocked, was.unsent
		}
		t.drop(budget)
	}
	copy(room.B[have:], p)
	t.slow = next
	return true
}

// drop gives the held bytes' memory back.
func (t *Task) drop(budget *membudget.Budget) {
	s := t.slow
	if s == nil {
		return
	}
	membudget.Default.Put(s.held)
	if budget != nil {
		budget.Release(s.counted)
	}
	t.slow = nil
}

// sendSome writes what Out takes of p at once; errno is 0 when that was not all
// because Out is full.
func (t *Task) sendSome(p []byte) (n int, errno syscall.Errno) {
	if n, errno = sock.Send(t.Out, p); errno == syscall.EAGAIN {
		errno = 0
	}
	return n, errno
}
