package fleet

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/liveness"
)

// Settings are the Options that may change while the fleet runs.
type Settings struct {
	Engines                                   upstream.ReloadableOptions // of the connections to engines
	ProbeInterval, ProbeTimeout               time.Duration
	HealthPath                                string
	UnhealthyThreshold                        int
	ScrapeInterval                            time.Duration
	ProbeInference                            bool
	BreakerThreshold                          int
	BreakerTimeout                            time.Duration
	Frozen                                    liveness.Bounds
	MaxRequests, MaxTokens                    int64
	RetryBudgetRatio, RetryBudgetMinPerSecond float64
}

// Settings returns the Settings in o.
func (o Options) Settings() Settings {
	o.defaults()
	return Settings{
		Engines: o.Upstream.Reloadable(), ProbeInterval: o.ProbeInterval, ProbeTimeout: o.ProbeTimeout, HealthPath: o.HealthPath, UnhealthyThreshold: o.UnhealthyThreshold,
		ScrapeInterval: o.ScrapeInterval, ProbeInference: o.ProbeInference, BreakerThreshold: o.BreakerThreshold, BreakerTimeout: o.BreakerTimeout, Frozen: o.Frozen,
		MaxRequests: o.MaxRequests, MaxTokens: o.MaxTokens, RetryBudgetRatio: o.RetryBudgetRatio, RetryBudgetMinPerSecond: o.RetryBudgetMinPerSecond,
	}
}

// activeSettings are the current Settings; replaced is closed when others replace them.
type activeSettings struct {
	Settings
	replaced chan struct{}
}

// Reload applies Settings. Existing counts and open breakers stay as they are, and so do
// connections to engines, within their new bounds.
func (f *Fleet) Reload(p Settings) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.settings.Swap(&activeSettings{p, make(chan struct{})})
	if old == nil {
		return // called by New
	}
	close(old.replaced)
	if p.ScrapeInterval <= 0 {
		f.forgetLoads()
	}
	for _, b := range f.budgets {
		b.rate.Store(newBudgetRate(&p))
	}
	for _, m := range f.members {
		m.setConnLimit(p.Engines)
	}
	for _, m := range f.transients {
		m.setConnLimit(p.Engines)
	}
}

// forgetLoads marks all loads as unknown: nothing reads them any more. Called with mu.
func (f *Fleet) forgetLoads() {
	for _, s := range *f.servers.Load() {
		for _, r := range s.ranks {
			setUnknownLoad(r)
		}
	}
}

// upstream returns the options of connections to engines.
func (f *Fleet) upstream() upstream.Options {
	return f.opt.Upstream.WithReloadable(f.settings.Load().Engines)
}

// The connections for probes and to a bootstrap server: few, independent of the limits for
// requests.
const (
	probeConns     = 16
	bootstrapConns = 4
)

func (m *member) setConnLimit(b upstream.ReloadableOptions) {
	for _, s := range m.servers {
		s.traffic.Reload(b)
		lowLimit := b
		lowLimit.MaxConns = probeConns
		s.probes.Reload(lowLimit)
		s.setBootstrapConnLimit(b)
	}
}

func (s *server) setBootstrapConnLimit(b upstream.ReloadableOptions) {
	if ep := s.bootstrap.Load(); ep != nil {
		b.MaxConns = bootstrapConns
		ep.Reload(b)
	}
}
