package pd

import (
	"fmt"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/worker"
)

// awaitAdmission lets the request wait until its session may be active and a rank can start it soon. In that
// case the rank of its first leg is reserved when it returns. If no request waits and the rank that it would choose has
// capacity, it returns at once, and the legs choose their ranks as without a queue. It answers with an error and
// returns false if the request may not wait, has waited too long, or cannot meet its target by the forecast.
func (q *request) awaitAdmission() bool {
	canWait := q.class != nil && q.waitsForAdmission()
	if place := q.startTurn(canWait); place != nil {
		return q.awaitPlace(q.newWaiter(), place)
	}
	if !canWait {
		return true
	}
	c := q.r.admission
	if (c.IsEmpty() || c.IsIdle(q.queuePool())) && q.hasCapacity() && q.choosesFree() {
		return true
	}
	return q.enqueue(q.newWaiter())
}

// maxLooked bounds in how many ranks choosesFree looks for a full one. A larger pool is unlikely to be served badly
// because one rank is.
const maxLooked = 256

// choosesFree reports whether the first leg would choose a rank that can start it soon. If not, the request waits for
// that rank, or is started by another (prefersFullRank).
func (q *request) choosesFree() bool {
	leg := q.firstLeg()
	candidates := q.candidates(leg)
	if len(candidates) < 2 || len(candidates) > maxLooked || !q.settings.Scheduler.ChoosesByCost() || q.handover.Handle != nil {
		return true
	}
	candidates = q.selectable(candidates)
	isFull := func(r *worker.Rank) bool { return !q.isExcluded(r) && !q.isFree(leg, r) }
	if !slices.ContainsFunc(candidates, isFull) {
		return true
	}
	query := q.newQuery(leg, candidates)
	q.skipped = q.skipKept(append(q.skipped[:0], q.excluded...), leg, candidates)
	query.RequestID, query.Excluded = "", q.skipped
	c, ok := q.settings.Scheduler.Preview(&query)
	return !ok || q.isFree(leg, c.Rank)
}

// enqueue lets the request wait. It answers with an error and returns false if no rank starts it.
func (q *request) enqueue(w *admission.Waiter) bool {
	c := q.r.admission
	q.entry.SetClass(q.class.Name, q.tenant)
	if !q.meetsTarget(w) {
		return false
	}
	if bound := c.Enqueue(w); bound != admission.WithinBounds {
		q.refuseQueueFull(w, bound)
		return false
	}
	q.x.OnClientGone(func() { c.Cancel(w, admission.Gone) })
	if q.waitSince.IsZero() {
		q.waitSince = time.Now()
	}
	wait := max(q.class.wait-time.Since(q.waitSince), 0)
	if q.startBy > 0 && q.class.refuse && !q.late {
		wait = min(wait, max(time.Duration(q.startBy-c.Now()), 0))
	}
	outcome := c.Wait(w, wait)
	q.x.OnClientGone(nil)
	return q.endWait(w, outcome)
}

// waitsForAdmission reports whether the request can wait: it computes something, and nothing that it
// holds expires meanwhile.
func (q *request) waitsForAdmission() bool {
	switch q.req.Endpoint.Kind {
	case front.Tokenize, front.Detokenize, front.CountTokens:
		return false
	}
	return !q.hasHandle && q.settings.Selector == nil && q.resumption == nil
}

// newWaiter returns the request as one that waits.
func (q *request) newWaiter() *admission.Waiter {
	q.lookedUp = time.Now()
	w := &admission.Waiter{Class: q.class.Name, Starter: q}
	output := 0
	if q.req.Endpoint.Disaggregable && !q.prefillOnly {
		output = schedule.ExpectedOutput(q.newQuery(schedule.WholeLeg, nil).MaxTokens)
	}
	rank, todo := q.expectedWork()
	w.Item = admission.Item{Pool: q.queuePool(), Group: q.rankGroup(), Tenant: q.tenant, Weight: q.weight, Cost: int64(todo + output), Bytes: int64(len(q.req.Doc.Body))}
	q.setDue(w, rank, todo, output)
	return w
}

// baseModel returns the model whose ranks the request uses: adapters of a model compete for its ranks.
func (q *request) baseModel() string {
	if r := q.firstRank(); r != nil && r.Worker.Info().Base != "" {
		return r.Worker.Info().Base
	}
	return q.pool.Model
}

// queuePool returns the name of the set of ranks that the request competes for.
func (q *request) queuePool() string {
	pool := q.baseModel()
	if q.plan.Family != nil || q.prefillOnly && q.prefillOnlyOnPrefill() {
		pool += " prefill"
	}
	return pool
}

// rankGroup names the ranks of queuePool that the request may use. It is "" for whole requests and those with
// two legs whose headers do not restrict it, if their model is a base model.
func (q *request) rankGroup() string {
	model := q.pool.Model
	if r := q.firstRank(); r == nil || r.Worker.Info().Base == "" || r.Worker.Info().Base == model {
		model = "" // else an adapter, which some of the ranks may not have
	}
	s := &q.steering
	if model == "" && q.plan.wholeSet == wholeDefault && !q.prefillOnly && q.resumption == nil && !q.plan.largeOnly && !s.isRestricting() {
		return ""
	}
	stored := ""
	if s.stored != nil {
		stored = s.stored.ID.String()
	}
	// A stream that continues is in a group of its own: it needs more KV than those that have not begun.
	return fmt.Sprintf("%q %d %v %v %v %q %v %v %q %q", model, q.plan.wholeSet, q.plan.largeOnly, q.prefillOnly, q.resumption != nil, stored, s.workers, s.ranks, s.allowed, s.labels)
}

