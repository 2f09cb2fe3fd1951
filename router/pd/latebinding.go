package pd

import (
	"math"
	"time"

	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// chosenPrefill is the choice of a prefill leg that was made while the request waited, with the joint
// choice of which it is a part.
type chosenPrefill struct {
	choice schedule.Choice
	joint  *schedule.JointChoice
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

// TryStart implements admission.Starter: it reserves the rank of the first leg if one has capacity.
func (q *request) TryStart(backlog admission.Backlog, emptySince *time.Time) admission.Verdict {
	q.backlog = backlog
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
		return q.whyFull()
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

// preferenceAge is how long a preference for a full rank is kept without comparing all ranks again: in a backlog
// many requests may be tried for each place that becomes free.
const preferenceAge = 20 * time.Millisecond

// prefersFullRank reports whether the request waits for a rank without capacity, because that holds so much of
// its prompt that computing it elsewhere would cost more: the first token is expected earlier there, or later by
// less than what the requests that run elsewhere would lose together, each of which waits while the tokens are
// computed. Otherwise a busy fleet would compute more with the queue than without, and each request would wait longer.
//
// It does so for admission.affinity_wait at most, counted from when it could first start elsewhere, and if another
// rank could meet its target, no longer than that rank still can.
func (q *request) prefersFullRank(leg schedule.LegKind, candidates []*worker.Rank) bool {
	s, now := q.settings, time.Now()
	if s.admission.AffinityWait == 0 || !s.Scheduler.ChoosesByCost() {
		return false
	}
	if !q.prefersUntil.IsZero() && !now.Before(q.prefersUntil) {
		return false
	}
	if q.preferred != nil && now.Sub(q.preferredAt) < preferenceAge && !q.isFree(leg, q.preferred) {
		return true
	}
	q.preferred = nil
	full, free, ok := q.fullAndFree(leg, q.selectable(candidates))
	if !ok {
		return false
	}
	until := q.prefersUntil
	if until.IsZero() {
		until = now.Add(min(s.admission.AffinityWait, q.class.wait/2))
	}
	if latest := q.latestStart(&free); latest >= 0 && latest < math.MaxInt64 {
		if q.latestStart(&full) < s.Scheduler.StartIn(full.Rank) {
			return false
		}
		if end := now.Add(latest - 2*preferenceAge); end.Before(until) {
			until = end
		}
	}
	if !now.Before(until) || !q.isWorthWaiting(&full, &free) {
		return false
	}
	q.prefersUntil, q.preferred, q.preferredAt = until, full.Rank, now
	return true
}

// selectable returns those candidates of the first leg among which reserveFirstLeg chooses.
func (q *request) selectable(candidates []*worker.Rank) []*worker.Rank {
	switch {
	case q.prefillOnly:
		return q.nextSelected(candidates)
	case q.plan.Family != nil:
		return q.notifying(candidates)
	}
	return candidates
}

// fullAndFree returns the rank with the lowest cost, if that has no capacity, and the one with the lowest cost among those
// with capacity. ok is false if there are no such ranks, or if the former has no more of the prompt cached: a request that
// waits gives up a place that is certain for one that others may take first, which a few milliseconds of the forecast do
// not justify. The former is none that a choice would leave out: one on which the request would miss more of its targets,
// that serves a trial, or that is kept for another request.
func (q *request) fullAndFree(leg schedule.LegKind, candidates []*worker.Rank) (full, free schedule.Choice, ok bool) {
	s := q.settings
	query := q.newQuery(leg, candidates)
	q.skipped = append(q.skipped[:0], q.excluded...)
	if s.Fleet.HasLimits() {
		for _, r := range candidates {
			if s.Fleet.HalfOpenBusy(r) && !q.isExcluded(r) {
				q.skipped = append(q.skipped, r)
			}
		}
	}
	q.skipped = q.skipKept(q.skipped, leg, candidates)
	if q.hasTargets(&query) {
		q.appendSlowRanks(&query)
	}
	query.Excluded = q.skipped
	full, ok = s.Scheduler.Preview(&query)
	if !ok || full.CachedTokens == 0 || q.isFree(leg, full.Rank) {
		return full, free, false
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, r := range candidates {
		if !q.isFree(leg, r) {
			q.skipped = append(q.skipped, r)
		}
	}
	query.Excluded = q.skipped
	free, ok = s.Scheduler.Preview(&query)
	return full, free, ok && full.CachedTokens > free.CachedTokens
}

// latestStart returns how long the request may still wait before it is sent to a rank if it is to meet its target and
// its deadline there; math.MaxInt64 if it has none.
func (q *request) latestStart(c *schedule.Choice) time.Duration {
	_, left, _ := q.startsWithin(c.Rank, max(q.promptTokens()-c.CachedTokens, 1), schedule.ExpectedOutput(q.maxTokens))
	return left
}

// isWorthWaiting compares the ranks of fullAndFree.
func (q *request) isWorthWaiting(full, free *schedule.Choice) bool {
	s := q.settings.Scheduler
	there, elsewhere := q.firstTokenIn(full), q.firstTokenIn(free)
	if q.plan.Family != nil && !q.prefillOnly && q.choosesJointly() {
		query := q.newQuery(schedule.WholeLeg, q.plan.Decode)
		query.Excluded = q.excluded
		local, ok := s.Preview(&query)
		mayCompute := ok && (q.pd.LocalWhenFaster || q.promptTokens()-local.CachedTokens <= q.pd.LocalPrefillTokens)
		if mayCompute && q.isFree(schedule.WholeLeg, local.Rank) && q.firstTokenIn(&local) <= there {
			return false // decode computes it
		}
	}
	if there < elsewhere {
		return true
	}
	more := s.PrefillTime(free.Rank, full.CachedTokens-free.CachedTokens)
	return there < elsewhere+more*time.Duration(free.Rank.Requests.Load()) && !q.overtakes()
}

// overtakes reports whether the request goes before others that have waited much longer, because of its class or its
// tenant's share: it does not wait for what they gain. Those that wait for a rank of their choice, and could have
// started before, have waited longer by admission.affinity_wait at most for that.
func (q *request) overtakes() bool {
	b := &q.backlog
	return b.Overtaken > overtakeMargin || b.OvertakenAny > q.settings.admission.AffinityWait+overtakeMargin
}

// overtakeMargin is how much longer others may have waited: those of equal tenants take turns.
const overtakeMargin = 250 * time.Millisecond

// firstTokenIn returns the forecast of the time to the first token on a rank. At a rank with as many requests as it may
// have, some must end first, as often as the engine has begun others.
func (q *request) firstTokenIn(c *schedule.Choice) time.Duration {
	s := q.settings.Scheduler
	start := s.StartIn(c.Rank)
	if f := q.settings.Fleet; f.HasLimits() {
		start = max(start, time.Duration(f.ExcessRequests(c.Rank))*c.Rank.Pace.Interval())
	}
	return start + s.PrefillTime(c.Rank, max(q.promptTokens()-c.CachedTokens, 1))
}

// reserveFirstLeg chooses among the ranks with capacity.
func (q *request) reserveFirstLeg(candidates []*worker.Rank) bool {
	candidates = q.selectable(candidates)
	switch {
	case q.prefillOnly:
		c, ok := q.choose(schedule.PrefillLeg, candidates)
		q.reservedPrefill.choice = c
		return ok
	case q.plan.Family == nil:
		c, ok := q.choose(schedule.WholeLeg, candidates)
		q.reservedDecode = c
		return ok
	case q.choosesJointly():
		c, ok := q.chooseJointly(candidates)
		if ok {
			q.reservedPrefill.joint = &c
		}
		return ok
	}
	c, ok := q.choose(schedule.PrefillLeg, candidates)
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

// hasLostPrefill reports whether a request with two legs has no prefill worker any more, or none that sends the
// notifications that it must wait for, and decode may compute its prompt.
func (q *request) hasLostPrefill() bool {
	return q.plan.Family != nil && !q.prefillOnly && len(q.notifying(q.plan.Prefill)) == 0 && len(q.plan.Decode) > 0 && q.mayDecodeOnly()
}

// startAtDecode is TryStart of a request that has lost its prefill workers (hasLostPrefill): it reserves a decode
// rank with capacity, which runs the request as a whole.
func (q *request) startAtDecode() admission.Verdict {
	if !q.anyFree(schedule.WholeLeg, q.plan.Decode) {
		return q.whyFull()
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
