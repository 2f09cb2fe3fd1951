package faults

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// failures are the ways in which the engine of a leg fails before it answers.
var failures = []struct {
	name  string
	infer http.HandlerFunc
}{
	{"reset", func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, "", true) }},
	{"closed", func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, "", false) }},
	{"cut in the body", func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", false)
	}},
	{"garbage", func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyRaw(w, "SSH-2.0-OpenSSH_9.2\r\n\r\n", false)
	}},
	{"two lengths", func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", false)
	}},
	{"500", harness.ReplyHandler(500, `{"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}`)},
	{"503", harness.ReplyHandler(503, `{"error":{"message":"full","type":"x","param":null,"code":503}}`)},
	{"502", harness.ReplyHandler(502, `<html>bad gateway</html>`)},
	{"429", harness.ReplyHandler(429, `{"error":{"message":"slow down","type":"x","param":null,"code":429}}`)},
	{"stall", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
}

// TestPrefillFailsOver: the router runs a failed prefill on the next prefill worker. If there is
// none, decode runs the whole request.
func TestPrefillFailsOver(t *testing.T) {
	t.Parallel()
	for _, f := range failures {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			bad, good, d := harness.StartScripted(t, f.infer), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, bad.Worker(worker.Prefill, "bad"), harness.SimWorker(good, worker.Prefill, "good"), harness.SimWorker(d, worker.Decode, "d0"))
			for i := range 4 {
				body := harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0))
				a := harness.Post(t, r.URL+"/v1/chat/completions", body)
				if a.Status != 200 || a.Text(t) == "" || a.Header.Get("X-Sluice-Prefill-Worker") != "good" {
					t.Errorf("status %d, prefill on %q: %s", a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
				}
			}
			if bad.Requests() == 0 {
				t.Error("the failing worker was never chosen: the test shows nothing")
			}
			if n := r.Metric(`sluice_leg_retries_total{leg="prefill"}`); n != float64(bad.Requests()) {
				t.Errorf("%v retries counted for %d failures", n, bad.Requests())
			}
			harness.WantIdle(t, r, 10*time.Second, good, d)
		})
		t.Run(f.name+", no other", func(t *testing.T) {
			t.Parallel()
			bad, d := harness.StartScripted(t, f.infer), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, bad.Worker(worker.Prefill, "bad"), harness.SimWorker(d, worker.Decode, "d0"))
			body := harness.Chat("")
			a := harness.Post(t, r.URL+"/v1/chat/completions", body)
			if a.Status != 200 || a.Text(t) == "" || a.Header.Get("X-Sluice-Prefill-Worker") != "" {
				t.Errorf("status %d, headers %v: %s", a.Status, a.Header, a.Body)
			}
			if recs := harness.GenerateRequests(d); len(recs) != 1 || string(recs[0].Body) != body {
				t.Errorf("decode was sent %d requests; want the client's bytes once", len(recs))
			}
			if r.Fallbacks("prefill_failed") != 1 || r.Fallbacks("decode_only") != 1 {
				t.Errorf("prefill_failed %v, decode_only %v; want 1, 1", r.Fallbacks("prefill_failed"), r.Fallbacks("decode_only"))
			}
			harness.WantIdle(t, r, 10*time.Second, d)
		})
	}
}

// TestRefusedPrefillFailsOver: the engine refuses the connection because it has just died, and no
// probe has detected that yet.
func TestRefusedPrefillFailsOver(t *testing.T) {
	t.Parallel()
	dead, p, d := harness.StartScripted(t, harness.ReplyHandler(200, "{}")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) {
		harness.ShortPrefillTimeout(c)
		c.Health.Interval = time.Minute
	}, dead.Worker(worker.Prefill, "dead"), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	dead.CloseClientConnections()
	dead.Listener.Close()
	for range 4 {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		if a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Errorf("status %d, prefill on %q: %s", a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
		}
	}
	if n := r.Metric(`sluice_legs_total{leg="prefill",outcome="upstream_failed"}`); n == 0 {
		t.Error("the dead worker was never tried: the test shows nothing")
	}
}

// TestPrefill4xxGoesToClient: the router forwards a 4xx response of prefill to the client
// unchanged, and the response does not count for the breaker.
func TestPrefill4xxGoesToClient(t *testing.T) {
	t.Parallel()
	small := func(o *sim.Options) { o.Role, o.MaxModelLen = "prefill", 16 }
	p, d := harness.StartSim(t, small), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Health.UnhealthyThreshold = 1 }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, stream := range []string{"", `,"stream":true`} {
		body := harness.Chat(stream) // exceeds the model's context length
		direct := harness.Post(t, p.URL()+"/v1/chat/completions", body)
		for range 5 {
			a := harness.Post(t, r.URL+"/v1/chat/completions", body)
			if a.Status != 400 || string(a.Body) != string(direct.Body) {
				t.Errorf("status %d, body %s; the engine says %d, %s", a.Status, a.Body, direct.Status, direct.Body)
			}
			if a.Header.Get("X-Sluice-Reason") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
				t.Errorf("headers %v: it is the engine's own error", a.Header)
			}
		}
	}
	for _, status := range []int{401, 403, 404, 422} {
		p.Fault(sim.Fault{Kind: sim.Status, Leg: "prefill", Status: status, N: 1})
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != status {
			t.Errorf("status %d, want the engine's %d", a.Status, status)
		}
	}
	if n := len(harness.GenerateRequests(d)); n != 0 {
		t.Errorf("decode was sent %d requests", n)
	}
	if s := r.State("p0"); s != worker.Ready {
		t.Errorf("p0 is %v", s)
	}
	if n := r.Metric(`sluice_leg_retries_total{leg="prefill"}`); n != 0 {
		t.Errorf("%v retries", n)
	}
	harness.WantIdle(t, r, 10*time.Second, p, d)
}

