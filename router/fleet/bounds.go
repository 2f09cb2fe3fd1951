package fleet

import "sluice/router/worker"

// Full says whether a rank takes no more requests now: it, or its worker, is at a
// bound (bounds), or it is half open with a request under way.
func (f *Fleet) Full(r *worker.Rank) bool {
	n, most := r.Requests.Load(), f.mostRequests(r)
	if most > 0 && n >= most {
		return true
	}
	if tokens := f.mostTokens(r); tokens > 0 && r.PrefillTokens.Load() >= tokens {
		return true
	}
	if most := r.Worker.Spec.MaxRequests; most > 0 && underWay(r.Worker) >= most {
		return true
	}
	return f.Trying(r)
}

// Trying says whether a rank is half open with a request under way: what becomes of that
// tells whether it takes others.
func (f *Fleet) Trying(r *worker.Rank) bool {
	return r.Requests.Load() > 0 && worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen
}

// Limited says whether any rank can be Full at all; where none can, nobody need
// be asked.
func (f *Fleet) Limited() bool {
	return f.pace.Load().MaxRequests > 0 || f.pace.Load().MaxTokens > 0 || f.bounded.Load() || f.narrow.Load() > 0
}

// Overbooked says whether a rank that a request was just booked on, or its worker,
// holds more requests than it may. The one that finds it so gives its place back:
// of two that took the last place at once, both do.
func (f *Fleet) Overbooked(r *worker.Rank) bool {
	n, most := r.Requests.Load(), f.mostRequests(r)
	if most > 0 && n > most {
		return true
	}
	if most := r.Worker.Spec.MaxRequests; most > 0 && underWay(r.Worker) > most {
		return true
	}
	return n > 1 && worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen
}

// mostRequests is the bound on a rank's requests: its worker's own, else the
// fleet's; 0: none.
func (f *Fleet) mostRequests(r *worker.Rank) int64 {
	if own := r.Worker.Spec.RankRequests; own > 0 {
		return own
	}
	return f.pace.Load().MaxRequests
}

// mostTokens is likewise that on prompt tokens still to be computed.
func (f *Fleet) mostTokens(r *worker.Rank) int64 {
	if own := r.Worker.Spec.RankTokens; own > 0 {
		return own
	}
	return f.pace.Load().MaxTokens
}

// underWay counts the requests on all ranks of a worker.
func underWay(w *worker.Worker) (n int64) {
	for _, r := range w.Ranks {
		n += r.Requests.Load()
	}
	return n
}

// hasBounds says whether a worker brings bounds of its own.
func hasBounds(s *worker.Spec) bool {
	return s.MaxRequests > 0 || s.RankRequests > 0 || s.RankTokens > 0
}
