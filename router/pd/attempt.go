package pd

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"syscall"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxSuspects bounds how many engines may break during one request: they close or reset the
// connection after the request was sent, hang until the timeout, or report that they exit. A
// request that kills engines must not run on the whole fleet.
const maxSuspects = 2

// runWhole runs a request on one rank, and again on another rank if that is safe.
func (q *request) runWhole() {
	for q.attempt = 1; ; q.attempt++ {
		if !q.shouldRetry(q.decode(schedule.WholeLeg)) {
			return
		}
	}
}

// runDisaggregated runs both legs in the family's order. If they fail before the client has
// received a byte, they run again on other ranks. Without a prefill worker, decode runs the whole
// request.
func (q *request) runDisaggregated() {
	tried := false
	for q.attempt = 1; ; q.attempt++ {
		prefill, end := q.beginAttempt()
		if end == prefillDone {
			switch order := q.plan.Family.Order(&q.handover); {
			case order == family.Concurrent:
				switch end := q.runConcurrent(prefill); {
				case end == legWaited:
					q.attempt-- // it sent nothing
				case !q.shouldRetry(end):
					return
				}
				continue
			case order == family.DecodeFirst && !tried:
				tried = true
				if end, declined := q.tryDecode(); !declined {
					prefill.Reservation.Release()
					if !q.shouldRetry(end) {
						return
					}
					continue
				}
			}
			end = q.prefill(prefill)
		}
		switch end {
		case prefillAnswered:
			return
		case prefillLocal:
			if !q.shouldRetry(q.decode(schedule.WholeLeg)) {
				return
			}
			continue
		case prefillRetry:
			q.countRetry(schedule.PrefillLeg)
			continue
		case prefillUnavailable:
			if !q.fallBackToDecodeOnly() {
				return
			}
		}
		if !q.shouldRetry(q.decode(schedule.DecodeLeg)) {
			return
		}
	}
}

// beginAttempt starts a new pair of legs. It chooses the prefill rank by cost, together with the
// decode rank if choosesJointly is true, and fetches the peer information that the family needs
// about it.
func (q *request) beginAttempt() (prefill schedule.Choice, end prefillEnd) {
	if q.startsAtDecode {
		decode := q.reservedDecode
		q.reservedDecode, q.startsAtDecode = schedule.Choice{}, false
		q.resetHandover()
		q.notifyingCandidates(q.plan.Prefill) // notes why it starts there, if it is for that
		q.reservedDecode = decode
		return prefill, prefillUnavailable
	}
	q.resetHandover()
	if q.decodeOnly || q.attempt-q.freeTries > q.pd.MaxAttempts {
		return prefill, prefillUnavailable
	}
	if q.attempt > 1 || q.resumption != nil {
		if q.refreshCandidates(); !q.hasCandidate(q.plan.Prefill) && !q.mayDecodeOnly() {
			q.awaitCandidate(schedule.PrefillLeg) // if none appears, the choice below reports it
		}
	}
	prefill, chosen := q.takeReservedPrefill()
	candidates := q.notifyingCandidates(q.nextSelected(q.plan.Prefill))
	if !chosen && q.choosesJointly() {
		if prefill, end, chosen = q.chooseHandover(candidates); end == prefillLocal {
			return prefill, end
		}
	}
	if !chosen {
		if prefill, chosen = q.choose(schedule.PrefillLeg, candidates); chosen && q.class != nil {
			q.beginUndecided()
		}
	}
	if !chosen {
		switch waited, answered := q.awaitLimits(q.plan.Prefill); {
		case waited:
			return q.beginAttempt() // with the rank that was reserved meanwhile
		case answered, q.refuseAtCapacity(schedule.PrefillLeg, q.plan.Prefill):
			return prefill, prefillAnswered
		}
		return prefill, prefillUnavailable
	}
	q.handover.Prefill, q.prefillCached = prefill.Rank, prefill.CachedTokens
	q.r.notificationBreakers.RecordTrial(prefill.Rank)
	if end = q.resolvePeerInfo(); end != prefillDone {
		prefill.Reservation.Release()
	} else {
		q.handover.ByIDs = q.sendsPromptIDs(prefill.Rank)
	}
	q.handover.RequestID = q.legRequestID()
	return prefill, end
}

