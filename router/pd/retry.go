package pd

import (
	"context"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// A retry chooses among the workers that are ready at its time, not at the time of the request's
// arrival. refreshCandidates reads the fleet's current view, and a rank that has failed the request
// becomes a candidate again when its engine is back (readmit). If no candidate is left but an
// engine may come back, the retry waits for it (awaitCandidate).

// exclusionReason says why a rank is excluded from further tries of a request.
type exclusionReason uint8

const (
	// excludedError: the engine is alive but answered with an error or too slowly.
	excludedError exclusionReason = iota
	// excludedDown: the connection was refused or broke, or the engine reported that it is
	// about to exit. It may be back soon.
	excludedDown
	// excludedTainted: the rank may list blocks of this prompt that were never written. It stays
	// excluded, because the router cannot be sure that a new process has replaced it.
	excludedTainted
)

// exclusion is a rank that has failed the request, see scratch.excluded.
type exclusion struct {
	reason exclusionReason
	// admissions is the rank's Fleet.Admissions when it was chosen. A higher value later means that
	// the engine was away and has come back.
	admissions uint32
}

// chosenRank is the last rank chosen for a leg, with its Fleet.Admissions and Fleet.Incarnation at
// that time.
type chosenRank struct {
	rank                    *worker.Rank
	admissions, incarnation uint32
}

// recordChosenRank records the chosen rank of a leg and its engine's incarnation.
func (q *request) recordChosenRank(leg schedule.LegKind, r *worker.Rank) {
	if r == nil {
		return
	}
	f := q.settings.Fleet
	q.r.sessions.Placed(&q.turn, leg, r)
	q.chosenFor[leg] = chosenRank{r, f.Admissions(r), f.Incarnation(r)}
}

// exclude excludes a rank from further tries of the request.
func (q *request) exclude(r *worker.Rank, reason exclusionReason) {
	n, known := uint32(0), false
	for i := range q.chosenFor {
		if c := &q.chosenFor[i]; c.rank == r {
			n, known = c.admissions, true
		}
	}
	if !known {
		n = q.settings.Fleet.Admissions(r)
	}
	q.excluded = append(q.excluded, r)
	q.exclusions = append(q.exclusions, exclusion{reason, n})
}

// readmit removes the exclusions for which readmits returns true.
func (q *request) readmit(readmits func(*worker.Rank, exclusion) bool) {
	kept := 0
	for i, r := range q.excluded {
		if readmits(r, q.exclusions[i]) {
			continue
		}
		q.excluded[kept], q.exclusions[kept] = r, q.exclusions[i]
		kept++
	}
	clear(q.excluded[kept:])
	q.excluded, q.exclusions = q.excluded[:kept], q.exclusions[:kept]
}

// refreshCandidates replaces the plan's candidates with the ranks that are ready now. Decisions
// about the request do not change: its model's configuration, its family, and whether one rank runs
// the whole request.
func (q *request) refreshCandidates() {
	f := q.settings.Fleet
	view := f.View() // before Admissions, which the fleet raises first: a rank that is back in the view is readmitted
	if len(q.excluded) > 0 {
		q.readmit(func(r *worker.Rank, e exclusion) bool {
			return e.reason != excludedTainted && f.Admissions(r) != e.admissions
		})
	}
	if view == q.view {
		return
	}
	q.view = view
	p := &q.plan
	pool, ok := q.poolOf(view)
	if !ok { // every worker of the model has been removed
		p.Prefill, p.Decode, p.Whole = nil, nil, nil
		return
	}
	q.pool = pool
	if p.Prefill != nil || p.Decode != nil || p.Family != nil {
		p.Prefill = filterRanks(&q.steering, withLabel(pool.Prefill, q.pd.PrefillLabels))
		p.Decode = filterRanks(&q.steering, withLabel(decodeRanks(pool, p.Traits), q.pd.DecodeLabels))
	}
	if p.Family == nil {
		p.Whole = filterRanks(&q.steering, q.wholeCandidates(pool))
	}
	q.dropTooSmall()
}

// dropTooSmall removes the candidates whose whole KV is too small for the prompt, if others can hold it. If none can, an
// engine must refuse the request.
func (q *request) dropTooSmall() {
	q.plan.largeOnly = false
	isTooSmall := func(r *worker.Rank) bool { return schedule.ExceedsKV(r, q.prompt.Count) }
	for _, ranks := range [...]*[]*worker.Rank{&q.plan.Prefill, &q.plan.Decode, &q.plan.Whole} {
		if !slices.ContainsFunc(*ranks, isTooSmall) {
			continue
		}
		if large := slices.DeleteFunc(slices.Clone(*ranks), isTooSmall); len(large) > 0 {
			*ranks, q.plan.largeOnly = large, true
		}
	}
}

// wholeCandidates returns the ranks of pool that may run the whole request.
func (q *request) wholeCandidates(pool *fleet.Pool) []*worker.Rank {
	switch q.plan.wholeSet {
	case wholeAny:
		return anyRank(pool)
	case wholeDecode:
		return withLabel(decodeRanks(pool, q.plan.Traits), q.pd.DecodeLabels)
	case wholeAggregated:
		return pool.Aggregated
	}
	return wholeRanks(pool)
}

// candidates returns the ranks that may run a leg of the plan.
func (q *request) candidates(leg schedule.LegKind) []*worker.Rank {
	switch {
	case leg == schedule.PrefillLeg && (!q.prefillOnly || q.prefillOnlyOnPrefill()):
		return q.plan.Prefill
	case q.plan.Family == nil:
		return q.plan.Whole
	}
	return q.plan.Decode
}

// prefillOnlyOnPrefill reports whether a prefill-only request runs on prefill workers.
func (q *request) prefillOnlyOnPrefill() bool { return q.plan.Family != nil || len(q.plan.Prefill) > 0 }

// prefillEngineLost reports whether the engine that computed the pair's handle is down or was down
// since, so that its KV is lost.
func (q *request) prefillEngineLost() bool {
	r, f := q.handover.Prefill, q.settings.Fleet
	if r == nil || q.plan.Traits.NoLease {
		return false
	}
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == r && f.Admissions(r) != c.admissions {
		return true
	}
	state, _ := r.Worker.State()
	return state == worker.Unhealthy || state == worker.Gone || f.RefusesConnections(r)
}

// mayDecodeOnly reports whether decode may run the whole request without a prefill worker.
func (q *request) mayDecodeOnly() bool {
	return q.pd.DecodeOnlyFallback && !q.plan.Traits.NoDecodeOnly
}

// maxFreeTries bounds the tries of one request that do not count because the engine's host refused
// the connection.
const maxFreeTries = 64

// triesLeft reports whether pd.max_attempts allows another try. A refused connection does not
// count, because no engine has seen the request.
func (q *request) triesLeft() bool { return q.attempt-q.freeTries < q.pd.MaxAttempts }

// awaitCandidate reports whether a leg has a candidate that has not failed the request. If an
// engine that went down may come back, it waits for one: up to timeouts.pool_wait over all retries
// of the request, or until the client disconnects or the deadline passes.
func (q *request) awaitCandidate(leg schedule.LegKind) bool {
	if q.refreshCandidates(); q.hasCandidate(q.candidates(leg)) {
		return true
	}
	if !q.mayRecover(leg) {
		return false
	}
	opt := q.settings
	n := q.r.waiting.Add(1)
	defer q.r.waiting.Add(-1)
	if opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		return false
	}
	began := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), q.earlierDeadline(began.Add(opt.Timeouts.PoolWait-q.waited)))
	defer cancel()
	q.x.OnClientGone(cancel)
	defer q.x.OnClientGone(nil)
	found := q.waitForRank(ctx, leg)
	q.waited += time.Since(began)
	q.entry.AddWait(began)
	q.setQueueTime(q.waited)
	return found
}

