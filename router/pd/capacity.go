package pd

import (
	"strings"
	"sync"
	"sync/atomic"

	"sluice/router/schedule"
	"sluice/router/worker"
)

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
	prefill := q.notifying(q.nextSelected(q.plan.Prefill))
	if len(prefill) == 0 && q.hasLostPrefill() {
		return q.anyFree(schedule.WholeLeg, q.plan.Decode)
	}
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
	headroom, owns, others := int64(0), false, false
	for _, r := range ranks {
		if q.isExcluded(r) || !q.isFree(schedule.DecodeLeg, r) {
			others = others || q.takesOthers(r)
			continue
		}
		if q.r.kvClaims.owns(r, q) {
			owns = true // the undecided choose among the others
			continue
		}
		others = true
		todo, output := q.kvNeed(r)
		n := min(q.settings.Fleet.Headroom(r), schedule.BatchHeadroom(r, q.engineQueue()), schedule.KVHeadroom(r, todo, output))
		if headroom += min(n, undecided+1); headroom > undecided {
			return true
		}
	}
	return owns && others
}

// takesOthers reports whether a decode rank could start a smaller request.
func (q *request) takesOthers(r *worker.Rank) bool {
	if q.r.kvClaims.n.Load() == 0 || q.isExcluded(r) || q.anySize {
		return false
	}
	q.anySize = true
	defer func() { q.anySize = false }()
	return q.isFree(schedule.DecodeLeg, r)
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
	q.r.kvClaims.release(q)
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
// the request and is not kept for a larger one, it reports no pressure, and it is below its load limits.
func (q *request) isFree(leg schedule.LegKind, r *worker.Rank) bool {
	s := q.settings
	if s.Fleet.HasLimits() && s.Fleet.AtCapacity(r) || leg != schedule.PrefillLeg && !q.ignoresClaims && !q.r.kvClaims.isOpen(r, q) {
		return false
	}
	todo, output := q.kvNeed(r)
	return s.Scheduler.CanStart(r, leg, q.engineQueue(), todo, output)
}

// kvRanks returns the ranks whose KV the request needs until it ends.
func (q *request) kvRanks() []*worker.Rank {
	if q.plan.Family != nil {
		return q.plan.Decode
	}
	return q.plan.Whole
}

// kvNeed returns how many tokens of prompt and output the KV of a rank must have room for: of a request of one token
// if anySize is set, or if the rank's whole KV is too small. Then all others' are too (see dropTooSmall), and an engine
// must refuse the request.
func (q *request) kvNeed(r *worker.Rank) (todo, output int) {
	if q.anySize || schedule.ExceedsKV(r, q.prompt.Count) {
		return 0, 1
	}
	todo = q.prompt.Count
	if !schedule.FitsKV(r, todo, q.maxTokens) {
		todo = q.newKVTokens(r)
	}
	return todo, q.maxTokens
}

func (q *request) engineQueue() schedule.EngineQueue {
	return schedule.EngineQueue{Time: q.settings.admission.EngineQueue, Backlogged: q.backlog.Lasts}
}
