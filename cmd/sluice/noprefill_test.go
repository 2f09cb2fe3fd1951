package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// TestDecodeOnlyFallbackWithoutPrefill: without a healthy prefill worker decode does the whole
// request at once, and the answer says so.
func TestDecodeOnlyFallbackWithoutPrefill(t *testing.T) {
	plain, p, d := startSim(t, nil), startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.Timeouts.PoolWait = time.Minute }, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	p.Crash()
	r.awaitState(t, "p0", worker.Unhealthy)
	if status, page := r.Pages.Ready(false); status != 200 || !strings.Contains(string(page), "no prefill worker is healthy") {
		t.Errorf("/readyz: %d %s", status, page)
	}
	for i, more := range []string{"", `,"stream":true`} {
		body := chat(more)
		want := post(t, plain.URL()+"/v1/chat/completions", body)
		began := time.Now()
		a := post(t, r.URL+"/v1/chat/completions", body)
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("it waited %v", took)
		}
		if a.Status != 200 || a.text(t) != want.text(t) || a.Header.Get("X-Sluice-Plan") != "local; reason=no_prefill_worker" || a.Header.Get("X-Sluice-Waited") != "" {
			t.Errorf("status %d, headers %v: %s", a.Status, a.Header, a.Body)
		}
		if n := r.fallbacks("no_prefill_worker"); n != float64(i+1) {
			t.Errorf("counted %v times after %d requests", n, i+1)
		}
	}
	// A request that is for prefill alone is not decode's: it waits.
	if got := postAsync(t, r.URL+"/v1/chat/completions", chat("")); (<-got).Status != 200 {
		t.Error("a third request failed")
	}
	done := make(chan *answer, 1)
	go func() {
		a, _ := tryPost(t.Context(), r.URL+"/v1/chat/completions", chat(""), "X-Sluice-Prefill-Only", "true")
		done <- a
	}()
	eventually(t, 10*time.Second, "the prefill-only request waits", func() bool { return r.metric("sluice_pool_waiters") == 1 })
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a == nil || a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "p0" {
		t.Errorf("%+v", a)
	}
	r.awaitState(t, "p0", worker.Ready)
	if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("with prefill back: %v", a.Header)
	}
}

// TestNoPrefillIsRefused: where decode may not, or cannot, do a whole request, the request
// waits for a prefill worker and is refused in its name.
func TestNoPrefillIsRefused(t *testing.T) {
	for _, family := range []string{"nixl", "sglang"} {
		fam := matrixFamilyNamed(t, family)
		p, pw := sidecarEngine(t, fam, worker.Prefill)
		_, dw := sidecarEngine(t, fam, worker.Decode)
		r := startRouter(t, func(c *config.Config) {
			c.PD.Family, c.PD.PlainDecode, c.Timeouts.PoolWait = family, family == "sglang", 200*time.Millisecond
		}, pw, dw)
		p.Crash()
		r.awaitState(t, "prefill", worker.Unhealthy)
		began := time.Now()
		a := post(t, r.URL+"/v1/chat/completions", chat(""))
		wantReason(t, a, 503, "no_prefill_worker")
		if status, page := r.Pages.Ready(false); status != 503 {
			t.Errorf("%s: /readyz: %d %s", family, status, page)
		}
		if msg, _, _ := a.errorOf(t); !strings.Contains(msg, "prefill") || time.Since(began) < 200*time.Millisecond {
			t.Errorf("%s: after %v: %s", family, time.Since(began), msg)
		}
	}
}

// TestAggregatedWorkersWithoutPrefill: in a pool of all three roles whose decode engines
// cannot prefill, aggregated workers take the whole requests.
func TestAggregatedWorkersWithoutPrefill(t *testing.T) {
	fam := matrixFamilyNamed(t, "sglang")
	p, pw := sidecarEngine(t, fam, worker.Prefill)
	_, dw := sidecarEngine(t, fam, worker.Decode)
	_, aw := sidecarEngine(t, fam, worker.Aggregated)
	r := startRouter(t, func(c *config.Config) { c.PD.Family = "sglang" }, pw, dw, aw)
	p.Crash()
	r.awaitState(t, "prefill", worker.Unhealthy)
	a := post(t, r.URL+"/v1/chat/completions", chat(""))
	if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "aggregated" {
		t.Errorf("status %d on %q: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
	}
}

// TestLastingFallbackIsReported: a family that never hands over answers every request, and yet
// the log warns, a metric and the readiness page show it, until a hand-over works.
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
			p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
			r := startRouter(t, nil, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
			const metric, line = "sluice_models_without_handover", "every request is decoded without a hand-over"
			k.breaks(p)
			if k.kind == "no_prefill_worker" {
				r.awaitState(t, "p0", worker.Unhealthy)
			}
			for i := range 15 {
				a := post(t, r.URL+"/v1/chat/completions", chat(fmt.Sprintf(`,"seed":%d`, i)))
				if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "local; reason="+k.kind {
					t.Fatalf("status %d, plan %q: %s", a.Status, a.Header.Get("X-Sluice-Plan"), a.Body)
				}
				if i == 3 && r.metric(metric) != 0 {
					t.Error("four requests are no lasting fall-back")
				}
				// Requests that no hand-over could serve say nothing of it.
				wantStatus(t, post(t, r.URL+"/v1/chat/completions", chat(`,"n":2`)), 200)
			}
			if n := r.metric(metric); n != 1 {
				t.Errorf("%s is %v", metric, n)
			}
			if n := strings.Count(r.logs.String(), line); n != 1 {
				t.Errorf("the log warns %d times, want once a minute", n)
			}
			if status, page := r.Pages.Ready(false); status != 200 || !bytes.Contains(page, []byte(`"degraded"`)) || !bytes.Contains(page, []byte(k.kind)) || bytes.Contains(page, []byte("p0")) {
				t.Errorf("/readyz: %d %s", status, page)
			}
			if _, page := r.Pages.Health(true); !bytes.Contains(page, []byte(k.kind)) {
				t.Errorf("/health: %s", page)
			}
			k.mend(p)
			r.awaitState(t, "p0", worker.Ready)
			eventually(t, 10*time.Second, "a hand-over works", func() bool {
				return post(t, r.URL+"/v1/chat/completions", chat("")).Header.Get("X-Sluice-Prefill-Worker") == "p0"
			})
			if _, page := r.Pages.Ready(false); r.metric(metric) != 0 || bytes.Contains(page, []byte(`"degraded"`)) {
				t.Errorf("with hand-overs again: %s is %v; /readyz %s", metric, r.metric(metric), page)
			}
		})
	}
}
