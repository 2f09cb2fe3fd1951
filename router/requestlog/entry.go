package requestlog

import (
	"bytes"
	"net/netip"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"sluice/dataplane/relay"
)

// Bounds of one entry; what is beyond them is counted in Dropped.
const (
	maxLegs    = 16
	maxChoices = 16
)

// Sink receives finished entries. Add must not block. An entry does not change after Add, and
// several sinks may keep the same one.
type Sink interface {
	Add(*Entry)
}

// TraceSampler decides at a request's start whether its trace is sampled, which engines receive in
// traceparent. A sink that implements it makes the Log give entries a trace.
type TraceSampler interface {
	Sample(parent TraceContext, model string) bool
}

// Limiter is a sink that needs not every request. If a Log has only such a sink, it collects nothing
// about a request that the sink does not want, so that the request costs nothing.
type Limiter interface {
	// Wants reports whether the sink wants a request that begins now.
	Wants(now time.Time) bool
}

// Log passes finished requests to its sinks. A nil Log has none. It is safe for concurrent use.
type Log struct {
	sinks   []Sink
	sampler TraceSampler
	limiter Limiter // nil: an Entry for every request
}

// New returns a Log with these sinks, or nil if there are none.
func New(sinks ...Sink) *Log {
	if len(sinks) == 0 {
		return nil
	}
	l := &Log{sinks: sinks}
	for _, s := range sinks {
		if t, ok := s.(TraceSampler); ok {
			l.sampler = t
		}
	}
	if len(sinks) == 1 {
		l.limiter, _ = sinks[0].(Limiter)
	}
	return l
}

// Request is what is known when a request begins.
type Request struct {
	ID          string
	Method      string // "": POST
	Endpoint    string // the route's path, a constant
	Key         string // the name of the API key's holder; "" if keys are off
	Model       string
	ModelBytes  []byte     // instead of Model; borrowed until Begin returns
	Client      netip.Addr // zero: unknown
	Stream      bool
	Bytes       int // of the decoded body
	Received    time.Time
	Traceparent []byte // the client's header; invalid ones are ignored
	Tracestate  []byte
}

// Wants reports whether a sink wants a request that begins now. Begin is called only for such
// requests.
func (l *Log) Wants(now time.Time) bool {
	return l != nil && (l.limiter == nil || l.limiter.Wants(now))
}

// Begin returns the Entry of a request, nil if l is. It copies strings, and replaces what is not UTF-8
// in those of the client.
func (l *Log) Begin(r Request) *Entry {
	if l == nil {
		return nil
	}
	e := &Entry{log: l, Request: r}
	e.ID, e.Model = cloneValid(r.ID, r.Model, r.ModelBytes)
	e.Request.ModelBytes, e.Request.Traceparent, e.Request.Tracestate = nil, nil, nil // borrowed
	e.Choices, e.Legs = e.firstChoices[:0], e.firstLegs[:0]
	if l.sampler != nil {
		e.Trace = newTrace(r.Traceparent, r.Tracestate)
		e.Trace.Sampled = l.sampler.Sample(e.Trace.Parent, e.Model)
	}
	return e
}

// cloneValid copies the id and the model, as a string or as bytes, with one allocation.
func cloneValid(id, model string, modelBytes []byte) (string, string) {
	const replacement = "\uFFFD"
	id = strings.ToValidUTF8(id, replacement)
	model = strings.ToValidUTF8(model, replacement)
	if !utf8.Valid(modelBytes) {
		modelBytes = bytes.ToValidUTF8(modelBytes, []byte(replacement))
	}
	var b strings.Builder
	b.Grow(len(id) + len(model) + len(modelBytes))
	b.WriteString(id)
	b.WriteString(model)
	b.Write(modelBytes)
	both := b.String()
	return both[:len(id)], both[len(id):]
}

