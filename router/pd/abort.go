package pd

import "sluice/router/pd/family"

// abortRules says what happens when a client disconnects, by the phase of the request and by what
// its legs pin on the prefill engine. armAbort turns a rule into the callback that the front calls
// on a disconnect. prefillAbort, decodeAbort and concurrentPrefill.abort implement the rules that
// take time.

// abortPhase is the phase of a request in which its client disconnects. Before the first leg, and
// while a request waits for a worker, no leg has been sent and there is nothing to cancel.
type abortPhase uint8

const (
	// phasePrefill: the prefill leg runs alone and has not been answered.
	phasePrefill abortPhase = iota
	// phaseBetween: prefill has answered; no decode engine has seen the handle.
	phaseBetween
	// phaseDecode: the decode leg, or the only leg, has been sent, and its response head has not
	// arrived.
	phaseDecode
	// phaseAnswer: the head has arrived, and the runner reads the response or a stream's first
	// event.
	phaseAnswer
	// phaseStream: the front relays the response. The relay cancels the call itself.
	phaseStream

	abortPhases
)

// kvPin is what the legs of a request pin on the prefill engine. A disconnect must not leave it
// pinned.
type kvPin uint8

const (
	// pinNothing: one leg without a handle, or a family whose handles pin nothing
	// (Traits.NoLease): LMCache, storage, orchestrated.
	pinNothing kvPin = iota
	// pinLeased: a handle pins blocks until a decode engine fetches them or the lease ends:
	// NIXL, TensorRT-LLM, Mooncake before vLLM 0.16.
	pinLeased
	// pinRoom: both legs run at once and meet in a room. Each engine drops its half when its
	// connection ends: SGLang.
	pinRoom
	// pinTransfer: both legs run at once, and prefill keeps blocks until decode asks for them
	// or a lease ends: Mooncake.
	pinTransfer

	kvPins
)

// cancelRule says which legs are cancelled, and when.
type cancelRule uint8

const (
	cancelNothing cancelRule = iota + 1 // no leg is active in this phase
	// cancelNow closes the leg's connection.
	cancelNow
	// cancelBoth closes the connections of both legs.
	cancelBoth
	// cancelAfterAnswer lets prefill answer, because only that response names the blocks. It
	// half-closes the call after abortWait, or a little later if prefill is predicted to end soon.
	cancelAfterAnswer
	// cancelAfterAdmission half-closes a concurrent prefill leg. It cancels decode after the decode
	// engine has admitted the request and can therefore notify prefill; see decodeAbort for the
	// bounds.
	cancelAfterAdmission
	// cancelPrefillFirst half-closes prefill and cancels decode after prefill has ended.
	cancelPrefillFirst
	// cancelByRelay: the relay closes decode's connection, after cutGrace if the handle may not
	// have reached the engine yet. It cancels a concurrent prefill leg at the same time.
	cancelByRelay
)

// reclaimRule says how the blocks that prefill pinned are freed.
type reclaimRule uint8

const (
	reclaimNothing reclaimRule = iota + 1 // nothing is pinned, or the engine frees the blocks when the connection closes
	// reclaimByRelease releases the blocks over the side channel, or sends a decode leg of one
	// token (releaseKV).
	reclaimByRelease
	// reclaimByDecode relies on the decode engine, which notifies prefill. If the engine may not
	// have received the request, the router releases the blocks over the side channel.
	reclaimByDecode
	// reclaimAfterGrace releases the blocks over the side channel if decode has not begun to answer
	// within the grace.
	reclaimAfterGrace
)

type abortRule struct {
	cancel  cancelRule
	reclaim reclaimRule
}

// abortRules has the rule for every pin and phase. A zero rule means that the phase does not exist
// for the pin: concurrent legs have neither a phase with prefill alone nor one between the legs.
var abortRules = [kvPins][abortPhases]abortRule{
	pinNothing: {
		phasePrefill: {cancelNow, reclaimNothing},
		phaseBetween: {cancelNothing, reclaimNothing},
		phaseDecode:  {cancelNow, reclaimNothing},
		phaseAnswer:  {cancelNow, reclaimNothing},
		phaseStream:  {cancelByRelay, reclaimNothing},
	},
	pinLeased: {
		phasePrefill: {cancelAfterAnswer, reclaimByRelease},
		phaseBetween: {cancelNothing, reclaimByRelease},
		phaseDecode:  {cancelAfterAdmission, reclaimByDecode},
		phaseAnswer:  {cancelNow, reclaimByDecode},
		phaseStream:  {cancelByRelay, reclaimAfterGrace},
	},
	pinRoom: {
		phaseDecode: {cancelBoth, reclaimNothing},
		phaseAnswer: {cancelBoth, reclaimNothing},
		phaseStream: {cancelByRelay, reclaimNothing},
	},
	pinTransfer: {
		phaseDecode: {cancelAfterAdmission, reclaimByDecode},
		phaseAnswer: {cancelPrefillFirst, reclaimByDecode},
		phaseStream: {cancelByRelay, reclaimByDecode},
	},
}

// pinOf returns what the legs pin in a phase, by the family's traits, whether both legs run at
// once, and whether there is a handle. In phasePrefill the prefill engine is about to create the
// handle.
func pinOf(phase abortPhase, t *family.Traits, concurrent, handle bool) kvPin {
	switch {
	case concurrent && t.NoLease:
		return pinRoom
	case concurrent:
		return pinTransfer
	case t.NoLease, !handle && phase != phasePrefill:
		return pinNothing
	}
	return pinLeased
}

// abortRule returns the rule for the request in a phase.
func (q *request) abortRule(phase abortPhase) abortRule {
	return abortRules[pinOf(phase, &q.plan.Traits, q.concurrent != nil, q.handover.Handle != nil)][phase]
}

// armAbort makes the front apply the rule of a phase if the client disconnects during the leg.
// OnClientGone(nil), or disarmPrefillAbort for a prefill leg, disarms it.
func (q *request) armAbort(l *leg, phase abortPhase) {
	switch q.abortRule(phase).cancel {
	case cancelNow:
		q.x.OnClientGone(l.call.CancelFunc())
	case cancelBoth:
		q.x.OnClientGone(q.concurrent.cutBoth)
	case cancelPrefillFirst:
		q.x.OnClientGone(q.concurrent.abortBoth)
	case cancelAfterAnswer:
		q.armPrefillAbort(l.call, l.reservation)
	case cancelAfterAdmission:
		q.armDecodeAbort(l)
	}
}

// keepsAbortRule reports whether the rule of phaseDecode stays in force in phaseAnswer, so that it
// remains armed across the response head. The callbacks of a concurrent prefill leg are armed
// again, because a failure in between returns the leg to its pool.
func (q *request) keepsAbortRule() bool {
	return q.concurrent == nil && q.abortRule(phaseDecode).cancel == q.abortRule(phaseAnswer).cancel
}
