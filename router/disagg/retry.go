package disagg

import (
	"context"
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// A retry chooses among the workers of its own moment, not of the moment in which the
// request arrived: renew takes the fleet's present view, and a rank that has failed the
// request is a candidate again when its engine has come back (readmit). Where no
// candidate is left but an engine may come back, the retry waits for it (anotherRank).

// setback says why a rank is excluded from the further tries of a request.
type setback uint8

const (
	// answeredBadly: the engine is alive and answered with an error, or was too slow.
	answeredBadly setback = iota
	// wentDown: the connection was refused or broke, or the engine said that it dies. The
	// engine may be back soon.
	wentDown
	// spoiled: the rank may hold blocks of this prompt that were never written. Whether it
	// came back as a new process is not known for sure, so it stays excluded.
	spoiled
)

// exclusion is a rank that has failed the request, see scratch.excluded.
type exclusion struct {
	why setback
	// admissions is Fleet.Admissions of the rank from when it was chosen: a later one
	// means that the engine was away and is back.
	admissions uint32
}

// chosenRank is the rank last chosen for a leg, and its Fleet.Admissions and
// Fleet.Lives at that time.
type chosenRank struct {
	rank                 *worker.Rank
	admissions, restarts uint32
}

// noteChoice remembers at which of its engine's lives a rank was chosen.
func (q *request) noteChoice(leg schedule.Leg, r *worker.Rank) {
	if r == nil {
		return
	}
	f := q.r.opt().Fleet
	q.chosenFor[leg] = chosenRank{r, f.Admissions(r), f.Lives(r)}
}

// exclude keeps a rank out of the further tries of the request.
func (q *request) exclude(r *worker.Rank, why setback) {
	n, known := uint32(0), false
	for i := range q.chosenFor {
		if c := &q.chosenFor[i]; c.rank == r {
			n, known = c.admissions, true
		}
	}
	if !known {
		n = q.r.opt().Fleet.Admissions(r)
	}
	q.excluded = append(q.excluded, r)
	q.exclusions = append(q.exclusions, exclusion{why, n})
}

// readmit drops the exclusions that again says true for.
func (q *request) readmit(again func(*worker.Rank, exclusion) bool) {
	kept := 0
	for i, r := range q.excluded {
		if again(r, q.exclusions[i]) {
			continue
		}
		q.excluded[kept], q.exclusions[kept] = r, q.exclusions[i]
		kept++
	}
	clear(q.excluded[kept:])
	q.excluded, q.exclusions = q.excluded[:kept], q.exclusions[:kept]
}

// renew replaces the plan's candidates by the ranks that are ready now. What was decided
// of the request stays: its model's settings, its family, and whether one rank does it all.
func (q *request) renew() {
	f := q.r.opt().Fleet
	if len(q.excluded) > 0 {
		q.readmit(func(r *worker.Rank, e exclusion) bool { return e.why != spoiled && f.Admissions(r) != e.admissions })
	}
	view := f.View()
	if view == q.seen {
		return
	}
	q.seen = view
	p := &q.plan
	pool, ok := q.poolOf(view)
	if !ok { // every worker of the model has left
		p.Prefill, p.Decode, p.Whole = nil, nil, nil
		return
	}
	q.pool = pool
	if p.Prefill != nil || p.Decode != nil || p.Family != nil {
		p.Prefill = fittingOr(&q.steering, labelled(pool.Prefill, q.pd.PrefillLabel))
		p.Decode = fittingOr(&q.steering, labelled(decodeRanks(pool, p.Traits), q.pd.DecodeLabel))
	}
	if p.Family == nil {
		p.Whole = fittingOr(&q.steering, q.wholeOf(pool))
	}
}

// wholeOf are the candidates of the plan for one rank, by the pool as it is now.
func (q *request) wholeOf(pool *fleet.Pool) []*worker.Rank {
	switch q.plan.on {
	case onAny:
		return anyRank(pool)
	case onDecode:
		return labelled(decodeRanks(pool, q.plan.Traits), q.pd.DecodeLabel)
	case onAggregated:
		return pool.Aggregated
	}
	return wholeRanks(pool)
}

// candidates are the ranks that may take a leg of the plan.
func (q *request) candidates(leg schedule.Leg) []*worker.Rank {
	switch {
	case leg == schedule.PrefillLeg && (!q.warming || q.warmsPrefill()):
		return q.plan.Prefill
	case q.plan.Family == nil:
		return q.plan.Whole
	}
	return q.plan.Decode
}

// warmsPrefill says whether a prefill-only request goes to prefill workers.
func (q *request) warmsPrefill() bool { return q.plan.Family != nil || len(q.plan.Prefill) > 0 }

// legStarted counts a leg that is about to be sent.
func (q *request) legStarted(leg schedule.Leg, r *worker.Rank) {
	q.tries[leg]++
	q.r.opt().Observer.LegStarted(leg, r.ID)
}

// prefillWentDown says whether the engine that computed the pair's handle is gone, or has
// been gone: its KV is lost.
func (q *request) prefillWentDown() bool {
	r, f := q.pair.Prefill, q.r.opt().Fleet
	if r == nil || q.plan.Traits.Unleased {
		return false
	}
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == r && f.Admissions(r) != c.admissions {
		return true
	}
	state, _ := r.Worker.State()
	return state == worker.Unhealthy || state == worker.Gone || f.Refuses(r)
}

// decodesAlone says whether decode may do the whole request where prefill cannot be had.
func (q *request) decodesAlone() bool { return q.pd.PlainDecode && !q.plan.Traits.NoPlain }

// maxFree bounds the tries of one request that do not count because the connection was
// refused at once.
const maxFree = 64

// triesLeft says whether pd.max_attempts allows another try. A refused connection is none:
// no engine has seen the request.
func (q *request) triesLeft() bool { return q.attempt-q.free < q.pd.MaxAttempts }

// anotherRank says whether a leg has a candidate that has not failed the request, and
// waits for one where an engine that went down may come back: for timeouts.pool_wait over
// all retries of the request, and while its client is there and its deadline has not passed.
func (q *request) anotherRank(leg schedule.Leg) bool {
	if q.renew(); q.other(q.candidates(leg)) {
		return true
	}
	if !q.mayComeBack(leg) {
		return false
	}
	opt := q.r.opt()
	n := q.r.waiting.Add(1)
	defer q.r.waiting.Add(-1)
	if opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		return false
	}
	began := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), q.orDeadline(began.Add(opt.Timeouts.PoolWait-q.waited)))
	defer cancel()
	q.x.OnGone(cancel)
	defer q.x.OnGone(nil)
	found := q.waitForRank(ctx, leg)
	q.waited += time.Since(began)
	q.x.SetHeader("X-Sluice-Waited", q.waited.Round(time.Millisecond).String())
	return found
}

