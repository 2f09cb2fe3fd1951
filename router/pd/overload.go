package pd

import (
	"fmt"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// chooseBelowLimits asks the scheduler for a rank that is not at a bound of its load
// (limits.rank_requests, limits.rank_tokens, its worker's own, a breaker that is half open). A
// decode that holds a handle is let over the bound rather than refused: it was
// admitted before its prefill, and the blocks of a handle that nobody reads are
// lost until the lease ends.
func (q *request) chooseBelowLimits(query *schedule.Query) (schedule.Choice, bool) {
	opt := q.settings
	if !opt.Fleet.HasLimits() {
		return opt.Scheduler.Choose(query)
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, c := range query.Candidates {
		if opt.Fleet.AtCapacity(c) {
			q.skipped = append(q.skipped, c)
		}
	}
	for {
		query.Excluded = q.skipped
		c, ok := opt.Scheduler.Choose(query)
		switch {
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

// refuseAtCapacity answers 429 when ranks that have not failed the request are all
// full, 503 where that is so because all have failed others and one request tries them;
// false when there is none such, and nothing was answered.
func (q *request) refuseAtCapacity(leg schedule.LegKind, candidates []*worker.Rank) bool {
	full, halfOpen := 0, 0
	for _, c := range candidates {
		if q.isExcluded(c) {
			continue
		}
		if !q.settings.Fleet.AtCapacity(c) && !slices.Contains(q.skipped, c) {
			return false
		}
		full++
		if q.settings.Fleet.HalfOpenBusy(c) {
			halfOpen++
		}
	}
	switch full {
	case 0:
		return false
	case halfOpen:
		q.refuse(front.NoWorker, fmt.Sprintf("all %d %s ranks for model %q that could take the request have failed lately, and are being tried with one request at a time",
			full, legName(leg), q.pool.Model), time.Second)
		return true
	}
	q.refuse(front.PoolOverloaded, fmt.Sprintf("all %d %s ranks for model %q that could take the request are at a bound of requests or of prompt tokens (limits.rank_requests, limits.rank_tokens, or the workers' own)",
		full, legName(leg), q.pool.Model), time.Second)
	return true
}

// admitDecode refuses a request with two legs whose decode pool is full, before its
// prefill is paid for.
func (q *request) admitDecode() bool {
	if q.plan.Family == nil || !q.settings.Fleet.HasLimits() {
		return true
	}
	q.skipped = q.skipped[:0]
	return !q.refuseAtCapacity(schedule.DecodeLeg, q.plan.Decode)
}

// withdrawRetry asks the pool's budget for one more try. One that no engine has
// seen is no load on them, and free.
func (q *request) withdrawRetry() bool {
	if q.unsent || q.settings.Fleet.WithdrawRetry(q.pool) {
		return true
	}
	q.noteFallback("retry_budget", "the pool's budget of retries is spent; the request ends with what it has")
	return false
}
