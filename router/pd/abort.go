package pd

import (
	"time"

	"sluice/router/pd/abort"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// This file applies the rules of package abort to a request: it arms the rule of each phase at the front
// and starts the watches over a decode leg.

// abortRule returns the rule for the request in a phase.
func (q *request) abortRule(phase abort.Phase) abort.Rule {
	handle := q.handover.Handle != nil || phase == abort.PhasePrefill && !q.prefillOnly
	return abort.RuleOf(phase, &q.plan.Traits, q.concurrent != nil, handle)
}

// armAbort makes the front carry out the rule of a phase if the client disconnects during its leg.
// disarmAbort ends that.
func (q *request) armAbort(phase abort.Phase) { q.x.OnClientGone(q.cancelFunc(phase)) }

// disarmAbort disarms the rule of the last armAbort. Afterwards nothing runs it any more, but what it
// has started may still go on.
func (q *request) disarmAbort() { q.x.OnClientGone(nil) }

// cancelFunc returns the function that carries out the rule of a phase when the client disconnects. It
// is nil if the runner has no call to cancel: between the legs, and while the relay has the stream.
func (q *request) cancelFunc(phase abort.Phase) func() {
	l := &q.decodeLeg.leg
	if phase == abort.PhasePrefill {
		l = &q.prefillLeg.leg
	}
	switch q.abortRule(phase).Cancel {
	case abort.CancelNow:
		return l.call.CancelFunc()
	case abort.CancelBoth:
		return q.concurrent.cancelBoth
	case abort.CancelPrefillFirst:
		return q.concurrent.abortBoth
	case abort.CancelAfterAnswer:
		return q.prefillLeg.armAbort()
	case abort.CancelAfterAdmission:
		return q.armDecodeAbort()
	}
	return nil
}

// keepsAbortRule reports whether the rule of abort.PhaseDecode stays in force in abort.PhaseAnswer, so that it
// remains armed across the response head. The callbacks of a concurrent prefill leg are armed
// again, because a failure in between returns the leg to its pool.
func (q *request) keepsAbortRule() bool {
	return q.concurrent == nil && q.abortRule(abort.PhaseDecode).Cancel == q.abortRule(abort.PhaseAnswer).Cancel
}

// armDecodeAbort prepares abort.CancelAfterAdmission. The lease of concurrent legs counts from their start,
// because the router does not know yet when prefill answers.
func (q *request) armDecodeAbort() (onGone func()) {
	l := &q.decodeLeg
	began := l.began.Time()
	by := began.Add(q.pd.Lease)
	if q.concurrent == nil {
		by = q.leaseDeadline()
	}
	rule := abort.DecodeLeg{
		Rank: l.rank, Call: l.call, Probes: &q.r.probes, Streamed: q.stream, Releasable: q.prefillLeg.kv.Held().CanRelease(),
		Deadline: by, KnownAt: began.Add(q.pd.AbortDelay),
	}
	if q.concurrent != nil {
		rule.Prefill = q.concurrent
	}
	// Without time to finish, the leg is aborted at once and its engine notifies prefill twice: then
	// the router need not wait for the engine either.
	if q.pd.AbandonedDecodeTimeout > 0 && q.notifiesTwice(l.rank) {
		rule.NotifiesTwice, rule.DrainTime = true, q.pd.AbandonedDecodeTimeout
	}
	return l.armAbort(&rule)
}

// closeGrace returns how long the connection of a decode with a handle stays open after the cancel if
// no event has arrived. vLLM sends the head of a stream before its engine core has the request. If
// the connection closes in between, prefill's blocks stay allocated until the lease ends. The first
// event shows that the core has the request. The grace applies whenever a stream ends early, on a
// goroutine or an event loop.
func (q *request) closeGrace() time.Duration {
	return q.abortRule(abort.PhaseStream).CloseGrace(q.pd.AbortDelay, q.decodeLeg.abort.CanRelease())
}

// reclaimKV frees the blocks of a handle by the rule of the phase in which the client disconnected, or in
// which the response broke off. received says that the decode engine has received its leg, as far as
// the router knows.
func (q *request) reclaimKV(phase abort.Phase, received bool) {
	rule := q.abortRule(phase).Reclaim
	if rule == abort.ReclaimByRelease {
		q.releaseKV()
		return
	}
	q.prefillLeg.reclaimKV(rule, received, q.closeGrace())
}

// usesPrefill reports whether the response is based on the work of handover.Prefill.
func (q *request) usesPrefill() bool { return q.concurrent != nil || q.handover.Handle != nil }

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

// monitorPrefill starts a monitor of the prefill rank that cancels the decode leg.
func (q *request) monitorPrefill(rank *worker.Rank) {
	l := &q.decodeLeg
	if l.monitor == nil {
		l.monitor = new(abort.DownMonitor)
		q.r.downMonitors.Add(l.monitor)
	}
	f := q.settings.Fleet
	incarnation := f.Incarnation(rank)
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == rank {
		incarnation = c.incarnation
	}
	l.monitor.Start(f, rank, incarnation, l.call)
	q.r.downMonitors.Wake()
}

// acceptAnswer ends the watches over the hand-over. It returns false if the hand-over is lost and a
// watch has cancelled the call.
func (q *request) acceptAnswer() bool {
	engineUp := q.decodeLeg.monitor.Finish()
	return q.prefillLeg.transfer.Unguard() && engineUp
}
