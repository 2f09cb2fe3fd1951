package pd

// settings are the Options and what the runner derives from them. A settings value never
// changes; Reload replaces the Runner's current one. A request reads the value that was
// current when it began until it ends, and so does its stream, also when another engine continues it.
// What requests share follows a reload at once:
//
//   - the admission queue, which sorts its waiting requests again and displaces those over its new bounds;
//   - the table of sessions, and with it turns that wait;
//   - what the Runner reads by options, such as PoolWaiters in AddWaiter and Migration in WorkerChanged.
//
// A waiting request has streams suspended by its own settings, whatever theirs are.
type settings struct {
	Options
	r        *Runner
	defaults modelPD
	models   map[string]*modelPD
	pins     clientPolicy
	trusted  clientPolicy // who may name a tenant and any class
	// admission is nil if requests do not wait.
	admission *admissionSettings
}

func newSettings(r *Runner, opt Options) (*settings, error) {
	s := &settings{Options: opt, r: r, models: make(map[string]*modelPD, len(opt.Models))}
	var err error
	if s.pins, err = newClientPolicy("steering.pinning", opt.Steering.Pinning); err != nil {
		return nil, err
	}
	if s.trusted, err = newClientPolicy("admission.trusted", opt.Admission.Trusted); err != nil {
		return nil, err
	}
	if s.admission, err = newAdmissionSettings(&s.Admission, opt.AdmissionBytes); err != nil {
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

// Reload applies the options of opt that may change while requests run (see Options.Reloadable) and
// ignores the others. It returns an error and changes nothing if NewRunner would reject the result.
func (r *Runner) Reload(opt Options) error {
	now := r.current.Load().Options
	opt.applyTo(&now)
	s, err := newSettings(r, now)
	if err != nil {
		return err
	}
	r.current.Store(s)
	r.sessions.SetOptions(now.Sessions)
	if s.admission != nil {
		r.admission.Reload(s.admission.queue)
	} else {
		r.admission.Disable()
	}
	return nil
}

// Reloadable returns a copy of o that has only the options that Reload applies.
func (o Options) Reloadable() Options {
	var only Options
	o.applyTo(&only)
	return only
}

func (o Options) applyTo(at *Options) {
	at.Sessions = o.Sessions
	at.PD, at.Models, at.Timeouts, at.Steering, at.Migration, at.PoolWaiters, at.TransferStall = o.PD, o.Models, o.Timeouts, o.Steering, o.Migration, o.PoolWaiters, o.TransferStall
	at.Admission, at.AdmissionBytes = o.Admission, o.AdmissionBytes
}

// options returns the current Options. A request reads q.settings instead.
func (r *Runner) options() *Options { return &r.current.Load().Options }

// pdOf returns the hand-over configuration of a model.
func (s *settings) pdOf(model string) *modelPD {
	if m, ok := s.models[model]; ok {
		return m
	}
	return &s.defaults
}
