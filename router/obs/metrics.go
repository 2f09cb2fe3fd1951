package obs

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Metrics holds the router's metrics. All methods are safe for concurrent use. The observer
// methods do not block; they allocate only when a series is used for the first time.
type Metrics struct {
	set         *metrics.Set
	legacyNames atomic.Bool

	accepted, panics                            *metrics.Counter
	events, bytes, unscanned, engineErrors      *metrics.Counter
	output                                      *metrics.Counter
	prompt, predicted                           *metrics.Counter
	comparedPrompt, comparedPredicted, reported *metrics.Counter
	predictionError                             *metrics.Counter
	connections                                 atomic.Int64
	inFlight                                    [3]atomic.Int64 // by schedule.LegKind
	legTimes                                    [3]histogram
	ttft                                        fineHistogram

	refused            labelMap[[2]string, metrics.Counter]
	responses          labelMap[response, metrics.Counter]
	legs               labelMap[legOutcome, metrics.Counter]
	retries            labelMap[schedule.LegKind, metrics.Counter]
	fallbacks          labelMap[string, metrics.Counter]
	migrations         labelMap[string, metrics.Counter]
	plans              labelMap[[2]string, metrics.Counter] // by plan and reason
	streams            labelMap[relay.Cause, metrics.Counter]
	truncatedResponses labelMap[relay.Cause, metrics.Counter] // non-streaming responses that the client did not read completely
	endpoints          map[string]*endpoint                   // by path; not modified after NewMetrics

	mu    sync.Mutex // guards workers and changes to ranks
	ranks atomic.Pointer[map[worker.ID]*rankSeries]
	// workers returns the members of the fleet, for their states; nil before ExposeWorkers.
	workers func() []*worker.Worker
}

type response struct {
	endpoint string
	code     int
}

type legOutcome struct {
	leg     schedule.LegKind
	outcome string
}

type endpoint struct {
	name           string
	duration, ttft histogram
}

// otherEndpoint is the label for paths that are not inference routes. Labels come from a closed
// list, because otherwise any client could create series.
const otherEndpoint = "other"

// NewMetrics returns an empty Metrics. It has no global state, so one process may have several
// routers.
func NewMetrics() *Metrics {
	s := metrics.NewSet()
	m := &Metrics{
		set:      s,
		accepted: s.NewCounter("sluice_requests_accepted_total"), panics: s.NewCounter("sluice_panics_total"),
		events: s.NewCounter("sluice_stream_events_total"), bytes: s.NewCounter("sluice_stream_bytes_total"),
		unscanned: s.NewCounter("sluice_stream_unscanned_events_total"), engineErrors: s.NewCounter("sluice_stream_engine_errors_total"),
		output: s.NewCounter("sluice_output_tokens_total"),
		prompt: s.NewCounter("sluice_cache_prompt_tokens_total"), predicted: s.NewCounter("sluice_cache_predicted_tokens_total"),
		comparedPrompt: s.NewCounter("sluice_cache_compared_prompt_tokens_total"), comparedPredicted: s.NewCounter("sluice_cache_compared_predicted_tokens_total"),
		reported: s.NewCounter("sluice_cache_reported_tokens_total"), predictionError: s.NewCounter("sluice_cache_prediction_error_tokens_total"),
		endpoints: map[string]*endpoint{},
	}
	counter := func(name string, labels ...string) *metrics.Counter {
		return s.GetOrCreateCounter(series(name, labels...))
	}
	m.refused.make = func(k [2]string) *metrics.Counter {
		return counter("sluice_requests_refused_total", "endpoint", k[0], "reason", k[1])
	}
	m.responses.make = func(k response) *metrics.Counter {
		return counter("sluice_responses_total", "endpoint", k.endpoint, "code", strconv.Itoa(k.code))
	}
	m.legs.make = func(k legOutcome) *metrics.Counter {
		return counter("sluice_legs_total", "leg", k.leg.String(), "outcome", k.outcome)
	}
	m.retries.make = func(l schedule.LegKind) *metrics.Counter {
		return counter("sluice_leg_retries_total", "leg", l.String())
	}
	m.fallbacks.make = func(kind string) *metrics.Counter { return counter("sluice_fallbacks_total", "kind", kind) }
	m.migrations.make = func(outcome string) *metrics.Counter {
		return counter("sluice_migrations_total", "outcome", outcome)
	}
	m.plans.make = func(k [2]string) *metrics.Counter { return counter("sluice_plans_total", "plan", k[0], "reason", k[1]) }
	m.streams.make = func(c relay.Cause) *metrics.Counter { return counter("sluice_streams_total", "cause", c.String()) }
	m.truncatedResponses.make = func(c relay.Cause) *metrics.Counter {
		return counter("sluice_responses_incomplete_total", "cause", c.String())
	}
	for _, e := range append(slices.Clip(front.Endpoints), front.StoredEndpoint) {
		m.endpoints[e.Path] = &endpoint{name: e.Path}
	}
	m.endpoints[otherEndpoint] = &endpoint{name: otherEndpoint}
	s.NewGauge("sluice_client_connections", func() float64 { return float64(m.connections.Load()) })
	for l := range m.inFlight {
		n := &m.inFlight[l]
		s.NewGauge(series("sluice_legs_in_flight", "leg", schedule.LegKind(l).String()), func() float64 { return float64(n.Load()) })
	}
	s.RegisterMetricsWriter(m.writeHistograms)
	s.RegisterMetricsWriter(m.writeWorkers)
	return m
}

