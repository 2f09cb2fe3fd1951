package disagg

// settled are the Options with what follows from them. It is never changed, but replaced
// as a whole by Change; a request that meets the change may see some of both.
type settled struct {
	Options
	defaults modelPD
	models   map[string]*modelPD
	pins     pins
}

func settle(opt Options) (*settled, error) {
	s := &settled{Options: opt, models: make(map[string]*modelPD, len(opt.Models))}
	var err error
	if s.pins, err = newPins(opt.Steering.Pins); err != nil {
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

// Change takes over what of opt may change while requests run (Options.Changeable); the
// rest of opt is not looked at. It fails, and changes nothing, on what NewRunner would
// refuse.
func (r *Runner) Change(opt Options) error {
	now := r.now.Load().Options
	opt.into(&now)
	s, err := settle(now)
	if err != nil {
		return err
	}
	r.now.Store(s)
	return nil
}

// Changeable is o with nothing but what Change takes over.
func (o Options) Changeable() Options {
	var only Options
	o.into(&only)
	return only
}

func (o Options) into(at *Options) {
	at.PD, at.Models, at.Timeouts, at.Steering, at.Migration, at.PoolWaiters, at.TransferStall = o.PD, o.Models, o.Timeouts, o.Steering, o.Migration, o.PoolWaiters, o.TransferStall
}

// opt are the Options of now.
func (r *Runner) opt() *Options { return &r.now.Load().Options }

func (r *Runner) pdOf(model string) *modelPD {
	s := r.now.Load()
	if m, ok := s.models[model]; ok {
		return m
	}
	return &s.defaults
}
