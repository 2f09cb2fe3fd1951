package transfers

import (
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/nixl"
	"sluice/nixl/completion"
)

// Wait is one hand-over that is watched, from Open to Close. Its methods but those
// that a tier calls are for one goroutine at a time; on a nil Wait they do nothing.
type Wait struct {
	watch  *Watch
	told   completion.Wait
	board  *nixl.Board // that ticket was lent from; nil: none was
	ticket nixl.Ticket
	tell   func() // the method value failed, made once

	// call is the decode leg that is cut when the hand-over is lost; wasCut once it
	// was. Whoever swaps it out has the say: a tier that lost it, or Settle that let
	// it go on.
	call    atomic.Pointer[upstream.Call]
	lost    atomic.Bool // told so, or stalled and settled
	stalled atomic.Bool
	stallAt atomic.Int64 // since clock; 0: no stall is looked for

	lateAt atomic.Int64 // since clock: when Linger gives up; 0: it does not linger
	late   func(completion.Result)
}

// wasCut stands in Wait.call for the call that was cut.
var wasCut = new(upstream.Call)

// clock is where stallAt counts from, so that no change of the wall clock matters.
var clock = time.Now()

// slack is how long a ticket outlives the time that its request may take.
const slack = time.Minute

// Open begins to watch the hand-over of the request that engines know as id, at the
// time now. It is nil while no tier is up. Close it.
func (w *Watch) Open(id string, now time.Time) *Wait {
	if w == nil || w.up.Load() == 0 {
		return nil
	}
	t := w.waits.Get()
	t.call.Store(nil)
	t.lost.Store(false)
	t.stalled.Store(false)
	w.book.Open(&t.told, id, now, t.tell)
	return t
}

// Lend lends the hand-over a slot of the completion board for at most the given
// time from Open, for AppendTicket. One is enough for all tries.
func (t *Wait) Lend(most time.Duration) {
	if t == nil || t.board != nil {
		return
	}
	b := t.watch.board.Load()
	if ticket, ok := b.HandOut(t.told.Number(), t.told.Opened().Add(most+slack)); ok {
		t.board, t.ticket = b, ticket
		t.told.Lent(ticket.Nonce)
	}
}

// AppendTicket appends what the decode engine's connector is told of its slot, as
// report.py's hand_out reads it; nothing where none was lent.
func (t *Wait) AppendTicket(dst []byte) []byte {
	if t == nil || t.board == nil {
		return dst
	}
	dst = strconv.AppendUint(append(dst, `{"slot":`...), uint64(t.ticket.Slot), 10)
	dst = strconv.AppendUint(append(dst, `,"sequence":"`...), t.ticket.Sequence, 16)
	dst = appendHex(append(dst, `","nonce":"`...), t.ticket.Nonce)
	dst = appendHex(append(dst, `","request":"`...), t.ticket.Request)
	dst = strconv.AppendUint(append(dst, `","board":`...), uint64(t.board.ID()), 10)
	return append(dst, '}')
}

// appendHex appends all 16 digits. strconv's form for any base took a sixth of what
// a watched hand-over costs.
func appendHex(dst []byte, n uint64) []byte {
	var digits [16]byte
	for i := range digits {
		digits[i] = "0123456789abcdef"[n>>60]
		n <<= 4
	}
	return append(dst, digits[:]...)
}

// Guard has call cut as soon as the hand-over is told lost, at once where it was
// told so already; and, with a stall above 0, when nothing was told for so long.
// Settle ends it.
func (t *Wait) Guard(call *upstream.Call, stall time.Duration) {
	if t == nil {
		return
	}
	if t.call.Swap(call) == wasCut || t.lost.Load() {
		t.lost.Store(true)
		t.cut(call)
		return
	}
	if stall <= 0 {
		return
	}
	t.stallAt.Store(int64(time.Since(clock)+stall) | 1)
	t.watch.stalls.OnDuty()
}

// stallCheck is how late a stall is seen at most.
const stallCheck = 50 * time.Millisecond

// look is the patrol's, over stalls and waits that linger.
func (t *Wait) look(now time.Time) (onDuty bool) {
	at := t.lateAt.Load()
	if at == 0 {
		return t.stall(now)
	}
	if r := t.told.Result(); r.State == completion.Pending && !r.Lost && int64(now.Sub(clock)) < at {
		return true
	}
	late := t.late
	t.late = nil
	t.watch.lingering.Add(-1)
	t.lateAt.Store(0)
	late(t.Close())
	return false
}