// Entry describes one request. Its methods may be called concurrently and on a nil Entry. The
// fields may be read after the Entry was passed to a sink.
type Entry struct {
	log *Log

	mu       sync.Mutex // guards what follows until finished
	finished bool

	Request
	Trace    Trace
	Tokenize Span
	Choices  []Choice
	Legs     []Leg
	Queue    Span   // the first wait for a worker; Queue.Took is the sum of all waits
	Class    string // admission class; "" if there is one class and the request did not wait
	Tenant   string // of an admission class
	Position int    // place in the admission queue when the wait began, 1 the first; 0: it did not wait there
	Plan     string
	Family   string // of the hand-over; "" for none
	Fallback string // the kind of the last departure from the plan

	PromptTokens int // as counted by the router, or by the engine if it reported a number
	Retries      int
	Migrations   int
	Preemptions  int             // how often the stream was suspended
	Suspended    time.Duration   // for how long together
	Dropped      int             // legs and choices beyond the bounds
	Intervals    relay.Intervals // the times between the stream's events
	Outcome

	// The memory of Choices and Legs; few requests need more.
	firstChoices [2]Choice
	firstLegs    [2]Leg
}

// Span is an interval of time; the zero Span did not take place.
type Span struct {
	Began time.Time
	Took  time.Duration
}

// End returns the end of the span.
func (s Span) End() time.Time { return s.Began.Add(s.Took) }

// Choice is one choice of a rank.
type Choice struct {
	Span
	Leg    string
	Worker string // "" if there was none
	Rank   int
}

// Leg is one call of an engine.
type Leg struct {
	Span
	Kind      string // prefill, decode, whole, or stored for a request about a stored response
	Worker    string
	Rank      int
	Predicted int // number of prompt tokens that the rank should have cached; -1: there is no prompt
	Outcome   string
	SpanID    SpanID
	URL       string // of the engine; only with a trace
	Engine    string // vllm, sglang or trtllm; "" unknown, or there is no trace
}

// Outcome is the end of a request.
type Outcome struct {
	Status        int
	Reason        string        // "" on success
	CachedTokens  int           // as reported by the engine; -1 unknown
	OutputTokens  int           // as reported by the engine; -1 unknown
	Events        int64         // of a stream, "[DONE]" included
	FirstToken    time.Duration // since Received; 0: there was none, or the response is not a stream
	ITLP50        time.Duration // inter-token latency, from Intervals; 0: unknown
	ITLP99        time.Duration
	Total         time.Duration
	ResponseBytes int64
	Transfer      Transfer
}

// Transfer is the request's KV transfer as observed.
type Transfer struct {
	State string // done, failed, expired, stalled, unknown; "" if none was observed
	Bytes int64
	Span  // its end is when it was reported
}

// NoLeg is the number of a leg that is in no Entry.
const NoLeg = -1

