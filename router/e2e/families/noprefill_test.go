package families

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestDecodeOnlyFallbackWithoutPrefill: without a healthy prefill worker a decode worker runs the
// whole request without a wait, and the response says so.
func TestDecodeOnlyFallbackWithoutPrefill(t *testing.T) {
	plain, p, d := harness.StartSim(t, nil), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.PoolWait = time.Minute }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	p.Crash()
	r.AwaitState(t, "p0", worker.Unhealthy)
	if status, page := r.Pages.Ready(false); status != 200 || !strings.Contains(string(page), "no prefill worker is healthy") {
		t.Errorf("/readyz: %d %s", status, page)
	}
	for i, more := range []string{"", `,"stream":true`} {
		body := harness.Chat(more)
		want := harness.Post(t, plain.URL()+"/v1/chat/completions", body)
		began := time.Now()
		a := harness.Post(t, r.URL+"/v1/chat/completions", body)
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("it waited %v", took)
		}
		if a.Status != 200 || a.Text(t) != want.Text(t) || a.Header.Get("X-Sluice-Plan") != "local; reason=no_prefill_worker" || a.Header.Get("X-Sluice-Queue-Time") != "" {
			t.Errorf("status %d, headers %v: %s", a.Status, a.Header, a.Body)
		}
		if n := r.Fallbacks("no_prefill_worker"); n != float64(i+1) {
			t.Errorf("counted %v times after %d requests", n, i+1)
		}
	}
	// A prefill-only request waits, because decode cannot run it.
	if got := harness.PostAsync(t, r.URL+"/v1/chat/completions", harness.Chat("")); (<-got).Status != 200 {
		t.Error("a third request failed")
	}
	done := make(chan *harness.Answer, 1)
	go func() {
		a, _ := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Prefill-Only", "true")
		done <- a
	}()
	testwait.UntilWithin(t, 10*time.Second, "the prefill-only request waits", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a == nil || a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "p0" {
		t.Errorf("%+v", a)
	}
	r.AwaitState(t, "p0", worker.Ready)
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("with prefill back: %v", a.Header)
	}
}

// TestNoPrefillIsRefused: if decode may not or cannot run a whole request, the request waits for a
// prefill worker, and the refusal names the prefill pool.
func TestNoPrefillIsRefused(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"nixl", "sglang"} {
		fam := harness.MatrixFamilyNamed(t, family)
		p, pw := harness.SidecarEngine(t, fam, worker.Prefill)
		_, dw := harness.SidecarEngine(t, fam, worker.Decode)
		r := harness.StartRouter(t, func(c *config.Config) {
			c.PD.Family, c.PD.DecodeOnlyFallback, c.Timeouts.PoolWait = family, family == "sglang", 200*time.Millisecond
		}, pw, dw)
		p.Crash()
		r.AwaitState(t, "prefill", worker.Unhealthy)
		began := time.Now()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		harness.WantReason(t, a, 503, "no_prefill_worker")
		if status, page := r.Pages.Ready(false); status != 503 {
			t.Errorf("%s: /readyz: %d %s", family, status, page)
		}
		if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, "prefill") || time.Since(began) < 200*time.Millisecond {
			t.Errorf("%s: after %v: %s", family, time.Since(began), msg)
		}
	}
}

// TestAggregatedWorkersWithoutPrefill: in a pool of all three roles whose decode engines cannot
// prefill, aggregated workers run the requests.
func TestAggregatedWorkersWithoutPrefill(t *testing.T) {
	fam := harness.MatrixFamilyNamed(t, "sglang")
	p, pw := harness.SidecarEngine(t, fam, worker.Prefill)
	_, dw := harness.SidecarEngine(t, fam, worker.Decode)
	_, aw := harness.SidecarEngine(t, fam, worker.Aggregated)
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "sglang" }, pw, dw, aw)
	p.Crash()
	r.AwaitState(t, "prefill", worker.Unhealthy)
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "aggregated" {
		t.Errorf("status %d on %q: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
	}
}

// TestLastingFallbackIsReported: a family whose hand-overs all fail still answers every request. The
// log, a metric and the readiness page report the failures until a hand-over works.
func TestLastingFallbackIsReported(t *testing.T) {
	for _, k := range []struct {
		kind   string
		breaks func(p *sim.Engine)
		mend   func(p *sim.Engine)
	}{
		{"incomplete_handle", func(p *sim.Engine) { p.Fault(sim.Fault{Kind: sim.NoHandle, Leg: "prefill"}) }, (*sim.Engine).ClearFaults},
		{"prefill_failed", func(p *sim.Engine) { p.Fault(sim.Fault{Kind: sim.Status, Leg: "prefill"}) }, (*sim.Engine).ClearFaults},
		{"no_prefill_worker", (*sim.Engine).Crash, func(p *sim.Engine) { p.Restart() }},
	} {
		t.Run(k.kind, func(t *testing.T) {
			p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			const metric, line = "sluice_models_without_handover", "every request is decoded without a hand-over"
			k.breaks(p)
			if k.kind == "no_prefill_worker" {
				r.AwaitState(t, "p0", worker.Unhealthy)
			}
			for i := range 15 {
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d`, i)))
				if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "local; reason="+k.kind {
					t.Fatalf("status %d, plan %q: %s", a.Status, a.Header.Get("X-Sluice-Plan"), a.Body)
				}
				if i == 3 && r.Metric(metric) != 0 {
					t.Error("four requests do not make a lasting fall-back")
				}
				// Requests that never use a hand-over do not affect the report.
				harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"n":2`)), 200)
			}
			if n := r.Metric(metric); n != 1 {
				t.Errorf("%s is %v", metric, n)
			}
			if n := strings.Count(r.Logs.String(), line); n != 1 {
				t.Errorf("the log warns %d times, want once a minute", n)
			}
			if status, page := r.Pages.Ready(false); status != 200 || !bytes.Contains(page, []byte(`"degraded"`)) || !bytes.Contains(page, []byte(k.kind)) || bytes.Contains(page, []byte("p0")) {
				t.Errorf("/readyz: %d %s", status, page)
			}
			if _, page := r.Pages.Health(true); !bytes.Contains(page, []byte(k.kind)) {
				t.Errorf("/health: %s", page)
			}
			k.mend(p)
			r.AwaitState(t, "p0", worker.Ready)
			testwait.UntilWithin(t, 10*time.Second, "a hand-over works", func() bool {
				return harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")).Header.Get("X-Sluice-Prefill-Worker") == "p0"
			})
			if _, page := r.Pages.Ready(false); r.Metric(metric) != 0 || bytes.Contains(page, []byte(`"degraded"`)) {
				t.Errorf("with hand-overs again: %s is %v; /readyz %s", metric, r.Metric(metric), page)
			}
		})
	}
}
