// Package requestlog tests the access log and traces of a whole router over simulated engines.
package requestlog

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// accessLog makes a router write its access log to a file and returns a function that waits for the
// line of a request.
func accessLog(t *testing.T) (mod func(*config.Config), find func(id string) map[string]any) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "access.log")
	mod = func(c *config.Config) { c.AccessLog.Output = "file:" + path }
	return mod, func(id string) (line map[string]any) {
		t.Helper()
		testwait.UntilWithin(t, 10*time.Second, "the line of "+id, func() bool {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for l := range bytes.Lines(text) {
				var v map[string]any
				if !bytes.HasSuffix(l, []byte("\n")) {
					return false // being written
				}
				if err := json.Unmarshal(l, &v); err != nil {
					t.Fatalf("%v: %s", err, l)
				}
				if v["request_id"] == id {
					line = v
					n++
				}
			}
			if n > 1 {
				t.Fatalf("%d lines of %s", n, id)
			}
			return n == 1
		})
		return line
	}
}

func want(t *testing.T, line map[string]any, members map[string]any) {
	t.Helper()
	for k, v := range members {
		if fmt.Sprint(line[k]) != fmt.Sprint(v) {
			t.Errorf("%s is %v, want %v; the line is %v", k, line[k], v, line)
		}
	}
}

// TestAccessLog: the line of a request agrees with what the client received.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	p := harness.StartSim(t, harness.UsingPD("nixl", "prefill"))
	d := harness.StartSim(t, harness.UsingPD("nixl", "decode"))
	r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("nixl"), mod), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, stream := range []bool{false, true} {
		id := fmt.Sprint("stream-", stream)
		body := harness.Chat(fmt.Sprintf(`,"ignore_eos":true,"stream":%v,"stream_options":{"include_usage":true}`, stream))
		if !stream {
			body = harness.Chat(`,"ignore_eos":true`)
		}
		a := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", id)
		harness.WantStatus(t, a, 200)
		var usage struct {
			Usage struct {
				Prompt int `json:"prompt_tokens"`
				Output int `json:"completion_tokens"`
			} `json:"usage"`
		}
		last := a.Body
		if stream {
			events := strings.Split(strings.TrimSpace(string(a.Body)), "\n\n")
			last = []byte(strings.TrimPrefix(events[len(events)-2], "data: "))
		}
		if err := json.Unmarshal(last, &usage); err != nil || usage.Usage.Output != 12 {
			t.Fatalf("%v, usage %+v in %s", err, usage, last)
		}
		line := find(id)
		want(t, line, map[string]any{
			"msg": "request", "endpoint": "/v1/chat/completions", "model": "sim", "client": "127.0.0.1", "stream": stream, "status": 200, "reason": nil,
			"plan": "disaggregated", "family": "nixl", "prefill_worker": "p0", "prefill_rank": 0, "decode_worker": "d0", "decode_rank": 0,
			"prompt_tokens": usage.Usage.Prompt, "output_tokens": 12, "request_bytes": len(body), "retries": 0, "migrations": 0,
			"predicted_cached_tokens": a.Header.Get("X-Sluice-Cached-Tokens"),
		})
		if stream {
			if n, _ := line["response_bytes"].(float64); int(n) < len(a.Body) { // chunk framing is included
				t.Errorf("%v bytes are logged, the client received %d", line["response_bytes"], len(a.Body))
			}
			if ttft, _ := line["ttft_ms"].(float64); ttft <= 0 || ttft > line["total_ms"].(float64) {
				t.Errorf("ttft %v of %v", line["ttft_ms"], line["total_ms"])
			}
		} else {
			want(t, line, map[string]any{"response_bytes": len(a.Body), "ttft_ms": nil})
		}
	}
}

