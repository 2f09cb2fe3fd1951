package app

import "sluice/router/session"

// exposeSessionMetrics registers the figures of the table of sessions.
func (r *Router) exposeSessionMetrics() {
	show := func(read func(*session.Stats) float64, name string, labels ...string) {
		r.metrics.GaugeFunc(func() float64 {
			stats := r.runner.Sessions().Stats()
			return read(&stats)
		}, name, labels...)
	}
	show(func(s *session.Stats) float64 { return float64(s.Sessions) }, "sluice_sessions")
	show(func(s *session.Stats) float64 { return float64(s.Active) }, "sluice_sessions_active")
	show(func(s *session.Stats) float64 { return float64(s.Waiting) }, "sluice_session_turns_waiting")
	show(func(s *session.Stats) float64 { return float64(s.Need) }, "sluice_sessions_active_tokens")
	show(func(s *session.Stats) float64 { return float64(s.Limited) }, "sluice_sessions_limited_models")
	show(func(s *session.Stats) float64 { return float64(s.Limit) }, "sluice_sessions_limit_tokens")
	show(func(s *session.Stats) float64 { return float64(s.Counts.Finished) }, "sluice_sessions_ended_total", "reason", "finished")
	show(func(s *session.Stats) float64 { return float64(s.Counts.Expired) }, "sluice_sessions_ended_total", "reason", "expired")
	show(func(s *session.Stats) float64 { return float64(s.Counts.Evicted) }, "sluice_sessions_ended_total", "reason", "evicted")
	for o := session.None + 1; o < session.NumOrigins; o++ {
		show(func(s *session.Stats) float64 { return float64(s.Counts.Requests[o]) }, "sluice_session_requests_total", "source", o.String())
	}
	for e := range session.NumWaits {
		show(func(s *session.Stats) float64 { return float64(s.Counts.Waits[e]) }, "sluice_session_waits_total", "outcome", e.String())
	}
}
