package schedule

// settings are the Options that may change while a Scheduler chooses. They are immutable and
// replaced as a whole. A choice that runs during a change may evaluate some candidates with the old
// settings and some with the new.
type settings struct {
	weights     weights
	temperature float64
	policy      policy
}

// Reload applies the weights, rates, temperature and policy of opt; its other fields are ignored. A
// rate that is no longer fixed is learned again, starting from what had been learned before it was
// fixed.
func (s *Scheduler) Reload(opt Options) {
	t := &settings{weights: newWeights(&opt), temperature: opt.Temperature}
	for p, name := range policyNames {
		if name == opt.Policy {
			t.policy = policy(p)
		}
	}
	s.rates.setFixed(&opt.Rates)
	s.settings.Store(t)
}

// Reloadable returns o with only the fields that Reload applies.
func (o Options) Reloadable() Options {
	return Options{
		OverlapWeight: o.OverlapWeight, PrefillWeight: o.PrefillWeight, DecodeWeight: o.DecodeWeight, QueueWeight: o.QueueWeight,
		HostWeight: o.HostWeight, DiskWeight: o.DiskWeight, InFlightWeight: o.InFlightWeight, EvictionWeight: o.EvictionWeight, OthersWeight: o.OthersWeight,
		Rates: o.Rates, Temperature: o.Temperature, Policy: o.Policy,
	}
}

func (s *Scheduler) currentSettings() *settings { return s.settings.Load() }
