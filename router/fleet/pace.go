package fleet

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/liveness"
)

// Pace is what of the Options may change while the fleet runs.
type Pace struct {
	Engines                     upstream.Bounds // of the connections to engines
	ProbeInterval, ProbeTimeout time.Duration
	HealthPath                  string
	FailAfter                   int
	ScrapeInterval              time.Duration
	ProbeInference              bool
	BreakAfter                  int
	BreakFor                    time.Duration
	Frozen                      liveness.Bounds
	MaxRequests, MaxTokens      int64
	RetryShare, RetryPerSecond  float64
}

// Pace is that of o.
func (o Options) Pace() Pace {
	o.defaults()
	return Pace{
		Engines: o.Upstream.Bounds(), ProbeInterval: o.ProbeInterval, ProbeTimeout: o.ProbeTimeout, HealthPath: o.HealthPath, FailAfter: o.FailAfter,
		ScrapeInterval: o.ScrapeInterval, ProbeInference: o.ProbeInference, BreakAfter: o.BreakAfter, BreakFor: o.BreakFor, Frozen: o.Frozen,
		MaxRequests: o.MaxRequests, MaxTokens: o.MaxTokens, RetryShare: o.RetryShare, RetryPerSecond: o.RetryPerSecond,
	}
}

// paced is the Pace of now; over is closed when another has its place.
type paced struct {
	Pace
	over chan struct{}
}

// Change takes over a Pace. What has been counted so far, and a breaker that is open, go
// on as they are; so do connections to engines, within their new bounds.
func (f *Fleet) Change(p Pace) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.pace.Swap(&paced{p, make(chan struct{})})
	if old == nil {
		return // New
	}
	close(old.over)
	if p.ScrapeInterval <= 0 {
		f.forgetLoads()
	}
	for _, b := range f.budgets {
		b.pay.Store(payOf(&p))
	}
	for _, m := range f.members {
		m.bound(p.Engines)
	}
	for _, m := range f.guests {
		m.bound(p.Engines)
	}
}

// forgetLoads marks all loads as unknown: nobody reads them any more. Called with mu.
func (f *Fleet) forgetLoads() {
	for _, s := range *f.servers.Load() {
		for _, r := range s.ranks {
			unknown(r)
		}
	}
}

// upstream are the options of connections to engines.
func (f *Fleet) upstream() upstream.Options { return f.opt.Upstream.Bounded(f.pace.Load().Engines) }

// The connections of probes, and to a bootstrap server: few, whatever requests may have.
const (
	probeConns     = 16
	bootstrapConns = 4
)

func (m *member) bound(b upstream.Bounds) {
	for _, s := range m.servers {
		s.traffic.Change(b)
		few := b
		few.MaxConns = probeConns
		s.probes.Change(few)
		s.boundBootstrap(b)
	}
}

func (s *server) boundBootstrap(b upstream.Bounds) {
	if ep := s.bootstrap.Load(); ep != nil {
		b.MaxConns = bootstrapConns
		ep.Change(b)
	}
}
