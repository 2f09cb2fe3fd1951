package app

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

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
	// usable checks files, which the fields cert, key and ca name.
	usable := func(files certs.Files, cert, key, ca string) {
		_, err := certs.New(files, nil)
		if err == nil {
			return
		}
		field := cert
		for _, f := range []struct{ field, file string }{{cert, files.Cert}, {key, files.Key}, {ca, files.CA}} {
			if f.file != "" && strings.Contains(err.Error(), fmt.Sprintf("%q", f.file)) {
				field = f.field
				break
			}
		}
		add(fieldError(cfg, field, err))
	}
	usable(clientFiles(cfg), "tls.cert", "tls.key", "tls.client_ca")
	usable(engineFiles(cfg), "engine_tls.cert", "engine_tls.key", "engine_tls.ca")
	if cfg.EngineAPI.TCP() {
		usable(engineAPIFiles(cfg), "engine_api.tls_cert", "engine_api.tls_key", "")
	}
	if c := cfg.Registration; c.Listen != "off" {
		usable(certs.Files{Cert: c.TLSCert, Key: c.TLSKey, CA: c.ClientCA}, "registration.tls_cert", "registration.tls_key", "registration.client_ca")
	}
	if file, ok := strings.CutPrefix(cfg.AccessLog.Output, "file:"); ok {
		if _, err := os.Stat(filepath.Dir(file)); err != nil {
			add(fieldError(cfg, "access_log.output", fmt.Errorf("accesslog: cannot write %q: %w", file, err)))
		}
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

// fieldError returns an error with the field that causes it and the field's place in the file.
func fieldError(cfg *config.Config, field string, err error) error {
	err = fmt.Errorf("%s: %w", field, err)
	if place := cfg.Place(field); place != "" {
		err = fmt.Errorf("%s: %w", place, err)
	}
	return err
}

// ownListeners returns the configured addresses at which the router listens.
func ownListeners(cfg *config.Config) *networks.OwnListeners {
	own := new(networks.OwnListeners)
	own.Add("listen", cfg.Listen)
	own.Add("admin.listen", cfg.Admin.Listen)
	own.Add("registration.listen", cfg.Registration.Listen)
	own.Add("engine_api.listen", cfg.EngineAPI.Listen)
	return own
}

// noopHandler lets CheckStart construct a front that never receives a request.
type noopHandler struct{}

func (noopHandler) ServeInference(front.Exchange) {}
