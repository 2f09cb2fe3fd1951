package tracing

import (
	"compress/gzip"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"sluice/bench/testwait"
	"sluice/router/requestlog"
)

// receiver is a collector that keeps what it receives.
type receiver struct {
	collectorpb.UnimplementedTraceServiceServer
	mu       sync.Mutex
	requests []*collectorpb.ExportTraceServiceRequest
	headers  []http.Header
}

func (r *receiver) Export(_ context.Context, m *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, m)
	return new(collectorpb.ExportTraceServiceResponse), nil
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	var body io.Reader = q.Body
	if q.Header.Get("Content-Encoding") == "gzip" {
		body, _ = gzip.NewReader(q.Body)
	}
	b, err := io.ReadAll(body)
	m := new(collectorpb.ExportTraceServiceRequest)
	if err == nil {
		err = proto.Unmarshal(b, m)
	}
	if err != nil || q.URL.Path != "/v1/traces" {
		http.Error(w, fmt.Sprint(err), 400)
		return
	}
	r.Export(q.Context(), m)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.headers = append(r.headers, q.Header)
}

// spans returns all spans received.
func (r *receiver) spans() (all []*tracepb.Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.requests {
		for _, rs := range m.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				all = append(all, ss.Spans...)
			}
		}
	}
	return all
}

func (r *receiver) resource() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := make(map[string]string)
	for _, a := range r.requests[0].ResourceSpans[0].Resource.Attributes {
		m[a.Key] = a.Value.GetStringValue()
	}
	return m
}

func startGRPC(t *testing.T) (*receiver, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, s := new(receiver), grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(s, r)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return r, "http://" + l.Addr().String()
}

func startHTTP(t *testing.T) (*receiver, string) {
	t.Helper()
	r := new(receiver)
	s := httptest.NewServer(r)
	t.Cleanup(s.Close)
	return r, s.URL
}

func start(t *testing.T, opt Options) (*Exporter, *requestlog.Log) {
	t.Helper()
	e, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e, requestlog.New(e)
}

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// logOne logs a disaggregated stream that was retried once and returns the traceparents of its legs.
func logOne(l *requestlog.Log, traceparent string) (legs []string) {
	at := time.Now()
	e := l.Begin(requestlog.Request{ID: "r1", Endpoint: "/v1/chat/completions", Model: "m", Stream: true, Received: at, Traceparent: []byte(traceparent), Tracestate: []byte("k=v")})
	e.SetTokenized(at, 30)
	e.SetPlan("disaggregated", "nixl")
	e.AddWait(at)
	e.AddChoice("prefill", "p0", 0, at)
	p := e.StartLeg("prefill", "p0", 0, 16, at)
	e.SetLegEngine(p, "http://[::1]:8100", "vllm")
	e.EndLeg(p, "ok", 10*time.Millisecond)
	bad := e.StartLeg("decode", "d0", 0, 0, at.Add(10*time.Millisecond))
	e.EndLeg(bad, "5xx", 5*time.Millisecond)
	e.AddRetry()
	d := e.StartLeg("decode", "d1", 1, 0, at.Add(15*time.Millisecond))
	e.SetLegEngine(d, "https://decode.example", "sglang")
	e.EndLeg(d, "ok", 85*time.Millisecond)
	for _, n := range []int{p, bad, d} {
		legs = append(legs, e.LegTraceparent(n))
	}
	e.Finish(requestlog.Outcome{Status: 200, CachedTokens: 8, OutputTokens: 5, FirstToken: 20 * time.Millisecond, Total: 100 * time.Millisecond,
		Transfer: requestlog.Transfer{State: "done", Bytes: 99, Span: requestlog.Span{Took: 3 * time.Millisecond}}}, 0)
	return legs
}

