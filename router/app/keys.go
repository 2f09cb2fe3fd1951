package app

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/router/apikey"
	"sluice/router/config"
)

// newKeyring creates the keyring if the configuration has API keys.
func (r *Router) newKeyring() error {
	if len(r.cfg.APIKeys) == 0 {
		return nil
	}
	specs, err := keySpecs(r.cfg)
	if err != nil {
		return err
	}
	if r.keyring, err = apikey.NewKeyring(specs); err != nil {
		return err
	}
	r.metrics.ExposeKeys(r.keyring)
	return nil
}

// reloadKeys replaces the keys of the keyring with those of next. It does nothing if the
// router started without keys or next has none.
func (r *Router) reloadKeys(next *config.Config) error {
	if r.keyring == nil || len(next.APIKeys) == 0 {
		return nil
	}
	specs, err := keySpecs(next)
	if err != nil {
		return err
	}
	return r.keyring.Replace(specs)
}

func keySpecs(cfg *config.Config) ([]apikey.Spec, error) {
	specs := make([]apikey.Spec, len(cfg.APIKeys))
	for i, k := range cfg.APIKeys {
		hash, err := apikey.ParseHash(k.SHA256)
		if err != nil {
			return nil, fmt.Errorf("api_keys[%d].sha256: %w", i, err)
		}
		specs[i] = apikey.Spec{Name: k.Name, Hash: hash, RequestsPerMinute: k.RequestsPerMinute, TokensPerMinute: k.TokensPerMinute, Models: k.Models,
			Classes: k.Classes, Weight: k.Weight}
	}
	return specs, nil
}

// authenticator returns the keyring as the front's authenticator; nil if there are no keys.
func (r *Router) authenticator() front.Authenticator {
	if r.keyring == nil {
		return nil
	}
	return r.keyring
}
