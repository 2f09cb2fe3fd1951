package obs

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"sluice/dataplane/jsonscan"
)

// MaskedValue replaces a secret in the log and in the admin API.
const MaskedValue = "[masked]"

// secretWords mark secrets: a value whose key contains one of them is masked.
var secretWords = []string{"token", "authorization", "password", "secret", "api_key", "apikey", "api-key", "cookie", "credential", "engine_key", "sha256"}

// publicKeys contain one of secretWords but are not secret, such as token counts, and the list of
// clients' keys, whose names and limits operators may see; the hash of each is sha256.
var publicKeys = []string{"api_keys", "tokens", "tokenize", "tokenizer", "token_ids"}

// NewLogger returns the process's logger and its level, which may change at run time. level is
// debug, info, warn or error (empty: info); format is text or json (empty: text). The logger masks
// attributes whose key names a secret (token, authorization, password, …), also inside groups. It
// writes durations as text, such as 1.5s, in both formats, and unprintable characters of clients and
// engines as escapes, so that a terminal does not interpret them.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, *slog.LevelVar, error) {
	least := new(slog.LevelVar)
	at, err := Level(level)
	if err != nil {
		return nil, nil, err
	}
	least.Set(at)
	opt := &slog.HandlerOptions{ReplaceAttr: mask, Level: least}
	var handler func(w io.Writer) slog.Handler
	switch format {
	case "text", "":
		handler = func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, opt) } // quotes what is not printable
	case "json":
		handler = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(printable{w}, opt) }
	default:
		return nil, nil, fmt.Errorf("obs: cannot log in format %q: want text or json", format)
	}
	note := func(dropped int) []byte {
		var line bytes.Buffer
		slog.New(handler(&line)).Warn("lines of the log were dropped, because its reader had stalled", "lines", dropped)
		return line.Bytes()
	}
	return slog.New(handler(newLogOutput(w, note))), least, nil
}

// DroppedLogLines returns how many lines the loggers of this process have dropped, because the readers of their
// output had stalled.
func DroppedLogLines() uint64 { return droppedLogLines.Load() }

// printable escapes the unprintable characters that slog's JSON handler copies.
type printable struct{ w io.Writer }

func (p printable) Write(line []byte) (int, error) {
	if _, err := p.w.Write(jsonscan.EscapeUnprintable(line)); err != nil {
		return 0, err
	}
	return len(line), nil
}

// Level parses the name of a level; "" is info.
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
		a.Value = slog.StringValue(a.Value.Duration().String()) // JSON would otherwise have a number of nanoseconds without a unit
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

// IsSecret reports whether the value of a key is secret and must not be shown.
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
