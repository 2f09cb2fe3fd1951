package pd

import (
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/upstream"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/pd/abort"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// legRecord is the account of one engine call: its rank, the reservation of load on that rank, and
// what the Observer learns about it. All drivers of a call share its methods to start, complete and
// release it: a request's goroutine (prefillLeg, decodeLeg), a stream that outlives the request
// (streamState), and a goroutine of the leg's own (concurrentPrefill, kvRelease).
type legRecord struct {
	settings    *settings     // of the request for which the call is made
	model       ModelObserver // nil: the call serves no request
	rank        *worker.Rank
	reservation *schedule.Reservation // nil after release
	began       monotime.Time
	predicted   int32 // number of prompt tokens that the rank should have cached
	status      int16 // HTTP status of the engine's response; 0 if none arrived
	kind        schedule.LegKind
	completed   bool
	entryLeg    int8              // the leg's number in entry
	entry       *requestlog.Entry // of the request; nil: none
}

// start opens the account of a leg that is about to be sent.
func (l *legRecord) start() {
	l.began, l.completed = monotime.Of(time.Now()), false
	l.settings.Observer.LegStarted(l.kind, l.rank.ID)
	l.entryLeg = int8(l.entry.StartLeg(l.kind.String(), l.rank.ID.Worker, int(l.rank.ID.Rank), int(l.predicted), l.began.Time()))
	l.entry.SetLegEngine(int(l.entryLeg), l.rank.URL, l.rank.Worker.Info().Engine)
}

// complete reports the leg's outcome to the Observer. Only the first call has an effect.
func (l *legRecord) complete(outcome string) { l.completeAfter(outcome, l.elapsed()) }

// completeAfter is complete for a leg whose response arrived before now.
func (l *legRecord) completeAfter(outcome string, took time.Duration) {
	if l.completed {
		return
	}
	l.completed = true
	l.settings.Observer.LegEnded(l.kind, l.rank.ID, outcome, took)
	if l.model != nil && outcome == "ok" {
		l.model.LegEnded(l.kind, took)
	}
	l.entry.EndLeg(int(l.entryLeg), outcome, took)
}

// release releases the leg's reservation on its rank. Only the first call has an effect. The
// Reservation may serve another request afterwards.
func (l *legRecord) release() {
	l.reservation.Release()
	l.reservation = nil
}

// end completes the leg and releases its reservation.
func (l *legRecord) end(outcome string) {
	l.release()
	l.complete(outcome)
}

// elapsed returns the time since the leg was sent.
func (l *legRecord) elapsed() time.Duration { return l.began.Since() }

// leg is an engine call that a request's goroutine drives. A request has one for prefill and one for
// the other kinds. Each serves one engine call after another, and passes its memory to the next
// request unless something else may still use it.
type leg struct {
	legRecord
	call *upstream.Call // the engine call; nil between legs
	own  *upstream.Call // memory for call; nil if another goroutine may still cancel the last one
}

// newCall makes the leg's own Call ready for another call.
func (l *leg) newCall() {
	if l.own == nil || l.own.Cancelled() {
		l.own = new(upstream.Call)
	} else {
		l.own.Reset()
	}
	l.call = l.own
}

// shareCall says that another goroutine may cancel the call after the leg.
func (l *leg) shareCall() {
	if l.call == l.own {
		l.own = nil
	}
}

// startLeg opens the account of a leg on the rank of a choice. The leg takes over the choice's
// reservation. The request counts the leg as a try.
func (q *request) startLeg(l *legRecord, kind schedule.LegKind, choice *schedule.Choice) {
	*l = legRecord{settings: q.settings, model: q.modelObserver, rank: choice.Rank, reservation: choice.Reservation, predicted: int32(choice.CachedTokens), kind: kind, entry: q.entry}
	if q.resumption == nil && q.modelObserver != nil && q.tries == [len(q.tries)]int{} {
		q.modelObserver.Queued(time.Since(q.req.Received))
	}
	q.tries[kind]++
	q.legSent = true
	l.start()
}

// prefillLeg is the prefill leg of an attempt. It owns the handle that prefill returns, until the
// attempt ends or a stream takes the handle over. Of Concurrent legs it has only the transfer: the
// rest is in concurrentPrefill.
type prefillLeg struct {
	leg
	abort    *abort.Prefill       // carries out abort.CancelAfterAnswer; nil until that rule has been armed
	kv       abort.KV             // state of the handle's blocks
	handleAt time.Time            // when prefill returned the handle
	transfer *kvtransfer.Transfer // reports about the transfer; nil if no engine reports any
}

// startPrefill starts a prefill leg that this goroutine drives.
func (q *request) startPrefill(choice *schedule.Choice) *prefillLeg {
	l := &q.prefillLeg
	l.newCall()
	q.startLeg(&l.legRecord, schedule.PrefillLeg, choice)
	return l
}

// armAbort prepares abort.CancelAfterAnswer and returns the function to call when the client
// disconnects. disarmAbort must follow the leg.
func (l *prefillLeg) armAbort() (onGone func()) {
	if l.abort == nil {
		l.abort = abort.NewPrefill()
	}
	return l.abort.Arm(l.call, l.reservation)
}

// disarmAbort ends the abort of a leg whose rule the front has disarmed. It reports whether the rule
// was abort.CancelAfterAnswer and the client has disconnected.
func (l *prefillLeg) disarmAbort() (aborted bool) {
	if !l.abort.WasStarted() {
		return false
	}
	l.abort.Stop()
	l.shareCall() // the timer may still use both
	l.abort = nil
	return true
}

// onKV applies an event to the blocks of the handle.
func (l *prefillLeg) onKV(event abort.Event) {
	was := l.kv.IsHeld()
	l.kv.On(event)
	l.countLeased(was)
}

// acquireKV begins the hand-over of a handle with the given lease, which may be nil.
func (l *prefillLeg) acquireKV(lease *sidechannel.Lease) {
	was := l.kv.IsHeld()
	l.kv.Acquire(lease)
	l.countLeased(was)
}

// reclaimKV ends the blocks of a handle by the rule of a client's disconnect, see abort.KV.Reclaim.
func (l *prefillLeg) reclaimKV(rule abort.ReclaimRule, received bool, grace time.Duration) {
	was := l.kv.IsHeld()
	l.kv.Reclaim(rule, received, grace)
	l.countLeased(was)
}

// takeKVForStream transfers the state of the blocks to a stream, with the rule for its early end.
func (l *prefillLeg) takeKVForStream(rule abort.ReclaimRule, grace time.Duration) abort.KV {
	was := l.kv.IsHeld()
	kv := l.kv.TakeForStream(rule, grace)
	l.countLeased(was)
	return kv
}

// countLeased updates Runner.LeasedHandles after a change of kv. It counts the handles that are held.
func (l *prefillLeg) countLeased(was bool) {
	switch is := l.kv.IsHeld(); {
	case is && !was:
		l.settings.r.leased.Add(1)
	case was && !is:
		l.settings.r.leased.Add(-1)
	}
}

// unwatch ends the watch over the transfer without a result.
func (l *prefillLeg) unwatch() {
	if l.transfer != nil {
		l.transfer.Close()
		l.transfer = nil
	}
}

// abandon ends what the leg still owns: the watch over the transfer and the handle.
func (l *prefillLeg) abandon() {
	l.unwatch()
	l.onKV(abort.Abandoned)
	l.kv = abort.KV{}
}

// reset prepares the leg for another request. The leg has been abandoned.
func (l *prefillLeg) reset() {
	if l.abort.WasStarted() { // only after a panic
		l.own, l.abort = nil, nil
	}
	*l = prefillLeg{leg: leg{own: l.own}, abort: l.abort}
}

// decodeLeg is the leg whose response the client gets: decode, or the whole request on one rank. Its
// owner either ends it or hands its record over to a stream.
type decodeLeg struct {
	leg
	abort    *abort.Decode // carries out abort.CancelAfterAdmission; nil: another rule applies to this leg
	ownAbort *abort.Decode // memory for abort
	// monitor watches prefill's engine while the leg waits for its KV; nil until it is needed.
	monitor *abort.DownMonitor
	// hasConnector says that the engine reports the leg's transfer by Sluice's connector.
	hasConnector bool
}

// startDecode starts a decode leg or a whole leg. call is that of Concurrent legs, else nil.
func (q *request) startDecode(kind schedule.LegKind, choice *schedule.Choice, call *upstream.Call) *decodeLeg {
	l := &q.decodeLeg
	l.dropShared()
	l.abort, l.hasConnector = nil, false
	if l.call = call; call == nil {
		l.newCall()
	}
	q.startLeg(&l.legRecord, kind, choice)
	return l
}

// dropShared drops the memory of the last leg that its abort or the monitor may still use.
func (l *decodeLeg) dropShared() {
	if l.ownAbort.WasStarted() {
		l.own, l.ownAbort = nil, nil
	}
	if l.monitor.InUse() {
		l.own = nil
	}
}

// armAbort prepares abort.CancelAfterAdmission and returns the function to call when the client
// disconnects.
func (l *decodeLeg) armAbort(rule *abort.DecodeLeg) (onGone func()) {
	if l.ownAbort == nil {
		l.ownAbort = abort.NewDecode()
	}
	l.abort = l.ownAbort
	return l.abort.Arm(rule)
}

// takeForStream transfers the leg's account to a stream and leaves nothing to end in the leg.
func (l *decodeLeg) takeForStream(status int) legRecord {
	record := l.legRecord
	record.status = int16(status)
	l.reservation, l.completed = nil, true
	l.shareCall()
	return record
}

// reset prepares the leg for another request. The monitor has been reset.
func (l *decodeLeg) reset() {
	l.dropShared()
	*l = decodeLeg{leg: leg{own: l.own}, ownAbort: l.ownAbort, monitor: l.monitor}
}