// StartLeg adds a leg that begins now and returns its number for the other methods.
func (e *Entry) StartLeg(kind, worker string, rank, predicted int, began time.Time) int {
	if e == nil {
		return NoLeg
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.finished || len(e.Legs) == maxLegs {
		e.drop()
		return NoLeg
	}
	l := Leg{Span: Span{Began: began}, Kind: kind, Worker: worker, Rank: rank, Predicted: predicted}
	if e.Trace.ID != (TraceID{}) {
		l.SpanID = newSpanID()
	}
	e.Legs = append(e.Legs, l)
	return len(e.Legs) - 1
}

// SetLegEngine records the URL and the kind of the engine that a leg calls, which only traces have.
func (e *Entry) SetLegEngine(leg int, url, engine string) {
	if e == nil || leg == NoLeg || e.Trace.ID == (TraceID{}) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.finished {
		e.Legs[leg].URL, e.Legs[leg].Engine = url, engine
	}
}

// drop counts what is beyond a bound. A finished entry does not change.
func (e *Entry) drop() {
	if !e.finished {
		e.Dropped++
	}
}

// EndLeg ends a leg. It has no effect on a finished Entry: a leg that outlives its request ends
// with it there.
func (e *Entry) EndLeg(leg int, outcome string, took time.Duration) {
	if e == nil || leg == NoLeg {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.finished {
		e.Legs[leg].Outcome, e.Legs[leg].Took = outcome, took
	}
}

// LegTraceparent returns the traceparent that names the leg's span, "" without a trace.
func (e *Entry) LegTraceparent(leg int) string {
	if e == nil || leg == NoLeg || e.Trace.ID == (TraceID{}) {
		return ""
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return formatTraceparent(e.Trace.ID, e.Legs[leg].SpanID, e.Trace.Sampled)
}

// AddChoice adds a choice that ended now.
func (e *Entry) AddChoice(leg, worker string, rank int, began time.Time) {
	e.change(func() {
		if len(e.Choices) == maxChoices {
			e.drop()
			return
		}
		e.Choices = append(e.Choices, Choice{Span{began, time.Since(began)}, leg, worker, rank})
	})
}

// AddWait adds a wait for a worker that ended now.
func (e *Entry) AddWait(began time.Time) {
	e.change(func() {
		if e.Queue.Began.IsZero() {
			e.Queue.Began = began
		}
		e.Queue.Took += time.Since(began)
	})
}

// SetClass records the admission class and the tenant of the request.
func (e *Entry) SetClass(class, tenant string) {
	e.change(func() { e.Class, e.Tenant = class, tenant })
}

// SetPosition records the place in the admission queue at which the request began to wait, from 1.
func (e *Entry) SetPosition(position int) {
	e.change(func() { e.Position = position })
}

// SetTokenized records that finding the prompt's tokens ended now.
func (e *Entry) SetTokenized(began time.Time, promptTokens int) {
	e.change(func() { e.Tokenize, e.PromptTokens = Span{began, time.Since(began)}, promptTokens })
}

// SetPlan records how the request runs: whole, disaggregated or prefill_only, and the hand-over's
// family.
func (e *Entry) SetPlan(plan, family string) {
	e.change(func() { e.Plan, e.Family = plan, family })
}

// SetStream records that the response is a stream, where the request does not say so.
func (e *Entry) SetStream() {
	e.change(func() { e.Stream = true })
}

// SetFallback records a departure from the plan.
func (e *Entry) SetFallback(kind string) {
	e.change(func() { e.Fallback = kind })
}

// AddRetry counts a leg that is sent again.
func (e *Entry) AddRetry() {
	e.change(func() { e.Retries++ })
}

// AddMigration counts an engine that takes over the request's stream.
func (e *Entry) AddMigration() {
	e.change(func() { e.Migrations++ })
}

// AddPreemption counts a suspension of the request's stream that has ended.
func (e *Entry) AddPreemption(took time.Duration) {
	e.change(func() { e.Preemptions++; e.Suspended += took })
}

func (e *Entry) change(f func()) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.finished {
		f()
	}
}

// Finish completes the Entry and passes it to the sinks. Only the first call has an effect.
// promptTokens replaces the router's count if it is positive.
func (e *Entry) Finish(out Outcome, promptTokens int) {
	if e == nil {
		return
	}
	e.mu.Lock()
	if e.finished {
		e.mu.Unlock()
		return
	}
	out.Reason = strings.Clone(out.Reason)
	if e.Stream {
		out.ITLP50, out.ITLP99 = e.Intervals.Quantile(0.5), e.Intervals.Quantile(0.99)
	}
	e.Outcome = out
	if promptTokens > 0 {
		e.PromptTokens = promptTokens
	}
	if t := &e.Transfer; t.State != "" && t.Began.IsZero() {
		if l := e.Leg("prefill"); l != nil {
			t.Began = l.End()
		} else {
			t.Began = e.Received
		}
	}
	end := e.Received.Add(out.Total)
	for i := range e.Legs {
		if l := &e.Legs[i]; l.Outcome == "" {
			l.Outcome, l.Took = "unfinished", max(end.Sub(l.Began), 0)
		}
	}
	e.finished = true
	e.mu.Unlock()
	for _, s := range e.log.sinks {
		s.Add(e)
	}
}

// Leg returns the last leg of one of the kinds; nil if there was none. It is for finished entries.
func (e *Entry) Leg(kinds ...string) *Leg {
	for i := len(e.Legs) - 1; i >= 0; i-- {
		for _, k := range kinds {
			if e.Legs[i].Kind == k {
				return &e.Legs[i]
			}
		}
	}
	return nil
}

// Refused passes a request to the sinks that the router refused before it became an Entry.
func (l *Log) Refused(r Request, out Outcome) {
	if l.Wants(r.Received) {
		l.Begin(r).Finish(out, 0)
	}
}
