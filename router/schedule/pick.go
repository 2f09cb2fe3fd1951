package schedule

import (
	"math"
	"slices"

	"sluice/router/worker"
)

// cheapestOf finds the lowest cost, or with byLoad the fewest requests, in one pass; among equals
// it draws by reservoir sampling.
func cheapestOf(f *choiceContext, q *Query, sc *scratch, rng *uint64, byLoad bool) bool {
	if len(q.Candidates) > maxAllRecorded && !byLoad {
		return cheapestOfMany(f, q, sc, rng)
	}
	best, ties := math.Inf(1), 0
	for _, r := range q.Candidates {
		sc.candidates = append(sc.candidates, candidateState{})
		t := &sc.candidates[len(sc.candidates)-1]
		f.evaluate(r, t)
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
			if randomBelow(rng, ties) == 0 {
				sc.best = *t
			}
		}
	}
	if len(sc.candidates) > maxAllRecorded {
		sc.candidates = sc.candidates[:0] // a comparison policy with many candidates records only the chosen one
	}
	return sc.usable > 0
}

// cheapestOfMany is cheapestOf for large pools: it keeps the terms of the best few only, and reads
// of the others no more than the cost needs.
func cheapestOfMany(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	best, ties := math.Inf(1), 0
	var chosen *worker.Rank
	worst := math.Inf(1)
	var t candidateState
	for _, r := range q.Candidates {
		cost := f.lowerBound(r, &t)
		if cost >= worst && cost != best {
			continue
		}
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		if cost < worst {
			f.evaluate(r, &t)
			worst = sc.insert(&t)
		}
		if cost < best {
			best, ties = cost, 1
			chosen = r
		} else if cost == best {
			ties++
			if randomBelow(rng, ties) == 0 {
				chosen = r
			}
		}
	}
	if chosen == nil {
		return false
	}
	sc.usable = len(q.Candidates) - len(q.Excluded)
	f.evaluate(chosen, &sc.best)
	// Another choice has reserved it meanwhile: an impossible count makes reserve fail, and the
	// choice is repeated.
	if sc.best.cost > best+1e-6 {
		sc.best.reserved, sc.best.blocks = -1, -1
	}
	return true
}

// insert keeps the maxBestRecorded cheapest and returns the cost that a rival must beat.
func (sc *scratch) insert(t *candidateState) float64 {
	if len(sc.candidates) < maxBestRecorded {
		sc.candidates = append(sc.candidates, *t)
		if len(sc.candidates) < maxBestRecorded {
			return math.Inf(1)
		}
	} else {
		sc.candidates[sc.worst()] = *t
	}
	return sc.candidates[sc.worst()].cost
}

func (sc *scratch) worst() int {
	at := 0
	for i := range sc.candidates {
		if sc.candidates[i].cost > sc.candidates[at].cost {
			at = i
		}
	}
	return at
}

// pickByCost chooses the lowest cost, or draws by cost if there is a temperature.
func (s *Scheduler) pickByCost(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	if s.temperature(q) > 0 {
		return s.pickByTemperature(f, q, sc, rng)
	}
	return cheapestOf(f, q, sc, rng, false)
}

// pickByTemperature draws by a softmax over the costs, scaled by their range.
func (s *Scheduler) pickByTemperature(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	// The lowest-cost pass fills the record and gives the start of the range.
	if !cheapestOf(f, q, sc, rng, false) {
		return false
	}
	least, most := sc.best.cost, sc.best.cost
	sc.costs = sc.costs[:0]
	var t candidateState
	for _, r := range q.Candidates {
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			sc.costs = append(sc.costs, math.Inf(1))
			continue
		}
		f.evaluate(r, &t)
		sc.costs = append(sc.costs, t.cost)
		least, most = min(least, t.cost), max(most, t.cost)
	}
	if most == least {
		return true
	}
	scale := min(1/(s.temperature(q)*(most-least)), math.MaxFloat64) // the lowest cost always has weight 1
	sum := 0.0
	for i, c := range sc.costs {
		sum += math.Exp((least - c) * scale)
		sc.costs[i] = sum
	}
	draw := float64(randomBelow(rng, math.MaxInt32)) / math.MaxInt32 * sum
	i := min(searchSums(sc.costs, draw), len(q.Candidates)-1)
	f.evaluate(q.Candidates[i], &sc.best)
	return true
}