// TestAccessLogOfIntervals: the line of a stream has quantiles of the time between its tokens.
func TestAccessLogOfIntervals(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 10 {
			io.WriteString(w, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"sim","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}`+"\n\n")
			w.(http.Flusher).Flush()
			testwait.Pace(20 * time.Millisecond)
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	r := harness.StartRouter(t, harness.AllOf(mod, func(c *config.Config) { c.Tokens.Mode = "text" }), e.Worker(worker.Aggregated, "w0"))
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", "paced"), 200)
	line := find("paced")
	p50, _ := line["itl_p50_ms"].(float64)
	p99, _ := line["itl_p99_ms"].(float64)
	if p50 < 15 || p99 < p50 || p99 > line["total_ms"].(float64) || line["events"] != 11. {
		t.Errorf("with 20 ms between tokens the line is %v", line)
	}
}

// TestAccessLogOfFailures: the reasons and the counts of requests that fail, are retried or migrate.
func TestAccessLogOfFailures(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	m := harness.StartMigrationFleet(t, false, 2, mod)
	const body = `{"model":"sim","stream":true,"prompt":"go on","max_tokens":40,"ignore_eos":true}`

	m.Fail("moves", sim.Fault{Kind: sim.Reset, After: 5})
	harness.WantStatus(t, harness.Post(t, m.URL+"/v1/completions", body, "X-Request-Id", "moves"), 200)
	want(t, find("moves"), map[string]any{"status": 200, "reason": nil, "migrations": 1, "output_tokens": nil, "plan": "whole"})
	m.Clear()

	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Status, ID: "retried", N: 1})
	}
	a := harness.Post(t, m.URL+"/v1/completions", body, "X-Request-Id", "retried")
	line := find("retried")
	want(t, line, map[string]any{"status": a.Status})
	if n, _ := line["retries"].(float64); n < 1 {
		t.Errorf("%v retries", line["retries"])
	}
	m.Clear()

	harness.WantStatus(t, harness.Post(t, m.URL+"/v1/completions", `{"model":"absent","prompt":"x"}`, "X-Request-Id", "unknown"), 404)
	want(t, find("unknown"), map[string]any{"status": 404, "reason": "unknown_model", "model": "absent", "events": nil})

	m.Fail("left", sim.Fault{Kind: sim.Slow, Delay: 50 * time.Millisecond}) // else 1,000 tokens can be sent before the client has left
	c := harness.StartRequest(t, m.Router, "left", `{"model":"sim","stream":true,"messages":[{"role":"user","content":"x"}],"max_tokens":1000,"ignore_eos":true}`)
	c.Event(t)
	c.Disconnect()
	want(t, find("left"), map[string]any{"status": 200, "reason": "client_gone"})
}

// TestAccessLogOfRefusals: requests that the router refuses by their head or body have a line too.
func TestAccessLogOfRefusals(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	const secret = "sk-0123456789abcdef"
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, harness.AllOf(mod, harness.WithKeys(config.APIKey{Name: "team", SHA256: apikey.HashOf(secret).String()})), harness.SimWorker(e, worker.Aggregated, "w0"))
	const auth = "Bearer " + secret
	for id, c := range map[string]struct {
		path, body, key string
		status          int
		members         map[string]any
	}{
		"no-key":  {"/v1/chat/completions", harness.Chat(""), "", 401, map[string]any{"reason": "invalid_api_key", "endpoint": "/v1/chat/completions", "key": nil}},
		"no-json": {"/v1/chat/completions", "{", auth, 400, map[string]any{"reason": "bad_json", "key": "team"}},
		"no-path": {"/v1/nothing", "{}", auth, 404, map[string]any{"reason": "unknown_route", "endpoint": nil}},
		"good":    {"/v1/chat/completions", harness.Chat(""), auth, 200, map[string]any{"reason": nil, "key": "team", "decode_worker": "w0"}},
	} {
		headers := []string{"X-Request-Id", id}
		if c.key != "" {
			headers = append(headers, "Authorization", c.key)
		}
		a := harness.Post(t, r.URL+c.path, c.body, headers...)
		harness.WantStatus(t, a, c.status)
		c.members["status"] = c.status
		if c.status != 200 {
			c.members["reason"] = a.Header.Get("X-Sluice-Reason")
		}
		want(t, find(id), c.members)
	}
}

// Traces are exported at once, so that no test waits for a batch.
func init() { os.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50") }

// collector keeps the spans that it receives over OTLP/HTTP.
type collector struct {
	mu    sync.Mutex
	spans []*tracepb.Span
}

func startCollector(t *testing.T) (*collector, func(*config.Config)) {
	t.Helper()
	c := new(collector)
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	return c, func(cfg *config.Config) { cfg.Tracing.Endpoint, cfg.Tracing.Sample = s.URL, 1 }
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	m := new(collectorpb.ExportTraceServiceRequest)
	if err := proto.Unmarshal(b, m); err != nil {
		http.Error(w, err.Error(), 400)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			c.spans = append(c.spans, ss.Spans...)
		}
	}
}

// trace waits for the spans of a trace.
func (c *collector) trace(t *testing.T, id string) (spans map[string]*tracepb.Span) {
	t.Helper()
	testwait.UntilWithin(t, 20*time.Second, "trace "+id+" arrives", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		spans = make(map[string]*tracepb.Span)
		for _, s := range c.spans {
			if hex.EncodeToString(s.TraceId) == id {
				spans[hex.EncodeToString(s.SpanId)] = s
			}
		}
		return len(spans) > 0
	})
	return spans
}

