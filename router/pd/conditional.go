package pd

import (
	"slices"

	"sluice/router/config"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// headerPlan is the response header that says where prefill ran, and why: "remote" (a prefill
// worker), "local" (the decode rank), or "prefill_only". It is absent if there was nothing to
// decide.
const headerPlan = "X-Sluice-Plan"

// conditional reports whether the decode rank may run prefill for a model's requests even if
// prefill workers are ready.
func conditional(pd *config.PD, t family.Traits) bool {
	return !t.NoDecodeOnly && (pd.LocalPrefillTokens > 0 || pd.LocalWhenFaster)
}

// choosesJointly reports whether the scheduler chooses the ranks of both legs together. It does so
// if one decode rank may run the whole request. Otherwise the decode rank is chosen when the decode
// leg is sent, by the load at that time and by the measured transfer rates from the prefill rank.
func (q *request) choosesJointly() bool { return conditional(q.pd, q.plan.Traits) }

// chooseHandover chooses the ranks of both legs of an attempt, or the one rank that runs the whole
// request. candidates are those of the prefill leg. The reservation of the decode rank stays in
// place until the decode leg is sent. chosen is false if every rank of a leg is at a load limit;
// the caller then chooses the legs one by one, and that path composes the error response.
func (q *request) chooseHandover(candidates []*worker.Rank) (prefill schedule.Choice, end prefillEnd, chosen bool) {
	c, ok := q.takeReservedJoint()
	if !ok {
		c, ok = q.chooseJointly(candidates)
	}
	if !ok {
		return prefill, prefillUnavailable, false
	}
	q.reservedDecode, q.handover.Decode = c.Decode, c.Decode.Rank
	if c.Local {
		q.planHeader = "local; reason=" + c.Reason
		q.settings.Observer.Planned("local", c.Reason)
		q.adoptChoice(schedule.WholeLeg, q.plan.Decode, c.Decode)
		return prefill, prefillLocal, true
	}
	q.planHeader = "remote; reason=" + c.Reason
	q.settings.Observer.Planned("remote", c.Reason)
	q.adoptChoice(schedule.PrefillLeg, candidates, c.Prefill)
	q.adoptChoice(schedule.DecodeLeg, q.plan.Decode, c.Decode)
	return c.Prefill, prefillDone, true
}

// chooseJointly asks the scheduler for two ranks that are below their load limits; see
// chooseBelowLimits.
func (q *request) chooseJointly(candidates []*worker.Rank) (schedule.JointChoice, bool) {
	opt := q.settings
	query := schedule.JointQuery{Query: q.newQuery(schedule.PrefillLeg, nil), Prefill: candidates, Decode: q.plan.Decode}
	query.Reservations = [2]*schedule.Reservation{q.reservations.acquire(), q.reservations.acquire()}
	if conditional(q.pd, q.plan.Traits) {
		query.LocalTokens, query.LocalWhenFaster = q.pd.LocalPrefillTokens, q.pd.LocalWhenFaster
	}
	decode := query.Query
	decode.Leg, decode.Candidates = schedule.DecodeLeg, q.plan.Decode
	hasTargets := q.hasTargets(&decode) // that of the first token is what a joint choice looks for in any case
	if !opt.Fleet.HasLimits() && !q.bindLate && !hasTargets && !q.avoidsClaims() {
		return opt.Scheduler.ChooseJoint(&query)
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, r := range candidates {
		if q.skips(schedule.PrefillLeg, r) {
			q.skipped = append(q.skipped, r)
		}
	}
	for _, r := range q.plan.Decode {
		if q.skips(schedule.DecodeLeg, r) {
			q.skipped = append(q.skipped, r)
		}
	}
	a := q.avoid(&decode, hasTargets)
	for {
		query.Excluded = q.skipped
		c, ok := opt.Scheduler.ChooseJoint(&query)
		if !ok && q.avoidsFewer(&a) {
			continue
		}
		if !ok {
			return c, false
		}
		over := slices.DeleteFunc([]*worker.Rank{c.Prefill.Rank, c.Decode.Rank}, func(r *worker.Rank) bool {
			return r == nil || !opt.Fleet.OverLimit(r)
		})
		if len(over) == 0 {
			return c, true
		}
		c.Prefill.Reservation.Release()
		c.Decode.Reservation.Release()
		q.skipped = append(q.skipped, over...)
	}
}

// replaceReserved reports whether another rank must replace the reserved rank r: r is no longer
// ready or has failed this request, and another candidate remains. It excludes r if r is not ready.
func (q *request) replaceReserved(r *worker.Rank, candidates []*worker.Rank) bool {
	if state, _ := r.Worker.State(); state != worker.Ready && !q.isExcluded(r) {
		if len(candidates) < 2 {
			return false // there is no alternative
		}
		q.exclude(r, excludedDown)
	}
	return q.isExcluded(r) && q.hasCandidate(candidates)
}
