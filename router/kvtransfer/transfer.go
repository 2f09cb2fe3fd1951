package kvtransfer

import (
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
)

// Transfer is one hand-over that is watched, from Open to Close. Its methods but those
// that a tier calls are for one goroutine at a time; on a nil Wait they do nothing.
type Transfer struct {
	watcher  *Watcher
	expected completion.Wait
	board    *nixl.CompletionBoard // that ticket was lent from; nil: none was
	slot     nixl.CompletionSlot
	onFailed func() // the method value failed, made once

	// call is the decode leg that is cut when the hand-over is lost; cancelledCall once it
	// was. Whoever swaps it out has the say: a tier that lost it, or Settle that let
	// it go on.
	call    atomic.Pointer[upstream.Call]
	lost    atomic.Bool // told so, or stalled and settled
	stalled atomic.Bool
	stallAt atomic.Int64 // since clock; 0: no stall is looked for

	lingerUntil atomic.Int64 // since clock: when Linger gives up; 0: it does not linger
	onReport    func(completion.Result)
}

// cancelledCall stands in Wait.call for the call that was cut.
var cancelledCall = new(upstream.Call)

// clock is where stallAt counts from, so that no change of the wall clock matters.
var clock = time.Now()

// slotSlack is how long a ticket outlives the time that its request may take.
const slotSlack = time.Minute

// Open begins to watch the hand-over of the request that engines know as id, at the
// time now. It is nil while no tier is up. Close it.
func (w *Watcher) Open(id string, now time.Time) *Transfer {
	if w == nil || w.up.Load() == 0 {
		return nil
	}
	t := w.transfers.Get()
	t.call.Store(nil)
	t.lost.Store(false)
	t.stalled.Store(false)
	w.registry.Open(&t.expected, id, now, t.onFailed)
	return t
}

// AcquireSlot lends the hand-over a slot of the completion board for at most the given
// time from Open, for AppendSlot. One is enough for all tries.
func (t *Transfer) AcquireSlot(timeout time.Duration) {
	if t == nil || t.board != nil {
		return
	}
	b := t.watcher.board.Load()
	if slot, ok := b.Acquire(t.expected.Number(), t.expected.Opened().Add(timeout+slotSlack)); ok {
		t.board, t.slot = b, slot
		t.expected.SetNonce(slot.Nonce)
	}
}

// AppendSlot appends what the decode engine's connector is told of its slot, as
// report.py's hand_out reads it; nothing where none was lent.
func (t *Transfer) AppendSlot(dst []byte) []byte {
	if t == nil || t.board == nil {
		return dst
	}
	dst = strconv.AppendUint(append(dst, `{"slot":`...), uint64(t.slot.Index), 10)
	dst = strconv.AppendUint(append(dst, `,"sequence":"`...), t.slot.Sequence, 16)
	dst = appendHex(append(dst, `","nonce":"`...), t.slot.Nonce)
	dst = appendHex(append(dst, `","request":"`...), t.slot.Request)
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
func (t *Transfer) Guard(call *upstream.Call, stall time.Duration) {
	if t == nil {
		return
	}
	if t.call.Swap(call) == cancelledCall || t.lost.Load() {
		t.lost.Store(true)
		t.cancelCall(call)
		return
	}
	if stall <= 0 {
		return
	}
	t.stallAt.Store(int64(time.Since(clock)+stall) | 1)
	t.watcher.sweeper.Wake()
}

// stallCheckInterval is how late a stall is seen at most.
const stallCheckInterval = 50 * time.Millisecond

// check is the patrol's, over stalls and waits that linger.
func (t *Transfer) check(now time.Time) (active bool) {
	at := t.lingerUntil.Load()
	if at == 0 {
		return t.checkStall(now)
	}
	if r := t.expected.Result(); r.State == completion.Pending && !r.LeaseExpired && int64(now.Sub(clock)) < at {
		return true
	}
	onReport := t.onReport
	t.onReport = nil
	t.watcher.lingering.Add(-1)
	t.lingerUntil.Store(0)
	onReport(t.Close())
	return false
}

// checkStall cuts a call that nothing has been told of in time. The wait may be closed
// and opened for another request meanwhile: then another time stands there.
func (t *Transfer) checkStall(now time.Time) (active bool) {
	at, call := t.stallAt.Load(), t.call.Load()
	if at == 0 || int64(now.Sub(clock)) < at {
		return at != 0
	}
	if t.expected.Result().State != completion.Pending || !t.stallAt.CompareAndSwap(at, 0) {
		return false
	}
	t.stalled.Store(true)
	if !t.cancelCall(call) {
		t.stalled.Store(false)
	}
	return false
}

// Unguard lets the guarded call go on alone. False: it was cut, the hand-over is lost.
func (t *Transfer) Unguard() bool {
	if t == nil {
		return true
	}
	if t.stallAt.Load() != 0 {
		t.stallAt.Store(0)
	}
	for {
		switch call := t.call.Load(); call {
		case cancelledCall:
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
func (t *Transfer) failed() {
	t.lost.Store(true)
	t.cancelCall(t.call.Load())
}

// cancelCall says whether call was still guarded; it is cut then. Behind the swap the Wait may
// be closed and another request's: it is not touched any more.
func (t *Transfer) cancelCall(call *upstream.Call) bool {
	if call == nil || call == cancelledCall || !t.call.CompareAndSwap(call, cancelledCall) {
		return false
	}
	call.Cancel()
	return true
}

// isLost is of the request's goroutine.
func (t *Transfer) isLost() bool { return t.lost.Load() || t.call.Load() == cancelledCall }

// LostReason says why the hand-over cannot succeed, "" while it can. The reasons are
// constants: "expired" (prefill has let go of the blocks), "failed", "stalled".
func (t *Transfer) LostReason() string {
	if t == nil || !t.isLost() {
		return ""
	}
	switch r := t.expected.Result(); {
	case t.stalled.Load():
		return "stalled"
	case r.LeaseExpired:
		return "expired"
	default:
		return "failed"
	}
}

// reportGrace is how long Await waits: a report that is on its way is a millisecond late.
const reportGrace = 30 * time.Millisecond

// AwaitLoss gives a report that is on its way a moment to come, after the engine has
// already said that the request failed. It says whether the hand-over is lost.
func (t *Transfer) AwaitLoss() bool {
	if t == nil {
		return false
	}
	for end := time.Now().Add(reportGrace); !t.isLost(); time.Sleep(time.Millisecond) {
		if t.expected.Result().State == completion.Done || time.Now().After(end) {
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
func (t *Transfer) Pending() bool {
	return t != nil && t.board != nil && t.expected.Result().State == completion.Pending
}

// CloseOnReport is for a request that has ended before anything was told of its hand-over,
// though its engine tells: a starved one may be a second late. It says whether the
// wait goes on, without the request: late is then called once, by a goroutine of
// ours, with what was told until then, and must not block. The Wait is not used after.
func (t *Transfer) CloseOnReport(onReport func(completion.Result)) bool {
	if !t.Pending() || t.isLost() {
		return false
	}
	if t.watcher.lingering.Add(1) > maxLingering {
		t.watcher.lingering.Add(-1)
		return false
	}
	t.Unguard()
	t.onReport = onReport
	t.lingerUntil.Store(int64(time.Since(clock)+lingerFor) | 1)
	t.watcher.sweeper.Wake()
	return true
}

// Close ends the wait and answers what was told. The Wait is not used after.
func (t *Transfer) Close() completion.Result {
	if t == nil {
		return completion.Result{}
	}
	t.Unguard()
	r := t.expected.Close()
	if t.board != nil {
		t.board.Release(t.slot)
		t.board = nil
	}
	t.watcher.count(t, &r)
	t.watcher.transfers.Put(t)
	return r
}
