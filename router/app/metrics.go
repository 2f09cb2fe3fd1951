package app

import (
	"sluice/router/fleet"
	"sluice/router/kvevents"
	"sluice/router/obs"
	"sluice/router/pd"
)

// runObserver is the metrics as the runner's Observer.
type runObserver struct{ *obs.Metrics }

// Model implements pd.Observer.
func (o runObserver) Model(name string) pd.ModelObserver { return o.Metrics.Model(name) }

// exposeMetrics registers the gauges whose values are read from the router's parts.
func (r *Router) exposeMetrics() {
	r.metrics.GaugeFunc(func() float64 { return 1 }, "sluice_build_info", "version", r.version)
	r.metrics.GaugeFunc(func() float64 { return float64(obs.DroppedLogLines()) }, "sluice_log_lines_dropped_total")
	r.metrics.GaugeFunc(func() float64 { return float64(r.runner.LeasedHandles()) }, "sluice_kv_handles_leased")
	r.metrics.GaugeFunc(func() float64 { return float64(len(r.runner.FailingHandovers())) }, "sluice_models_without_handover")
	r.metrics.GaugeFunc(r.orphanRanks, "sluice_kv_orphan_ranks")
	r.metrics.GaugeFunc(func() float64 { return float64(r.runner.OpenNotificationBreakers()) }, "sluice_kv_notification_breakers_open")
	for i, what := range [...]string{"accept_failed", "rejected", "idle_closed"} {
		r.metrics.GaugeFunc(func() float64 {
			failed, turned, closed := r.front.FDStats()
			return float64([...]uint64{failed, turned, closed}[i])
		}, "sluice_fd_limit_events_total", "event", what)
	}
	for i, kind := range [...]string{"applied", "malformed", "wrong_rank"} {
		r.metrics.GaugeFunc(func() float64 {
			applied, malformed, wrongRank := r.loads.Counts()
			return float64([...]uint64{applied, malformed, wrongRank}[i])
		}, "sluice_load_messages_total", "kind", kind)
	}
	r.metrics.GaugeFunc(func() float64 { threads, _ := r.front.Loops(); return float64(threads) }, "sluice_relay_threads")
	r.metrics.GaugeFunc(func() float64 { _, streams := r.front.Loops(); return float64(streams) }, "sluice_relay_loop_streams")
	r.completions.exposeMetrics(r.metrics)
	r.exposeTransferMetrics()
	r.metrics.ExposeAdmission(r.runner.Admission())
	r.metrics.GaugeFunc(func() float64 { return float64(r.runner.Waiting()) }, "sluice_pool_waiters")
	r.exposeSessionMetrics()
	r.metrics.GaugeFunc(func() float64 { return float64(r.fleet.RetriesDenied()) }, "sluice_retries_denied_total")
	for _, sign := range fleet.RestartSigns {
		r.metrics.GaugeFunc(func() float64 { return float64(r.fleet.Restarts(sign)) }, "sluice_engine_restarts_total", "evidence", sign)
	}
	for _, state := range fleet.Frozen {
		r.metrics.GaugeFunc(func() float64 { return float64(r.fleet.FrozenVerdicts(state)) }, "sluice_engine_frozen_total", "state", state.String())
		r.metrics.GaugeFunc(func() float64 { return float64(r.fleet.FrozenCalls(state)) }, "sluice_engine_frozen_calls_total", "state", state.String())
		r.metrics.GaugeFunc(func() float64 { return float64(r.fleet.FrozenRanks(state)) }, "sluice_engine_frozen_ranks", "state", state.String())
	}
	for _, medium := range kvevents.Media {
		for _, locality := range []string{kvevents.LocalityRemote, kvevents.LocalityUnspecified} {
			blocks := func() float64 { return float64(r.feeds.Uncredited().Blocks(medium, locality)) }
			r.metrics.GaugeFunc(blocks, "sluice_kv_uncredited_blocks_total", "medium", medium, "locality", locality)
		}
	}
	r.metrics.GaugeFunc(func() float64 { return float64(r.front.BodyBytes()) }, "sluice_memory_budget_used_bytes")
	r.metrics.GaugeFunc(func() float64 { return float64(r.front.BodyLimit()) }, "sluice_memory_budget_limit_bytes")
}