// series returns a metric name with labels; labels are name, value, name, value, …. It panics if
// the name is not in the Catalog.
func series(name string, labels ...string) string {
	if families[name] == nil {
		panic("obs: metric " + name + " is not in the catalog") // a bug; the first test that uses the metric finds it
	}
	return name + "{" + labelList(labels...) + "}"
}

func labelList(labels ...string) string {
	var b strings.Builder
	for i := 0; i+1 < len(labels); i += 2 {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%s=%s", labels[i], quote(labels[i+1]))
	}
	return b.String()
}

var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

func quote(v string) string { return `"` + escapes.Replace(v) + `"` }

// GaugeFunc adds a gauge whose value f returns at each scrape. name must be in the Catalog; labels
// are name, value, name, value, ….
func (m *Metrics) GaugeFunc(f func() float64, name string, labels ...string) {
	if len(labels) > 0 {
		name = series(name, labels...)
	} else if families[name] == nil {
		panic("obs: metric " + name + " is not in the catalog")
	}
	m.set.GetOrCreateGauge(name, f)
}

// ShowLegacyNames makes WritePrometheus also write the former series in LegacyNames.
func (m *Metrics) ShowLegacyNames() { m.legacyNames.Store(true) }

// WritePrometheus writes all metrics, including those of the process, in the Prometheus text
// format.
func (m *Metrics) WritePrometheus(w io.Writer) {
	var b bytes.Buffer
	m.set.WritePrometheus(&b)
	describe(w, b.Bytes(), m.legacyNames.Load())
	metrics.WriteProcessMetrics(w)
	writeDescriptors(w)
}

// writeDescriptors writes the number of open file descriptors and their limit. The metrics package
// would open and list /proc/self/fd. That fails just when no descriptor is left, and takes
// milliseconds for ten thousand descriptors. Since Linux 6.2 the directory's size is the number of
// descriptors; on older kernels writeDescriptors falls back to the list.
func writeDescriptors(w io.Writer) {
	var limit syscall.Rlimit
	dir, err := os.Stat("/proc/self/fd")
	if err != nil || dir.Size() == 0 || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		metrics.WriteFDMetrics(w)
		return
	}
	metrics.WriteGaugeUint64(w, "process_max_fds", limit.Cur)
	metrics.WriteGaugeUint64(w, "process_open_fds", uint64(dir.Size()))
}