// mayComeBack says whether it is worth while to wait for a candidate: the pool has workers,
// and not all of them are there and have answered the request badly.
func (q *request) mayComeBack(leg schedule.Leg) bool {
	if q.waited >= q.r.opt().Timeouts.PoolWait || q.named.Prefill != nil && leg == schedule.PrefillLeg || q.x.Gone() || q.late() {
		return false // nobody probes workers that a request names
	}
	for i, r := range q.excluded {
		if q.exclusions[i].why == wentDown && q.takes(leg, r.Worker.Spec.Role) {
			return true
		}
	}
	if len(q.candidates(leg)) > 0 {
		return false
	}
	for role, n := range q.pool.Members {
		if n > 0 && q.takes(leg, worker.Role(role)) {
			return true
		}
	}
	return false
}

// takes says whether workers of a role take a leg of the plan.
func (q *request) takes(leg schedule.Leg, role worker.Role) bool {
	switch {
	case q.plan.Family == nil && q.plan.on == onAny:
		return true
	case leg == schedule.PrefillLeg && (!q.warming || q.warmsPrefill()):
		return role == worker.Prefill
	}
	return role != worker.Prefill
}

const (
	// firstPause is after how long an engine that went down is tried again though the fleet
	// still says that it is ready: it may have restarted before a probe saw it gone. Each
	// further pause of the request is twice as long.
	firstPause = 100 * time.Millisecond
	longPause  = 2 * time.Second
)

// waitForRank waits until a leg has a candidate, or ctx ends.
func (q *request) waitForRank(ctx context.Context, leg schedule.Leg) bool {
	f := q.r.opt().Fleet
	q.pause = min(max(2*q.pause, firstPause), longPause)
	on, cancel := context.WithTimeout(ctx, q.pause)
	defer cancel()
	for {
		seen := q.seen
		_, changed := f.Wait(on, func(v *fleet.View) bool { return v != seen })
		q.renew()
		switch {
		case ctx.Err() != nil, q.x.Gone(), q.late():
			return false
		case q.other(q.candidates(leg)):
			return true
		case changed:
			continue
		case on == ctx:
			return false // the fleet is closed
		}
		// The pause is over. The fleet tells when those that it knows to be down are back.
		on = ctx
		ready := q.candidates(leg)
		q.readmit(func(r *worker.Rank, e exclusion) bool { return e.why == wentDown && contains(ready, r) })
		if q.other(ready) {
			return true
		}
	}
}

func contains(ranks []*worker.Rank, r *worker.Rank) bool {
	for i := range ranks {
		if ranks[i] == r {
			return true
		}
	}
	return false
}

// returnsWithin is how long the fleet may take to ask an engine that has restarted what it is.
const returnsWithin = time.Second

// awaitReturn waits for a prefill rank that has just answered, and whose answer has shown
// the fleet that its engine has restarted: it is back in a moment.
func (q *request) awaitReturn(r *worker.Rank) {
	ctx, cancel := context.WithDeadline(context.Background(), q.orDeadline(time.Now().Add(returnsWithin)))
	defer cancel()
	q.x.OnGone(cancel)
	defer q.x.OnGone(nil)
	q.r.opt().Fleet.Wait(ctx, func(*fleet.View) bool {
		q.renew()
		return contains(q.plan.Prefill, r)
	})
}

// goneWaiting answers for a client that left while its request waited for a worker.
func (q *request) goneWaiting() bool {
	if q.waited == 0 || !q.x.Gone() {
		return false
	}
	q.refuse(front.ClientGone, "the client closed the connection while waiting for a worker", 0)
	return true
}
