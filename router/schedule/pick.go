package schedule

import (
	"math"
	"slices"

	"sluice/router/worker"
)

// pickLeast finds the least cost, or with byLoad the fewest requests, in one
// pass; equals are drawn by reservoir.
func pickLeast(f *frame, q *Query, sc *scratch, rng *uint64, byLoad bool) bool {
	if len(q.Candidates) > keepAll && !byLoad {
		return pickLeastOfMany(f, q, sc, rng)
	}
	best, ties := math.Inf(1), 0
	for _, r := range q.Candidates {
		sc.kept = append(sc.kept, term{})
		t := &sc.kept[len(sc.kept)-1]
		f.look(r, t)
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			t.excluded = true
			continue
		}
		sc.usable++
		cost := t.cost
		if byLoad {
			cost = float64(t.requests)
		}
		if cost < best {
			best, ties = cost, 1
			sc.best = *t
		} else if cost == best {
			ties++
			if below(rng, ties) == 0 {
				sc.best = *t
			}
		}
	}
	if len(sc.kept) > keepAll {
		sc.kept = sc.kept[:0] // a comparison policy over many: the chosen will do
	}
	return sc.usable > 0
}

// pickLeastOfMany is pickLeast for big pools: it keeps the terms of the best few
// only, and reads of the others no more than the cost needs.
func pickLeastOfMany(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	best, ties := math.Inf(1), 0
	var chosen *worker.Rank
	worst := math.Inf(1)
	var t term
	for _, r := range q.Candidates {
		cost := f.glance(r, &t)
		if cost >= worst && cost != best {
			continue
		}
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		if cost < worst {
			f.look(r, &t)
			worst = sc.keep(&t)
		}
		if cost < best {
			best, ties = cost, 1
			chosen = r
		} else if cost == best {
			ties++
			if below(rng, ties) == 0 {
				chosen = r
			}
		}
	}
	if chosen == nil {
		return false
	}
	sc.usable = len(q.Candidates) - len(q.Excluded)
	f.look(chosen, &sc.best)
	// Booked meanwhile by another: an impossible count makes reserve fail, and
	// the choice is made anew.
	if sc.best.cost > best+1e-6 {
		sc.best.reserved, sc.best.blocks = -1, -1
	}
	return true
}

// keep holds the keepBest cheapest and returns the cost a rival must beat.
func (sc *scratch) keep(t *term) float64 {
	if len(sc.kept) < keepBest {
		sc.kept = append(sc.kept, *t)
		if len(sc.kept) < keepBest {
			return math.Inf(1)
		}
	} else {
		sc.kept[sc.dearest()] = *t
	}
	return sc.kept[sc.dearest()].cost
}

func (sc *scratch) dearest() int {
	at := 0
	for i := range sc.kept {
		if sc.kept[i].cost > sc.kept[at].cost {
			at = i
		}
	}
	return at
}

// pickByCost takes the least cost, or draws by cost where there is a temperature.
func (s *Scheduler) pickByCost(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	if s.warmth(q) > 0 {
		return s.pickWarm(f, q, sc, rng)
	}
	return pickLeast(f, q, sc, rng, false)
}

// pickWarm draws by a softmax over the costs, scaled by their range.
func (s *Scheduler) pickWarm(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	// The least-cost pass fills the record and says where the range starts.
	if !pickLeast(f, q, sc, rng, false) {
		return false
	}
	least, most := sc.best.cost, sc.best.cost
	sc.costs = sc.costs[:0]
	var t term
	for _, r := range q.Candidates {
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			sc.costs = append(sc.costs, math.Inf(1))
			continue
		}
		f.look(r, &t)
		sc.costs = append(sc.costs, t.cost)
		least, most = min(least, t.cost), max(most, t.cost)
	}
	if most == least {
		return true
	}
	scale := min(1/(s.warmth(q)*(most-least)), math.MaxFloat64) // the least cost's weight is 1 at any
	sum := 0.0
	for i, c := range sc.costs {
		sum += math.Exp((least - c) * scale)
		sc.costs[i] = sum
	}
	draw := float64(below(rng, math.MaxInt32)) / math.MaxInt32 * sum
	i := min(sort64(sc.costs, draw), len(q.Candidates)-1)
	f.look(q.Candidates[i], &sc.best)
	return true
}

// sort64 is the first index whose running sum exceeds draw.
func sort64(sums []float64, draw float64) int {
	i, _ := slices.BinarySearchFunc(sums, draw, func(e, t float64) int {
		if e > t {
			return 1
		}
		return -1
	})
	return i
}

// pickBlind takes the next or any candidate, whatever its cost.
func (s *Scheduler) pickBlind(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	n := len(q.Candidates)
	if n == 0 {
		return false
	}
	start := 0
	if s.tuned().policy != atRandom {
		start = int((s.turn[q.Leg%legs].Add(1) - 1) % uint64(n))
	} else {
		start = below(rng, n)
	}
	for i := range n {
		r := q.Candidates[(start+i)%n]
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		sc.usable++
		if sc.usable == 1 {
			f.look(r, &sc.best)
			sc.kept = append(sc.kept, sc.best)
		}
	}
	return sc.usable > 0
}

// bounded is how many times the mean of requests a rank may have and still keep
// its sessions.
const bounded = 1.25

// pickSticky takes the rank that the session's hash falls on, as long as it has
// no more than its share of the requests under way; else by cost. The rank
// is found by rendezvous, so sessions move only from ranks that leave, and several
// routers agree.
func (s *Scheduler) pickSticky(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	home, requests, usable := homeOf(q)
	if !s.pickByCost(f, q, sc, rng) {
		return false
	}
	if home == nil || home == sc.best.rank {
		return true
	}
	var t term
	f.look(home, &t)
	if float64(t.requests) >= 1+bounded*float64(requests)/float64(usable) {
		return true // yields
	}
	sc.best = t
	return true
}

// homeOf is the candidate on which a session's hash falls, with the requests
// under way on all that are not excluded, and how many those are.
func homeOf(q *Query) (home *worker.Rank, requests int64, usable int) {
	most := uint64(0)
	for _, r := range q.Candidates {
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		usable++
		requests += r.Requests.Load()
		if h := mix(q.Session ^ r.Worker.Hash()*(2*uint64(r.ID.Rank)+1)); home == nil || h > most {
			home, most = r, h
		}
	}
	return home, requests, usable
}

// pickHashed is plain session hashing; a request without a session takes its
// turn.
func (s *Scheduler) pickHashed(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	if q.Session == 0 {
		return s.pickBlind(f, q, sc, rng)
	}
	home, _, usable := homeOf(q)
	if home == nil {
		return false
	}
	f.look(home, &sc.best)
	sc.kept, sc.usable = append(sc.kept, sc.best), usable
	return true
}
