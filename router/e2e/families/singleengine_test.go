package families

import (
	"net/http"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestSingleEngineServes: a request has no prefill leg if only the engine that computes the prompt, or
// that stores the previous turn, can answer it.
func TestSingleEngineServes(t *testing.T) {
	for _, name := range []string{"nixl", "nixl-push", "orchestrated", "storage"} {
		t.Run(name, func(t *testing.T) {
			p, d := harness.StartSim(t, harness.UsingPD(name, "prefill")), harness.StartSim(t, harness.UsingPD(name, "decode"))
			r := harness.StartRouter(t, harness.UsingFamily(name), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			for _, c := range []struct{ path, body string }{
				{"/v1/completions", `{"model":"sim","prompt":"score me","max_tokens":3,"prompt_logprobs":1}`},
				{"/v1/completions", `{"model":"sim","prompt":"score me","max_tokens":3,"echo":true,"logprobs":1}`},
				{"/v1/chat/completions", `{"model":"sim","messages":[{"role":"user","content":"score me"}],"max_tokens":3,"prompt_logprobs":0}`},
			} {
				a := harness.Post(t, r.URL+c.path, c.body)
				if a.Status != http.StatusOK || a.Header.Get("X-Sluice-Prefill-Worker") != "" {
					t.Errorf("%s: %d, prefill by %q: %s", c.body, a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
				}
			}
			if n := len(harness.GenerateRequests(p)); n != 0 {
				t.Errorf("prefill was sent %d of them", n)
			}
			if n := r.Fallbacks("prompt_logprobs"); n != 3 {
				t.Errorf("counted %v times, want 3", n)
			}
			harness.WantIdle(t, r, 20*time.Second, p, d)
		})
	}
}

// TestSingleSGLangEngine: such a request runs on an aggregated worker if there is one, because SGLang's
// decode engines cannot prefill.
func TestSingleSGLangEngine(t *testing.T) {
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", role })
	}
	p, d, a := engine("prefill"), engine("decode"), engine("aggregated")
	pw := harness.SimWorker(p, worker.Prefill, "p0")
	harness.WithBootstrap(&pw, p)
	r := harness.StartRouter(t, harness.UsingFamily("sglang"), pw, harness.SimWorker(d, worker.Decode, "d0"), harness.SimWorker(a, worker.Aggregated, "a0"))
	for body, want := range map[string]string{
		`{"model":"sim","prompt":"score me","max_tokens":3,"echo":true,"logprobs":1}`: "a0",
		`{"model":"sim","prompt":"score me","max_tokens":3,"logprobs":1}`:             "d0",
	} {
		if got := harness.Post(t, r.URL+"/v1/completions", body); got.Status != http.StatusOK || got.Header.Get("X-Sluice-Worker") != want {
			t.Errorf("%s: %d by %q, want %s: %s", body, got.Status, got.Header.Get("X-Sluice-Worker"), want, got.Body)
		}
	}
	harness.WantIdle(t, r, 20*time.Second, p, d, a)
}
