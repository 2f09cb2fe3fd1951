package pd

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/worker"
)

// chosenPrefill is the choice of a prefill leg that was made while the request waited, with the joint
// choice of which it is a part.
type chosenPrefill struct {
	choice schedule.Choice
	joint  *schedule.JointChoice
}

// awaitAdmission lets the request wait until its session may be active and a rank can start it soon. In that
// case the rank of its first leg is reserved when it returns. If no request waits and a rank has capacity,
// it returns at once, and the legs choose their ranks as without a queue. It answers with an error and
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
	if c.IsEmpty() && q.hasCapacity() {
		return true
	}
	w := q.newWaiter()
	if c.IsIdle(w.Item.Pool) && q.hasCapacity() {
		return true
	}
	return q.enqueue(w)
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

// queuePool returns the name of the set of ranks that the request competes for.
func (q *request) queuePool() string {
	pool := q.pool.Model
	if r := q.firstRank(); r != nil && r.Worker.Info().Base != "" {
		pool = r.Worker.Info().Base // adapters of a model compete for its ranks
	}
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
	if model == "" && q.plan.wholeSet == wholeDefault && !q.prefillOnly && q.resumption == nil && !s.isRestricting() {
		return ""
	}
	stored := ""
	if s.stored != nil {
		stored = s.stored.ID.String()
	}
	// A stream that continues is in a group of its own: it needs more KV than those that have not begun.
	return fmt.Sprintf("%q %d %v %v %q %v %v %q %q", model, q.plan.wholeSet, q.prefillOnly, q.resumption != nil, stored, s.workers, s.ranks, s.allowed, s.labels)
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

// targetMargin is the part of a target that a forecast leaves unused, because it is not exact.
const targetMargin = 0.1

// setDue sets the latest start by which the request meets its targets: that of the first token, and its
// deadline. A request without targets has its place among others as if it had to start after half of
// its longest wait.
func (q *request) setDue(w *admission.Waiter, rank *worker.Rank, todo, output int) {
	c := q.r.admission
	if q.settings.admission.Mode == "fifo" {
		w.Item.Due = c.Now()
		return
	}
	var prefill, decode time.Duration
	if q.engineDelay = 0; rank != nil {
		prefill, q.engineDelay = q.settings.Scheduler.FirstTokenTime(rank, todo)
		if !q.stream {
			decode = time.Duration(output) * q.settings.Scheduler.StepTime(rank, q.promptTokens()+output)
		}
	}
	left := time.Duration(math.MaxInt64)
	since := time.Since(q.req.Received)
	if q.awaitsFirstToken() {
		left = q.firstTokenBudget() - prefill
		q.startBy = c.Now() + int64(left)
	}
	if !q.deadline.IsZero() {
		total := q.deadline.Sub(q.req.Received)
		left = min(left, time.Duration((1-targetMargin)*float64(total))-prefill-decode-since)
	}
	if left == math.MaxInt64 {
		w.Item.Due = c.Now() + int64(q.class.wait/2)
		return
	}
	w.Item.Due, w.Item.Firm = c.Now()+int64(left), true
}

// meetsTarget reports whether the request may wait. If the forecast says that it cannot start in time,
// it is refused or marked late, as its class says.
//
// The delay in the engine counts only if others of its class or of higher ones go before it. It is learned
// from the first tokens of whatever the engine has been given: were a request refused for it alone, a class
// could be kept out by lower ones, and nothing would correct the delay.
func (q *request) meetsTarget(w *admission.Waiter) bool {
	c := q.r.admission
	if !w.Item.Firm {
		return true
	}
	wait := c.Forecast(w)
	left := time.Duration(w.Item.Due - c.Now())
	if delay := q.engineDelay; wait == 0 {
		if q.startBy > 0 {
			q.startBy += int64(delay)
		}
		if left < 0 {
			w.Item.Due += int64(delay)
			left += delay
		}
	}
	if max(wait, 0) <= left {
		return true
	}
	if q.late = true; !q.class.refuse {
		w.Item.Due = 0 // passed already
		return true
	}
	q.refuseUnmet("refused: its target cannot be met", fmt.Sprintf("the request would wait %s", roundWait(max(wait, 0))), wait, wait, wait-max(left, 0))
	return false
}

// refuseUnmet refuses a request whose target cannot be met any more.
func (q *request) refuseUnmet(note, what string, waited, forecast, retry time.Duration) {
	q.r.countRefusal(q.class.Name, q.tenant, front.TargetUnmet)
	q.noteAdmission(note, waited, forecast)
	q.refuse(front.TargetUnmet, fmt.Sprintf("%s (class %s), too long for its target of %s", what, q.class.Name, q.describeTarget()), q.class.retryAfter(retry))
}

// refuseEarly refuses a request whose target cannot be met, before its prompt is looked at: under overload
// most of the router's work would be for requests that it refuses. It returns false, without an answer,
// if the request may be in time as far as is known without its prompt.
func (q *request) refuseEarly() bool {
	c := q.r.admission
	if q.class == nil || !q.class.refuse || q.ttft == 0 || !q.stream || c.IsEmpty() || !q.waitsForAdmission() || q.wantsPrefillOnly() {
		return false
	}
	rank := q.firstRank()
	if rank == nil {
		return false
	}
	w := &admission.Waiter{Class: q.class.Name}
	w.Item = admission.Item{Pool: q.queuePool(), Group: q.rankGroup(), Tenant: q.tenant, Weight: q.weight, Cost: 1}
	q.setDue(w, rank, 0, 0)
	q.entry.SetClass(q.class.Name, q.tenant)
	return !q.meetsTarget(w)
}

// firstTokenBudget returns how much is left of the target of the first token, less targetMargin.
func (q *request) firstTokenBudget() time.Duration {
	return time.Duration((1-targetMargin)*float64(q.ttft)) - time.Since(q.req.Received)
}

// awaitsFirstToken reports whether the request has a target for its first token.
func (q *request) awaitsFirstToken() bool { return q.ttft > 0 && q.stream && !q.prefillOnly }

func (q *request) describeTarget() string {
	if q.awaitsFirstToken() {
		return q.ttft.String() + " for the first token"
	}
	return q.deadline.Sub(q.req.Received).String() + " for the response"
}

func roundWait(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// retryAfter returns the time after which a refused request of the class may be sent again: the forecast, at
// least a second, and at most the longest wait of the class. A forecast beyond that says that the request would
// not start, not when another would.
func (c *admissionClass) retryAfter(forecast time.Duration) time.Duration {
	return max(min(forecast, c.wait), time.Second)
}

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

// releaseAdmitted gives back what TryStart has reserved.
func (q *request) releaseAdmitted() {
	q.reservedDecode.Reservation.Release()
	q.reservedDecode, q.startsAtDecode = schedule.Choice{}, false
	p := &q.reservedPrefill
	p.choice.Reservation.Release()
	if p.joint != nil {
		p.joint.Prefill.Reservation.Release()
		p.joint.Decode.Reservation.Release()
	}
	*p = chosenPrefill{}
	q.endUndecided()
}

// hasCapacity reports whether the legs of the plan could start now. It returns true if a leg has no
// candidates: then the request does not wait for capacity, but for a worker.
func (q *request) hasCapacity() bool {
	if q.prefillOnly {
		ranks := q.nextSelected(q.candidates(schedule.PrefillLeg))
		return len(ranks) == 0 || q.anyFree(schedule.PrefillLeg, ranks)
	}
	if q.plan.Family == nil {
		return len(q.plan.Whole) == 0 || q.anyFree(schedule.WholeLeg, q.plan.Whole)
	}
	prefill := q.nextSelected(q.plan.Prefill)
	return (len(prefill) == 0 || q.anyFree(schedule.PrefillLeg, prefill)) && (len(q.plan.Decode) == 0 || q.decodeHasHeadroom())
}

// decodeHasHeadroom reports whether a decode rank could start the request beside those whose prompts
// are being computed: they will need decode ranks that they have not chosen yet. If headers restrict the
// request, so do its own ranks beside those with the same restriction.
func (q *request) decodeHasHeadroom() bool {
	total, alike := q.r.undecided.count(q)
	if !q.steering.isRestricting() {
		return q.hasHeadroom(q.plan.Decode, total)
	}
	return q.hasHeadroom(q.plan.Decode, alike) && q.hasHeadroom(withLabel(decodeRanks(q.pool, q.plan.Traits), q.pd.DecodeLabels), total)
}

// hasHeadroom reports whether some of the ranks could start the request beside undecided others.
func (q *request) hasHeadroom(ranks []*worker.Rank, undecided int64) bool {
	if undecided <= 0 {
		return q.anyFree(schedule.DecodeLeg, ranks)
	}
	headroom := int64(0)
	for _, r := range ranks {
		if q.isExcluded(r) || !q.isFree(schedule.DecodeLeg, r) {
			continue
		}
		n := min(q.settings.Fleet.Headroom(r), schedule.BatchHeadroom(r, q.engineQueue()), schedule.KVHeadroom(r, q.prompt.Count, q.maxTokens))
		if headroom += min(n, undecided+1); headroom > undecided {
			return true
		}
	}
	return false
}

// undecided counts, by model, the requests with two legs whose prompt is being computed and whose decode
// rank has not been chosen. Those that headers restrict also count by their restriction.
type undecided struct {
	byModel sync.Map // *atomic.Int64 by name

	mu         sync.Mutex
	restricted map[undecidedKey]int64 // above 0
}

type undecidedKey struct{ model, group string }

func (u *undecided) of(model string) *atomic.Int64 {
	if n, ok := u.byModel.Load(model); ok {
		return n.(*atomic.Int64)
	}
	n, _ := u.byModel.LoadOrStore(strings.Clone(model), new(atomic.Int64))
	return n.(*atomic.Int64)
}

// count returns how many others of the request's model are undecided, and how many of these have its
// restriction.
func (u *undecided) count(q *request) (total, alike int64) {
	total = u.of(q.pool.Model).Load()
	if q.steering.isRestricting() {
		u.mu.Lock()
		alike = u.restricted[q.undecidedKey()]
		u.mu.Unlock()
	}
	if q.isUndecided != nil {
		total, alike = total-1, alike-1
	}
	return total, alike
}

func (u *undecided) addRestricted(k undecidedKey, n int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.restricted == nil {
		u.restricted = map[undecidedKey]int64{}
	}
	if u.restricted[k] += n; u.restricted[k] == 0 {
		delete(u.restricted, k)
	}
}

func (q *request) undecidedKey() undecidedKey { return undecidedKey{q.pool.Model, q.rankGroup()} }

// beginUndecided counts the request as one whose decode rank will be chosen later.
func (q *request) beginUndecided() {
	if q.isUndecided != nil {
		return
	}
	u := &q.r.undecided
	q.isUndecided = u.of(q.pool.Model)
	q.isUndecided.Add(1)
	if q.steering.isRestricting() {
		q.undecidedAs = q.undecidedKey()
		q.undecidedAs.model = strings.Clone(q.undecidedAs.model)
		u.addRestricted(q.undecidedAs, 1)
	}
}

func (q *request) endUndecided() {
	if q.isUndecided == nil {
		return
	}
	q.isUndecided.Add(-1)
	q.isUndecided = nil
	if q.undecidedAs != (undecidedKey{}) {
		q.r.undecided.addRestricted(q.undecidedAs, -1)
		q.undecidedAs = undecidedKey{}
	}
}

// anyFree reports whether one of the ranks could start a leg soon. It returns true if all of them are half open
// and busy with a trial: nobody waits for a trial, so the request is refused.
func (q *request) anyFree(leg schedule.LegKind, ranks []*worker.Rank) bool {
	s := q.settings
	trials, full := false, false
	for _, r := range ranks {
		switch {
		case q.isExcluded(r):
		case s.Fleet.HasLimits() && s.Fleet.HalfOpenBusy(r):
			trials = true
		case q.isFree(leg, r):
			return true
		default:
			full = true
		}
	}
	return trials && !full
}

// isFree reports whether a rank could start a leg soon: little work is queued there, its KV can hold
// the request, it reports no pressure, and it is below its load limits.
func (q *request) isFree(leg schedule.LegKind, r *worker.Rank) bool {
	s := q.settings
	if s.Fleet.HasLimits() && s.Fleet.AtCapacity(r) {
		return false
	}
	return s.Scheduler.CanStart(r, leg, q.engineQueue(), q.prompt.Count, q.maxTokens)
}

func (q *request) engineQueue() schedule.EngineQueue {
	return schedule.EngineQueue{Time: q.settings.admission.EngineQueue, Backlogged: q.backlogged}
}

// TryStart implements admission.Starter: it reserves the rank of the first leg if one has capacity.
func (q *request) TryStart(backlogged time.Duration, emptySince *time.Time) admission.Verdict {
	q.backlogged = backlogged
	q.refreshCandidates()
	leg := q.firstLeg()
	candidates := q.candidates(leg)
	if q.hasLostPrefill() {
		*emptySince = time.Time{}
		return q.startAtDecode()
	}
	if len(candidates) == 0 || q.plan.Family != nil && len(q.plan.Decode) == 0 && !q.prefillOnly {
		return q.awaitWorkers(emptySince)
	}
	*emptySince = time.Time{}
	if q.yields() {
		return admission.NotNow
	}
	if !q.hasCapacity() {
		q.preempt()
		if len(q.excluded) > 0 {
			return admission.NotNow // others of its group may use these ranks
		}
		return admission.NoCapacity
	}
	if now := time.Now(); len(q.overlaps) > 0 && now.Sub(q.lookedUp) > overlapAge {
		q.lookedUp = now
		q.lookUpOverlap(now)
	}
	if q.prefersFullRank(leg, candidates) {
		return admission.NotNow
	}
	q.bindLate = true
	ok := q.reserveFirstLeg(candidates)
	q.bindLate = false
	if !ok {
		return admission.NotNow // another request was faster
	}
	return admission.Started
}

// overlapAge is how old the look-up of a waiting request's prefix may be when its rank is chosen.
const overlapAge = 200 * time.Millisecond

// prefersFullRank reports whether the request waits for a rank without capacity, because that holds so much of
// its prompt that the first token is expected earlier there. It does so for admission.affinity_wait at
// most, counted from when it could first start elsewhere.
func (q *request) prefersFullRank(leg schedule.LegKind, candidates []*worker.Rank) bool {
	s := q.settings
	if s.admission.AffinityWait == 0 || !s.Scheduler.ChoosesByCost() {
		return false
	}
	query := q.newQuery(leg, candidates)
	best, ok := s.Scheduler.Preview(&query)
	if !ok || best.CachedTokens == 0 || q.isFree(leg, best.Rank) {
		return false
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, r := range candidates {
		if !q.isFree(leg, r) {
			q.skipped = append(q.skipped, r)
		}
	}
	query.Excluded = q.skipped
	other, ok := s.Scheduler.Preview(&query)
	if !ok || q.firstTokenIn(&best) >= q.firstTokenIn(&other) {
		return false
	}
	now := time.Now()
	if q.affinitySince.IsZero() {
		q.affinitySince = now
	}
	return now.Sub(q.affinitySince) < s.admission.AffinityWait
}

// firstTokenIn returns the forecast of the time to the first token on a rank.
func (q *request) firstTokenIn(c *schedule.Choice) time.Duration {
	s := q.settings.Scheduler
	return s.StartIn(c.Rank) + s.PrefillTime(c.Rank, max(q.promptTokens()-c.CachedTokens, 1))
}

// reserveFirstLeg chooses among the ranks with capacity.
func (q *request) reserveFirstLeg(candidates []*worker.Rank) bool {
	switch {
	case q.prefillOnly:
		c, ok := q.choose(schedule.PrefillLeg, q.nextSelected(candidates))
		q.reservedPrefill.choice = c
		return ok
	case q.plan.Family == nil:
		c, ok := q.choose(schedule.WholeLeg, candidates)
		q.reservedDecode = c
		return ok
	case q.choosesJointly():
		c, ok := q.chooseJointly(q.notifyingCandidates(candidates))
		if ok {
			q.reservedPrefill.joint = &c
		}
		return ok
	}
	c, ok := q.choose(schedule.PrefillLeg, q.notifyingCandidates(candidates))
	q.reservedPrefill.choice = c
	if ok {
		q.beginUndecided()
	}
	return ok
}

// takeReservedPrefill returns the choice of the prefill leg that TryStart has made, once. ok is false
// if there is none, or its rank is no longer ready.
func (q *request) takeReservedPrefill() (c schedule.Choice, ok bool) {
	c, q.reservedPrefill.choice = q.reservedPrefill.choice, schedule.Choice{}
	if c.Rank == nil {
		return c, false
	}
	if state, _ := c.Rank.Worker.State(); state != worker.Ready {
		c.Reservation.Release()
		return schedule.Choice{}, false
	}
	c.Reservation.Start()
	return c, true
}

// takeReservedJoint is takeReservedPrefill for a joint choice of both legs.
func (q *request) takeReservedJoint() (c schedule.JointChoice, ok bool) {
	if q.reservedPrefill.joint == nil {
		return c, false
	}
	c, q.reservedPrefill.joint = *q.reservedPrefill.joint, nil
	return c, true
}

// awaitWorkers is TryStart of a request whose leg has no ready worker. It waits for one for
// timeouts.pool_wait, counted from when the waiting requests that may use the same ranks had none. Then it
// goes on, and is refused as a request that found none at its arrival.
func (q *request) awaitWorkers(emptySince *time.Time) admission.Verdict {
	now := time.Now()
	if emptySince.IsZero() {
		*emptySince = now
	}
	if now.Sub(*emptySince) < q.settings.Timeouts.PoolWait {
		return admission.NoCapacity
	}
	q.waited = q.settings.Timeouts.PoolWait
	return admission.Started
}

// hasLostPrefill reports whether a request with two legs has no prefill worker any more, and decode may compute its
// prompt.
func (q *request) hasLostPrefill() bool {
	return q.plan.Family != nil && !q.prefillOnly && len(q.plan.Prefill) == 0 && len(q.plan.Decode) > 0 && q.mayDecodeOnly()
}

// startAtDecode is TryStart of a request that has lost its prefill workers (hasLostPrefill): it reserves a decode
// rank with capacity, which runs the request as a whole.
func (q *request) startAtDecode() admission.Verdict {
	if !q.anyFree(schedule.WholeLeg, q.plan.Decode) {
		if len(q.excluded) > 0 {
			return admission.NotNow // others of its group may use these ranks
		}
		return admission.NoCapacity
	}
	q.bindLate = true
	c, ok := q.choose(schedule.WholeLeg, q.plan.Decode)
	q.bindLate = false
	if !ok {
		return admission.NotNow // another request was faster
	}
	q.reservedDecode, q.startsAtDecode = c, true
	return admission.Started
}
