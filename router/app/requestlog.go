package app

import (
	"time"

	"sluice/dataplane/front"
	"sluice/router/requestlog"
	"sluice/router/requestlog/accesslog"
	"sluice/router/requestlog/recent"
	"sluice/router/requestlog/tracing"
)

// newRequestLog opens the access log, starts the trace exporter and creates the ring of requests for
// the console. It returns nil if all are off.
func (r *Router) newRequestLog() (*requestlog.Log, error) {
	var sinks []requestlog.Sink
	var err error
	if c := &r.cfg.AccessLog; c.Output != "off" {
		r.accessLog, err = accesslog.New(accesslog.Options{Output: c.Output, Sample: c.Sample, MaxFileBytes: c.MaxFile, MaxFiles: c.MaxFiles, Log: r.log})
		if err != nil {
			return nil, fieldError(r.cfg, "access_log.output", err)
		}
		sinks = append(sinks, r.accessLog)
		stat := func(read func(s accesslog.Stats) uint64) func() float64 {
			return func() float64 { return float64(read(r.accessLog.Stats())) }
		}
		r.metrics.GaugeFunc(stat(func(s accesslog.Stats) uint64 { return s.Written }), "sluice_access_log_lines_total", "result", "written")
		r.metrics.GaugeFunc(stat(func(s accesslog.Stats) uint64 { return s.Dropped }), "sluice_access_log_lines_total", "result", "dropped")
		r.metrics.GaugeFunc(stat(func(s accesslog.Stats) uint64 { return s.Failed }), "sluice_access_log_lines_total", "result", "failed")
	}
	c := &r.cfg.Tracing
	opt := tracing.Options{Endpoint: c.Endpoint, Protocol: c.Protocol, Sample: c.Sample, Slow: c.Slow, Version: r.version, TLS: r.cfg.TLS.Cert != "", Log: r.log}
	if opt.Protocol == "auto" {
		opt.Protocol = ""
	}
	if opt.Enabled() {
		if r.tracer, err = tracing.New(opt); err != nil {
			return nil, err
		}
		sinks = append(sinks, r.tracer)
		stat := func(read func(s tracing.Stats) uint64) func() float64 {
			return func() float64 { return float64(read(r.tracer.Stats())) }
		}
		r.metrics.GaugeFunc(stat(func(s tracing.Stats) uint64 { return s.Exported }), "sluice_traces_total", "result", "exported")
		r.metrics.GaugeFunc(stat(func(s tracing.Stats) uint64 { return s.Dropped }), "sluice_traces_total", "result", "dropped")
		r.metrics.GaugeFunc(stat(func(s tracing.Stats) uint64 { return s.Failed }), "sluice_traces_total", "result", "failed")
	}
	if n := r.cfg.Admin.Timelines; n > 0 && r.cfg.Admin.Listen != "off" {
		r.recent = recent.New(recent.Options{Size: n, Slow: c.Slow})
		sinks = append(sinks, r.recent)
	}
	return requestlog.New(sinks...), nil
}

func (r *Router) closeRequestLog() {
	if r.accessLog != nil {
		r.accessLog.Close()
	}
	if r.tracer != nil {
		r.tracer.Close()
	}
}

// logRefused returns what passes the front's refusals to the request log; nil if there is none.
func logRefused(requests *requestlog.Log) func(front.Refusal) {
	if requests == nil {
		return nil
	}
	return func(r front.Refusal) {
		now := time.Now()
		if r.Received.IsZero() {
			r.Received = now
		}
		requests.Refused(
			requestlog.Request{ID: r.RequestID, Endpoint: r.Endpoint, Key: r.Key, Client: r.Client, Bytes: r.Bytes, Received: r.Received},
			requestlog.Outcome{Status: r.Reason.Status(), Reason: string(r.Reason), CachedTokens: -1, OutputTokens: -1, Total: now.Sub(r.Received)})
	}
}