// TestPrefill4xxHidesPrivateFields: the router removes members about KV from such a response.
func TestPrefill4xxHidesPrivateFields(t *testing.T) {
	t.Parallel()
	answer := harness.ReplyHandler(400, `{"error":{"message":"no"},"kv_transfer_params":{"remote_host":"10.0.0.9"}}`)
	for _, family := range []string{"nixl", "sglang"} { // sequential and concurrent legs
		p := harness.StartScripted(t, answer)
		d := harness.StartScripted(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family, c.Tokens.Mode = family, "text" }, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		if a.Status != 400 || !strings.Contains(string(a.Body), `"no"`) || strings.Contains(string(a.Body), "10.0.0.9") {
			t.Errorf("%s: status %d: %s", family, a.Status, a.Body)
		}
	}
}

// TestCrashingRequestKillsAtMostTwo: a request that crashes its engine is not retried on the
// whole fleet.
func TestCrashingRequestKillsAtMostTwo(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		name  string
		fault sim.Fault
	}{
		{"prefill dies with a last word", sim.Fault{Kind: sim.Crash, Leg: "prefill"}},
		{"prefill resets", sim.Fault{Kind: sim.Reset, Leg: "prefill"}},
		{"decode dies with a last word", sim.Fault{Kind: sim.Crash, Leg: "decode"}},
		{"decode resets", sim.Fault{Kind: sim.Reset, Leg: "decode"}},
		{"any leg dies", sim.Fault{Kind: sim.Crash}},
	} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			var engines []*sim.Engine
			var workers []config.Worker
			for i := range 4 {
				p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
				p.Fault(k.fault)
				d.Fault(k.fault)
				engines = append(engines, p, d)
				workers = append(workers, harness.SimWorker(p, worker.Prefill, fmt.Sprint("p", i)), harness.SimWorker(d, worker.Decode, fmt.Sprint("d", i)))
			}
			r := harness.StartRouter(t, func(c *config.Config) { c.PD.MaxAttempts = 8 }, workers...)
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
			if a.Status != 500 && a.Status != 502 {
				t.Errorf("status %d: %s", a.Status, a.Body)
			}
			if msg, _, _ := a.ErrorOf(t); a.Status == 502 && !strings.Contains(msg, "d") {
				t.Errorf("message %q", msg)
			}
			hit := 0
			for _, e := range engines {
				if e.Stats().Faults > 0 { // a retry on a reused connection may cause two faults on one engine
					hit++
				}
			}
			if hit != 2 {
				t.Errorf("%d engines were hit, want 2", hit)
			}
		})
	}
}

// TestFailedFinishReasonFailsOver: a TensorRT-LLM context server answers 200 with a finish reason
// that says that it failed. That is a failed prefill leg, not the client's answer and not a
// hand-over.
func TestFailedFinishReasonFailsOver(t *testing.T) {
	trt := func(role string) func(*sim.Options) {
		return func(o *sim.Options) { o.Engine, o.Role = "trtllm", role }
	}
	for _, finish := range []string{"error", "abort", "cancelled", "timeout"} {
		for _, params := range []string{`null`, `{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":7,"encoded_opaque_state":"AA=="}`} {
			t.Run(finish+" "+params[:1], func(t *testing.T) {
				t.Parallel()
				answer := `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"half"},"finish_reason":"` + finish + `","disaggregated_params":` + params + `}],"usage":{"prompt_tokens":3,"completion_tokens":1}}`
				bad, good, d := harness.StartScripted(t, harness.ReplyHandler(200, answer)), harness.StartSim(t, trt("prefill")), harness.StartSim(t, trt("decode"))
				r := harness.StartRouter(t, harness.UsingFamily("trtllm"), bad.Worker(worker.Prefill, "bad"), harness.SimWorker(good, worker.Prefill, "good"), harness.SimWorker(d, worker.Decode, "d0"))
				for i := range 4 {
					a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, i, i%2 == 0)))
					if a.Status != 200 || a.Text(t) == "half" || a.Text(t) == "" || a.Header.Get("X-Sluice-Prefill-Worker") != "good" {
						t.Errorf("status %d, prefill on %q: %s", a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
					}
				}
				if n := r.Metric(`sluice_leg_retries_total{leg="prefill"}`); n == 0 || n != float64(bad.Requests()) {
					t.Errorf("%v retries counted for %d failures", n, bad.Requests())
				}
				if n := r.Metric(`sluice_legs_total{leg="prefill",outcome="5xx"}`); n != float64(bad.Requests()) {
					t.Errorf("%v legs counted as 5xx for %d failures", n, bad.Requests())
				}
				harness.WantIdle(t, r, 10*time.Second, good, d)

				alone := harness.StartRouter(t, harness.UsingFamily("trtllm"), bad.Worker(worker.Prefill, "bad"), harness.SimWorker(d, worker.Decode, "d0"))
				a := harness.Post(t, alone.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "no-other")
				if a.Status != 200 || a.Text(t) == "half" || a.Header.Get("X-Sluice-Prefill-Worker") != "" || alone.Fallbacks("prefill_failed") != 1 {
					t.Errorf("no other prefill: status %d, prefill_failed %v: %s", a.Status, alone.Fallbacks("prefill_failed"), a.Body)
				}
				if notes := fmt.Sprint(alone.Outcome(t, "no-other").Notes); !strings.Contains(notes, `its finish_reason is "`+finish+`"`) {
					t.Errorf("notes %q do not name the finish reason", notes)
				}
			})
		}
	}
}