// attributes returns those of a span that are texts or numbers.
func attributes(s *tracepb.Span) map[string]string {
	m := make(map[string]string)
	for _, a := range s.Attributes {
		if m[a.Key] = a.Value.GetStringValue(); m[a.Key] == "" {
			m[a.Key] = fmt.Sprint(a.Value.GetIntValue())
		}
	}
	return m
}

// startStoring starts an engine that stores the responses "resp_1" and "resp_2". It closes the
// connection of a request about "resp_2". traceparents receives the header of the others.
func startStoring(t *testing.T, traceparents chan<- string) config.Worker {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model","max_model_len":4096}]}`)
	})
	mux.HandleFunc("/v1/responses/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == "resp_2" {
			panic(http.ErrAbortHandler)
		}
		traceparents <- r.Header.Get("Traceparent")
		if r.URL.Query().Get("stream") == "true" {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "event: response.completed\ndata: {\"response\":{\"id\":\"resp_1\"},\"type\":\"response.completed\"}\n\n")
			w.(http.Flusher).Flush()
			return
		}
		harness.ReplyJSON(w, 200, `{"id":"resp_1","object":"response","status":"completed"}`)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return config.Worker{ID: "w0", URL: s.URL, Role: worker.Aggregated, KVEvents: []string{"off"}}
}

// TestAccessLogOfStoredResponses: a request about a stored response has one line, whether the answer is
// whole, a stream or a failure of the engine; and its trace is the parent of what the engine does.
func TestAccessLogOfStoredResponses(t *testing.T) {
	t.Parallel()
	mod, find := accessLog(t)
	c, traced := startCollector(t)
	traceparents := make(chan string, 8)
	r := harness.StartRouter(t, harness.AllOf(mod, traced), startStoring(t, traceparents))
	for id, k := range map[string]struct {
		path    string
		status  int
		members map[string]any
	}{
		"whole":  {"/v1/responses/resp_1", 200, map[string]any{"stream": false, "reason": nil}},
		"stream": {"/v1/responses/resp_1?stream=true", 200, map[string]any{"stream": true, "reason": nil, "events": 1}},
		"fails":  {"/v1/responses/resp_2", 502, map[string]any{"stream": false}},
	} {
		a := harness.Get(t, r.URL+k.path, "X-Request-Id", id)
		harness.WantStatus(t, a, k.status)
		line := find(id)
		want(t, line, k.members)
		want(t, line, map[string]any{
			"method": "GET", "endpoint": "/v1/responses/{id}", "status": k.status, "decode_worker": "w0", "decode_rank": 0,
			"model": nil, "output_tokens": nil, "cached_tokens": nil, "predicted_cached_tokens": nil, "client": "127.0.0.1",
		})
		if k.status != 200 {
			want(t, line, map[string]any{"reason": a.Header.Get("X-Sluice-Reason")})
			continue
		}
		if n, _ := line["response_bytes"].(float64); int(n) < len(a.Body) { // chunk framing is included
			t.Errorf("%s: %v bytes are logged, the client received %d", id, line["response_bytes"], len(a.Body))
		}
		spans := c.trace(t, fmt.Sprint(line["trace_id"]))
		sent := strings.Split(<-traceparents, "-")
		if leg := spans[sent[2]]; sent[1] != line["trace_id"] || leg == nil || leg.Name != "stored" || spans[hex.EncodeToString(leg.ParentSpanId)] == nil {
			t.Errorf("%s: the engine was sent %v, the trace is %v", id, sent, spans)
		}
	}
	// A refusal before an engine is asked has its one line from the front.
	harness.WantStatus(t, harness.Get(t, r.URL+"/v1/responses/..", "X-Request-Id", "refused"), 404)
	want(t, find("refused"), map[string]any{"status": 404, "decode_worker": nil})
}

