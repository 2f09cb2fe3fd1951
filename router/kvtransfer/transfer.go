package kvtransfer

import (
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/upstream"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
)

// Transfer is one watched hand-over, from Open to Close. A tier calls failed from its own
// goroutine; all other methods are for one goroutine at a time. The methods of a nil Transfer
// do nothing.
type Transfer struct {
	watcher  *Watcher
	expected completion.Wait
	board    *nixl.CompletionBoard // the board that slot belongs to; nil: no slot was acquired
	slot     nixl.CompletionSlot
	onFailed func() // the method value of failed, created once to avoid an allocation

	// call is the decode leg that is cancelled when the hand-over is lost, and cancelledCall
	// after that. The goroutine that swaps the call out decides: a tier, which cancels it, or
	// Unguard, which lets it continue.
	call    atomic.Pointer[upstream.Call]
	lost    atomic.Bool // a tier reported the loss, or the request's goroutine has seen the call cancelled
	stalled atomic.Bool
	stallAt atomic.Int64 // a monotime.Time; 0: stalls are not detected

	lingerUntil atomic.Int64 // a monotime.Time: when CloseOnReport gives up; 0: it is not waiting
	onReport    func(completion.Result)
}

// cancelledCall is the value of Transfer.call after the call was cancelled.
var cancelledCall = new(upstream.Call)

// slotSlack is how long a slot outlives the maximum duration of its request.
const slotSlack = time.Minute

// Open starts to watch the hand-over of the request whose X-Request-Id is id. now is the
// current time. Open returns nil while no tier is up. The caller must Close the Transfer.
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

// AcquireSlot acquires a slot of the completion board for AppendSlot. The slot is valid for at
// most timeout from Open, plus slotSlack. One slot serves all attempts of the request.
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

// AppendSlot appends the JSON object that describes the slot to the decode engine's connector,
// as slot_of of report.py reads it. It appends nothing when no slot was acquired.
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

// appendHex appends n as 16 hexadecimal digits. strconv.AppendUint took a sixth of the cost of
// a watched hand-over.
func appendHex(dst []byte, n uint64) []byte {
	var digits [16]byte
	for i := range digits {
		digits[i] = "0123456789abcdef"[n>>60]
		n <<= 4
	}
	return append(dst, digits[:]...)
}

// Guard cancels call as soon as the hand-over is reported lost, at once if it was already. With
// a stall above 0, Guard also cancels call when no report arrives for that long. Unguard ends
// this.
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
	t.stallAt.Store(int64(monotime.Uptime()+stall) | 1)
	t.watcher.sweeper.Wake()
}

// stallCheckInterval is the maximum delay before a stall is detected.
const stallCheckInterval = 50 * time.Millisecond

// check is the sweeper's callback. It looks for stalls and finishes transfers for which
// CloseOnReport waits.
func (t *Transfer) check(now time.Time) (active bool) {
	at := t.lingerUntil.Load()
	if at == 0 {
		return t.checkStall(now)
	}
	if r := t.expected.Result(); r.State == completion.Pending && !r.LeaseExpired && int64(monotime.Of(now)) < at {
		return true
	}
	onReport := t.onReport
	t.onReport = nil
	t.watcher.lingering.Add(-1)
	t.lingerUntil.Store(0)
	onReport(t.Close())
	return false
}

// checkStall cancels a call for which no report arrived in time. The Transfer may be closed and
// opened for another request meanwhile; stallAt then has another value and the swap fails.
func (t *Transfer) checkStall(now time.Time) (active bool) {
	at, call := t.stallAt.Load(), t.call.Load()
	if at == 0 || int64(monotime.Of(now)) < at {
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

// Unguard lets the guarded call continue without supervision. It returns false when the call
// was cancelled, which means that the hand-over is lost.
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

// failed marks the hand-over lost and cancels the guarded call. A tier calls it at most once.
func (t *Transfer) failed() {
	t.lost.Store(true)
	t.cancelCall(t.call.Load())
}

// cancelCall cancels call and returns true if it was still guarded. After the swap the Transfer
// may be closed and used for another request, so cancelCall does not touch it again.
func (t *Transfer) cancelCall(call *upstream.Call) bool {
	if call == nil || call == cancelledCall || !t.call.CompareAndSwap(call, cancelledCall) {
		return false
	}
	call.Cancel()
	return true
}

// isLost is for the request's goroutine only.
func (t *Transfer) isLost() bool { return t.lost.Load() || t.call.Load() == cancelledCall }

// LostReason returns why the hand-over cannot succeed, "" while it can. The reasons are
// constants: "expired" (the prefill engine has freed the blocks), "failed", "stalled".
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

// reportGrace bounds AwaitLoss. A report in flight arrives about a millisecond after the
// engine's answer.
const reportGrace = 30 * time.Millisecond

// AwaitLoss waits up to reportGrace for a report in flight, after the engine has answered that
// the request failed. It returns whether the hand-over is lost.
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
	maxLingering = 1024 // each one occupies a slot of the board
)

// Pending returns whether a report is expected that has not arrived. It is false without a
// slot, because the engine may not run the connector then.
func (t *Transfer) Pending() bool {
	return t != nil && t.board != nil && t.expected.Result().State == completion.Pending
}

// CloseOnReport is for a request that ended before the report of its hand-over arrived,
// although its engine runs the connector; the report of a starved engine may be a second late.
// If CloseOnReport returns true, the watch continues without the request, and the sweeper's
// goroutine calls onReport once with the result. onReport must not block. The caller must not
// use the Transfer afterwards. If it returns false, the caller still owns the Transfer.
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
	t.lingerUntil.Store(int64(monotime.Uptime()+lingerFor) | 1)
	t.watcher.sweeper.Wake()
	return true
}

// Close ends the watch and returns what was reported. The caller must not use the Transfer
// afterwards.
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