func attributes(s *tracepb.Span) map[string]string {
	m := make(map[string]string)
	for _, a := range s.Attributes {
		m[a.Key] = strings.Trim(strings.TrimPrefix(a.Value.String(), "string_value:"), `"`)
		if v := a.Value.GetIntValue(); v != 0 {
			m[a.Key] = fmt.Sprint(v)
		}
	}
	return m
}

// TestStatusOfTransfer: a transfer that was reported to have gone wrong is an error, one without a report is not.
func TestStatusOfTransfer(t *testing.T) {
	r, url := startHTTP(t)
	e, l := start(t, Options{Endpoint: url, Protocol: "http"})
	want := map[string]tracepb.Status_StatusCode{
		"done": tracepb.Status_STATUS_CODE_UNSET, "unknown": tracepb.Status_STATUS_CODE_UNSET,
		"failed": tracepb.Status_STATUS_CODE_ERROR, "expired": tracepb.Status_STATUS_CODE_ERROR, "stalled": tracepb.Status_STATUS_CODE_ERROR,
	}
	for state := range want {
		entry := l.Begin(requestlog.Request{ID: state, Endpoint: "/v1/completions", Received: time.Now(), Traceparent: []byte(parent)})
		entry.Finish(requestlog.Outcome{Status: 200, Total: time.Second, Transfer: requestlog.Transfer{State: state, Span: requestlog.Span{Took: time.Millisecond}}}, 0)
	}
	e.Close()
	for _, s := range r.spans() {
		if s.Name != "kv_transfer" {
			continue
		}
		state := attributes(s)["sluice.transfer.state"]
		if code := s.GetStatus().GetCode(); code != want[state] {
			t.Errorf("a transfer that is %q has the status %v, want %v", state, code, want[state])
		}
		delete(want, state)
	}
	if len(want) > 0 {
		t.Errorf("no spans of %v", want)
	}
}

// TestSpans: both protocols deliver the tree of doc.go, with the client's span above it, and the legs'
// spans are those that engines were sent.
func TestSpans(t *testing.T) {
	for protocol, open := range map[string]func(*testing.T) (*receiver, string){"grpc": startGRPC, "http": startHTTP} {
		t.Run(protocol, func(t *testing.T) {
			r, url := open(t)
			e, l := start(t, Options{Endpoint: url, Protocol: protocol, Version: "v1"})
			legs := logOne(l, parent)
			e.Close()
			spans := r.spans()
			byID, names := map[string]*tracepb.Span{}, map[string]int{}
			for _, s := range spans {
				byID[hex.EncodeToString(s.SpanId)] = s
				if id := hex.EncodeToString(s.TraceId); id != parent[3:35] {
					t.Errorf("%s is in trace %s", s.Name, id)
				}
				if s.EndTimeUnixNano < s.StartTimeUnixNano || s.TraceState != "k=v" {
					t.Errorf("%s: from %d to %d, tracestate %q", s.Name, s.StartTimeUnixNano, s.EndTimeUnixNano, s.TraceState)
				}
				names[s.Name]++
			}
			want := map[string]int{"chat m": 1, "tokenize": 1, "queue": 1, "choose": 1, "prefill": 1, "decode": 2, "stream": 1, "kv_transfer": 1}
			if fmt.Sprint(names) != fmt.Sprint(want) || len(byID) != len(spans) {
				t.Fatalf("spans are %v, want %v, each with an id of its own", names, want)
			}
			root := spans[slices.IndexFunc(spans, func(s *tracepb.Span) bool { return s.Name == "chat m" })]
			if hex.EncodeToString(root.ParentSpanId) != parent[36:52] || root.Kind != tracepb.Span_SPAN_KIND_SERVER {
				t.Errorf("the root's parent is %x and its kind %v", root.ParentSpanId, root.Kind)
			}
			a := attributes(root)
			for k, v := range map[string]string{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": "30", "gen_ai.usage.output_tokens": "5", "http.response.status_code": "200", "http.route": "/v1/chat/completions", "sluice.request.id": "r1", "sluice.retries": "1"} {
				if a[k] != v {
					t.Errorf("%s is %q, want %q", k, a[k], v)
				}
			}
			for _, s := range spans {
				parentName := ""
				if p := byID[hex.EncodeToString(s.ParentSpanId)]; p != nil {
					parentName = p.Name
				}
				if want := map[bool]string{true: "decode", false: "chat m"}[s.Name == "stream"]; s != root && parentName != want {
					t.Errorf("%s is below %q, want %q", s.Name, parentName, want)
				}
			}
			for i, name := range []string{"prefill", "decode", "decode"} {
				s := byID[legs[i][36:52]]
				if s == nil || s.Name != name || s.Kind != tracepb.Span_SPAN_KIND_CLIENT || legs[i][:36] != parent[:36] {
					t.Fatalf("leg %d was sent %s, whose span is %v", i, legs[i], s)
				}
				if failed := s.Status.GetCode() == tracepb.Status_STATUS_CODE_ERROR; failed != (i == 1) {
					t.Errorf("leg %d has status %v", i, s.Status)
				}
			}
			res := r.resource()
			if res["service.name"] != "sluice" || res["service.version"] != "v1" || res["telemetry.sdk.language"] != "go" {
				t.Errorf("the resource is %v", res)
			}
			if s := e.Stats(); s != (Stats{Exported: 1}) {
				t.Errorf("stats are %+v", s)
			}
		})
	}
}