func (m *Metrics) writeHistograms(w io.Writer) {
	names := make([]string, 0, len(m.endpoints))
	for name := range m.endpoints {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, n := range names {
		m.endpoints[n].duration.write(w, "sluice_request_duration_seconds", labelList("endpoint", n))
	}
	for _, n := range names {
		m.endpoints[n].ttft.write(w, "sluice_time_to_first_token_seconds", labelList("endpoint", n))
	}
	for l := range m.legTimes {
		m.legTimes[l].write(w, "sluice_leg_duration_seconds", labelList("leg", schedule.LegKind(l).String()))
	}
}

func (m *Metrics) endpoint(path string) *endpoint {
	if e, ok := m.endpoints[path]; ok {
		return e
	}
	return m.endpoints[otherEndpoint]
}

// Accepted implements front.Observer.
func (m *Metrics) Accepted() { m.accepted.Inc() }

// Refused implements front.Observer.
func (m *Metrics) Refused(endpoint string, reason front.Reason) {
	m.refused.get([2]string{m.endpoint(endpoint).name, string(reason)}).Inc()
}

// ResponseCut implements front.Observer.
func (m *Metrics) ResponseCut(_ string, cause relay.Cause) { m.truncatedResponses.get(cause).Inc() }

// ResponseEnded implements front.Observer.
func (m *Metrics) ResponseEnded(endpoint string, status int, took time.Duration) {
	e := m.endpoint(endpoint)
	e.duration.observe(took)
	m.responses.get(response{e.name, status}).Inc()
}

// Panicked implements front.Observer; the front logs it.
func (m *Metrics) Panicked(string, any, []byte) { m.panics.Inc() }

// Connections implements front.Observer.
func (m *Metrics) Connections(open int) { m.connections.Store(int64(open)) }

// LegStarted implements pd.Observer.
func (m *Metrics) LegStarted(leg schedule.LegKind, _ worker.ID) {
	if int(leg) < len(m.inFlight) {
		m.inFlight[leg].Add(1)
	}
}

// LegEnded implements pd.Observer.
func (m *Metrics) LegEnded(leg schedule.LegKind, id worker.ID, outcome string, took time.Duration) {
	if int(leg) < len(m.inFlight) {
		m.inFlight[leg].Add(-1)
		m.legTimes[leg].observe(took)
	}
	k := legOutcome{leg, outcome}
	m.legs.get(k).Inc()
	if r := m.rank(id); r != nil {
		r.legs.get(k).Add(1)
	}
}

// FallbackUsed implements pd.Observer.
func (m *Metrics) FallbackUsed(kind string) { m.fallbacks.get(kind).Inc() }

// Migrated implements pd.Observer.
func (m *Metrics) Migrated(outcome string) { m.migrations.get(outcome).Inc() }

// Planned implements pd.Observer.
func (m *Metrics) Planned(plan, reason string) { m.plans.get([2]string{plan, reason}).Inc() }

// Retried implements pd.Observer.
func (m *Metrics) Retried(leg schedule.LegKind) { m.retries.get(leg).Inc() }

// FirstToken implements pd.Observer.
func (m *Metrics) FirstToken(endpoint string, took time.Duration) {
	m.endpoint(endpoint).ttft.observe(took)
	m.ttft.observe(took)
}

// Streamed implements pd.Observer.
func (m *Metrics) Streamed(_ string, res *relay.Result) {
	m.streams.get(res.Cause).Inc()
	m.events.AddInt64(res.Events)
	m.bytes.AddInt64(res.Bytes)
	m.unscanned.AddInt64(res.Unscanned)
	if res.SawErrorEvent {
		m.engineErrors.Inc()
	}
	m.output.AddInt64(int64(max(0, res.Usage.Completion)))
}

// Cached implements pd.Observer. actual is negative if the engine did not report cached tokens.
func (m *Metrics) Cached(_ worker.ID, promptTokens, predicted, actual int) {
	if promptTokens <= 0 {
		return
	}
	m.prompt.Add(promptTokens)
	m.predicted.Add(max(0, predicted))
	if actual < 0 {
		return
	}
	m.comparedPrompt.Add(promptTokens)
	m.comparedPredicted.Add(max(0, predicted))
	m.reported.Add(actual)
	m.predictionError.Add(max(predicted-actual, actual-predicted))
}