// stall cuts a call that nothing has been told of in time. The wait may be closed
// and opened for another request meanwhile: then another time stands there.
func (t *Wait) stall(now time.Time) (onDuty bool) {
	at, call := t.stallAt.Load(), t.call.Load()
	if at == 0 || int64(now.Sub(clock)) < at {
		return at != 0
	}
	if t.told.Result().State != completion.Pending || !t.stallAt.CompareAndSwap(at, 0) {
		return false
	}
	t.stalled.Store(true)
	if !t.cut(call) {
		t.stalled.Store(false)
	}
	return false
}

// Settle lets the guarded call go on alone. False: it was cut, the hand-over is lost.
func (t *Wait) Settle() bool {
	if t == nil {
		return true
	}
	if t.stallAt.Load() != 0 {
		t.stallAt.Store(0)
	}
	for {
		switch call := t.call.Load(); call {
		case wasCut:
			t.lost.Store(true)
			return false
		case nil:
			return !t.lost.Load()
		default:
			if t.call.CompareAndSwap(call, nil) {
				return true
			}
		}
	}
}

// failed is called by a tier, once.
func (t *Wait) failed() {
	t.lost.Store(true)
	t.cut(t.call.Load())
}

// cut says whether call was still guarded; it is cut then. Behind the swap the Wait may
// be closed and another request's: it is not touched any more.
func (t *Wait) cut(call *upstream.Call) bool {
	if call == nil || call == wasCut || !t.call.CompareAndSwap(call, wasCut) {
		return false
	}
	call.Cut()
	return true
}

// isLost is of the request's goroutine.
func (t *Wait) isLost() bool { return t.lost.Load() || t.call.Load() == wasCut }

// Lost says why the hand-over cannot succeed, "" while it can. The reasons are
// constants: "expired" (prefill has let go of the blocks), "failed", "stalled".
func (t *Wait) Lost() string {
	if t == nil || !t.isLost() {
		return ""
	}
	switch r := t.told.Result(); {
	case t.stalled.Load():
		return "stalled"
	case r.Lost:
		return "expired"
	default:
		return "failed"
	}
}

// grace is how long Await waits: a report that is on its way is a millisecond late.
const grace = 30 * time.Millisecond

// Await gives a report that is on its way a moment to come, after the engine has
// already said that the request failed. It says whether the hand-over is lost.
func (t *Wait) Await() bool {
	if t == nil {
		return false
	}
	for end := time.Now().Add(grace); !t.isLost(); time.Sleep(time.Millisecond) {
		if t.told.Result().State == completion.Done || time.Now().After(end) {
			return false
		}
	}
	return true
}

const (
	lingerFor    = 2 * time.Second
	maxLingering = 1024 // each keeps a slot of the board
)

// Pending says whether something will be told that has not been: the engine is known
// to tell.
func (t *Wait) Pending() bool {
	return t != nil && t.board != nil && t.told.Result().State == completion.Pending
}

// Linger is for a request that has ended before anything was told of its hand-over,
// though its engine tells: a starved one may be a second late. It says whether the
// wait goes on, without the request: late is then called once, by a goroutine of
// ours, with what was told until then, and must not block. The Wait is not used after.
func (t *Wait) Linger(late func(completion.Result)) bool {
	if !t.Pending() || t.isLost() {
		return false
	}
	if t.watch.lingering.Add(1) > maxLingering {
		t.watch.lingering.Add(-1)
		return false
	}
	t.Settle()
	t.late = late
	t.lateAt.Store(int64(time.Since(clock)+lingerFor) | 1)
	t.watch.stalls.OnDuty()
	return true
}

// Close ends the wait and answers what was told. The Wait is not used after.
func (t *Wait) Close() completion.Result {
	if t == nil {
		return completion.Result{}
	}
	t.Settle()
	r := t.told.Close()
	if t.board != nil {
		t.board.Release(t.ticket)
		t.board = nil
	}
	t.watch.count(t, &r)
	t.watch.waits.Put(t)
	return r
}
