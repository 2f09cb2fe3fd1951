package pd

// settings are the Options and what the runner derives from them. A settings value never
// changes; Reload replaces the Runner's current one. A request reads the value that was
// current when it began until it ends, so it never sees two configurations. A stream that
// migrates reads the value of the time of its migration.
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

// pdOf is the hand-over of a model.
func (s *settings) pdOf(model string) *modelPD {
	if m, ok := s.models[model]; ok {
		return m
	}
	return &s.defaults
}
