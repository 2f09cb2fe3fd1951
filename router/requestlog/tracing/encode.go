package tracing

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	mathrand "math/rand/v2"
	"net/url"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0" // the last one that has generative AI; docs/request-log.md names it
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"sluice/router/requestlog"
)

// encoder makes OTLP messages of entries.
type encoder struct {
	resource *resourcepb.Resource
	schema   string // of the resource's attributes
	scheme   string // http or https: how clients reach the router
	scope    *commonpb.InstrumentationScope
}

// newEncoder reads the resource's attributes from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
func newEncoder(version string, tls bool) (encoder, error) {
	instance := make([]byte, 8)
	rand.Read(instance)
	r, err := resource.New(context.Background(),
		resource.WithAttributes(
			attribute.String("service.name", "sluice"), attribute.String("service.version", version),
			attribute.String("service.instance.id", hex.EncodeToString(instance))),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil {
		return encoder{}, err
	}
	e := encoder{resource: new(resourcepb.Resource), schema: r.SchemaURL(), scope: &commonpb.InstrumentationScope{Name: "sluice", Version: version}}
	e.scheme = map[bool]string{false: "http", true: "https"}[tls]
	for i := r.Iter(); i.Next(); {
		a := i.Attribute()
		e.resource.Attributes = append(e.resource.Attributes, text(a.Key, a.Value.String()))
	}
	return e, nil
}

func (e *encoder) encode(entries []*requestlog.Entry) *tracepb.ResourceSpans {
	spans := make([]*tracepb.Span, 0, 8*len(entries))
	for _, r := range entries {
		spans = e.appendSpans(spans, r)
	}
	return &tracepb.ResourceSpans{
		Resource: e.resource, SchemaUrl: e.schema,
		ScopeSpans: []*tracepb.ScopeSpans{{Scope: e.scope, SchemaUrl: semconv.SchemaURL, Spans: spans}},
	}
}

// operations are the gen_ai.operation.name of endpoints.
var operations = map[string]string{
	"/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat",
	"/v1/completions": "text_completion", "/generate": "text_completion", "/inference/v1/generate": "text_completion",
	"/v1/embeddings": "embeddings",
}

// appendSpans appends the spans of a request. The span of the request is the parent of all others but
// of the span stream, whose parent is its leg.
func (e *encoder) appendSpans(spans []*tracepb.Span, r *requestlog.Entry) []*tracepb.Span {
	root := e.rootSpan(r)
	t := &trace{spans: append(spans, root), root: root}
	if !r.Tokenize.Began.IsZero() {
		t.add("tokenize", r.Tokenize, number(semconv.GenAIUsageInputTokensKey, int64(r.PromptTokens)))
	}
	if !r.Queue.Began.IsZero() {
		t.addQueue(r)
	}
	for i := range r.Choices {
		c := &r.Choices[i]
		attributes := []*commonpb.KeyValue{text("sluice.leg", c.Leg)}
		if c.Worker != "" {
			attributes = append(attributes, text("sluice.worker", c.Worker), number("sluice.rank", int64(c.Rank)))
		}
		t.add("choose", c.Span, attributes...)
	}
	t.addLegs(r)
	if k := &r.Transfer; k.State != "" {
		span := t.add("kv_transfer", k.Span, text("sluice.transfer.state", k.State), number("sluice.transfer.bytes", k.Bytes))
		if k.State != "done" && k.State != "unknown" { // of an unknown one no report has come
			span.Status = &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: k.State}
		}
	}
	return t.spans
}

// rootSpan returns the span of the whole request. Its parent is the client's span, if there is one.
func (e *encoder) rootSpan(r *requestlog.Entry) *tracepb.Span {
	operation := operations[r.Endpoint]
	name := operation
	if name == "" {
		name = cmp.Or(r.Endpoint, "request")
	} else if r.Model != "" {
		name += " " + r.Model
	}
	root := &tracepb.Span{
		TraceId: r.Trace.ID[:], SpanId: r.Trace.Span[:], TraceState: r.Trace.Parent.State, Name: name, Kind: tracepb.Span_SPAN_KIND_SERVER,
		StartTimeUnixNano: nanos(r.Received), EndTimeUnixNano: nanos(r.Received.Add(r.Total)),
		Attributes: []*commonpb.KeyValue{
			text(semconv.HTTPRequestMethodKey, method(r)), number(semconv.HTTPResponseStatusCodeKey, int64(r.Status)), text(semconv.URLSchemeKey, e.scheme),
			text("sluice.request.id", r.ID),
		},
	}
	if r.Trace.Parent.ID != (requestlog.TraceID{}) {
		root.ParentSpanId = r.Trace.Parent.Span[:]
	}
	add := func(a ...*commonpb.KeyValue) { root.Attributes = append(root.Attributes, a...) }
	addText := func(key attribute.Key, value string) {
		if value != "" {
			add(text(key, value))
		}
	}
	addText(semconv.HTTPRouteKey, r.Endpoint)
	addText(semconv.URLPathKey, r.Endpoint) // without the id of a stored response, which is as good as a secret
	if operation != "" {
		add(text(semconv.GenAIOperationNameKey, operation), text(semconv.GenAIProviderNameKey, "sluice"))
	}
	addText(semconv.GenAIRequestModelKey, r.Model)
	addText("sluice.plan", r.Plan)
	addText("sluice.pd.family", r.Family)
	addText("sluice.fallback", r.Fallback)
	addText("sluice.key", r.Key)
	if r.Client.IsValid() {
		add(text(semconv.ClientAddressKey, r.Client.String()))
	}
	if r.PromptTokens > 0 {
		add(number(semconv.GenAIUsageInputTokensKey, int64(r.PromptTokens)))
	}
	if r.OutputTokens > 0 {
		add(number(semconv.GenAIUsageOutputTokensKey, int64(r.OutputTokens)))
	}
	if r.CachedTokens >= 0 && r.Reason == "" {
		add(number(semconv.GenAIUsageCacheReadInputTokensKey, int64(r.CachedTokens)))
	}
	if r.FirstToken > 0 {
		add(float("sluice.time_to_first_token", r.FirstToken.Seconds()))
	}
	add(boolean("sluice.stream", r.Stream), number("sluice.retries", int64(r.Retries)), number("sluice.migrations", int64(r.Migrations)))
	addText(semconv.ErrorTypeKey, r.Reason)
	if r.Status >= 500 || r.Reason != "" && r.Status < 400 {
		root.Status = &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: r.Reason}
	}
	return root
}