// TestConventions: attributes that do not begin with "sluice." are those of the conventions whose version
// docs/request-log.md and the schema name. The spans of the request and of its legs have the required
// ones, with the right values.
func TestConventions(t *testing.T) {
	r, url := startHTTP(t)
	e, l := start(t, Options{Endpoint: url, Protocol: "http", TLS: true})
	logOne(l, parent)
	l.Begin(requestlog.Request{ID: "r2", Method: "GET", Endpoint: "/v1/responses/{id}", Client: netip.MustParseAddr("::1"), Received: time.Now(), Traceparent: []byte(parent)}).
		Finish(requestlog.Outcome{Status: 502, Reason: "upstream_failed", CachedTokens: -1}, 0)
	e.Close()
	page, err := os.ReadFile("../../../docs/request-log.md")
	if err != nil {
		t.Fatal(err)
	}
	version := semconv.SchemaURL[strings.LastIndex(semconv.SchemaURL, "/")+1:]
	if want := "conventions " + version; !strings.Contains(string(page), want) {
		t.Errorf("docs/request-log.md does not say %q", want)
	}
	for _, m := range r.requests {
		if got := m.ResourceSpans[0].ScopeSpans[0].SchemaUrl; got != semconv.SchemaURL {
			t.Errorf("the schema of the spans is %q", got)
		}
	}
	known := []attribute.Key{
		semconv.HTTPRequestMethodKey, semconv.HTTPResponseStatusCodeKey, semconv.HTTPRouteKey, semconv.URLPathKey, semconv.URLSchemeKey, semconv.ClientAddressKey,
		semconv.ServerAddressKey, semconv.ServerPortKey, semconv.ErrorTypeKey, semconv.GenAIOperationNameKey, semconv.GenAIProviderNameKey, semconv.GenAIRequestModelKey,
		semconv.GenAIUsageInputTokensKey, semconv.GenAIUsageOutputTokensKey, semconv.GenAIUsageCacheReadInputTokensKey,
	}
	seen := make(map[string]bool)
	var legs []map[string]string
	for _, s := range r.spans() {
		a := attributes(s)
		for k := range a {
			seen[k] = true
			if !strings.HasPrefix(k, "sluice.") && !slices.Contains(known, attribute.Key(k)) {
				t.Errorf("%s has the attribute %s, which the conventions do not have", s.Name, k)
			}
			if !strings.Contains(string(page), "`"+k+"`") {
				t.Errorf("docs/request-log.md does not name the attribute %s of %s", k, s.Name)
			}
		}
		want := map[string]string{"http.request.method": "POST"}
		switch {
		case s.Kind == tracepb.Span_SPAN_KIND_CLIENT:
			legs = append(legs, a)
			want["gen_ai.operation.name"], want["gen_ai.request.model"] = "chat", "m"
		case a["http.request.method"] == "GET":
			want = map[string]string{"http.request.method": "GET", "http.route": "/v1/responses/{id}", "url.path": "/v1/responses/{id}", "url.scheme": "https", "error.type": "upstream_failed", "client.address": "::1", "gen_ai.provider.name": ""}
		case s.Kind == tracepb.Span_SPAN_KIND_SERVER:
			want = map[string]string{"http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions", "url.scheme": "https", "gen_ai.provider.name": "sluice", "gen_ai.usage.cache_read.input_tokens": "8"}
		default:
			continue
		}
		for k, v := range want {
			if a[k] != v {
				t.Errorf("%s: %s is %q, want %q", s.Name, k, a[k], v)
			}
		}
	}
	for _, k := range known {
		if !seen[string(k)] {
			t.Errorf("no span has the attribute %s", k)
		}
	}
	for i, want := range [][3]string{{"::1", "8100", "vllm"}, {}, {"decode.example", "443", "sglang"}} { // the second engine is not known
		if got := [3]string{legs[i]["server.address"], legs[i]["server.port"], legs[i]["gen_ai.provider.name"]}; got != want {
			t.Errorf("leg %d: server.address, server.port and gen_ai.provider.name are %q, want %q", i, got, want)
		}
	}
}

// TestSampling: who decides, and what is kept although it was not sampled.
func TestSampling(t *testing.T) {
	unsampled := parent[:53] + "00"
	for _, c := range []struct {
		name, sampler, arg, traceparent string
		sample                          float64
		out                             requestlog.Outcome
		migrations                      int
		kept                            bool
	}{
		{"ratio 0", "", "", "", 0, requestlog.Outcome{Status: 200}, 0, false},
		{"ratio 1", "", "", "", 1, requestlog.Outcome{Status: 200}, 0, true},
		{"sampled parent", "", "", parent, 0, requestlog.Outcome{Status: 200}, 0, true},
		{"unsampled parent", "", "", unsampled, 1, requestlog.Outcome{Status: 200}, 0, false},
		{"environment", "always_on", "", unsampled, 0, requestlog.Outcome{Status: 200}, 0, true},
		{"environment off", "parentbased_always_off", "", "", 1, requestlog.Outcome{Status: 200}, 0, false},
		{"environment ratio", "traceidratio", "0", parent, 1, requestlog.Outcome{Status: 200}, 0, false},
		{"slow", "", "", unsampled, 0, requestlog.Outcome{Status: 200, Total: 2 * time.Second}, 0, true},
		{"failed", "", "", unsampled, 0, requestlog.Outcome{Status: 502, Reason: "upstream_failed"}, 0, true},
		{"broken stream", "", "", unsampled, 0, requestlog.Outcome{Status: 200, Reason: "engine_reset"}, 0, true},
		{"client's fault", "", "", unsampled, 0, requestlog.Outcome{Status: 400, Reason: "bad_json"}, 0, false},
		{"migrated", "", "", unsampled, 0, requestlog.Outcome{Status: 200}, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("OTEL_TRACES_SAMPLER", c.sampler)
			t.Setenv("OTEL_TRACES_SAMPLER_ARG", c.arg)
			r, url := startHTTP(t)
			x, l := start(t, Options{Endpoint: url, Protocol: "http", Sample: c.sample, Slow: time.Second})
			e := l.Begin(requestlog.Request{Received: time.Now(), Traceparent: []byte(c.traceparent)})
			for range c.migrations {
				e.AddMigration()
			}
			e.Finish(c.out, 0)
			x.Close()
			if kept := len(r.spans()) > 0; kept != c.kept {
				t.Errorf("kept: %v, want %v", kept, c.kept)
			}
		})
	}
}

// TestRatio: the share of sampled traces is the configured one, and the same trace id has the same
// answer everywhere.
func TestRatio(t *testing.T) {
	e := &Exporter{sampler: sampler{ratio: 0.25}}
	n := 0
	for i := range 20000 {
		c := requestlog.TraceContext{ID: requestlog.TraceID{1, 15: byte(i), 14: byte(i >> 8), 9: byte(i * 7), 10: byte(i * 13)}}
		for j := range c.ID {
			c.ID[j] ^= byte(i * (j + 3) * 2654435761 >> 13)
		}
		on := e.Sample(c, "")
		if on != e.Sample(c, "") {
			t.Fatal("the same trace is sampled once and not the next time")
		}
		if on {
			n++
		}
	}
	if n < 4000 || n > 6000 {
		t.Errorf("%d of 20000 traces are sampled, want about 5000", n)
	}
	for n = 0; n < 10; {
		if e.Sample(requestlog.TraceContext{}, "") {
			n++ // ends only if traces without a parent are sampled too
		}
	}
}

// TestEnvironment: the standard variables configure the exporter where Options do not.
func TestEnvironment(t *testing.T) {
	r, url := startHTTP(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a")
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
	t.Setenv("OTEL_SERVICE_NAME", "edge")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
	opt := Options{Sample: 1}
	if !opt.Enabled() {
		t.Error("an endpoint in the environment does not turn tracing on")
	}
	_, l := start(t, opt)
	logOne(l, "")
	testwait.UntilWithin(t, 10*time.Second, "the spans arrive without a Close", func() bool { return len(r.spans()) > 0 })
	if res := r.resource(); res["service.name"] != "edge" || res["deployment.environment.name"] != "test" {
		t.Errorf("the resource is %v", res)
	}
	testwait.UntilWithin(t, 10*time.Second, "the header is recorded", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.headers) > 0 })
	if h := r.headers[0]; h.Get("X-Team") != "a" || h.Get("Content-Encoding") != "gzip" {
		t.Errorf("headers are %v", h)
	}
	for name, value := range map[string]string{"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			if opt.Enabled() {
				t.Error("tracing is on")
			}
		})
	}
	for name, value := range map[string]string{"OTEL_BSP_SCHEDULE_DELAY": "soon", "OTEL_BSP_MAX_QUEUE_SIZE": "0", "OTEL_TRACES_SAMPLER": "sometimes", "OTEL_EXPORTER_OTLP_PROTOCOL": "carrier-pigeon"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			if e, err := New(opt); err == nil {
				e.Close()
				t.Errorf("%s=%s was accepted", name, value)
			} else if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), value) || !strings.Contains(err.Error(), "want") {
				t.Errorf("the error does not name variable, value and what is accepted: %v", err)
			}
		})
	}
}

// TestEndpointWithoutScheme: a collector without a scheme is refused by the variable's name, without its value.
func TestEndpointWithoutScheme(t *testing.T) {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} {
		for _, value := range []string{"127.0.0.1:4318", "user:secret@host:4318", "http://", "ftp://h"} {
			t.Setenv(name, value)
			if e, err := New(Options{Sample: 1}); err == nil {
				e.Close()
				t.Errorf("%s=%s was accepted", name, value)
			} else if !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "want") {
				t.Errorf("%s=%s: %v; want the variable and what is accepted", name, value, err)
			}
			t.Setenv(name, "")
		}
	}
}

// TestStreamWithoutUsage: a stream whose engine reports no output tokens has a span without their number.
func TestStreamWithoutUsage(t *testing.T) {
	r, url := startHTTP(t)
	e, l := start(t, Options{Endpoint: url, Sample: 1})
	at := time.Now()
	x := l.Begin(requestlog.Request{ID: "r1", Endpoint: "/v1/chat/completions", Model: "m", Stream: true, Received: at})
	leg := x.StartLeg("decode", "d0", 0, 0, at)
	x.EndLeg(leg, "ok", 100*time.Millisecond)
	x.Finish(requestlog.Outcome{Status: 200, OutputTokens: -1, Events: 3, FirstToken: 20 * time.Millisecond, Total: 100 * time.Millisecond}, 0)
	e.Close()
	spans := r.spans()
	if !slices.ContainsFunc(spans, func(s *tracepb.Span) bool { return s.Name == "stream" }) {
		t.Errorf("there is no span of the stream among %d", len(spans))
	}
	for _, s := range spans {
		if v, has := attributes(s)["gen_ai.usage.output_tokens"]; has {
			t.Errorf("span %s has %s output tokens", s.Name, v)
		}
	}
}

// TestMissingCollector: requests do not wait for a collector that is absent or does not answer, and
// what is lost is counted.
func TestMissingCollector(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts in the kernel and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	t.Setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
	t.Setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
	t.Setenv("OTEL_BSP_EXPORT_TIMEOUT", "300")
	for _, url := range []string{"http://127.0.0.1:9", "http://" + silent.Addr().String()} {
		for _, protocol := range []string{"grpc", "http"} {
			t.Run(protocol+" "+url, func(t *testing.T) {
				e, l := start(t, Options{Endpoint: url, Protocol: protocol, Sample: 1})
				began := time.Now()
				const n = 1000
				for range n {
					logOne(l, "")
				}
				if took := time.Since(began); took > 2*time.Second {
					t.Errorf("%d requests took %v", n, took)
				}
				testwait.UntilWithin(t, 10*time.Second, "a batch fails", func() bool { return e.Stats().Failed > 0 })
				began = time.Now()
				e.Close()
				if took := time.Since(began); took > 3*closeTimeout {
					t.Errorf("Close took %v", took)
				}
				if s := e.Stats(); s.Exported != 0 || s.Dropped < n/2 || s.Dropped+s.Failed != n {
					t.Errorf("stats are %+v; want every one of %d dropped or failed", s, n)
				}
			})
		}
	}
}

// TestClientBytes: what a client sends in a header or a model's name cannot make a batch invalid, which
// would lose the traces of other clients.
func TestClientBytes(t *testing.T) {
	for protocol, open := range map[string]func(*testing.T) (*receiver, string){"grpc": startGRPC, "http": startHTTP} {
		r, url := open(t)
		e, l := start(t, Options{Endpoint: url, Protocol: protocol, Sample: 1})
		logOne(l, "")
		l.Begin(requestlog.Request{ID: "a\xff", Model: "m\xfe", Received: time.Now(), Traceparent: []byte(parent), Tracestate: []byte("k=\xff")}).Finish(requestlog.Outcome{Status: 200}, 0)
		e.Close()
		if s := e.Stats(); s != (Stats{Exported: 2}) || len(r.spans()) < 9 {
			t.Errorf("%s: stats are %+v, %d spans", protocol, s, len(r.spans()))
		}
	}
}

// TestSettingsThatCannotBeUsed: what OpenTelemetry's libraries say about a variable goes to the router's
// log, without the value.
func TestSettingsThatCannotBeUsed(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "topsecret")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://u:topsecret@h:%zz")
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "topsecret")
	var out strings.Builder
	e, err := New(Options{Endpoint: "http://127.0.0.1:1", Log: slog.New(slog.NewJSONHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	for _, want := range []string{`"detail":"parse headers","reason":"missing '="`, `"detail":"parse url","reason":"not a URL"`, `"detail":"parse duration","reason":"invalid"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in %s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "topsecret") {
		t.Errorf("the log has a value: %s", out.String())
	}
}