// setQueueTime tells the client how long its request waited for a worker. X-Sluice-Waited is the
// former name of the header.
func (q *request) setQueueTime(d time.Duration) {
	text := d.Round(time.Millisecond).String()
	q.x.SetHeader("X-Sluice-Queue-Time", text)
	q.x.SetHeader("X-Sluice-Waited", text)
}

// mayRecover reports whether a candidate may appear: the pool has workers, and not all of them are
// ready and have failed the request.
func (q *request) mayRecover(leg schedule.LegKind) bool {
	if q.waited >= q.settings.Timeouts.PoolWait || q.selected.Prefill != nil && leg == schedule.PrefillLeg || q.x.ClientGone() || q.pastDeadline() {
		return false // the fleet does not probe workers that a request names
	}
	for i, r := range q.excluded {
		if q.exclusions[i].reason == excludedDown && q.roleServes(leg, r.Worker.Spec.Role) {
			return true
		}
	}
	if len(q.candidates(leg)) > 0 {
		return false
	}
	for role, n := range q.pool.Members {
		if n > 0 && q.roleServes(leg, worker.Role(role)) {
			return true
		}
	}
	return false
}

// roleServes reports whether workers of a role can run a leg of the plan.
func (q *request) roleServes(leg schedule.LegKind, role worker.Role) bool {
	switch {
	case q.plan.Family == nil && q.plan.wholeSet == wholeAny:
		return true
	case leg == schedule.PrefillLeg && (!q.prefillOnly || q.prefillOnlyOnPrefill()):
		return role == worker.Prefill
	}
	return role != worker.Prefill
}