// TestTraces: every engine call of a request has a span, whose id the engine was sent, below the span
// of the request, which is below the client's; for each family in which the order of the legs
// differs.
func TestTraces(t *testing.T) {
	for _, family := range []string{"nixl", "sglang", "off"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			c, mod := startCollector(t)
			parents := make(chan string, 10)
			engine := func(role string) *harness.ScriptedEngine {
				return harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
					parents <- role + " " + strings.Join(r.Header.Values("Traceparent"), ",")
					switch {
					case role == "prefill" && family == "nixl":
						harness.ReplyJSON(w, 200, harness.PrefillReply(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2],"remote_engine_id":"e","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}`))
					case role == "prefill":
						harness.ReplyJSON(w, 200, harness.WholeAnswer)
					default:
						harness.AnswerOK(w, r)
					}
				})
			}
			var workers []config.Worker
			legs := []string{"whole"}
			if family == "off" {
				workers = append(workers, engine("whole").Worker(worker.Aggregated, "w0"))
			} else {
				p, d := engine("prefill"), engine("decode")
				workers = append(workers, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
				legs = []string{"prefill", "decode"}
			}
			for i := range workers {
				workers[i].Engine = "vllm"
			}
			r := harness.StartRouter(t, harness.AllOf(mod, func(cfg *config.Config) { cfg.PD.Family, cfg.Tokens.Mode = family, "text" }), workers...)
			const id, client = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "Traceparent", "00-"+id+"-"+client+"-01", "Tracestate", "k=v", "X-Request-Id", "r1")
			harness.WantStatus(t, a, 200)
			seen := make(map[string]string) // span id by leg
			for range legs {
				select {
				case s := <-parents:
					leg, parent, _ := strings.Cut(s, " ")
					if len(parent) != 55 || parent[3:35] != id || parent[36:52] == client || parent[53:] != "01" {
						t.Errorf("%s was sent traceparent %q", leg, parent)
						continue
					}
					seen[leg] = parent[36:52]
				case <-time.After(10 * time.Second):
					t.Fatal("an engine received nothing")
				}
			}
			spans := c.trace(t, id)
			rootID := ""
			names := make(map[string]int)
			for sid, s := range spans {
				names[s.Name]++
				if hex.EncodeToString(s.ParentSpanId) == client {
					rootID = sid
				}
			}
			if root := spans[rootID]; root == nil || root.Name != "chat sim" {
				t.Fatalf("no span below the client's; spans are %v", names)
			}
			for i, leg := range legs {
				s := spans[seen[leg]]
				if s == nil || s.Name != leg || hex.EncodeToString(s.ParentSpanId) != rootID {
					t.Errorf("%s: span %s is %v; spans are %v", leg, seen[leg], s, names)
					continue
				}
				a := attributes(s)
				if at := fmt.Sprintf("http://%s:%s", a["server.address"], a["server.port"]); at != workers[i].URL || a["gen_ai.provider.name"] != "vllm" {
					t.Errorf("%s: attributes are %v; want the engine %s, vllm", leg, a, workers[i].URL)
				}
			}
			for _, name := range []string{"tokenize", "choose"} {
				if names[name] == 0 {
					t.Errorf("no span %q; spans are %v", name, names)
				}
			}
		})
	}
}

// TestTracesOfMigration: a stream that moves to another engine is one trace, with a span for each
// engine call, and it is kept although it was not sampled.
func TestTracesOfMigration(t *testing.T) {
	t.Parallel()
	c, mod := startCollector(t)
	m := harness.StartMigrationFleet(t, false, 2, harness.AllOf(mod, func(cfg *config.Config) { cfg.Tracing.Sample = 0 }))
	const id = "11f92f3577b34da6a3ce929d0e0e4736"
	m.Fail("moves", sim.Fault{Kind: sim.Reset, After: 5})
	a := harness.Post(t, m.URL+"/v1/completions", `{"model":"sim","stream":true,"prompt":"go on","max_tokens":40,"ignore_eos":true}`, "X-Request-Id", "moves", "Traceparent", "00-"+id+"-00f067aa0ba902b7-00")
	harness.WantStatus(t, a, 200)
	names := make(map[string]int)
	for _, s := range c.trace(t, id) {
		names[s.Name]++
	}
	if want := map[string]int{"text_completion sim": 1, "tokenize": 1, "choose": 2, "whole": 2, "stream": 1}; !maps.Equal(names, want) {
		t.Errorf("the spans are %v, want %v", names, want)
	}
}

// TestTracingOff: without tracing the client's traceparent reaches the engine unchanged.
func TestTracingOff(t *testing.T) {
	t.Parallel()
	got := make(chan string, 1)
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("Traceparent")
		harness.AnswerOK(w, r)
	})
	r := harness.StartRouter(t, func(c *config.Config) { c.Tokens.Mode = "text" }, e.Worker(worker.Aggregated, "w0"))
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	if _, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(""), "Traceparent", parent); err != nil {
		t.Fatal(err)
	}
	if p := <-got; p != parent {
		t.Errorf("the engine received %q", p)
	}
}
