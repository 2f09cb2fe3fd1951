package main

import (
	"net/http"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/worker"
)

// TestSingleEngineServes: requests whose answer only the engine can give that computes the
// prompt, or that keeps the last turn, have no prefill leg.
func TestSingleEngineServes(t *testing.T) {
	for _, name := range []string{"nixl", "nixl-push", "orchestrated", "storage"} {
		t.Run(name, func(t *testing.T) {
			p, d := startSim(t, usingPD(name, "prefill")), startSim(t, usingPD(name, "decode"))
			r := startRouter(t, usingFamily(name), simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
			for _, c := range []struct{ path, body string }{
				{"/v1/completions", `{"model":"sim","prompt":"score me","max_tokens":3,"prompt_logprobs":1}`},
				{"/v1/completions", `{"model":"sim","prompt":"score me","max_tokens":3,"echo":true,"logprobs":1}`},
				{"/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"score me"}],"max_tokens":3,"prompt_logprobs":0}`},
			} {
				a := post(t, r.URL+c.path, c.body)
				if a.Status != http.StatusOK || a.Header.Get("X-Sluice-Prefill-Worker") != "" {
					t.Errorf("%s: %d, prefill by %q: %s", c.body, a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
				}
			}
			if n := len(generateRequests(p)); n != 0 {
				t.Errorf("prefill was sent %d of them", n)
			}
			if n := r.fallbacks("prompt_logprobs"); n != 3 {
				t.Errorf("counted %v times, want 3", n)
			}
			wantIdle(t, r, 20*time.Second, p, d)
		})
	}
}

// Engines that cannot prefill where they decode: an aggregated worker does it, where there is one.
func TestSingleSGLangEngine(t *testing.T) {
	engine := func(role string) *sim.Engine {
		return startSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", role })
	}
	p, d, a := engine("prefill"), engine("decode"), engine("aggregated")
	pw := simWorker(p, worker.Prefill, "p0")
	withBootstrap(&pw, p)
	r := startRouter(t, usingFamily("sglang"), pw, simWorker(d, worker.Decode, "d0"), simWorker(a, worker.Aggregated, "a0"))
	for body, want := range map[string]string{
		`{"model":"sim","prompt":"score me","max_tokens":3,"echo":true,"logprobs":1}`: "a0",
		`{"model":"sim","prompt":"score me","max_tokens":3,"logprobs":1}`:             "d0",
	} {
		if got := post(t, r.URL+"/v1/completions", body); got.Status != http.StatusOK || got.Header.Get("X-Sluice-Worker") != want {
			t.Errorf("%s: %d by %q, want %s: %s", body, got.Status, got.Header.Get("X-Sluice-Worker"), want, got.Body)
		}
	}
	wantIdle(t, r, 20*time.Second, p, d, a)
}
