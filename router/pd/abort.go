package pd

// What a client's disconnect does, by the phase in which it comes and by what the legs
// pin: abortRules is the whole rule. armAbort turns a row into the callback that the front
// runs; prefillAbort, decodeAbort and concurrentPrefill.abort carry the longer ones out.

// abortPhase is how far a request is when its client disconnects. Before the first leg and
// while a request waits for a worker nothing is sent, so there is nothing to cancel.
type abortPhase uint8

const (
	// phasePrefill: the prefill leg runs alone; its answer has not come.
	phasePrefill abortPhase = iota
	// phaseBetween: prefill has answered; no decode engine has seen the handle.
	phaseBetween
	// phaseDecode: the decode leg (or the only leg) is sent; its response head has not come.
	phaseDecode
	// phaseAnswer: the head has come; the runner reads the answer, or a stream's first event.
	phaseAnswer
	// phaseStream: the front relays the answer. The relay cancels the call itself.
	phaseStream

	abortPhases
)

// kvPin is what the legs of a request pin on the prefill engine, and so what a disconnect
// must not leave behind.
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

// cancelRule is what is cancelled, and when.
type cancelRule uint8

const (
	cancelNothing cancelRule = iota + 1 // no leg is under way in this phase
	// cancelNow closes the leg's connection.
	cancelNow
	// cancelBoth closes the connections of both legs.
	cancelBoth
	// cancelAfterAnswer lets prefill answer, because the answer alone names the blocks, and
	// half-closes the call after abortWait, or a little later where it is about to end.
	cancelAfterAnswer
	// cancelAfterAdmission half-closes a concurrent prefill leg, and cancels decode once its
	// engine has taken the request in and can tell prefill; see decodeAbort for the bounds.
	cancelAfterAdmission
	// cancelPrefillFirst half-closes prefill, and cancels decode when prefill has ended.
	cancelPrefillFirst
	// cancelByRelay: the relay closes decode's connection, after cutGrace where a handle may
	// not have reached the engine. A concurrent prefill leg is cancelled with it.
	cancelByRelay
)

// reclaimRule is how the blocks that prefill pinned are freed.
type reclaimRule uint8

const (
	reclaimNothing reclaimRule = iota + 1 // nothing is pinned, or the engine frees it with the connection
	// reclaimByRelease sends the release that the side channel allows, or a decode leg of one
	// token (releaseKV).
	reclaimByRelease
	// reclaimByDecode leaves it to the decode engine, which tells prefill. Where it is not
	// certain that the engine had the request, the side channel releases the blocks.
	reclaimByDecode
	// reclaimAfterGrace releases over the side channel what decode had not begun to answer.
	reclaimAfterGrace
)

type abortRule struct {
	cancel  cancelRule
	reclaim reclaimRule
}

// abortRules has the rule of every phase and pin. A zero rule is a phase that the pin does
// not have: legs that run at once have no prefill alone and nothing between.
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

// pinOf is what legs pin in a phase: of a family with such traits, with both legs at once,
// and with a handle (which prefill is about to make in phasePrefill).
func pinOf(phase abortPhase, t *Traits, concurrent, handle bool) kvPin {
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

// abortRule is the rule that holds for the request in a phase.
func (q *request) abortRule(phase abortPhase) abortRule {
	return abortRules[pinOf(phase, &q.plan.Traits, q.concurrent != nil, q.handover.Handle != nil)][phase]
}

// armAbort has the front carry the rule of a phase out when the client disconnects during
// the leg. OnClientGone(nil), or disarmPrefillAbort for a prefill leg, ends it.
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

// keepsAbortRule reports whether the rule of phaseDecode holds on in phaseAnswer, so that it
// stays armed across the response head. A concurrent prefill leg's callbacks are armed again,
// because a failure in between gives the leg back to its pool.
func (q *request) keepsAbortRule() bool {
	return q.concurrent == nil && q.abortRule(phaseDecode).cancel == q.abortRule(phaseAnswer).cancel
}
