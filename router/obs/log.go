package obs

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// Masked is what the log shows in place of a secret.
const Masked = "[masked]"

// secretWords in an attribute's key make its value unfit for a log.
var secretWords = []string{"token", "authorization", "password", "secret", "api_key", "apikey", "api-key", "cookie", "credential"}

// plainKeys hold one of secretWords and are no secrets: counts of tokens.
var plainKeys = []string{"tokens", "tokenize", "tokenizer", "token_ids"}

// NewLogger makes the process's logger. level is debug, info, warn or error,
// format text or json; empty means info and text. Attributes whose key names a
// secret (token, authorization, password, …) are shown masked, however deep in
// groups they are.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	opt := &slog.HandlerOptions{ReplaceAttr: mask}
	switch strings.ToLower(level) {
	case "debug":
		opt.Level = slog.LevelDebug
	case "info", "":
		opt.Level = slog.LevelInfo
	case "warn":
		opt.Level = slog.LevelWarn
	case "error":
		opt.Level = slog.LevelError
	default:
		return nil, fmt.Errorf("obs: cannot log at level %q: want debug, info, warn or error", level)
	}
	switch format {
	case "text", "":
		return slog.New(slog.NewTextHandler(w, opt)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opt)), nil
	}
	return nil, fmt.Errorf("obs: cannot log in format %q: want text or json", format)
}

func mask(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindInt64 || a.Value.Kind() == slog.KindUint64 || a.Value.Kind() == slog.KindGroup {
		return a
	}
	if IsSecret(a.Key) {
		a.Value = slog.StringValue(Masked)
	}
	return a
}

// IsSecret says whether a key's value must not be shown.
func IsSecret(key string) bool {
	k := strings.ToLower(key)
	for _, p := range plainKeys {
		k = strings.ReplaceAll(k, p, "")
	}
	for _, w := range secretWords {
		if strings.Contains(k, w) {
			return true
		}
	}
	return false
}