// expectedWork returns the rank that would run the first leg if all were free, and how many tokens of
// the prompt it would compute. rank is nil if there is none.
func (q *request) expectedWork() (rank *worker.Rank, todo int) {
	leg := q.firstLeg()
	todo = q.promptTokens()
	query := q.newQuery(leg, q.candidates(leg))
	query.RequestID = ""
	if c, ok := q.settings.Scheduler.Preview(&query); ok {
		return c.Rank, max(todo-c.CachedTokens, 1)
	}
	return nil, todo
}

func (q *request) firstLeg() schedule.LegKind {
	if q.plan.Family == nil && !q.prefillOnly {
		return schedule.WholeLeg
	}
	return schedule.PrefillLeg
}

func roundWait(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

func (q *request) refuseQueueFull(w *admission.Waiter, bound admission.Bound) {
	q.r.countRefusal(q.class.Name, q.tenant, front.AdmissionFull)
	full := q.describeFull(bound)
	q.noteAdmission("refused: "+full, 0, w.Forecast)
	q.refuse(front.AdmissionFull, fmt.Sprintf("no rank for model %q can start the request soon, and the queue is full: %s", q.pool.Model, full), q.class.retryAfter(w.Forecast))
}

// describeFull says which bound of the queue is reached.
func (q *request) describeFull(bound admission.Bound) string {
	s := q.settings.admission
	switch bound {
	case admission.ClassRequests:
		return fmt.Sprintf("at most %d requests of class %s may wait (its max_requests)", q.class.MaxRequests, q.class.Name)
	case admission.ClassBytes:
		return fmt.Sprintf("at most %d bytes of class %s may wait (its max_bytes)", q.class.MaxBytes, q.class.Name)
	case admission.AllRequests:
		return fmt.Sprintf("at most %d requests may wait (admission.max_requests)", s.queue.Limits.MaxRequests)
	}
	if s.MaxBytes == 0 {
		return fmt.Sprintf("at most %d bytes may wait (half of limits.memory_budget, as admission.max_bytes is 0)", s.queue.Limits.MaxBytes)
	}
	return fmt.Sprintf("at most %d bytes may wait (admission.max_bytes)", s.queue.Limits.MaxBytes)
}

// endWait continues or ends a request that has waited.
func (q *request) endWait(w *admission.Waiter, outcome admission.Outcome) bool {
	q.preemption.end()
	q.endKVWait()
	if outcome == admission.Gone {
		q.endPlace(session.Left)
	} else {
		q.endPlace(session.Refused) // without effect after a dispatch
	}
	q.entry.AddWait(time.Now().Add(-w.Waited))
	q.entry.SetPosition(w.Position)
	q.setQueueTime(w.Waited)
	if outcome == admission.Dispatched {
		q.noteAdmission("waited", w.Waited, w.Forecast)
		if q.x.ClientGone() {
			q.releaseAdmitted()
			q.refuse(front.ClientGone, "the client closed the connection while its request waited", 0)
			return false
		}
		return true
	}
	switch outcome {
	case admission.Gone:
		q.noteAdmission("the client disconnected", w.Waited, w.Forecast)
		q.refuse(front.ClientGone, "the client closed the connection while its request waited", 0)
	case admission.Displaced:
		q.r.countRefusal(q.class.Name, q.tenant, front.AdmissionFull)
		full := q.describeFull(w.Bound)
		q.noteAdmission("refused: a request with a larger claim has its place, "+full, w.Waited, w.Forecast)
		q.refuse(front.AdmissionFull, fmt.Sprintf("the queue is full (class %s: %s), and a request of a higher class, or of a model or tenant that takes less of it, has the place of this one", q.class.Name, full), q.class.retryAfter(q.r.admission.Forecast(w)))
	default:
		if time.Since(q.waitSince) < q.class.wait { // what the forecast did not see
			q.refuseUnmet("refused: its target could not be met any more", fmt.Sprintf("no rank could start the request within %s", roundWait(w.Waited)), w.Waited, w.Forecast, q.r.admission.Forecast(w))
			return false
		}
		q.r.countRefusal(q.class.Name, q.tenant, front.AdmissionTimeout)
		q.noteAdmission("refused: it waited too long", w.Waited, w.Forecast)
		q.refuse(front.AdmissionTimeout, fmt.Sprintf("no rank for model %q could start the request within %s (class %s, admission.max_wait or the class's own)", q.pool.Model, q.class.wait, q.class.Name), q.class.retryAfter(q.r.admission.Forecast(w)))
	}
	return false
}

// noteAdmission adds what became of the wait to the explain record.
func (q *request) noteAdmission(what string, waited, forecast time.Duration) {
	expected := "no forecast"
	if forecast >= 0 {
		expected = "forecast " + roundWait(forecast).String()
	}
	text := fmt.Sprintf("admission: %s; %s in class %s, %s", what, roundWait(waited), q.class.Name, expected)
	if q.tenant != "" {
		text += ", tenant " + q.tenant
	}
	if q.ttft > 0 {
		text += ", target of the first token " + q.ttft.String()
	}
	if q.tpot > 0 {
		text += ", of the time per token " + q.tpot.String()
	}
	if q.late {
		text += ", late"
	}
	q.settings.Scheduler.AddNote(q.req.RequestID, text)
}
