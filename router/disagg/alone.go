package disagg

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// alone counts, for each model, requests in a row that decode did alone although a
// hand-over was planned for them: because no prefill worker is healthy, because prefill
// fails, or because what it answers cannot be handed over. One such request is an event in
// the log. When there is nothing but such requests the disaggregation does not work at all,
// and every client gets its answer nevertheless: so the log warns, and /readyz, /health
// and a metric show it. Where all hand-overs succeed a request reads one counter.
type alone struct {
	count atomic.Int32 // of streaks
	mu    sync.Mutex
	of    map[string]*streak // by model
}

// streak is one model's requests without a hand-over, since the last that had one.
type streak struct {
	requests int
	since    time.Time
	kind     string // of the last one, as FellBack's
	detail   string
	warned   time.Time
}

const (
	// lasting is how many requests in a row without a hand-over are taken to be no accident.
	lasting = 10
	// warnAgain is the time between two warnings of one streak.
	warnAgain = time.Minute
	// mostStreaks bounds the models that are remembered; a fleet serves few.
	mostStreaks = 1024
)

// Alone is a model whose requests are all decoded without the hand-over that is
// configured for it.
type Alone struct {
	Model    string
	Requests int       // in a row
	Since    time.Time // the first of them
	Kind     string    // why the last one was, as Observer.FellBack's
	Detail   string
}

// DecodesAlone says whether decode may do whole requests of every model where no prefill
// worker is healthy (pd.plain_decode, and what the families' engines can).
func (r *Runner) DecodesAlone() bool {
	s := r.now.Load()
	may := func(m *modelPD) bool { return m.pd.PlainDecode && !m.traits.NoPlain }
	for _, m := range s.models {
		if !may(m) {
			return false
		}
	}
	return may(&s.defaults)
}

// Alone lists the models whose hand-overs have stopped to work, by name.
func (r *Runner) Alone() (all []Alone) {
	a := &r.alone
	if a.count.Load() == 0 {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for model, s := range a.of {
		if s.requests >= lasting {
			all = append(all, Alone{model, s.requests, s.since, s.kind, s.detail})
		}
	}
	slices.SortFunc(all, func(x, y Alone) int { return strings.Compare(x.Model, y.Model) })
	return all
}

// decodedAlone notes that decode does a whole request because of kind. The response says so
// in a header.
func (q *request) decodedAlone(kind, detail string) {
	q.planned = "local; reason=" + kind
	a, opt, model := &q.r.alone, q.r.opt(), q.pool.Model
	a.mu.Lock()
	s := a.of[model]
	if s == nil {
		if a.of == nil {
			a.of = make(map[string]*streak)
		}
		if len(a.of) >= mostStreaks {
			a.mu.Unlock()
			return
		}
		s = &streak{since: time.Now()}
		a.of[model] = s
		a.count.Store(int32(len(a.of)))
	}
	s.requests++
	s.kind, s.detail = kind, detail
	now := time.Now()
	warn := s.requests >= lasting && now.Sub(s.warned) >= warnAgain
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

// handedOver notes that a hand-over of the request's model has worked.
func (q *request) handedOver() {
	a := &q.r.alone
	if a.count.Load() == 0 {
		return
	}
	model := q.pool.Model
	a.mu.Lock()
	s := a.of[model]
	if s != nil {
		delete(a.of, model)
		a.count.Store(int32(len(a.of)))
	}
	a.mu.Unlock()
	if s != nil && s.requests >= lasting {
		q.r.opt().Log.Info("hand-overs work again", "model", model, "after_requests", s.requests)
	}
}
