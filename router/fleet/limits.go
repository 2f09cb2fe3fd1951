package fleet

import (
	"math"

	"sluice/router/worker"
)

// AtCapacity reports whether a rank accepts no more requests now: it or its worker is at a bound,
// or it is half open with a running request.
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

// ExcessRequests returns how many requests must end until a rank and its worker are below their bounds
// of requests; 0 if they are.
func (f *Fleet) ExcessRequests(r *worker.Rank) (n int64) {
	if limit := f.requestLimit(r); limit > 0 {
		n = r.Requests.Load() - limit + 1
	}
	if limit := r.Worker.Spec.MaxRequests; limit > 0 {
		n = max(n, inFlight(r.Worker)-limit+1)
	}
	return max(n, 0)
}

// Headroom returns how many more requests a rank and its worker may have, math.MaxInt64 without a bound.
func (f *Fleet) Headroom(r *worker.Rank) int64 {
	headroom := int64(math.MaxInt64)
	if limit := f.requestLimit(r); limit > 0 {
		headroom = limit - r.Requests.Load()
	}
	if limit := r.Worker.Spec.MaxRequests; limit > 0 {
		headroom = min(headroom, int64(limit)-int64(inFlight(r.Worker)))
	}
	return max(headroom, 0)
}

// HalfOpenBusy reports whether a rank is half open with a running request, whose result decides
// whether it accepts others.
func (f *Fleet) HalfOpenBusy(r *worker.Rank) bool {
	return r.Requests.Load() > 0 && worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen
}

// HasLimits reports whether any rank can be AtCapacity because of a bound; if not, callers can skip
// the check.
func (f *Fleet) HasLimits() bool {
	return f.settings.Load().MaxRequests > 0 || f.settings.Load().MaxTokens > 0 || f.hasLimits.Load() || f.halfOpenCount.Load() > 0
}

// OverLimit reports whether a rank on which a request was just reserved, or its worker, has more
// requests than allowed. The caller then releases its reservation: if two have taken the last place
// concurrently, both do.
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

// requestLimit returns the bound on a rank's requests: its worker's own, else the fleet's; 0:
// unlimited.
func (f *Fleet) requestLimit(r *worker.Rank) int64 {
	if own := r.Worker.Spec.RankRequests; own > 0 {
		return own
	}
	return f.settings.Load().MaxRequests
}

// tokenLimit returns the bound on prompt tokens still to be computed, by the same rule.
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

// hasOwnLimits reports whether a worker's Spec has bounds.
func hasOwnLimits(s *worker.Spec) bool {
	return s.MaxRequests > 0 || s.RankRequests > 0 || s.RankTokens > 0
}
