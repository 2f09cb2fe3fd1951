package abort

import (
	"time"

	"sluice/router/pd/family"
)

// Phase is the phase of a request in which its client disconnects. Before the first leg, and
// while a request waits for a worker, no leg has been sent and there is nothing to cancel.
type Phase uint8

const (
	// PhasePrefill: the prefill leg runs alone and has not been answered. Concurrent legs are in
	// PhaseDecode or PhaseAnswer while prefill runs.
	PhasePrefill Phase = iota
	// PhaseBetween: prefill has answered; no decode engine has seen the handle.
	PhaseBetween
	// PhaseDecode: the decode leg, or the only leg, has been sent, and its response head has not
	// arrived.
	PhaseDecode
	// PhaseAnswer: the head has arrived, and the runner reads the response or a stream's first
	// event.
	PhaseAnswer
	// PhaseStream: the front relays the response. The relay cancels the call itself.
	PhaseStream

	phases
)

// legClass says what the legs of a request keep on the prefill engine. A disconnect must not leave it
// there.
type legClass uint8

const (
	// classUnleased: one leg without a handle, or a family whose handles lease nothing
	// (Traits.NoLease): LMCache, storage, orchestrated, SGLang without a bootstrap port.
	classUnleased legClass = iota
	// classLeased: a handle leases blocks until a decode engine fetches them or the lease ends:
	// NIXL, TensorRT-LLM, Mooncake before vLLM 0.16, and nixl-push where the legs run one after the
	// other.
	classLeased
	// classRoom: both legs run at once and meet in a room. Each engine drops its half when its
	// connection ends: SGLang.
	classRoom
	// classTransfer: both legs run at once, and prefill keeps blocks until decode asks for them
	// or a lease ends: Mooncake, nixl-push.
	classTransfer

	legClasses
)

// CancelRule says which legs are cancelled, and when.
type CancelRule uint8

const (
	CancelNothing CancelRule = iota + 1 // no leg is active in this phase
	// CancelNow closes the leg's connection.
	CancelNow
	// CancelBoth closes the connections of both legs.
	CancelBoth
	// CancelAfterAnswer lets prefill answer, because only that response names the blocks. It
	// half-closes the call after abortWait, or a little later if prefill is predicted to end soon.
	CancelAfterAnswer
	// CancelAfterAdmission half-closes a concurrent prefill leg. It cancels decode after the decode
	// engine has admitted the request and can therefore notify prefill; see Decode for the
	// bounds.
	CancelAfterAdmission
	// CancelPrefillFirst half-closes prefill and cancels decode after prefill has ended.
	CancelPrefillFirst
	// CancelByRelay: the relay closes decode's connection. The end of the stream cancels a concurrent
	// prefill leg.
	CancelByRelay
	// CancelByRelayAfterGrace: like CancelByRelay, but the connection stays open for a grace if no
	// event has arrived, because the handle may not have reached the engine's core yet.
	CancelByRelayAfterGrace
)

// ReclaimRule says how the blocks that prefill leased are freed.
type ReclaimRule uint8

const (
	ReclaimNothing ReclaimRule = iota + 1 // nothing is leased, or the engine frees the blocks when the connection closes
	// ReclaimByRelease releases the blocks over the side channel, or sends a decode leg of one
	// token (releaseKV).
	ReclaimByRelease
	// ReclaimByDecode relies on the decode engine, which notifies prefill. If the engine may not
	// have received the request, the router releases the blocks over the side channel.
	ReclaimByDecode
	// ReclaimAfterGrace releases the blocks over the side channel after a grace, unless decode has
	// generated a token or answered.
	ReclaimAfterGrace
)

// Rule is what a client's disconnect causes in one phase.
type Rule struct {
	Cancel  CancelRule
	Reclaim ReclaimRule
}

// rules has the rule for every class and phase. Package pd carries out both columns of all of them: the
// request's cancelFunc or, in PhaseStream, the relay cancels; KV.Reclaim or, for ReclaimByRelease, releaseKV
// reclaims, and KV.GiveUp in PhaseStream. A zero rule means that the phase does not exist
// for the class: concurrent legs have neither a phase with prefill alone nor one between the legs.
var rules = [legClasses][phases]Rule{
	classUnleased: {
		PhasePrefill: {CancelNow, ReclaimNothing},
		PhaseBetween: {CancelNothing, ReclaimNothing},
		PhaseDecode:  {CancelNow, ReclaimNothing},
		PhaseAnswer:  {CancelNow, ReclaimNothing},
		PhaseStream:  {CancelByRelay, ReclaimNothing},
	},
	classLeased: {
		PhasePrefill: {CancelAfterAnswer, ReclaimByRelease},
		PhaseBetween: {CancelNothing, ReclaimByRelease},
		PhaseDecode:  {CancelAfterAdmission, ReclaimByDecode},
		PhaseAnswer:  {CancelNow, ReclaimAfterGrace},
		PhaseStream:  {CancelByRelayAfterGrace, ReclaimAfterGrace},
	},
	classRoom: {
		PhaseDecode: {CancelBoth, ReclaimNothing},
		PhaseAnswer: {CancelBoth, ReclaimNothing},
		PhaseStream: {CancelByRelay, ReclaimNothing},
	},
	classTransfer: {
		PhaseDecode: {CancelAfterAdmission, ReclaimByDecode},
		PhaseAnswer: {CancelPrefillFirst, ReclaimByDecode},
		PhaseStream: {CancelByRelayAfterGrace, ReclaimByDecode},
	},
}

// classOf returns the class of legs by the family's traits, whether both legs run at
// once, and whether prefill has returned a handle or is about to.
func classOf(t *family.Traits, concurrent, handle bool) legClass {
	switch {
	case concurrent && t.NoLease:
		return classRoom
	case concurrent:
		return classTransfer
	case t.NoLease, !handle:
		return classUnleased
	}
	return classLeased
}

// RuleOf returns the rule of a phase for a family with the given traits. concurrent says that both
// legs run at once, handle that prefill has returned a handle or is about to.
func RuleOf(phase Phase, t *family.Traits, concurrent, handle bool) Rule {
	return rules[classOf(t, concurrent, handle)][phase]
}

// CloseGrace returns how long the connection of a stream of this rule stays open after the cancel if no event
// has arrived. delay is PD.AbortDelay; releasable says that the router can release the blocks itself.
func (r Rule) CloseGrace(delay time.Duration, releasable bool) time.Duration {
	switch {
	case r.Cancel != CancelByRelayAfterGrace:
		return 0
	case releasable:
		return min(delay, maxReleaseWait)
	}
	return delay
}
