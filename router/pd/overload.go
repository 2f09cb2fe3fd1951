package pd

import (
	"fmt"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// chooseBelowLimits asks the scheduler for a rank that is below its load limits
// (limits.rank_requests, limits.rank_tokens, the worker's own limits, a half-open breaker). A
// decode leg whose request has a KV handle may exceed the limits: the router admitted the request
// before its prefill, and the engine leases the blocks of an unread handle until the lease ends.
func (q *request) chooseBelowLimits(query *schedule.Query) (schedule.Choice, bool) {
	opt := q.settings
	hasTargets := q.hasTargets(query)
	if !opt.Fleet.HasLimits() && !q.bindLate && !hasTargets && !q.avoidsClaims() {
		return opt.Scheduler.Choose(query)
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, c := range query.Candidates {
		if q.skips(query.Leg, c) {
			q.skipped = append(q.skipped, c)
		}
	}
	a := q.avoid(query, hasTargets)
	for {
		query.Excluded = q.skipped
		c, ok := opt.Scheduler.Choose(query)
		switch {
		case !ok && q.avoidsFewer(&a):
			continue
		case !ok && q.handover.Handle != nil && query.Leg == schedule.DecodeLeg:
			query.Excluded = q.excluded
			return opt.Scheduler.Choose(query)
		case !ok || !opt.Fleet.OverLimit(c.Rank):
			return c, ok
		}
		c.Reservation.Release()
		q.skipped = append(q.skipped, c.Rank)
	}
}

// avoided are ranks in q.skipped, from an index, that are better than none: the kept ones and then the slow ones.
type avoided struct{ from, kept, slow int }

// avoid makes a choice leave out ranks that are kept for others and, of the rest, those on which the request would miss
// more of its targets.
func (q *request) avoid(query *schedule.Query, hasTargets bool) avoided {
	a := avoided{from: len(q.skipped)}
	if q.avoidsClaims() {
		q.skipped = q.skipKept(q.skipped, query.Leg, query.Candidates)
		a.kept = len(q.skipped) - a.from
	}
	if hasTargets {
		a.slow = q.skipSlowRanks(query)
	}
	return a
}

// avoidsClaims reports whether a choice has to leave out ranks that are kept for others. One that is bound late does so
// in any case.
func (q *request) avoidsClaims() bool { return q.r.kvClaims.n.Load() > 0 && !q.bindLate }

// avoidsFewer lets a choice that found no rank take the slow ones too, and then the kept ones. It returns false if it
// may take them already.
func (q *request) avoidsFewer(a *avoided) bool {
	from := a.from + a.kept
	switch {
	case a.slow > 0:
		q.skipped, a.slow = slices.Delete(q.skipped, from, from+a.slow), 0
	case a.kept > 0:
		q.skipped, a.kept = slices.Delete(q.skipped, a.from, from), 0
	default:
		return false
	}
	return true
}

// skips reports whether a choice leaves a rank out: it is at a load limit or, if the choice was left
// for later, has no capacity.
func (q *request) skips(leg schedule.LegKind, r *worker.Rank) bool {
	if q.bindLate {
		return !q.isFree(leg, r)
	}
	return q.settings.Fleet.AtCapacity(r)
}

// refuseAtCapacity answers with 429 if every candidate that has not failed the request is at a load
// limit. It answers with 503 if all of them are at the limit because their breakers are half open
// and already try one request. It returns false without an answer if no candidate remains or one of
// them is below its limits.
func (q *request) refuseAtCapacity(leg schedule.LegKind, candidates []*worker.Rank) bool {
	full, halfOpen := q.countFull(candidates)
	switch full {
	case 0:
		return false
	case halfOpen:
		q.refuse(front.NoWorker, fmt.Sprintf("all %d %s ranks for model %q that could take the request have failed recently: their breakers are half open, with one request each",
			full, legName(leg), q.pool.Model), time.Second)
		return true
	}
	q.refuse(front.PoolOverloaded, fmt.Sprintf("all %d %s ranks for model %q that could take the request are at their limits of requests or of prompt tokens (limits.rank_requests, limits.rank_tokens, or the workers' own)",
		full, legName(leg), q.pool.Model), time.Second)
	return true
}

// countFull returns how many candidates that have not failed the request are at a load limit, and of
// these how many because they are half open. It returns 0 if one is below its limits.
func (q *request) countFull(candidates []*worker.Rank) (full, halfOpen int) {
	for _, c := range candidates {
		if q.isExcluded(c) {
			continue
		}
		if !q.settings.Fleet.AtCapacity(c) && !slices.Contains(q.skipped, c) {
			return 0, 0
		}
		full++
		if q.settings.Fleet.HalfOpenBusy(c) {
			halfOpen++
		}
	}
	return full, halfOpen
}

// mayAwaitLimits reports whether a request may wait that found every candidate of a leg at a load limit,
// because others were faster.
func (q *request) mayAwaitLimits(candidates []*worker.Rank) bool {
	if q.class == nil || q.r.admission.IsDisabled() || q.legSent || q.resumption != nil || q.attempt > 1 || !q.waitsForAdmission() {
		return false
	}
	full, halfOpen := q.countFull(candidates)
	return full > halfOpen
}

// awaitLimits lets a request wait that may (mayAwaitLimits). When it has waited, the rank of its first leg is
// reserved. The rest of a suspended stream waits until a rank is below its limits, because the place that it
// has waited for can be lost to others or with its rank. awaitLimits returns false if the request may not
// wait, or has been answered.
func (q *request) awaitLimits(candidates []*worker.Rank) (waited, answered bool) {
	if q.suspendedFor != nil {
		full, halfOpen := q.countFull(candidates)
		return full > halfOpen && q.awaitLimit(q.legDeadline), false
	}
	if !q.mayAwaitLimits(candidates) {
		return false, false
	}
	if !q.enqueue(q.newWaiter()) {
		return false, true
	}
	return true, false
}

// awaitDecodeLimits is awaitLimits for a request that has reserved the prefill rank of an attempt and found every
// decode rank at a load limit. It releases the prefill rank unless it returns false twice.
func (q *request) awaitDecodeLimits(prefill *schedule.Choice) (waited, answered bool) {
	switch {
	case q.mayAwaitLimits(q.plan.Decode):
		prefill.Reservation.Release() // others may use it meanwhile
		waited = q.enqueue(q.newWaiter())
		return waited, !waited
	case q.refuseAtCapacity(schedule.DecodeLeg, q.plan.Decode):
		prefill.Reservation.Release()
		return false, true
	}
	return false, false
}

// admitDecode refuses a two-leg request before its prefill runs if the decode pool is at capacity. It is
// called for requests that do not wait for capacity.
func (q *request) admitDecode() bool {
	if q.plan.Family == nil || !q.settings.Fleet.HasLimits() {
		return true
	}
	q.skipped = q.skipped[:0]
	return !q.refuseAtCapacity(schedule.DecodeLeg, q.plan.Decode)
}

// withdrawRetry takes one retry from the pool's retry budget and reports whether the request may
// try again. A request that no engine has received adds no load, so its retry is free.
func (q *request) withdrawRetry() bool {
	if q.unsent || q.settings.Fleet.WithdrawRetry(q.pool) {
		return true
	}
	q.noteFallback("retry_budget", "the pool's retry budget is exhausted; the request ends with the last failure")
	return false
}
