package schedule

// tuning is what of the Options may change while a Scheduler chooses. It is never
// changed, but replaced as a whole: a choice that meets the change may weigh some
// candidates by the one and some by the other, which a choice made a moment before or
// after would have done with all.
type tuning struct {
	weights     weights
	temperature float64
	policy      policy
}

// Tune takes over the weights, the rates, the temperature and the policy of opt; the
// rest of opt is not looked at. A rate that is fixed no more is learned again, from what
// had been learned before it was fixed.
func (s *Scheduler) Tune(opt Options) {
	t := &tuning{weights: newWeights(&opt), temperature: opt.Temperature}
	for p, name := range policyNames {
		if name == opt.Policy {
			t.policy = policy(p)
		}
	}
	s.rates.fix(&opt.Rates)
	s.tune.Store(t)
}

// Tunable is o with nothing but what Tune takes over.
func (o Options) Tunable() Options {
	return Options{
		OverlapWeight: o.OverlapWeight, PrefillWeight: o.PrefillWeight, DecodeWeight: o.DecodeWeight, QueueWeight: o.QueueWeight,
		HostWeight: o.HostWeight, DiskWeight: o.DiskWeight, AwaitedWeight: o.AwaitedWeight, Rates: o.Rates, Temperature: o.Temperature, Policy: o.Policy,
	}
}

func (s *Scheduler) tuned() *tuning { return s.tune.Load() }
