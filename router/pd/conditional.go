package pd

import (
	"slices"

	"sluice/router/config"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// headerPlan says whether prefill ran elsewhere (remote) or on the decode rank
// (local), with the reason, where the two were weighed against each other.
const headerPlan = "X-Sluice-Plan"

// conditional says whether a model's requests may be prefilled where they are
// decoded although there are prefill workers.
func conditional(pd *config.PD, t Traits) bool {
	return !t.NoPlainDecode && (pd.LocalPrefillTokens > 0 || pd.LocalWhenFaster)
}

// choosesJointly says whether the ranks of both legs are chosen together: where one
// decode rank may do it all. Else decode's is chosen when it is sent, by the load
// of that moment and by what transfers from the prefill rank took.
func (q *request) choosesJointly() bool { return conditional(q.pd, q.plan.Traits) }

// chooseHandover chooses both ranks of an attempt, prefill's from the candidates given,
// or the one that does it all. Decode stays booked until it is sent. chosen is
// false when a leg has no rank left that is not at a bound: the legs are then
// chosen one by one, which knows what to answer.
func (q *request) chooseHandover(candidates []*worker.Rank) (prefill schedule.Choice, end prefillEnd, chosen bool) {
	c, ok := q.chooseJointly(candidates)
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

// chooseJointly asks the scheduler for two ranks that are not at a bound of their
// load; see chooseBelowLimits.
func (q *request) chooseJointly(candidates []*worker.Rank) (schedule.JointChoice, bool) {
	opt := q.settings
	query := schedule.JointQuery{Query: q.newQuery(schedule.PrefillLeg, nil), Prefill: candidates, Decode: q.plan.Decode}
	query.Reservations = [2]*schedule.Reservation{q.reservations.acquire(), q.reservations.acquire()}
	if conditional(q.pd, q.plan.Traits) {
		query.LocalTokens, query.LocalWhenFaster = q.pd.LocalPrefillTokens, q.pd.LocalWhenFaster
	}
	if !opt.Fleet.HasLimits() {
		return opt.Scheduler.ChooseJoint(&query)
	}
	q.skipped = append(q.skipped[:0], q.excluded...)
	for _, ranks := range [...][]*worker.Rank{candidates, q.plan.Decode} {
		for _, r := range ranks {
			if opt.Fleet.AtCapacity(r) {
				q.skipped = append(q.skipped, r)
			}
		}
	}
	for {
		query.Excluded = q.skipped
		c, ok := opt.Scheduler.ChooseJoint(&query)
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

// replaceReserved takes a rank that was booked earlier out of the choice when it is not
// ready any more, or has failed this request, and others are left.
func (q *request) replaceReserved(r *worker.Rank, candidates []*worker.Rank) bool {
	if state, _ := r.Worker.State(); state != worker.Ready && !q.isExcluded(r) {
		if len(candidates) < 2 {
			return false // as good as nobody
		}
		q.exclude(r, excludedDown)
	}
	return q.isExcluded(r) && q.hasCandidate(candidates)
}