// searchSums returns the first index whose running sum exceeds draw.
func searchSums(sums []float64, draw float64) int {
	i, _ := slices.BinarySearchFunc(sums, draw, func(e, t float64) int {
		if e > t {
			return 1
		}
		return -1
	})
	return i
}

// pickIgnoringLoad chooses the next or a random candidate, regardless of its cost.
func (s *Scheduler) pickIgnoringLoad(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	n := len(q.Candidates)
	if n == 0 {
		return false
	}
	start := 0
	if s.currentSettings().policy != atRandom {
		start = int((s.nextTurn[q.Leg%numLegs].Add(1) - 1) % uint64(n))
	} else {
		start = randomBelow(rng, n)
	}
	for i := range n {
		r := q.Candidates[(start+i)%n]
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		sc.usable++
		if sc.usable == 1 {
			f.evaluate(r, &sc.best)
			sc.candidates = append(sc.candidates, sc.best)
		}
	}
	return sc.usable > 0
}

// sessionLoadFactor is the multiple of the mean number of requests up to which a rank keeps its
// sessions, and of the time to compute the prompt up to which it counts as equal.
const sessionLoadFactor = 1.25

// pickBySession chooses the rank of the session's last request, or the one that the session's hash
// selects, as long as that costs neither cached tokens nor waiting, and chooses by cost otherwise. A
// rank is found by rendezvous hashing, so sessions move only from ranks that leave, and several
// routers agree.
func (s *Scheduler) pickBySession(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	if !s.pickByCost(f, q, sc, rng) {
		return false
	}
	home, requests, usable := sessionRank(q)
	if home == nil || home == sc.best.rank {
		return true
	}
	var t candidateState
	f.evaluate(home, &t)
	if float64(t.requests) < 1+sessionLoadFactor*float64(requests)/float64(usable) && f.isAsGood(&t, &sc.best) {
		sc.best, sc.atSession = t, true
	}
	return true
}

// isAsGood reports whether a leg on t has as many cached tokens as on best, waits no longer for its
// start, and computes the rest about as fast.
func (f *choiceContext) isAsGood(t, best *candidateState) bool {
	const rounding = 1e-9 // ms
	x, y := f.weights.termsOf(f.leg, f.prompt, t), f.weights.termsOf(f.leg, f.prompt, best)
	return t.credit >= best.credit && x.Queue+x.Waiting+x.Pressure <= y.Queue+y.Waiting+y.Pressure+rounding &&
		x.Prefill+x.Transfer <= sessionLoadFactor*(y.Prefill+y.Transfer)+rounding
}

// sessionRank returns the candidate of the session, the number of running requests on all candidates
// that are not excluded, and the number of these.
func sessionRank(q *Query) (home *worker.Rank, requests int64, usable int) {
	most, last := uint64(0), false
	for _, r := range q.Candidates {
		if len(q.Excluded) > 0 && slices.Contains(q.Excluded, r) {
			continue
		}
		usable++
		requests += r.Requests.Load()
		switch {
		case last:
		case r == q.SessionRank:
			home, last = r, true
		case q.Session == 0:
		default:
			if h := mixSeed(q.Session ^ r.Worker.Hash()*(2*uint64(r.ID.Rank)+1)); home == nil || h > most {
				home, most = r, h
			}
		}
	}
	return home, requests, usable
}

// sessionDecides reports whether a session may decide a choice: one that the client has named for
// that purpose, or any if nothing is known of the ranks' caches.
func (q *Query) sessionDecides() bool {
	if q.Session != 0 || q.SessionRank == nil {
		return q.Session != 0
	}
	for i := range q.Overlaps {
		if q.Overlaps[i].Overlap.Max() > 0 {
			return false
		}
	}
	return (len(q.Overlaps) > 0 || q.Overlap == nil || q.Overlap.Max() == 0) && (q.Approx == nil || q.Approx.Max() == 0)
}

// pickBySessionHash is plain session hashing; a request without a session is placed round robin.
func (s *Scheduler) pickBySessionHash(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	if q.Session == 0 {
		return s.pickIgnoringLoad(f, q, sc, rng)
	}
	home, _, usable := sessionRank(&Query{Candidates: q.Candidates, Excluded: q.Excluded, Session: q.Session})
	if home == nil {
		return false
	}
	f.evaluate(home, &sc.best)
	sc.candidates, sc.usable = append(sc.candidates, sc.best), usable
	return true
}
