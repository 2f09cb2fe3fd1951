package pd

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// fallbackTracker counts, per model, the consecutive requests that decode ran alone although the
// plan had two legs, because no prefill worker is healthy, prefill fails, or its response cannot be
// handed over. A single such request is a log event. If all requests end this way, disaggregation
// does not work although every client gets its response; the router then logs warnings and reports
// the state on /readyz, /health and in a metric. While all hand-overs succeed, a request reads only
// one counter.
type fallbackTracker struct {
	count   atomic.Int32 // number of streaks in byModel
	mu      sync.Mutex
	byModel map[string]*fallbackStreak
}

// fallbackStreak describes a model's requests since its last successful hand-over.
type fallbackStreak struct {
	requests int
	since    time.Time
	kind     string // of the last request; see Observer.FallbackUsed
	detail   string
	warned   time.Time
}

const (
	// minFallbackStreak is the number of consecutive requests without a hand-over from which the
	// router reports the model as failing.
	minFallbackStreak = 10
	// warnInterval is the minimum time between two warnings about one streak.
	warnInterval = time.Minute
	// maxStreaks bounds the number of models in byModel.
	maxStreaks = 1024
)

// FailingHandover describes a model whose requests all run without the hand-over that is configured
// for it.
type FailingHandover struct {
	Model    string
	Requests int       // consecutive requests without a hand-over
	Since    time.Time // when the first of them ended
	Kind     string    // reason of the last one; see Observer.FallbackUsed
	Detail   string
}

// DecodeOnlyAllowed reports whether, for every model, decode may run whole requests when no
// prefill worker is healthy. That requires pd.decode_only_fallback and a family whose decode
// engines can prefill.
func (r *Runner) DecodeOnlyAllowed() bool {
	s := r.current.Load()
	allowed := func(m *modelPD) bool { return m.pd.DecodeOnlyFallback && !m.traits.NoDecodeOnly }
	for _, m := range s.models {
		if !allowed(m) {
			return false
		}
	}
	return allowed(&s.defaults)
}

// FailingHandovers returns the models whose hand-overs have stopped working, sorted by name.
func (r *Runner) FailingHandovers() (all []FailingHandover) {
	a := &r.fallbacks
	if a.count.Load() == 0 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for model, s := range a.byModel {
		if s.requests >= minFallbackStreak {
			all = append(all, FailingHandover{model, s.requests, s.since, s.kind, s.detail})
		}
	}
	slices.SortFunc(all, func(x, y FailingHandover) int { return strings.Compare(x.Model, y.Model) })
	return all
}

// recordFallback records that decode runs a whole request because of kind, and sets the plan header
// of the response.
func (q *request) recordFallback(kind, detail string) {
	q.planHeader = "local; reason=" + kind
	a, opt, model := &q.r.fallbacks, q.settings, q.pool.Model
	a.mu.Lock()
	s := a.byModel[model]
	if s == nil {
		if a.byModel == nil {
			a.byModel = make(map[string]*fallbackStreak)
		}
		if len(a.byModel) >= maxStreaks {
			a.mu.Unlock()
			return
		}
		s = &fallbackStreak{since: time.Now()}
		a.byModel[model] = s
		a.count.Store(int32(len(a.byModel)))
	}
	s.requests++
	s.kind, s.detail = kind, detail
	now := time.Now()
	warn := s.requests >= minFallbackStreak && now.Sub(s.warned) >= warnInterval
	if warn {
		s.warned = now
	}
	n, since := s.requests, s.since
	a.mu.Unlock()
	if warn {
		opt.Log.Warn("every request is decoded without a hand-over", "model", model, "requests", n, "since", since, "kind", kind, "detail", detail,
			"hint", "the prefill workers: are they healthy, and do they run the KV connector of pd.family? sluice check --probe asks them")
	}
}

// recordHandover records a successful hand-over of the request's model, which ends its streak.
func (q *request) recordHandover() {
	a := &q.r.fallbacks
	if a.count.Load() == 0 {
		return
	}
	model := q.pool.Model
	a.mu.Lock()
	s := a.byModel[model]
	if s != nil {
		delete(a.byModel, model)
		a.count.Store(int32(len(a.byModel)))
	}
	a.mu.Unlock()
	if s != nil && s.requests >= minFallbackStreak {
		q.settings.Log.Info("hand-overs work again", "model", model, "after_requests", s.requests)
	}
}