const (
	// minRetryPause is how long a retry waits before it tries an engine again that went down
	// although the fleet still lists it as ready: it may have restarted between two probes. Each
	// further pause of the request is twice as long.
	minRetryPause = 100 * time.Millisecond
	maxRetryPause = 2 * time.Second
)

// waitForRank waits until a leg has a candidate or ctx ends.
func (q *request) waitForRank(ctx context.Context, leg schedule.LegKind) bool {
	f := q.settings.Fleet
	on, cancel := context.WithTimeout(ctx, q.pause.Next(minRetryPause, maxRetryPause))
	defer cancel()
	for {
		seen := q.view
		_, changed := f.Wait(on, func(v *fleet.View) bool { return v != seen })
		q.refreshCandidates()
		switch {
		case ctx.Err() != nil, q.x.ClientGone(), q.pastDeadline():
			return false
		case q.hasCandidate(q.candidates(leg)):
			return true
		case changed && on != ctx:
			continue
		case !changed && on == ctx:
			return false // the fleet is closed
		}
		// The pause is over. What is a candidate at its end is tried again, so a rank that becomes one later has
		// been out of the pools and is back. Fleet.Admissions need not show that: it does not count ranks that
		// were frozen, or workers that were drained.
		on = ctx
		ready := q.candidates(leg)
		q.readmit(func(r *worker.Rank, e exclusion) bool { return e.reason == excludedDown && containsRank(ready, r) })
		if q.hasCandidate(ready) {
			return true
		}
	}
}

func containsRank(ranks []*worker.Rank, r *worker.Rank) bool {
	for i := range ranks {
		if ranks[i] == r {
			return true
		}
	}
	return false
}

// maxReturnWait bounds how long the router waits for the fleet's probe of an engine that has
// restarted.
const maxReturnWait = time.Second

// awaitReturn waits for a prefill rank whose response has just shown the fleet that its engine
// restarted. The fleet admits the rank again shortly.
func (q *request) awaitReturn(r *worker.Rank) {
	ctx, cancel := context.WithDeadline(context.Background(), q.earlierDeadline(time.Now().Add(maxReturnWait)))
	defer cancel()
	q.x.OnClientGone(cancel)
	defer q.x.OnClientGone(nil)
	q.settings.Fleet.Wait(ctx, func(*fleet.View) bool {
		q.refreshCandidates()
		return containsRank(q.plan.Prefill, r)
	})
}

// refuseIfGone ends a request whose client disconnected while it waited for a worker, and
// reports whether it did.
func (q *request) refuseIfGone() bool {
	if q.waited == 0 || !q.x.ClientGone() {
		return false
	}
	q.refuse(front.ClientGone, "the client closed the connection while waiting for a worker", 0)
	return true
}
