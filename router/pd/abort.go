package pd

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/pd/abort"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// This file applies the rules of package abort to a request: it arms the rule of each phase at the front
// and starts the watches over a decode leg.

// abortRule returns the rule for the request in a phase.
func (q *request) abortRule(phase abort.Phase) abort.Rule {
	return abort.RuleOf(phase, &q.plan.Traits, q.concurrent != nil, q.handover.Handle != nil)
}

// armAbort makes the front apply the rule of a phase if the client disconnects during the leg.
// OnClientGone(nil), or disarmPrefillAbort for a prefill leg, disarms it.
func (q *request) armAbort(l *leg, phase abort.Phase) {
	switch q.abortRule(phase).Cancel {
	case abort.CancelNow:
		q.x.OnClientGone(l.call.CancelFunc())
	case abort.CancelBoth:
		q.x.OnClientGone(q.concurrent.cutBoth)
	case abort.CancelPrefillFirst:
		q.x.OnClientGone(q.concurrent.abortBoth)
	case abort.CancelAfterAnswer:
		q.armPrefillAbort(l.call, l.reservation)
	case abort.CancelAfterAdmission:
		q.armDecodeAbort(l)
	}
}

// keepsAbortRule reports whether the rule of abort.PhaseDecode stays in force in abort.PhaseAnswer, so that it
// remains armed across the response head. The callbacks of a concurrent prefill leg are armed
// again, because a failure in between returns the leg to its pool.
func (q *request) keepsAbortRule() bool {
	return q.concurrent == nil && q.abortRule(abort.PhaseDecode).Cancel == q.abortRule(abort.PhaseAnswer).Cancel
}

// armPrefillAbort arms abort.CancelAfterAnswer for a prefill leg until disarmPrefillAbort.
func (q *request) armPrefillAbort(call *upstream.Call, res *schedule.Reservation) {
	if q.prefillAbort == nil {
		q.prefillAbort = abort.NewPrefill()
	}
	q.x.OnClientGone(q.prefillAbort.Arm(call, res))
}

// disarmPrefillAbort disarms the rule of a prefill leg. It reports whether the rule was armed and
// the client has disconnected.
func (q *request) disarmPrefillAbort() (aborted bool) {
	q.x.OnClientGone(nil)
	l := q.prefillAbort
	if !l.WasStarted() {
		return false
	}
	l.Stop()
	q.call, q.prefillAbort = nil, nil // the timer may still use them
	return true
}

// armDecodeAbort arms abort.CancelAfterAdmission. The lease of concurrent legs counts from their start,
// because the router does not know yet when prefill answers.
func (q *request) armDecodeAbort(l *leg) {
	rank, call, began := l.rank, l.call, l.began.time()
	by := began.Add(q.pd.Lease)
	if q.concurrent == nil {
		by = q.leaseDeadline()
	}
	leg := abort.DecodeLeg{
		Rank: rank, Call: call, Probes: &q.r.probes, Streamed: q.stream, Releasable: q.kv.Held().CanRelease(),
		Deadline: by, KnownAt: began.Add(q.pd.AbortDelay),
	}
	if q.concurrent != nil {
		leg.Prefill = q.concurrent
	}
	// Without time to finish, the leg is aborted at once and its engine notifies prefill twice: then
	// the router need not wait for the engine either.
	if q.pd.AbandonedDecode > 0 && q.notifiesTwice(rank) {
		leg.NotifiesTwice, leg.DrainTime = true, q.pd.AbandonedDecode
	}
	l.abort = q.newDecodeAbort()
	q.x.OnClientGone(l.abort.Arm(&leg))
}

// closeGrace returns how long the connection of a decode with a handle stays open after the cancel if
// no event has arrived. vLLM sends the head of a stream before its engine core has the request. If
// the connection closes in between, prefill's blocks stay allocated until the lease ends. The first
// event shows that the core has the request. The grace applies whenever a stream ends early, on a
// goroutine or an event loop.
func (q *request) closeGrace(l *leg) time.Duration {
	return q.abortRule(abort.PhaseStream).CloseGrace(q.pd.AbortDelay, l.abort.CanRelease())
}

// usesPrefill reports whether the response is based on the work of handover.Prefill.
func (q *request) usesPrefill() bool { return q.concurrent != nil || q.handover.Handle != nil }

// onKV applies an event to the blocks of the request's handle.
func (q *request) onKV(event abort.Event) {
	was := q.kv.IsHeld()
	q.kv.On(event)
	q.countLeased(was)
}

// acquireKV begins the hand-over of a handle with the given lease, which may be nil.
func (q *request) acquireKV(lease *sidechannel.Lease) {
	was := q.kv.IsHeld()
	q.kv.Acquire(lease)
	q.countLeased(was)
}

// handOverKV transfers the state of the blocks to the stream of a leg.
func (q *request) handOverKV(l *leg) abort.KV {
	was := q.kv.IsHeld()
	kv := q.kv.HandOver(q.abortRule(abort.PhaseStream).Reclaim, q.closeGrace(l))
	q.countLeased(was)
	return kv
}

// countLeased updates Runner.LeasedHandles after a change of kv. It counts the handles that are held.
func (q *request) countLeased(was bool) {
	switch is := q.kv.IsHeld(); {
	case is && !was:
		q.r.leased.Add(1)
	case was && !is:
		q.r.leased.Add(-1)
	}
}

// giveUpKV ends the handle's blocks after a decode stream has ended between its head and its first event.
func (q *request) giveUpKV(l *leg) {
	q.kv.SetEarlyEnd(q.abortRule(abort.PhaseAnswer).Reclaim, q.closeGrace(l))
	was := q.kv.IsHeld()
	q.kv.GiveUp()
	q.countLeased(was)
}

// notifiesTwice reports whether a decode engine may tell prefill twice to free the blocks when its
// non-streaming request is cancelled.
//
// vLLM does so from 0.21 on: the API server treats the cancelled call like one that the engine core
// never received. Prefill logs "Potentially invalid KV blocks for unrecognized request" and counts
// a notification after expiry, which are also the signs of a real fault. Sluice's connector
// suppresses the second notification.
func (q *request) notifiesTwice(rank *worker.Rank) bool {
	return q.plan.Traits.Pulls && !q.stream && q.handover.Handle != nil && rank.VersionAtLeast(0, 21, 0) && rank.Option("connector") != "true"
}

// monitorPrefill starts a monitor of the prefill rank that cancels call.
func (q *request) monitorPrefill(rank *worker.Rank, call *upstream.Call) {
	if q.downMonitor == nil {
		q.downMonitor = new(abort.DownMonitor)
		q.r.downMonitors.Add(q.downMonitor)
	}
	f := q.settings.Fleet
	incarnation := f.Incarnation(rank)
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == rank {
		incarnation = c.incarnation
	}
	q.downMonitor.Start(f, rank, incarnation, call)
	q.r.downMonitors.Wake()
}

// acceptAnswer ends the watches over the hand-over. It returns false if the hand-over is lost and a
// watch has cancelled the call.
func (q *request) acceptAnswer() bool {
	engineUp := q.downMonitor.Finish()
	return q.transfer.Unguard() && engineUp
}