// resetHandover clears the hand-over of the previous attempt.
func (q *request) resetHandover() {
	q.prefillLeg.abandon()
	q.reservedDecode.Reservation.Release()
	q.reservedDecode, q.planHeader = schedule.Choice{}, ""
	q.handover = family.Handover{
		Kind: q.req.Endpoint.Kind, Path: q.req.Endpoint.Path, Doc: &q.req.Doc, Stream: q.stream, Tokens: q.prompt.Tokens,
		Token: rand.Uint64() >> 1, PrefillCached: -1, TextOnlyCache: &q.textOnlyCache, RawTokens: q.rawTokens(),
	}
}

// fallBackToDecodeOnly makes decode run the whole request. It answers with an error and returns
// false if the configuration or the family forbids that.
func (q *request) fallBackToDecodeOnly() bool {
	q.handover.Handle = nil
	// No decode engine will read the blocks of a handle whose lease ends too soon.
	q.prefillLeg.onKV(abort.Abandoned)
	if q.x.ClientGone() { // an engine whose call was half-closed may still answer, with an empty response
		q.refuse(front.ClientGone, "the client closed the connection before decode was sent", 0)
		return false
	}
	tries := ", after " + pluralize(q.tries[schedule.PrefillLeg], "try", "tries") + q.waitedSuffix() + ", and "
	switch {
	case q.refuseIfGone():
		return false
	case q.plan.Traits.NoDecodeOnly:
		q.refuse(front.UpstreamFailed, "prefill is unavailable"+tries+"a decode worker of family "+q.plan.Family.Name()+" cannot prefill", time.Second)
		return false
	case !q.pd.DecodeOnlyFallback:
		q.refuse(front.UpstreamFailed, "the prefill response has no usable handle"+tries+"pd.decode_only_fallback is off", time.Second)
		return false
	}
	kind, detail := q.fallbackKind, q.fallbackDetail
	if kind == "" {
		kind, detail = reasonNoPrefill, q.unreadyPrefill()
	}
	q.noteFallback("decode_only", "decode does the whole request")
	q.recordFallback(kind, detail)
	return true
}

// pluralize formats a number with its noun.
func pluralize(n int, one, many string) string {
	if n == 1 {
		many = one
	}
	return strconv.Itoa(n) + " " + many
}

// waitedSuffix returns the part of an error message that says how long retries waited for workers.
func (q *request) waitedSuffix() string {
	if q.waited == 0 {
		return ""
	}
	return " and " + q.waited.Round(time.Millisecond).String() + " of waiting for a worker"
}

// shouldRetry reports whether the end of a leg requires another attempt. If not, the request has
// been answered.
func (q *request) shouldRetry(end legEnd) bool {
	if end == legAnswered {
		return false
	}
	q.countRetry(schedule.DecodeLeg)
	return true
}

// mayRetry reports whether a failed leg may run again. If its engine went down and no other is
// available, it waits for that engine or another (awaitCandidate).
func (q *request) mayRetry(leg schedule.LegKind, down bool) bool {
	if !q.triesLeft() || q.pastDeadline() || q.suspects >= maxSuspects || q.hasHandle && !q.unsent {
		return false
	}
	if q.refreshCandidates(); !q.hasCandidate(q.candidates(leg)) && (!down || !q.awaitCandidate(leg)) {
		return false
	}
	return q.withdrawRetry()
}

// hasCandidate reports whether any candidate has not failed this request.
func (q *request) hasCandidate(candidates []*worker.Rank) bool {
	for _, c := range candidates {
		if !q.isExcluded(c) {
			return true
		}
	}
	return false
}

