package obs

import (
	"sluice/dataplane/front"
	"sluice/router/schedule"
)

// Totals are the counters since the process started, for the console. The difference of two Totals
// is the activity between them. LegsInFlight and Connections are current values.
type Totals struct {
	Accepted, Refused, Ended uint64
	LegsInFlight             [3]int64 // by schedule.LegKind
	Fallbacks, Retries       uint64
	Events, Bytes            uint64
	OutputTokens             uint64 // of requests that have ended, as the engines reported them
	PromptTokens             uint64 // prompt tokens of requests with a predicted overlap
	PredictedTokens          uint64
	ComparedPrompt           uint64 // prompt tokens of requests whose cached tokens the engine reported
	ComparedPredicted        uint64
	ReportedTokens           uint64
	Connections              int64
	TTFT                     Distribution
}

// Totals reads the counters into t, one after the other.
func (m *Metrics) Totals(t *Totals) {
	*t = Totals{
		Accepted: m.accepted.Get(), Events: m.events.Get(), Bytes: m.bytes.Get(),
		PromptTokens: m.prompt.Get(), PredictedTokens: m.predicted.Get(),
		ComparedPrompt: m.comparedPrompt.Get(), ComparedPredicted: m.comparedPredicted.Get(), ReportedTokens: m.reported.Get(),
		Connections: m.connections.Load(),
	}
	for i := range m.inFlight {
		t.LegsInFlight[i] = m.inFlight[i].Load()
	}
	for _, c := range m.refused.all() {
		t.Refused += c.Get()
	}
	for _, c := range m.responses.all() {
		t.Ended += c.Get()
	}
	for _, c := range m.fallbacks.all() {
		t.Fallbacks += c.Get()
	}
	for _, c := range m.retries.all() {
		t.Retries += c.Get()
	}
	for _, model := range m.models.all() {
		t.OutputTokens += model.output.Get()
	}
	m.ttft.copyTo(&t.TTFT)
}

var _ front.Observer = (*Metrics)(nil)

// Fallbacks returns the number of fallbacks by kind.
func (m *Metrics) Fallbacks() map[string]uint64 {
	out := map[string]uint64{}
	for k, c := range m.fallbacks.all() {
		out[k] = c.Get()
	}
	return out
}

// RetriesOf returns how often legs of a kind were retried.
func (m *Metrics) RetriesOf(leg schedule.LegKind) uint64 {
	if c, ok := m.retries.all()[leg]; ok {
		return c.Get()
	}
	return 0
}
