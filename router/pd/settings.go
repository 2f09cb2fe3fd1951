package pd

// settings are the Options with what follows from them. It is never changed, but replaced
// as a whole by Change; a request that meets the change may see some of both.
type settings struct {
	Options
	defaults modelPD
	models   map[string]*modelPD
	pins     pinPolicy
}

func newSettings(opt Options) (*settings, error) {
	s := &settings{Options: opt, models: make(map[string]*modelPD, len(opt.Models))}
	var err error
	if s.pins, err = newPinPolicy(opt.Steering.Pins); err != nil {
		return nil, err
	}
	if s.defaults, err = newModelPD(opt.PD); err != nil {
		return nil, err
	}
	for name, m := range opt.Models {
		if m.PD == nil {
			continue
		}
		own, err := newModelPD(*m.PD)
		if err != nil {
			return nil, err
		}
		s.models[name] = &own
	}
	return s, nil
}

// Reload takes over what of opt may change while requests run (Options.Changeable); the
// rest of opt is not looked at. It fails, and changes nothing, on what NewRunner would
// refuse.
func (r *Runner) Reload(opt Options) error {
	now := r.current.Load().Options
	opt.applyTo(&now)
	s, err := newSettings(now)
	if err != nil {
		return err
	}
	r.current.Store(s)
	return nil
}

// Reloadable is o with nothing but what Change takes over.
func (o Options) Reloadable() Options {
	var only Options
	o.applyTo(&only)
	return only
}

func (o Options) applyTo(at *Options) {
	at.PD, at.Models, at.Timeouts, at.Steering, at.Migration, at.PoolWaiters, at.TransferStall = o.PD, o.Models, o.Timeouts, o.Steering, o.Migration, o.PoolWaiters, o.TransferStall
}

// options are the Options of now.
func (r *Runner) options() *Options { return &r.current.Load().Options }

func (r *Runner) pdOf(model string) *modelPD {
	s := r.current.Load()
	if m, ok := s.models[model]; ok {
		return m
	}
	return &s.defaults
}
