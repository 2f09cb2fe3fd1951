package app

import (
	"fmt"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/dns"
	"sluice/router/discovery/kube"
	"sluice/router/discovery/registration"
	"sluice/router/worker"
)

// discover starts the discovery sources. It fails if the fleet refuses a worker of the
// configuration itself, or a source cannot be created; started sources retry on their own.
func (r *Router) discover() error {
	r.discovery = discovery.NewRunner(r.fleet, r.log)
	specs := r.cfg.Specs()
	var own discovery.Source = discovery.Static(specs)
	if path := r.cfg.Path(); path != "" {
		own = &discovery.File{Path: path, Parse: configReader(r, specs), Interval: r.cfg.Discovery.FilePollInterval, Reloads: r.fileSource}
	}
	if err := r.discovery.Start(own, specs...); err != nil {
		return err
	}
	if path := r.cfg.Discovery.File; path != "" {
		parse := func(text []byte) ([]worker.Spec, error) { return config.ParseWorkers(path, text) }
		_ = r.discovery.Start(&discovery.File{Path: path, Parse: parse, Interval: r.cfg.Discovery.FilePollInterval})
	}
	for i := range r.cfg.Discovery.DNS {
		d := &r.cfg.Discovery.DNS[i]
		_ = r.discovery.Start(&dns.Source{
			Lookup:      dns.Lookup{Host: d.Name, SRV: d.Type == "srv", Port: uint16(d.Port), Server: d.Server},
			Spec:        func(t dns.Target) worker.Spec { return d.Spec(t.Addr.String(), t.Port, "dns") },
			MinInterval: d.MinInterval, MaxInterval: d.MaxInterval,
		})
	}
	if r.cfg.Kube.Selector != "" {
		src, err := kube.New(r.cfg.Kube)
		if err != nil {
			return err
		}
		_ = r.discovery.Start(src)
	}
	if r.cfg.Registration.On() {
		bound, err := r.inherited.Listen(socketRegister, r.cfg.Registration.Listen)
		if err != nil {
			return fmt.Errorf("registration: cannot listen on %q: %w; choose another address with --register", r.cfg.Registration.Listen, err)
		}
		r.register, err = registration.New(registration.Options{
			Config: r.cfg.Registration, Log: r.log, State: r.workerState, Connector: r.connectorDocument, Listener: bound, KnownWorkers: r.knownWorkers(),
		})
		if err != nil {
			return err
		}
		r.log.Info("registration is listening", "address", r.register.Addr())
		_ = r.discovery.Start(r.register)
	}
	return nil
}

// workerState returns the state of a worker and its reason, for the responses of the
// registration listener. The last result is false if the fleet does not know the worker.
func (r *Router) workerState(id string) (worker.State, string, bool) {
	for _, w := range r.fleet.View().Workers {
		if w.Spec.ID == id {
			s, why := w.State()
			return s, why, true
		}
	}
	return worker.Gone, "", false
}

// configReader returns the parser for the watched configuration file. The parser returns the
// workers, applies the keys, and logs the other fields that differ (reloadLists).
func configReader(r *Router, specs []worker.Spec) func([]byte) ([]worker.Spec, error) {
	return func(text []byte) ([]worker.Spec, error) {
		next, err := r.cfg.Reread(text)
		if err != nil {
			return nil, err
		}
		r.reloadLists(next)
		specs = next.SpecsAfter(specs)
		return specs, nil
	}
}

// sourceNames returns the names of the discovery sources other than the configuration itself.
func (r *Router) sourceNames() []string {
	var names []string
	for _, s := range r.discovery.States() {
		if s.Source != (discovery.Static{}).Name() && (s.Source != "file "+r.cfg.Path()) {
			names = append(names, s.Source)
		}
	}
	return names
}
