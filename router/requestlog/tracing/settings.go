package tracing

import (
	"errors"
	"log/slog"
	"net/url"

	"github.com/go-logr/logr"
)

// settingsSink receives what OpenTelemetry's libraries log about OTEL_* variables that they cannot use.
// They would write it to standard error as plain text, with the values, which can be credentials.
type settingsSink struct{ log *slog.Logger }

// Init implements logr.LogSink.
func (settingsSink) Init(logr.RuntimeInfo) {}

// Enabled implements logr.LogSink: only errors are logged.
func (settingsSink) Enabled(int) bool { return false }

// Info implements logr.LogSink.
func (settingsSink) Info(int, string, ...any) {}

// Error implements logr.LogSink. It leaves out the values, and the URL that an error quotes.
func (s settingsSink) Error(err error, message string, _ ...any) {
	reason := "invalid"
	var quoting *url.Error
	switch {
	case errors.As(err, &quoting):
		reason = "not a URL"
	case err != nil && message == "parse headers":
		reason = err.Error() // it quotes nothing
	}
	s.log.Warn("an OTEL_* variable cannot be used and is ignored", "detail", message, "reason", reason)
}

// WithValues implements logr.LogSink.
func (s settingsSink) WithValues(...any) logr.LogSink { return s }

// WithName implements logr.LogSink.
func (s settingsSink) WithName(string) logr.LogSink { return s }