// trace collects the spans of one request.
type trace struct {
	spans []*tracepb.Span
	root  *tracepb.Span
}

// add adds a step of the router below the root.
func (t *trace) add(name string, s requestlog.Span, attributes ...*commonpb.KeyValue) *tracepb.Span {
	return t.addBelow(t.root, requestlog.SpanID{}, name, tracepb.Span_SPAN_KIND_INTERNAL, s, attributes...)
}

// addBelow adds a span below parent. A zero id stands for a random one.
func (t *trace) addBelow(parent *tracepb.Span, id requestlog.SpanID, name string, kind tracepb.Span_SpanKind, s requestlog.Span, attributes ...*commonpb.KeyValue) *tracepb.Span {
	if id == (requestlog.SpanID{}) {
		binary.NativeEndian.PutUint64(id[:], mathrand.Uint64()|1)
	}
	span := &tracepb.Span{
		TraceId: t.root.TraceId, SpanId: id[:], TraceState: t.root.TraceState, ParentSpanId: parent.SpanId, Name: name, Kind: kind,
		StartTimeUnixNano: nanos(s.Began), EndTimeUnixNano: nanos(s.End()), Attributes: attributes,
	}
	t.spans = append(t.spans, span)
	return span
}

// addQueue adds the span of the wait for admission.
func (t *trace) addQueue(r *requestlog.Entry) {
	span := t.add("queue", r.Queue)
	for _, a := range [...][2]string{{"sluice.class", r.Class}, {"sluice.tenant", r.Tenant}} {
		if a[1] != "" {
			span.Attributes = append(span.Attributes, text(attribute.Key(a[0]), a[1]))
		}
	}
	if r.Position > 0 {
		span.Attributes = append(span.Attributes, number("sluice.queue.position", int64(r.Position)))
	}
}

// addLegs adds a span for each leg, whose id the engine received in traceparent. The span stream,
// from the first token to the end, is below the leg that delivered the first token.
func (t *trace) addLegs(r *requestlog.Entry) {
	first := r.Received.Add(r.FirstToken)
	streamed := r.FirstToken == 0
	for i := range r.Legs {
		l := &r.Legs[i]
		span := t.addBelow(t.root, l.SpanID, l.Kind, tracepb.Span_SPAN_KIND_CLIENT, l.Span,
			text("sluice.worker", l.Worker), number("sluice.rank", int64(l.Rank)), text(semconv.HTTPRequestMethodKey, method(r)))
		span.Attributes = appendEngine(span.Attributes, r, l)
		if l.Predicted >= 0 {
			span.Attributes = append(span.Attributes, number("sluice.predicted_cached_tokens", int64(l.Predicted)))
		}
		if l.Outcome != "ok" {
			span.Attributes = append(span.Attributes, text(semconv.ErrorTypeKey, l.Outcome))
			span.Status = &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: l.Outcome}
		}
		if l.Kind != "prefill" && !streamed && !first.Before(l.Began) && !first.After(l.End()) {
			streamed = true
			var usage []*commonpb.KeyValue
			if r.OutputTokens > 0 { // the engine may report none
				usage = append(usage, number(semconv.GenAIUsageOutputTokensKey, int64(r.OutputTokens)))
			}
			t.addBelow(span, requestlog.SpanID{}, "stream", tracepb.Span_SPAN_KIND_INTERNAL, requestlog.Span{Began: first, Took: l.End().Sub(first)}, usage...)
		}
	}
}

// appendEngine appends what the conventions want to know of the engine that a leg calls.
func appendEngine(to []*commonpb.KeyValue, r *requestlog.Entry, l *requestlog.Leg) []*commonpb.KeyValue {
	if u, err := url.Parse(l.URL); err == nil && u.Host != "" {
		to = append(to, text(semconv.ServerAddressKey, u.Hostname()))
		port, err := strconv.Atoi(u.Port())
		if err != nil {
			port = map[bool]int{false: 80, true: 443}[u.Scheme == "https"]
		}
		to = append(to, number(semconv.ServerPortKey, int64(port)))
	}
	if l.Engine != "" {
		to = append(to, text(semconv.GenAIProviderNameKey, l.Engine))
	}
	if operation := operations[r.Endpoint]; operation != "" {
		to = append(to, text(semconv.GenAIOperationNameKey, operation))
	}
	if r.Model != "" {
		to = append(to, text(semconv.GenAIRequestModelKey, r.Model))
	}
	return to
}

func method(r *requestlog.Entry) string { return cmp.Or(r.Method, "POST") }

func nanos(t time.Time) uint64 { return uint64(max(t.UnixNano(), 0)) }

func text(key attribute.Key, value string) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: string(key), Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: value}}}
}

func number(key attribute.Key, value int64) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: string(key), Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: value}}}
}

func float(key attribute.Key, value float64) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: string(key), Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_DoubleValue{DoubleValue: value}}}
}

func boolean(key attribute.Key, value bool) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: string(key), Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_BoolValue{BoolValue: value}}}
}
