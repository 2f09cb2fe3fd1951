package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
)

const maskedText = "(hidden)"

// String shows the address and hides the token.
func (a Admin) String() string {
	token := ""
	if a.Token != "" {
		token = maskedText
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
		a.Token = maskedText
	}
	return json.Marshal(fields(a))
}

// String shows all but the token.
func (r Registration) String() string {
	type fields Registration
	if r.Token != "" {
		r.Token = maskedText
	}
	return fmt.Sprintf("%+v", fields(r))
}

// GoString hides the token from %#v too.
func (r Registration) GoString() string { return r.String() }

// LogValue hides the token from slog.
func (r Registration) LogValue() slog.Value { return slog.StringValue(r.String()) }

// MarshalJSON hides the token.
func (r Registration) MarshalJSON() ([]byte, error) {
	type fields Registration
	if r.Token != "" {
		r.Token = maskedText
	}
	return json.Marshal(fields(r))
}

// String shows all but the token.
func (r EngineAPI) String() string {
	type fields EngineAPI
	if r.Token != "" {
		r.Token = maskedText
	}
	return fmt.Sprintf("%+v", fields(r))
}

// GoString hides the token from %#v too.
func (r EngineAPI) GoString() string { return r.String() }

// LogValue hides the token from slog.
func (r EngineAPI) LogValue() slog.Value { return slog.StringValue(r.String()) }

// MarshalJSON hides the token.
func (r EngineAPI) MarshalJSON() ([]byte, error) {
	type fields EngineAPI
	if r.Token != "" {
		r.Token = maskedText
	}
	return json.Marshal(fields(r))
}

// configFields is Config without its methods, so that printing one does not recurse. The fields of
// types Admin, Registration and EngineAPI still mask their secrets.
type configFields Config

// String shows every value but secrets.
func (c Config) String() string {
	p := configFields(c)
	p.origins, p.reparse = nil, nil
	if p.EngineKey != "" {
		p.EngineKey = maskedText
	}
	return fmt.Sprintf("%+v", p)
}

// MarshalJSON hides secrets.
func (c Config) MarshalJSON() ([]byte, error) {
	p := configFields(c)
	if p.EngineKey != "" {
		p.EngineKey = maskedText
	}
	return json.Marshal(p)
}

// GoString hides secrets from %#v too.
func (c Config) GoString() string { return c.String() }

// LogValue hides secrets from slog.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }
