package fleet

import "time"

// Pace is what of the Options may change while the fleet runs.
type Pace struct {
	ProbeInterval, ProbeTimeout time.Duration
	FailAfter                   int
	BreakAfter                  int
	BreakFor                    time.Duration
	MaxRequests, MaxTokens      int64
}

// Pace is that of o.
func (o Options) Pace() Pace {
	o.defaults()
	return Pace{
		ProbeInterval: o.ProbeInterval, ProbeTimeout: o.ProbeTimeout, FailAfter: o.FailAfter,
		BreakAfter: o.BreakAfter, BreakFor: o.BreakFor, MaxRequests: o.MaxRequests, MaxTokens: o.MaxTokens,
	}
}

// Change takes over a Pace. What has been counted so far, and a breaker that is open, go
// on as they are.
func (f *Fleet) Change(p Pace) { f.pace.Store(&p) }
