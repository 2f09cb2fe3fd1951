package disagg

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"syscall"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxSuspects bounds how many engines may break (close or reset the connection
// after the request was sent, hang until the time-out, or say that they die)
// under one request: a request that kills its engine must not be walked through
// the fleet.
const maxSuspects = 2

// runWhole runs a request on one rank, elsewhere again while that is safe.
func (q *request) runWhole() {
	for q.attempt = 1; ; q.attempt++ {
		if !q.again(q.decode(schedule.Whole)) {
			return
		}
	}
}

// runDisaggregated runs the pair of legs in the family's order. A pair that
// fails before the client has seen a byte is run again with other ranks; when
// prefill cannot be had, decode does the whole request.
func (q *request) runDisaggregated() {
	tried := false
	for q.attempt = 1; ; q.attempt++ {
		prefill, end := q.begin()
		if end == prefillDone {
			switch order := q.plan.Family.Order(&q.pair); {
			case order == Concurrent:
				if !q.again(q.both(prefill)) {
					return
				}
				continue
			case order == DecodeFirst && !tried:
				tried = true
				if end, declined := q.try(); !declined {
					prefill.Reservation.Release()
					if !q.again(end) {
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
			if !q.again(q.decode(schedule.Whole)) {
				return
			}
			continue
		case prefillAgain:
			q.r.opt().Observer.Retried(schedule.PrefillLeg)
			continue
		case prefillNone:
			if !q.decodePlainly() {
				return
			}
		}
		if !q.again(q.decode(schedule.DecodeLeg)) {
			return
		}
	}
}

// begin makes a new pair of legs: chooses the prefill rank, by cost, before
// anything is sent (and decode's with it, see joint), and learns what the family
// must know of it.
func (q *request) begin() (prefill schedule.Choice, end prefillEnd) {
	q.hold(false)
	q.startPair()
	if q.plainly || q.attempt-q.free > q.pd.MaxAttempts {
		return prefill, prefillNone
	}
	if q.attempt > 1 || q.taking != nil {
		if q.renew(); !q.other(q.plan.Prefill) && !q.decodesAlone() {
			q.anotherRank(schedule.PrefillLeg) // else the choice says that there is none
		}
	}
	chosen := false
	candidates := q.telling(q.nextNamed(q.plan.Prefill))
	if q.joint() {
		if prefill, end, chosen = q.beginPair(candidates); end == prefillLocal {
			return prefill, end
		}
	}
	if !chosen {
		if prefill, chosen = q.choose(schedule.PrefillLeg, candidates); !chosen {
			if q.refuseFull(schedule.PrefillLeg, q.plan.Prefill) {
				return prefill, prefillAnswered
			}
			return prefill, prefillNone
		}
	}
	q.pair.Prefill, q.prefillCached = prefill.Rank, prefill.CachedTokens
	q.r.silences.tried(prefill.Rank)
	if end = q.findFact(); end != prefillDone {
		prefill.Reservation.Release()
	}
	q.pair.RequestID = q.legID()
	return prefill, end
}

// startPair forgets the last attempt's pair.
func (q *request) startPair() {
	q.prefilled = false
	q.unwatch()
	q.abandon()
	q.booked.Reservation.Release()
	q.booked, q.planned = schedule.Choice{}, ""
	q.pair = Pair{
		Kind: q.x.Endpoint.Kind, Path: q.x.Endpoint.Path, Doc: &q.x.Doc, Stream: q.stream, Tokens: q.prompt.Tokens,
		Token: rand.Uint64() >> 1, PrefillCached: -1, texts: &q.texts, spelled: q.spelled(),
	}
}

// decodePlainly gives the whole request to decode, or answers and returns false
// where the configuration or the family forbids it.
func (q *request) decodePlainly() bool {
	q.pair.Handle = nil
	if q.x.Gone() { // an engine that is hung up may still answer, with nothing
		q.refuse(front.ClientGone, "the client closed the connection before decode was sent", 0)
		return false
	}
	tries := ", after " + counted(q.tries[schedule.PrefillLeg], "try", "tries") + q.waitedFor() + ", and "
	switch {
	case q.goneWaiting():
		return false
	case q.plan.Traits.NoPlain:
		q.refuse(front.UpstreamFailed, "prefill could not be had"+tries+"a decode worker of family "+q.plan.Family.Name()+" cannot prefill", time.Second)
		return false
	case !q.pd.PlainDecode:
		q.refuse(front.UpstreamFailed, "prefill gave no handle that decode could use"+tries+"pd.plain_decode is off", time.Second)
		return false
	}
	kind, detail := q.fell, q.fellFor
	if kind == "" {
		kind, detail = noPrefill, q.lacking()
	}
	q.fellBack("plain_decode", "decode does the whole request")
	q.decodedAlone(kind, detail)
	return true
}

// counted is a number of things.
func counted(n int, one, many string) string {
	if n == 1 {
		many = one
	}
	return strconv.Itoa(n) + " " + many
}

// waitedFor says for an error how long the request's retries have waited for workers.
func (q *request) waitedFor() string {
	if q.waited == 0 {
		return ""
	}
	return " and " + q.waited.Round(time.Millisecond).String() + " of waiting for a worker"
}

// again says whether a leg's end calls for another attempt; when not, the
// request has been answered.
func (q *request) again(end legEnd) bool {
	if end == legAnswered {
		return false
	}
	q.r.opt().Observer.Retried(schedule.DecodeLeg)
	return true
}

// mayRunAgain says whether a failed leg may be run again. Where its engine went down and
// there is no other it waits for one, or for that engine (anotherRank).
func (q *request) mayRunAgain(leg schedule.Leg, down bool) bool {
	if !q.triesLeft() || q.late() || q.suspects >= maxSuspects || q.shown && !q.unsent {
		return false
	}
	if q.renew(); !q.other(q.candidates(leg)) && (!down || !q.anotherRank(leg)) {
		return false
	}
	return q.retryGranted()
}

// other says whether a candidate is left that has not failed this request.
func (q *request) other(candidates []*worker.Rank) bool {
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

// legID is the request id the engines see: the client's own for the first
// attempt, with "-2", "-3" for later ones, because engines before vLLM 0.14 go
// wrong on an id they have seen. Clients send one id twice, at once too; where that
// would join two requests (joinedByID) a pair's legs have an end of their own, which no
// engine takes for its own random one (eight hexadecimal digits).
func (q *request) legID() string {
	n, joined := q.before+q.attempt, q.pair.Token != 0 && q.joinedByID()
	if n <= 1 && !joined {
		return q.x.RequestID
	}
	var room [160]byte // front bounds an id to 128 bytes
	id := append(room[:0], q.x.RequestID...)
	if n > 1 {
		id = strconv.AppendInt(append(id, '-'), int64(n), 10)
	}
	if joined {
		id = strconv.AppendUint(append(id, "-x"...), q.pair.Token, 36)
	}
	return string(id)
}

// joinedByID says whether the engines of the pair know its hand-over by X-Request-Id
// alone. Both are of one release, or refuse each other; where neither has told which, it
// may be an old one. A newer one may be started so that it does (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION);
// that is known from its first handle on.
func (q *request) joinedByID() bool {
	if q.plan.Traits.ByID || !q.plan.Traits.OldByID || q.pair.Prefill == nil {
		return q.plan.Traits.ByID
	}
	of := q.pair.Prefill
	if of.Worker.Info().Version == "" && len(q.plan.Decode) > 0 {
		of = q.plan.Decode[0] // a sidecar's own engine is asked, those that requests name are not
	}
	return !atLeast(of, 0, 14, 0) || q.pair.Fact == givenIDs
}

// headers makes the header lines of one leg.
func (q *request) headers(r *worker.Rank) []upstream.Field {
	q.fields = q.x.ForwardFields(q.fields[:0])
	id := q.pair.RequestID
	if id == "" {
		id = q.legID()
	}
	q.fields = append(q.fields, upstream.Field{Name: "X-Request-Id", Value: id})
	if r.SendRank && !q.leg.RankInBody {
		q.fields = append(q.fields, upstream.Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(r.HeaderRank())})
	}
	return q.fields
}

// path is where the leg goes.
func (q *request) path() string {
	if q.leg.Path != "" {
		return q.leg.Path
	}
	return q.x.Endpoint.Path
}

// body makes the segments of the leg's body.
func (q *request) body() [][]byte {
	if q.leg.Body != nil {
		q.segments = append(q.segments[:0], q.leg.Body)
	} else {
		q.segments = q.x.Doc.Segments(q.segments[:0], q.leg.Edits...)
	}
	return q.segments
}

// failure sorts a failed engine call.
type failure struct {
	reason front.Reason
	// unsent: the engine has seen nothing of the request.
	unsent bool
	// suspect: the engine broke with the request in hand.
	suspect bool
	// ofEngine: the failure counts against the worker's health.
	ofEngine bool
	// down: the engine is gone, or its connection broke. It may come back soon.
	down bool
	// refused: the connection was refused at once, which costs a request no try.
	refused bool
}

func sort(err error) failure {
	var up *upstream.Error
	f := failure{reason: front.UpstreamFailed, ofEngine: true}
	if errors.As(err, &up) {
		f.unsent = up.Phase == upstream.PhaseDial
	}
	switch {
	case errors.Is(err, upstream.ErrTooManyConns):
		return failure{reason: front.EngineConnections, unsent: true}
	case errors.Is(err, upstream.ErrWanting):
		return failure{reason: front.TooManyConnections, unsent: true}
	case errors.Is(err, upstream.ErrMemory):
		return failure{reason: front.BudgetSpent}
	case errors.Is(err, upstream.ErrFrozen):
		f.ofEngine = false // the fleet found it out
		f.suspect = !f.unsent
		f.down = true
	case errors.Is(err, upstream.ErrTimeout):
		f.reason = front.UpstreamTimeout
		// A slow answer to a long prompt is no sign of ill health; a connection
		// that cannot be made is. But a request that hangs engines must not be
		// walked through the fleet either.
		f.ofEngine, f.down = f.unsent, f.unsent
		f.suspect = !f.unsent
	case errors.Is(err, upstream.ErrCoded), errors.Is(err, upstream.ErrRedirected):
		f.reason = front.UpstreamGarbage
	case errors.Is(err, upstream.ErrProtocol):
		f.reason = front.UpstreamGarbage
		f.suspect = true
	default:
		f.suspect = !f.unsent
		f.down, f.refused = true, f.unsent && errors.Is(err, syscall.ECONNREFUSED)
	}
	return f
}

// setback is why a rank with such a failure is excluded from the request's further tries.
func (f failure) setback() setback {
	if f.down {
		return wentDown
	}
	return answeredBadly
}

// failed books a failed leg: against the worker, against the request, in the
// log and for explain. It says how the failure sorts.
func (q *request) failed(r *worker.Rank, leg string, err error) failure {
	f := sort(err)
	if f.ofEngine && !q.late() {
		q.r.opt().Fleet.Failed(r, err)
	}
	q.note(r, leg, f, err)
	return f
}

// note is failed for a worker that has been told of already.
func (q *request) note(r *worker.Rank, leg string, f failure, err error) {
	q.unsent = f.unsent
	if f.suspect {
		q.suspects++
	}
	if f.refused && q.free < maxFree {
		q.free++
	}
	q.exclude(r, f.setback())
	q.r.opt().Scheduler.Note(q.x.RequestID, leg+" on "+r.ID.String()+" failed: "+err.Error())
	q.x.Log().Warn("leg failed", "leg", leg, "worker", r.ID.String(), "attempt", q.attempt, "err", err)
}

// legFailed takes in that a leg failed, or that its hand-over is lost or its client gone:
// then, over, end is what follows.
func (q *request) legFailed(leg schedule.Leg, rank *worker.Rank, call *upstream.Call, err error, took time.Duration) (f failure, end legEnd, over bool) {
	opt := q.r.opt()
	if !q.settle() {
		return f, q.lostOn(rank, took), true
	}
	if call.WasCut() {
		opt.Observer.LegEnded(leg, rank.ID, q.whyGone(), took)
		q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
		return f, legAnswered, true
	}
	f = q.failed(rank, legName(leg), err)
	opt.Observer.LegEnded(leg, rank.ID, string(f.reason), took)
	return f, legAgain, false
}

// againOr runs the attempt again behind a failed leg where it may be, if again; else it
// tells the client.
func (q *request) againOr(f failure, leg schedule.Leg, rank *worker.Rank, err error, again bool) legEnd {
	if again && q.mayRunAgain(leg, f.down) {
		return legAgain
	}
	if q.goneWaiting() {
		return legAnswered
	}
	q.refuse(f.reason, fmt.Sprintf("%s on %s failed%s: %s", legName(leg), rank.ID, q.afterTries(leg), upstream.Told(err)), 0)
	return legAnswered
}

// afterTries says for an error how often a leg was tried, "" where once.
func (q *request) afterTries(leg schedule.Leg) string {
	n := q.tries[leg]
	if n < 2 && q.waited == 0 {
		return ""
	}
	return ", after " + counted(n, "try", "tries") + q.waitedFor()
}

// brokeOff takes in that an answer broke off behind its head, of which the client has seen
// nothing. One that took too long is not waited for again.
func (q *request) brokeOff(leg schedule.Leg, rank *worker.Rank, call *upstream.Call, err error, took time.Duration) legEnd {
	f, end, over := q.legFailed(leg, rank, call, err, took)
	if over {
		return end
	}
	return q.againOr(f, leg, rank, err, f.reason != front.UpstreamTimeout)
}

// worthRetry: statuses that speak of the worker's state, not of the request.
func worthRetry(status int) bool {
	return status == 500 || status == 502 || status == 503 || status == 504 || status == 429
}

// dying are what an engine says in the 500 that is its last answer: the core
// process is dead and the HTTP server about to end (vLLM, EngineDeadError).
var dying = [...][]byte{[]byte("EngineCore encountered an issue"), []byte("EngineDeadError")}

// diedOf says whether an answer tells that the engine ends with this request.
func diedOf(status int, body []byte) bool {
	if status != 500 {
		return false
	}
	for _, d := range dying {
		if bytes.Contains(body, d) {
			return true
		}
	}
	return false
}
