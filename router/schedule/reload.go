package schedule

// settings is what of the Options may change while a Scheduler chooses. It is never
// changed, but replaced as a whole: a choice that meets the change may weigh some
// candidates by the one and some by the other, which a choice made a moment before or
// after would have done with all.
type settings struct {
	weights     weights
	temperature float64
	policy      policy
}

// Reload takes over the weights, the rates, the temperature and the policy of opt; the
// rest of opt is not looked at. A rate that is fixed no more is learned again, from what
// had been learned before it was fixed.
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

// Reloadable is o with nothing but what Tune takes over.
func (o Options) Reloadable() Options {
	return Options{
		OverlapWeight: o.OverlapWeight, PrefillWeight: o.PrefillWeight, DecodeWeight: o.DecodeWeight, QueueWeight: o.QueueWeight,
		HostWeight: o.HostWeight, DiskWeight: o.DiskWeight, InFlightWeight: o.InFlightWeight, Rates: o.Rates, Temperature: o.Temperature, Policy: o.Policy,
	}
}

func (s *Scheduler) currentSettings() *settings { return s.settings.Load() }
