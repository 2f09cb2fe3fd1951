package fleet

import "sluice/router/worker"

// AtCapacity says whether a rank takes no more requests now: it, or its worker, is at a
// bound (bounds), or it is half open with a request under way.
func (f *Fleet) AtCapacity(r *worker.Rank) bool {
	n, limit := r.Requests.Load(), f.requestLimit(r)
	if limit > 0 && n >= limit {
		return true
	}
	if tokens := f.tokenLimit(r); tokens > 0 && r.PrefillTokens.Load() >= tokens {
		return true
	}
	if limit := r.Worker.Spec.MaxRequests; limit > 0 && inFlight(r.Worker) >= limit {
		return true
	}
	return f.HalfOpenBusy(r)
}

// HalfOpenBusy says whether a rank is half open with a request under way: what becomes of that
// tells whether it takes others.
func (f *Fleet) HalfOpenBusy(r *worker.Rank) bool {
	return r.Requests.Load() > 0 && worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen
}

// HasLimits says whether any rank can be Full at all; where none can, nobody need
// be asked.
func (f *Fleet) HasLimits() bool {
	return f.settings.Load().MaxRequests > 0 || f.settings.Load().MaxTokens > 0 || f.hasLimits.Load() || f.halfOpenCount.Load() > 0
}

// OverLimit says whether a rank that a request was just booked on, or its worker,
// holds more requests than it may. The one that finds it so gives its place back:
// of two that took the last place at once, both do.
func (f *Fleet) OverLimit(r *worker.Rank) bool {
	n, limit := r.Requests.Load(), f.requestLimit(r)
	if limit > 0 && n > limit {
		return true
	}
	if limit := r.Worker.Spec.MaxRequests; limit > 0 && inFlight(r.Worker) > limit {
		return true
	}
	return n > 1 && worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen
}

// requestLimit is the bound on a rank's requests: its worker's own, else the
// fleet's; 0: none.
func (f *Fleet) requestLimit(r *worker.Rank) int64 {
	if own := r.Worker.Spec.RankRequests; own > 0 {
		return own
	}
	return f.settings.Load().MaxRequests
}

// tokenLimit is likewise that on prompt tokens still to be computed.
func (f *Fleet) tokenLimit(r *worker.Rank) int64 {
	if own := r.Worker.Spec.RankTokens; own > 0 {
		return own
	}
	return f.settings.Load().MaxTokens
}

// inFlight counts the requests on all ranks of a worker.
func inFlight(w *worker.Worker) (n int64) {
	for _, r := range w.Ranks {
		n += r.Requests.Load()
	}
	return n
}

// hasOwnLimits says whether a worker brings bounds of its own.
func hasOwnLimits(s *worker.Spec) bool {
	return s.MaxRequests > 0 || s.RankRequests > 0 || s.RankTokens > 0
}
