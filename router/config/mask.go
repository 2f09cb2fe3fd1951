package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
)

const hidden = "(hidden)"

// String shows the address and hides the token.
func (a Admin) String() string {
	token := ""
	if a.Token != "" {
		token = hidden
	}
	return fmt.Sprintf("{listen: %s, token: %s, runtime_file: %s}", a.Listen, token, a.RuntimeFile)
}

// GoString hides the token from %#v too.
func (a Admin) GoString() string { return a.String() }

// LogValue hides the token from slog.
func (a Admin) LogValue() slog.Value { return slog.StringValue(a.String()) }

// MarshalJSON hides the token.
func (a Admin) MarshalJSON() ([]byte, error) {
	type fields Admin
	if a.Token != "" {
		a.Token = hidden
	}
	return json.Marshal(fields(a))
}

// String shows all but the token.
func (r Register) String() string {
	type fields Register
	if r.Token != "" {
		r.Token = hidden
	}
	return fmt.Sprintf("%+v", fields(r))
}

// GoString hides the token from %#v too.
func (r Register) GoString() string { return r.String() }

// LogValue hides the token from slog.
func (r Register) LogValue() slog.Value { return slog.StringValue(r.String()) }

// MarshalJSON hides the token.
func (r Register) MarshalJSON() ([]byte, error) {
	type fields Register
	if r.Token != "" {
		r.Token = hidden
	}
	return json.Marshal(fields(r))
}

// String shows all but the token.
func (r Routed) String() string {
	type fields Routed
	if r.Token != "" {
		r.Token = hidden
	}
	return fmt.Sprintf("%+v", fields(r))
}

// GoString hides the token from %#v too.
func (r Routed) GoString() string { return r.String() }

// LogValue hides the token from slog.
func (r Routed) LogValue() slog.Value { return slog.StringValue(r.String()) }

// MarshalJSON hides the token.
func (r Routed) MarshalJSON() ([]byte, error) {
	type fields Routed
	if r.Token != "" {
		r.Token = hidden
	}
	return json.Marshal(fields(r))
}

// plainConfig is Config without its methods, so that printing does not recurse;
// Admin, Register and Routed keep their own.
type plainConfig Config

// String shows every value but secrets.
func (c Config) String() string {
	p := plainConfig(c)
	p.origins, p.again = nil, nil
	if p.EngineKey != "" {
		p.EngineKey = hidden
	}
	return fmt.Sprintf("%+v", p)
}

// MarshalJSON hides secrets.
func (c Config) MarshalJSON() ([]byte, error) {
	p := plainConfig(c)
	if p.EngineKey != "" {
		p.EngineKey = hidden
	}
	return json.Marshal(p)
}

// GoString hides secrets from %#v too.
func (c Config) GoString() string { return c.String() }

// LogValue hides secrets from slog.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }
