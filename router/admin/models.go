package admin

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/worker"
)

// ModelStatus has the figures of one model's requests. Rates and quantiles cover the last
// Stats.WindowS seconds, counts the time since the process started.
type ModelStatus struct {
	Model string `json:"model"`
	// Workers are the ready workers that serve it by role, and Members the workers in any state.
	Workers     RoleCounts        `json:"workers_ready"`
	Members     RoleCounts        `json:"workers"`
	RequestRate float64           `json:"requests_per_s"`
	TokenRate   float64           `json:"output_tokens_per_s"`
	ErrorRate   float64           `json:"failed_per_s"`
	HitRate     *float64          `json:"hit_actual"` // share of prompt tokens that engines reported as cached
	TTFT        Quantiles         `json:"ttft_ms"`
	Duration    Quantiles         `json:"duration_ms"`
	Outcomes    map[string]uint64 `json:"outcomes"`
	Input       uint64            `json:"input_tokens"`
	Output      uint64            `json:"output_tokens"`
	Cached      uint64            `json:"cached_tokens"`
}

// RoleCounts counts workers by role.
type RoleCounts struct {
	Prefill    int `json:"prefill"`
	Decode     int `json:"decode"`
	Aggregated int `json:"aggregated"`
}

const (
	modelInterval = time.Second
	modelWindow   = int(window/modelInterval) + 1 // number of totals kept to compute differences
)

// modelSampler keeps the totals of each model over the last window.
type modelSampler struct {
	metrics *obs.Metrics

	mu      sync.Mutex
	samples []modelSample // oldest first, at most modelWindow
}

type modelSample struct {
	at     time.Time
	totals map[string]*obs.ModelTotals
}

func newModelSampler(m *obs.Metrics) *modelSampler {
	s := &modelSampler{metrics: m}
	s.sample(time.Now())
	return s
}

func (s *modelSampler) run(ctx context.Context) {
	tick := time.NewTicker(modelInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sample(now)
		}
	}
}

func (s *modelSampler) sample(now time.Time) {
	totals := s.metrics.ModelTotals()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.samples) == modelWindow {
		s.samples = slices.Delete(s.samples, 0, 1)
	}
	s.samples = append(s.samples, modelSample{now, totals})
}

// status returns the models that the fleet serves or that have had requests, by name, at most
// maxModels.
func (s *modelSampler) status(view *fleet.View) []ModelStatus {
	s.mu.Lock()
	first, last := s.samples[0], s.samples[len(s.samples)-1]
	s.mu.Unlock()
	byName := map[string]*ModelStatus{}
	model := func(name string) *ModelStatus {
		if byName[name] == nil {
			byName[name] = &ModelStatus{Model: name, Outcomes: map[string]uint64{}}
		}
		return byName[name]
	}
	for name, t := range last.totals {
		model(name).fill(first.totals[name], t, last.at.Sub(first.at))
	}
	for _, wk := range view.Workers {
		state, _ := wk.State()
		for _, name := range wk.Info().Models {
			m := model(name)
			m.Members.add(wk.Spec.Role)
			if state == worker.Ready {
				m.Workers.add(wk.Spec.Role)
			}
		}
	}
	out := make([]ModelStatus, 0, len(byName))
	for _, m := range byName {
		out = append(out, *m)
	}
	slices.SortFunc(out, func(a, b ModelStatus) int { return cmp.Compare(a.Model, b.Model) })
	return out[:min(len(out), maxModels)]
}

// fill sets the figures from two totals, of which the earlier one may be nil.
func (m *ModelStatus) fill(a, b *obs.ModelTotals, took time.Duration) {
	if a == nil {
		a = &obs.ModelTotals{}
	}
	sec := max(took.Seconds(), modelInterval.Seconds())
	for i, name := range obs.ModelOutcomes {
		m.Outcomes[name] = b.Requests[i]
		m.RequestRate += rate(a.Requests[i], b.Requests[i], sec)
		if name == "failed" {
			m.ErrorRate = rate(a.Requests[i], b.Requests[i], sec)
		}
	}
	m.RequestRate = round(m.RequestRate)
	m.TokenRate = rate(a.Output, b.Output, sec)
	m.HitRate = share(b.Cached-a.Cached, b.Input-a.Input)
	m.TTFT, m.Duration = quantilesOf(b.FirstToken.Since(a.FirstToken)), quantilesOf(b.Duration.Since(a.Duration))
	m.Input, m.Output, m.Cached = b.Input, b.Output, b.Cached
}

func quantilesOf(b obs.Buckets) (q Quantiles) {
	if b.Quantile(1) == 0 {
		return q
	}
	p50, p90, p99 := millis(b.Quantile(0.5)), millis(b.Quantile(0.9)), millis(b.Quantile(0.99))
	return Quantiles{&p50, &p90, &p99}
}

func (n *RoleCounts) add(role worker.Role) {
	switch role {
	case worker.Prefill:
		n.Prefill++
	case worker.Decode:
		n.Decode++
	default:
		n.Aggregated++
	}
}
