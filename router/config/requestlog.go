package config

import (
	"net/url"

	"sluice/router/requestlog/accesslog"
)

func (c *Config) checkRequestLog(bad func(path, format string, args ...any)) {
	if o := c.AccessLog.Output; o != "off" {
		if err := accesslog.CheckOutput(o); err != nil {
			bad("access_log.output", "%v, or off", err)
		}
	}
	if e := c.Tracing.Endpoint; e != "" {
		// The exporter does not send a query, which may be meant as a credential.
		if u, err := url.Parse(e); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
			bad("tracing.endpoint", "%s; want http://HOST:PORT or https://HOST:PORT, with an optional path; credentials belong in $OTEL_EXPORTER_OTLP_HEADERS", quoted(e))
		}
	}
}
