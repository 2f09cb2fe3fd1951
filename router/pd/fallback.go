package pd

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// fallbackTracker counts, for each model, requests in a row that decode did alone although a
// hand-over was planned for them: because no prefill worker is healthy, because prefill
// fails, or because what it answers cannot be handed over. One such request is an event in
// the log. When there is nothing but such requests the disaggregation does not work at all,
// and every client gets its answer nevertheless: so the log warns, and /readyz, /health
// and a metric show it. Where all hand-overs succeed a request reads one counter.
type fallbackTracker struct {
	count   atomic.Int32 // of streaks
	mu      sync.Mutex
	byModel map[string]*fallbackStreak // by model
}

// fallbackStreak is one model's requests without a hand-over, since the last that had one.
type fallbackStreak struct {
	requests int
	since    time.Time
	kind     string // of the last one, as FallbackUsed's
	detail   string
	warned   time.Time
}

const (
	// minFallbackStreak is how many requests in a row without a hand-over are taken to be no accident.
	minFallbackStreak = 10
	// warnInterval is the time between two warnings of one streak.
	warnInterval = time.Minute
	// maxStreaks bounds the models that are remembered; a fleet serves few.
	maxStreaks = 1024
)

// FailingHandover is a model whose requests are all decoded without the hand-over that is
// configured for it.
type FailingHandover struct {
	Model    string
	Requests int       // in a row
	Since    time.Time // the first of them
	Kind     string    // why the last one was, as Observer.FallbackUsed's
	Detail   string
}

// PlainDecodeAllowed says whether decode may do whole requests of every model where no prefill
// worker is healthy (pd.decode_only_fallback, and what the families' engines can).
func (r *Runner) PlainDecodeAllowed() bool {
	s := r.current.Load()
	allowed := func(m *modelPD) bool { return m.pd.PlainDecode && !m.traits.NoPlainDecode }
	for _, m := range s.models {
		if !allowed(m) {
			return false
		}
	}
	return allowed(&s.defaults)
}

// FailingHandovers lists the models whose hand-overs have stopped to work, by name.
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

// recordFallback notes that decode does a whole request because of kind. The response says so
// in a header.
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
			"look", "the prefill workers: are they healthy, and do they run the KV connector of pd.family? sluice check --probe asks them")
	}
}

// recordHandover notes that a hand-over of the request's model has worked.
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
