package obs

import (
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Metrics holds the router's metrics. All methods are safe for concurrent use. The observer
// methods do not block; they allocate only when a series is used for the first time.
type Metrics struct {
	legacyNames, native atomic.Bool

	accepted, panics                            counter
	events, bytes, unscanned, engineErrors      counter
	output                                      counter
	prompt, predicted                           counter
	comparedPrompt, comparedPredicted, reported counter
	predictionError                             counter
	connections                                 atomic.Int64
	inFlight                                    [legKinds]atomic.Int64
	legTimes                                    [legKinds]*histogram
	ttft                                        fineHistogram
	models                                      models
	admission                                   admissionMetrics

	refused            labelMap[[2]string, counter]
	responses          labelMap[response, counter]
	legs               labelMap[legOutcome, counter]
	retries            labelMap[schedule.LegKind, counter]
	fallbacks          labelMap[string, counter]
	migrations         labelMap[string, counter]
	plans              labelMap[[2]string, counter] // by plan and reason
	promptForms        labelMap[string, counter]
	streams            labelMap[relay.Cause, counter]
	truncatedResponses labelMap[relay.Cause, counter] // non-streaming responses that the client did not read completely
	endpoints          map[string]*endpoint           // by path; not modified after NewMetrics

	process *prometheus.Registry // of the process and the Go runtime

	mu         sync.Mutex // guards the fields below and changes to ranks
	gauges     []gauge    // ordered by key; a list is not modified
	collectors []func(*page)
	ranks      atomic.Pointer[map[worker.ID]*rankSeries]
	// workers returns the members of the fleet, for their states; nil before ExposeWorkers.
	workers func() []*worker.Worker
}

// legKinds is the number of values of schedule.LegKind.
const legKinds = 3

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
	duration, ttft *histogram
}

// otherEndpoint is the label for paths that are not inference routes. Labels come from a closed
// list, because otherwise any client could create series.
const otherEndpoint = "other"

// NewMetrics returns an empty Metrics. It has no global state, so one process may have several
// routers.
func NewMetrics() *Metrics {
	m := &Metrics{endpoints: map[string]*endpoint{}, process: newProcessRegistry()}
	for i := range m.legTimes {
		m.legTimes[i] = newHistogram(durationBounds, false)
	}
	addEndpoint := func(name string) {
		m.endpoints[name] = &endpoint{name, newHistogram(durationBounds, false), newHistogram(durationBounds, false)}
	}
	for _, e := range append(slices.Clip(front.Endpoints), front.StoredEndpoint, front.SessionEndpoint) {
		addEndpoint(e.Path)
	}
	addEndpoint(otherEndpoint)
	m.refused.overflow = func(k [2]string) [2]string { return [2]string{k[0], otherValue} }
	m.responses.overflow = func(k response) response { return response{endpoint: k.endpoint} }
	m.legs.overflow = otherOutcome
	m.fallbacks.overflow = otherWord
	m.migrations.overflow = otherWord
	m.plans.overflow = func(k [2]string) [2]string { return [2]string{k[0], otherValue} }
	m.promptForms.overflow = otherWord
	m.admission.init()
	m.models.overflow, m.models.bound = otherWord, maxModels
	m.models.create = func(string) *Model { return newModel(m.native.Load()) }
	return m
}

func otherWord(string) string { return otherValue }

func otherOutcome(k legOutcome) legOutcome { return legOutcome{k.leg, otherValue} }

// ShowLegacyNames makes scrapes also have the former series in LegacyNames.
func (m *Metrics) ShowLegacyNames() { m.legacyNames.Store(true) }

// UseNativeHistograms makes the histograms of models have native buckets besides the classic ones,
// in the format of protocol buffers. Call it before the first request.
func (m *Metrics) UseNativeHistograms() { m.native.Store(true) }

