package app

import (
	"fmt"

	"sluice/dataplane/certs"
	"sluice/dataplane/front"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/networks"
)

// CheckStart returns the reasons why New would fail with a valid configuration, as far as
// they can be found without binding a listener: unusable certificates and keys, and
// options that the front refuses.
func CheckStart(cfg *config.Config) (problems []error) {
	add := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	specs, err := keySpecs(cfg)
	if err == nil && len(specs) > 0 {
		_, err = apikey.NewKeyring(specs)
	}
	add(err)
	usable := func(of string, files certs.Files) {
		if _, err := certs.New(files, nil); err != nil {
			add(fmt.Errorf("%s: %w", of, err))
		}
	}
	usable("tls", clientFiles(cfg))
	usable("engine_tls", engineFiles(cfg))
	if cfg.EngineAPI.TCP() {
		usable("engine_api.tls_cert", engineAPIFiles(cfg))
	}
	if c := cfg.Register; c.Listen != "off" {
		usable("registration.tls_cert", certs.Files{Cert: c.TLSCert, Key: c.TLSKey, CA: c.ClientCA})
	}
	own := ownListeners(cfg)
	for _, spec := range cfg.Specs() {
		if err := fleet.CheckAddresses(own, &spec); err != nil {
			add(fmt.Errorf("worker %q: %w", spec.ID, err))
		}
	}
	options := frontOptions(cfg)
	options.Handler = noopHandler{}
	_, err = front.New(options)
	add(err)
	return problems
}

// ownListeners returns the configured addresses at which the router listens.
func ownListeners(cfg *config.Config) *networks.OwnListeners {
	own := new(networks.OwnListeners)
	own.Add("listen", cfg.Listen)
	own.Add("admin.listen", cfg.Admin.Listen)
	own.Add("registration.listen", cfg.Register.Listen)
	own.Add("engine_api.listen", cfg.EngineAPI.Listen)
	return own
}

// noopHandler lets CheckStart construct a front that never receives a request.
type noopHandler struct{}

func (noopHandler) ServeInference(front.Exchange) {}
