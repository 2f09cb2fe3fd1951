package obs

import (
	"sluice/dataplane/front"
	"sluice/router/schedule"
)

// Totals are counters since the start, for the console and the load's rates;
// differences between two of them are what happened between.
type Totals struct {
	Accepted, Refused, Ended uint64
	LegsInFlight             [3]int64 // by schedule.Leg
	Fallbacks, Retries       uint64
	Events, Bytes            uint64
	OutputTokens             uint64
	PromptTokens             uint64 // of requests with a predicted overlap
	PredictedTokens          uint64
	ComparedPrompt           uint64 // of requests whose cached tokens were reported
	ComparedPredicted        uint64
	ReportedTokens           uint64
	Connections              int64
	TTFT                     Distribution
}

// Totals reads the counters, one by one.
func (m *Metrics) Totals(t *Totals) {
	*t = Totals{
		Accepted: m.accepted.Get(), Events: m.events.Get(), Bytes: m.bytes.Get(), OutputTokens: m.output.Get(),
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
	m.ttft.copyTo(&t.TTFT)
}

var _ front.Observer = (*Metrics)(nil)

// Fallbacks gives how often each kind of fall-back happened.
func (m *Metrics) Fallbacks() map[string]uint64 {
	out := map[string]uint64{}
	for k, c := range m.fallbacks.all() {
		out[k] = c.Get()
	}
	return out
}

// RetriesOf gives how often a leg was run again.
func (m *Metrics) RetriesOf(leg schedule.LegKind) uint64 {
	if c, ok := m.retries.all()[leg]; ok {
		return c.Get()
	}
	return 0
}
