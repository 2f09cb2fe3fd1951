package obs

import (
	"cmp"
	"slices"
	"time"

	"sluice/dataplane/relay"
	"sluice/router/schedule"
)

// maxModels bounds the models with series of their own; the others are one model, "other".
const maxModels = 100

// Model has the measurements of one model's requests. It implements pd.ModelObserver. All methods
// are safe for concurrent use; an observation is a few atomic additions.
type Model struct {
	intervals     relay.Intervals
	fineIntervals *nativeBuckets

	queue, firstToken, perToken, transfer, duration *histogram
	legs                                            [legKinds]*histogram
	requests                                        [modelOutcomes]counter
	input, output, cached                           counter
}

// The outcomes of a model's requests. An SLO on errors counts modelFailed over modelOK and
// modelFailed.
const (
	modelOK = iota
	modelRejected
	modelClientGone
	modelFailed
	modelOutcomes
)

var modelOutcomeNames = [modelOutcomes]string{"ok", "rejected", "client_gone", "failed"}

func newModel(native bool) *Model {
	m := &Model{
		queue: newHistogram(queueBounds, native), firstToken: newHistogram(firstTokenBounds, native).withExemplars(),
		perToken: newHistogram(intervalBounds, native), transfer: newHistogram(transferBounds, native),
		duration: newHistogram(durationBounds, native).withExemplars(),
	}
	for i := range m.legs {
		m.legs[i] = newHistogram(durationBounds, native)
	}
	if native {
		m.fineIntervals = new(nativeBuckets)
		m.intervals.Fine = m.fineIntervals.observeN
	}
	return m
}

// Intervals returns the counters of the time between the tokens of a stream.
func (m *Model) Intervals() *relay.Intervals { return &m.intervals }

// Queued records the time from a request's head until its first leg is sent.
func (m *Model) Queued(took time.Duration) { m.queue.observe(took) }

// LegEnded records the duration of a leg that succeeded.
func (m *Model) LegEnded(leg schedule.LegKind, took time.Duration) {
	if int(leg) < len(m.legs) {
		m.legs[leg].observe(took)
	}
}

// Transferred records the duration of a KV transfer, as an engine measured it.
func (m *Model) Transferred(took time.Duration) { m.transfer.observe(took) }

// FirstToken records the time from a request's head to the first token of its stream. trace is the
// request's trace id, zero if it has none.
func (m *Model) FirstToken(took time.Duration, trace [16]byte) {
	m.firstToken.observeTraced(took, trace)
}

// Ended counts a request that has ended. prompt is its number of prompt tokens as the router
// counted them, for engines that report none.
func (m *Model) Ended(out schedule.Outcome, prompt int, trace [16]byte) {
	outcome := modelOutcome(out.Status, out.Reason)
	m.requests[outcome].Inc()
	if out.Status != 200 {
		return
	}
	m.input.Add(int64(cmp.Or(max(out.PromptTokens, 0), prompt)))
	m.output.Add(int64(max(out.OutputTokens, 0)))
	m.cached.Add(int64(max(out.CachedTokens, 0)))
	if outcome != modelOK {
		return
	}
	m.duration.observeTraced(out.Total, trace)
	if n := out.OutputTokens; n > 1 && out.TTFT > 0 {
		m.perToken.observe((out.Total - out.TTFT) / time.Duration(n-1))
	}
}

// Outcome returns the outcome, of ModelOutcomes, of a request that ended with a status and a reason.
func Outcome(status int, reason string) string {
	return modelOutcomeNames[modelOutcome(status, reason)]
}

func modelOutcome(status int, reason string) int {
	switch {
	case status == 499, reason == relay.ClientGone.String(), reason == relay.ClientStalled.String():
		return modelClientGone
	case status >= 500:
		return modelFailed
	case status >= 400:
		return modelRejected
	case reason == "", reason == relay.Drained.String(), reason == relay.Deadline.String():
		return modelOK
	}
	return modelFailed
}

// ModelTotals are the measurements of one model since the process started, for the console. The
// difference of two is the activity between them.
type ModelTotals struct {
	Requests              [modelOutcomes]uint64 // in the order of ModelOutcomes
	Input, Output, Cached uint64                // tokens
	FirstToken, Duration  Buckets
}

// ModelOutcomes are the outcomes of a model's requests.
var ModelOutcomes = modelOutcomeNames

// ModelTotals reads the measurements of every model, one counter after the other.
func (m *Metrics) ModelTotals() map[string]*ModelTotals {
	all := m.models.all()
	out := make(map[string]*ModelTotals, len(all))
	for name, s := range all {
		t := &ModelTotals{Input: s.input.Get(), Output: s.output.Get(), Cached: s.cached.Get(),
			FirstToken: s.firstToken.copy(), Duration: s.duration.copy()}
		for i := range t.Requests {
			t.Requests[i] = s.requests[i].Get()
		}
		out[name] = t
	}
	return out
}

// Model returns the measurements of a model's requests; beyond maxModels those of the model
// "other". name must be a name that the fleet has, not any text of a request.
func (m *Metrics) Model(name string) *Model {
	if name == "" { // a sidecar's engine whose model is unknown
		name = otherValue
	}
	return m.models.get(name)
}

// models are the measurements by model.
type models struct{ labelMap[string, Model] }

func (v *models) collect(p *page) {
	all := v.all()
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		s := all[name]
		for i, outcome := range modelOutcomeNames {
			p.add("sluice_model_requests_total", labelPairs("model", name, "outcome", outcome), float64(s.requests[i].Get()))
		}
		labels := labelPairs("model", name)
		p.add("sluice_model_input_tokens_total", labels, float64(s.input.Get()))
		p.add("sluice_model_output_tokens_total", labels, float64(s.output.Get()))
		p.add("sluice_model_cached_tokens_total", labels, float64(s.cached.Get()))
		s.queue.collect(p, "sluice_model_queue_seconds", "model", name)
		s.firstToken.collect(p, "sluice_model_time_to_first_token_seconds", "model", name)
		s.collectIntervals(p, name)
		s.perToken.collect(p, "sluice_model_time_per_output_token_seconds", "model", name)
		for leg, h := range s.legs {
			h.collect(p, "sluice_model_leg_duration_seconds", "model", name, "leg", schedule.LegKind(leg).String())
		}
		s.transfer.collect(p, "sluice_model_kv_transfer_seconds", "model", name)
		s.duration.collect(p, "sluice_model_request_duration_seconds", "model", name)
	}
}

func (m *Model) collectIntervals(p *page, name string) {
	counts := make([]uint64, len(m.intervals.Buckets))
	for i := range counts {
		counts[i] = m.intervals.Buckets[i].Load()
	}
	var from *histogram
	if m.fineIntervals != nil {
		from = &histogram{native: m.fineIntervals}
	}
	addHistogram(p, "sluice_model_inter_token_latency_seconds", intervalBounds.seconds, counts, float64(m.intervals.Sum.Load())/1e9, from, []string{"model", name})
}
