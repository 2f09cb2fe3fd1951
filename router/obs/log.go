package obs

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// MaskedValue is what the log shows in place of a secret.
const MaskedValue = "[masked]"

// secretWords in an attribute's key make its value unfit for a log.
var secretWords = []string{"token", "authorization", "password", "secret", "api_key", "apikey", "api-key", "cookie", "credential", "engine_key"}

// publicKeys hold one of secretWords and are no secrets: counts of tokens.
var publicKeys = []string{"tokens", "tokenize", "tokenizer", "token_ids"}

// NewLogger makes the process's logger. level is debug, info, warn or error,
// format text or json; empty means info and text. Attributes whose key names a
// secret (token, authorization, password, …) are shown masked, however deep in
// groups they are. Durations are text such as 1.5s in both formats. The level may be changed by what is returned beside the logger.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, *slog.LevelVar, error) {
	least := new(slog.LevelVar)
	at, err := Level(level)
	if err != nil {
		return nil, nil, err
	}
	least.Set(at)
	opt := &slog.HandlerOptions{ReplaceAttr: mask, Level: least}
	switch format {
	case "text", "":
		return slog.New(slog.NewTextHandler(w, opt)), least, nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opt)), least, nil
	}
	return nil, nil, fmt.Errorf("obs: cannot log in format %q: want text or json", format)
}

// Level reads a level's name; "" is info.
func Level(name string) (slog.Level, error) {
	switch strings.ToLower(name) {
	case "debug":
		return slog.LevelDebug, nil
	case "info", "":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("obs: cannot log at level %q: want debug, info, warn or error", name)
}

func mask(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration && !IsSecret(a.Key) {
		a.Value = slog.StringValue(a.Value.Duration().String()) // as JSON it would be a bare number of nanoseconds
		return a
	}
	if a.Value.Kind() == slog.KindInt64 || a.Value.Kind() == slog.KindUint64 || a.Value.Kind() == slog.KindGroup {
		return a
	}
	if IsSecret(a.Key) {
		a.Value = slog.StringValue(MaskedValue)
	}
	return a
}

// IsSecret says whether a key's value must not be shown.
func IsSecret(key string) bool {
	k := strings.ToLower(key)
	for _, p := range publicKeys {
		k = strings.ReplaceAll(k, p, "")
	}
	for _, w := range secretWords {
		if strings.Contains(k, w) {
			return true
		}
	}
	return false
}