func (q *request) isExcluded(r *worker.Rank) bool {
	for _, e := range q.excluded {
		if e == r {
			return true
		}
	}
	return false
}

// legRequestID returns the request id for the engines: the client's id in the first attempt, and
// with the suffix "-2", "-3" in later ones, because engines before vLLM 0.14 fail on an id that
// they have seen. Clients may send the same id twice, even at once. If the engines could then
// confuse two requests (Traits.JoinsLegs), the legs of a pair get a suffix of their own. Engines
// cannot mistake it for their random suffix of eight hexadecimal digits.
func (q *request) legRequestID() string {
	n, unique := q.attemptsBefore+q.attempt, q.handover.Token != 0 && q.plan.Traits.JoinsLegs(&q.handover, q.plan.Decode)
	if n <= 1 && !unique {
		return q.req.RequestID
	}
	var buf [160]byte // the front limits an id to 128 bytes
	id := append(buf[:0], q.req.RequestID...)
	if n > 1 {
		id = strconv.AppendInt(append(id, '-'), int64(n), 10)
	}
	if unique {
		id = strconv.AppendUint(append(id, "-x"...), q.handover.Token, 36)
	}
	return string(id)
}

// countRetry reports that a leg is sent again.
func (q *request) countRetry(leg schedule.LegKind) {
	q.settings.Observer.Retried(leg)
	q.entry.AddRetry()
}

// legHeaders returns the header lines of one leg.
func (q *request) legHeaders(l *legRecord) []upstream.Field {
	r := l.rank
	q.fields = q.setTraceparent(q.x.ForwardFields(q.fields[:0]), l)
	id := q.handover.RequestID
	if id == "" {
		id = q.legRequestID()
	}
	q.fields = append(q.fields, upstream.Field{Name: "X-Request-Id", Value: id}, front.HopField(q.x))
	if r.SendRank && !q.legRequest.RankInBody {
		q.fields = append(q.fields, upstream.Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(r.HeaderRank())})
	}
	return q.fields
}

// legPath returns the path of the leg's endpoint.
func (q *request) legPath() string {
	if q.legRequest.Path != "" {
		return q.legRequest.Path
	}
	return q.req.Endpoint.Path
}

// legBody returns the segments of the leg's body.
func (q *request) legBody() [][]byte {
	if q.legRequest.Body != nil {
		q.segments = append(q.segments[:0], q.legRequest.Body)
	} else {
		q.segments = q.req.Doc.Segments(q.segments[:0], q.legRequest.Edits...)
	}
	return q.segments
}

// failure is the class of a failed engine call.
type failure struct {
	reason front.Reason
	// unsent: the engine has received no part of the request.
	unsent bool
	// suspect: the engine broke while it had the request.
	suspect bool
	// engineFault: the failure counts against the worker's health.
	engineFault bool
	// down: the engine is gone or its connection broke. It may be back soon.
	down bool
	// refused: the connection was refused; this does not count as a try.
	refused bool
}

func classify(err error) failure {
	f := failure{reason: front.UpstreamFailed, engineFault: true}
	if up, ok := errors.AsType[*upstream.Error](err); ok {
		f.unsent = up.Phase == upstream.PhaseDial
	}
	switch {
	case errors.Is(err, upstream.ErrTooManyConns):
		return failure{reason: front.EngineConnLimit, unsent: true}
	case errors.Is(err, upstream.ErrLocalResources):
		return failure{reason: front.TooManyConnections, unsent: true}
	case errors.Is(err, upstream.ErrMemory):
		return failure{reason: front.BudgetExhausted}
	case errors.Is(err, upstream.ErrFrozen):
		f.engineFault = false // the fleet already knows
		f.suspect = !f.unsent
		f.down = true
	case errors.Is(err, upstream.ErrTimeout):
		f.reason = front.UpstreamTimeout
		// A slow response to a long prompt does not show that the engine is unhealthy; a connection
		// that cannot be opened does. A request that hangs engines must not run on the whole fleet
		// either.
		f.engineFault, f.down = f.unsent, f.unsent
		f.suspect = !f.unsent
	case errors.Is(err, upstream.ErrContentEncoding), errors.Is(err, upstream.ErrRedirect):
		f.reason = front.UpstreamInvalid
	case errors.Is(err, upstream.ErrProtocol):
		f.reason = front.UpstreamInvalid
		f.suspect = true
	default:
		f.suspect = !f.unsent
		f.down, f.refused = true, f.unsent && errors.Is(err, syscall.ECONNREFUSED)
	}
	return f
}

// exclusionReason returns the reason for which such a failure excludes a rank from further tries.
func (f failure) exclusionReason() exclusionReason {
	if f.down {
		return excludedDown
	}
	return excludedError
}

// recordFailure counts a failed leg against the worker and the request, logs it, and adds it
// to the explain record. It returns the class of the failure.
func (q *request) recordFailure(r *worker.Rank, leg string, err error) failure {
	f := classify(err)
	if f.engineFault && !q.pastDeadline() {
		q.settings.Fleet.ReportFailure(r, err)
	}
	q.applyFailure(r, leg, f, err)
	return f
}

// applyFailure is recordFailure for a failure that the fleet already knows.
func (q *request) applyFailure(r *worker.Rank, leg string, f failure, err error) {
	q.unsent = f.unsent
	if f.suspect {
		q.suspects++
	}
	if f.refused && q.freeTries < maxFreeTries {
		q.freeTries++
	}
	q.exclude(r, f.exclusionReason())
	q.settings.Scheduler.AddNote(q.req.RequestID, leg+" on "+r.ID.String()+" failed: "+err.Error())
	q.x.Log().Warn("leg failed", "leg", leg, "rank", r.ID.String(), "attempt", q.attempt, "error", err)
}

// endFailedLeg ends a leg that failed. If its hand-over is lost or its client has disconnected,
// done is true and end says what follows.
func (q *request) endFailedLeg(l *decodeLeg, err error) (f failure, end legEnd, done bool) {
	if !q.acceptAnswer() {
		return f, q.endLostHandover(l), true
	}
	if l.call.Cancelled() {
		l.end(q.abortReason())
		q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
		return f, legAnswered, true
	}
	f = q.recordFailure(l.rank, legName(l.kind), err)
	l.end(string(f.reason))
	return f, legRetry, false
}

// retryOrRefuse runs the attempt of a failed leg again if retry is set and mayRetry allows it.
// Otherwise it refuses the request.
func (q *request) retryOrRefuse(f failure, l *decodeLeg, err error, retry bool) legEnd {
	if retry && q.mayRetry(l.kind, f.down) {
		return legRetry
	}
	if q.refuseIfGone() {
		return legAnswered
	}
	q.refuse(f.reason, fmt.Sprintf("%s on %s failed%s: %s", legName(l.kind), l.rank.ID, q.triesSuffix(l.kind), upstream.ClientMessage(err)), 0)
	return legAnswered
}

// triesSuffix returns the part of an error message with the number of tries of a leg, "" after one
// try.
func (q *request) triesSuffix(leg schedule.LegKind) string {
	n := q.tries[leg]
	if n < 2 && q.waited == 0 {
		return ""
	}
	return ", after " + pluralize(n, "try", "tries") + q.waitedSuffix()
}

// handleBrokenAnswer ends a leg whose response broke off after its head, before the client has
// received any of it. The request does not run again after a timeout.
func (q *request) handleBrokenAnswer(l *decodeLeg, err error) legEnd {
	f, end, done := q.endFailedLeg(l, err)
	if done {
		return end
	}
	return q.retryOrRefuse(f, l, err, f.reason != front.UpstreamTimeout)
}
