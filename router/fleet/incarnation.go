package fleet

import "fmt"

// incarnation distinguishes successive engine processes at the same address. Not every engine shows
// every sign: vLLM with several API servers omits the process metrics, and metrics can be disabled.
type incarnation struct {
	started float64 // process_start_time_seconds; 0 unknown
	created float64 // oldest *_created stamp of the engine's own metrics; 0 unknown
	tokens  float64 // counter of tokens, never decreases in one process; -1 unknown
	sources string  // the event endpoints it reported, joined
}

const (
	restartStart    = "start_time"
	restartMetrics  = "metrics_created"
	restartCounters = "counters_reset"
	restartRefused  = "connection_refused"
	restartSources  = "event_sources"
	restartEngineID = "engine_id" // from hand-overs: see engineIDs
)

// RestartSigns are the signs by which a new process behind a worker's address is recognised, by
// their names in metrics.
var RestartSigns = [...]string{restartStart, restartMetrics, restartCounters, restartRefused, restartSources, restartEngineID}

// restartSign returns the sign that now is another process than l, and the detail; both are "" if
// there is none. Only newer start times count: behind one address there may be several processes
// that answer in turn, which must not look like a restart per second. refused means that a
// connection was refused in between. That is evidence only if the process reports no start time,
// since only a process that is gone stops listening.
func (l *incarnation) restartSign(now *incarnation, refused bool) (sign, detail string) {
	switch {
	case l.started > 0 && now.started > 0:
		if now.started > l.started+0.001 {
			return restartStart, fmt.Sprintf("process_start_time_seconds is %.2f, was %.2f", now.started, l.started)
		}
	case l.created > 0 && now.created > 0:
		if now.created > l.created+0.001 {
			return restartMetrics, fmt.Sprintf("metrics were created at %.2f, before at %.2f", now.created, l.created)
		}
	case l.tokens >= 0 && now.tokens >= 0 && now.tokens < l.tokens:
		return restartCounters, fmt.Sprintf("token counters fell from %.0f to %.0f", l.tokens, now.tokens)
	case refused:
		return restartRefused, "it refused connections and reports no start time"
	}
	if l.sources != "" && now.sources != "" && l.sources != now.sources {
		return restartSources, fmt.Sprintf("event sources changed from %s to %s", l.sources, now.sources)
	}
	return "", ""
}

// observe collects the signs in one sample of /metrics.
func (l *incarnation) observe(m metric, value float64) {
	if !usable(value) {
		return
	}
	switch m {
	case processStart:
		l.started = max(l.started, value)
	case vllmPromptTokens, vllmGenerationTokens, sglangPromptTokens, sglangGenerationTokens:
		l.tokens = max(l.tokens, 0) + value
	case tokensCreated:
		if l.created == 0 || value < l.created {
			l.created = value
		}
	}
}
