package disagg

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
	return !t.NoPlain && (pd.LocalPrefillTokens > 0 || pd.LocalWhenFaster)
}

// joint says whether the ranks of both legs are chosen together: where one
// decode rank may do it all. Else decode's is chosen when it is sent, by the load
// of that moment and by what transfers from the prefill rank took.
func (q *request) joint() bool { return conditional(q.pd, q.plan.Traits) }

// beginPair chooses both ranks of an attempt, prefill's from the candidates given,
// or the one that does it all. Decode stays booked until it is sent. chosen is
// false when a leg has no rank left that is not at a bound: the legs are then
// chosen one by one, which knows what to answer.
func (q *request) beginPair(candidates []*worker.Rank) (prefill schedule.Choice, end prefillEnd, chosen bool) {
	c, ok := q.choosePair(candidates)
	if !ok {
		return prefill, prefillNone, false
	}
	q.booked, q.pair.Decode = c.Decode, c.Decode.Rank
	if c.Local {
		q.planned = "local; reason=" + c.Why
		q.r.opt().Observer.Planned("local", c.Why)
		q.chose(schedule.Whole, q.plan.Decode, c.Decode)
		return prefill, prefillLocal, true
	}
	q.planned = "remote; reason=" + c.Why
	q.r.opt().Observer.Planned("remote", c.Why)
	q.chose(schedule.PrefillLeg, candidates, c.Prefill)
	q.chose(schedule.DecodeLeg, q.plan.Decode, c.Decode)
	return c.Prefill, prefillDone, true
}

// choosePair asks the scheduler for two ranks that are not at a bound of their
// load; see chooseWithin.
func (q *request) choosePair(candidates []*worker.Rank) (schedule.PairChoice, bool) {
	opt := q.r.opt()
	query := schedule.PairQuery{Query: q.queryOf(schedule.PrefillLeg, nil), Prefill: candidates, Decode: q.plan.Decode}
	query.Reservations = [2]*schedule.Reservation{q.rooms.next(), q.rooms.next()}
	if conditional(q.pd, q.plan.Traits) {
		query.LocalTokens, query.LocalWhenFaster = q.pd.LocalPrefillTokens, q.pd.LocalWhenFaster
	}
	if !opt.Fleet.Limited() {
		return opt.Scheduler.ChoosePair(&query)
	}
	q.passed = append(q.passed[:0], q.excluded...)
	for _, ranks := range [...][]*worker.Rank{candidates, q.plan.Decode} {
		for _, r := range ranks {
			if opt.Fleet.Full(r) {
				q.passed = append(q.passed, r)
			}
		}
	}
	for {
		query.Excluded = q.passed
		c, ok := opt.Scheduler.ChoosePair(&query)
		if !ok {
			return c, false
		}
		over := slices.DeleteFunc([]*worker.Rank{c.Prefill.Rank, c.Decode.Rank}, func(r *worker.Rank) bool {
			return r == nil || !opt.Fleet.Overbooked(r)
		})
		if len(over) == 0 {
			return c, true
		}
		c.Prefill.Reservation.Release()
		c.Decode.Reservation.Release()
		q.passed = append(q.passed, over...)
	}
}

// leave takes a rank that was booked earlier out of the choice when it is not
// ready any more, or has failed this request, and others are left.
func (q *request) leave(r *worker.Rank, candidates []*worker.Rank) bool {
	if state, _ := r.Worker.State(); state != worker.Ready && !q.isExcluded(r) {
		if len(candidates) < 2 {
			return false // as good as nobody
		}
		q.exclude(r, wentDown)
	}
	return q.isExcluded(r) && q.other(candidates)
}