// collectCounters adds the series that do not belong to ranks or models.
func (m *Metrics) collectCounters(p *page) {
	for _, c := range [...]struct {
		name string
		n    *counter
	}{
		{"sluice_requests_accepted_total", &m.accepted}, {"sluice_panics_total", &m.panics},
		{"sluice_stream_events_total", &m.events}, {"sluice_stream_bytes_total", &m.bytes},
		{"sluice_stream_unscanned_events_total", &m.unscanned}, {"sluice_stream_engine_errors_total", &m.engineErrors},
		{"sluice_output_tokens_total", &m.output},
		{"sluice_cache_prompt_tokens_total", &m.prompt}, {"sluice_cache_predicted_tokens_total", &m.predicted},
		{"sluice_cache_compared_prompt_tokens_total", &m.comparedPrompt}, {"sluice_cache_compared_predicted_tokens_total", &m.comparedPredicted},
		{"sluice_cache_reported_tokens_total", &m.reported}, {"sluice_cache_prediction_error_tokens_total", &m.predictionError},
	} {
		p.add(c.name, nil, float64(c.n.Get()))
	}
	p.add("sluice_client_connections", nil, float64(m.connections.Load()))
	for l := range m.inFlight {
		p.add("sluice_legs_in_flight", labelPairs("leg", schedule.LegKind(l).String()), float64(m.inFlight[l].Load()))
	}
	addMap(p, "sluice_requests_refused_total", &m.refused, func(k [2]string) []string { return []string{"endpoint", k[0], "reason", k[1]} })
	addMap(p, "sluice_responses_total", &m.responses, func(k response) []string {
		code := otherValue
		if k.code > 0 {
			code = strconv.Itoa(k.code)
		}
		return []string{"endpoint", k.endpoint, "code", code}
	})
	addMap(p, "sluice_legs_total", &m.legs, func(k legOutcome) []string { return []string{"leg", k.leg.String(), "outcome", k.outcome} })
	addMap(p, "sluice_leg_retries_total", &m.retries, func(l schedule.LegKind) []string { return []string{"leg", l.String()} })
	addMap(p, "sluice_fallbacks_total", &m.fallbacks, func(kind string) []string { return []string{"kind", kind} })
	addMap(p, "sluice_migrations_total", &m.migrations, func(outcome string) []string { return []string{"outcome", outcome} })
	addMap(p, "sluice_plans_total", &m.plans, func(k [2]string) []string { return []string{"plan", k[0], "reason", k[1]} })
	addMap(p, "sluice_prefill_prompts_total", &m.promptForms, func(form string) []string { return []string{"form", form} })
	addMap(p, "sluice_streams_total", &m.streams, func(c relay.Cause) []string { return []string{"cause", c.String()} })
	addMap(p, "sluice_responses_incomplete_total", &m.truncatedResponses, func(c relay.Cause) []string { return []string{"cause", c.String()} })
	m.mu.Lock()
	gauges := m.gauges
	m.mu.Unlock()
	for i := range gauges {
		p.add(gauges[i].name, gauges[i].labels, gauges[i].read())
	}
}

func (m *Metrics) collectHistograms(p *page) {
	names := make([]string, 0, len(m.endpoints))
	for name := range m.endpoints {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, n := range names {
		m.endpoints[n].duration.collect(p, "sluice_request_duration_seconds", "endpoint", n)
		m.endpoints[n].ttft.collect(p, "sluice_time_to_first_token_seconds", "endpoint", n)
	}
	m.admission.collect(p)
	for l := range m.legTimes {
		m.legTimes[l].collect(p, "sluice_leg_duration_seconds", "leg", schedule.LegKind(l).String())
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

// ResponseIncomplete implements front.Observer.
func (m *Metrics) ResponseIncomplete(_ string, cause relay.Cause) {
	m.truncatedResponses.get(cause).Inc()
}

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
		r.legs.get(k).Inc()
		if outcome == "ok" && int(leg) < legKinds {
			r.legTimes[leg].Add(int64(took))
		}
	}
}

// FallbackUsed implements pd.Observer.
func (m *Metrics) FallbackUsed(kind string) { m.fallbacks.get(kind).Inc() }

// Migrated implements pd.Observer.
func (m *Metrics) Migrated(outcome string) { m.migrations.get(outcome).Inc() }

// PromptSent implements pd.Observer.
func (m *Metrics) PromptSent(form string) { m.promptForms.get(form).Inc() }

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
	m.events.Add(res.Events)
	m.bytes.Add(res.Bytes)
	m.unscanned.Add(res.Unscanned)
	if res.SawErrorEvent {
		m.engineErrors.Inc()
	}
	m.output.Add(int64(max(0, res.Usage.Completion)))
}

// Cached implements pd.Observer. actual is negative if the engine did not report cached tokens.
func (m *Metrics) Cached(_ worker.ID, promptTokens, predicted, actual int) {
	if promptTokens <= 0 {
		return
	}
	m.prompt.Add(int64(promptTokens))
	m.predicted.Add(int64(max(0, predicted)))
	if actual < 0 {
		return
	}
	m.comparedPrompt.Add(int64(promptTokens))
	m.comparedPredicted.Add(int64(max(0, predicted)))
	m.reported.Add(int64(actual))
	m.predictionError.Add(int64(max(predicted-actual, actual-predicted)))
}
