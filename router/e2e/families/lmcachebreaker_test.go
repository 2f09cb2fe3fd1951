package families

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// withNotifyWait limits the wait for notifications to d.
func withNotifyWait(d time.Duration) func(*config.Config) {
	return func(c *config.Config) { c.PD.CompletionTimeout = d }
}

// TestLMCacheKVNeverWritten: a decode worker that has allocated memory for KV that is never written
// does not receive the decode leg, because it would read the previous content of that memory.
func TestLMCacheKVNeverWritten(t *testing.T) {
	g := startLMCache(t, nil, withNotifyWait(300*time.Millisecond))
	g.p.Fault(sim.Fault{Kind: sim.Stall, Path: "write", N: 1})
	for _, f := range harness.RequestForms(31, "") {
		g.wantSameAnswers(t, f)
	}
	if n := g.Fallbacks("not_completed"); n < 1 {
		t.Errorf("%v waits given up; want 1", n)
	}
	for _, d := range g.d {
		if n := d.Stats().Sum().GarbageReads; n != 0 {
			t.Errorf("%d reads of blocks that were not written", n)
		}
	}
}

// TestLMCacheSilentWorkerIsSkipped: a prefill worker that never sends notifications delays two
// requests. Then it receives no more while another worker sends them.
func TestLMCacheSilentWorkerIsSkipped(t *testing.T) {
	port := harness.FreePort(t)
	engine := func(role, proxy string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.PD, o.Role, o.LMCacheProxy = "lmcache", role, proxy })
	}
	silent, notifies, whole := engine("prefill", ""), engine("prefill", fmt.Sprintf("tcp://127.0.0.1:%d", port)), harness.StartSim(t, nil)
	workers := []config.Worker{harness.SimWorker(silent, worker.Prefill, "silent"), harness.SimWorker(notifies, worker.Prefill, "tells")}
	for i := range 2 {
		d := engine("decode", "")
		w := harness.SimWorker(d, worker.Decode, fmt.Sprint("d", i))
		side := []string{strconv.Itoa(d.SidePort())}
		w.Options = map[string][]string{"init_port": side, "alloc_port": side}
		workers = append(workers, w)
	}
	const wait = 100 * time.Millisecond
	r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("lmcache"), withNotifyWait(wait), func(c *config.Config) {
		c.LMCache.ProxyPort = port
		c.Tokens.Timeout = 10 * time.Second
		c.PD.MaxAttempts = 2
	}), workers...)
	began := time.Now()
	for i := range 12 {
		f := harness.RequestForms(40+i, "")[i%4]
		harness.WantSameAnswer(t, f.Name, harness.Post(t, r.URL+f.Path, f.Body), harness.Post(t, whole.URL()+f.Path, f.Body))
	}
	// Under load the other worker's notifications may be late as well, and the router tries the
	// silent worker again every 10 s.
	late := r.Metric(`sluice_kv_notifications_total{outcome="early"}`)
	if n, most := len(harness.GenerateRequests(silent)), 2+int(late)+int(time.Since(began)/(10*time.Second)); n < 2 || n > most {
		t.Errorf("the silent worker got %d of 12 hand-overs; want 2, %d at most", n, most)
	}
	if n := r.Metric("sluice_kv_notification_breakers_open"); n < 1 || late == 0 && n != 1 {
		t.Errorf("%v silent ranks, want 1", n)
	}
	if !strings.Contains(r.Logs.Tail(1<<20), "sends no notifications that its KV has been written") || !strings.Contains(r.Logs.Tail(1<<20), "rank=silent/0") {
		t.Error("the log does not say who is silent")
	}
}

// TestLMCacheOnlyDecodeWorkerSilent: after a missing notification or a failed prefill, the only decode
// worker may have unwritten blocks cached for the prompt. The router refuses requests with this
// prompt, because a plain request would read these blocks too. Other prompts work.
func TestLMCacheOnlyDecodeWorkerSilent(t *testing.T) {
	for _, c := range []struct {
		name, look string
		fault      sim.Fault
		waits      float64
	}{
		{"never written", "pd_proxy_host", sim.Fault{Kind: sim.Stall, Path: "write", N: 1}, 1},
		{"prefill breaks", "prefill on p0/0 failed", sim.Fault{Kind: sim.Reset, Leg: "prefill"}, 0},
		{"prefill answers 500", "prefill on p0/0 answered 500", sim.Fault{Kind: sim.Status, Status: 500, Leg: "prefill"}, 0},
		{"prefill answers 504", "prefill on p0/0 answered 504", sim.Fault{Kind: sim.Status, Status: 504, Leg: "prefill"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := startLMCacheOf(t, 1, nil, withNotifyWait(300*time.Millisecond))
			g.p.Fault(c.fault)
			f := harness.RequestForms(35, "")
			a := harness.Post(t, g.URL+f[0].Path, f[0].Body)
			if msg, _, _ := a.ErrorOf(t); a.Status != 503 || a.Header.Get("X-Sluice-Reason") != "kv_not_written" || !strings.Contains(msg, c.look) || !strings.Contains(msg, "d0/0") {
				t.Errorf("%d %s: %s", a.Status, a.Header.Get("X-Sluice-Reason"), msg)
			}
			if n := len(harness.GenerateRequests(g.d[0])); n != 0 {
				t.Errorf("decode was sent %d requests", n)
			}
			if n := g.Fallbacks("not_completed"); n != c.waits {
				t.Errorf("%v waits given up, want %v", n, c.waits)
			}
			if n := g.Metric(`sluice_requests_refused_total{endpoint="` + f[0].Path + `",reason="kv_not_written"}`); n != 1 {
				t.Errorf("%v refusals counted, want 1", n)
			}
			g.p.ClearFaults()
			for _, other := range harness.RequestForms(36, "")[:2] {
				g.wantSameAnswers(t, other)
			}
			if n := g.d[0].Stats().Sum().GarbageReads; n != 0 {
				t.Errorf("%d reads of blocks that were not written", n)
			}
			harness.WantIdle(t, g.Router, 20*time.Second, g.p, g.d[0])
		})
	}
}

// TestLMCachePrefillRefuses: a prefill engine that answers 429 or 503 has written nothing, so the
// decode worker that it was to write to runs the whole request.
func TestLMCachePrefillRefuses(t *testing.T) {
	for _, status := range []int{429, 503} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			t.Parallel()
			g := startLMCacheOf(t, 1, nil, nil)
			g.p.Fault(sim.Fault{Kind: sim.Status, Status: status, Leg: "prefill"})
			for _, f := range harness.RequestForms(37, "")[:2] {
				g.wantSameAnswers(t, f)
			}
		})
	}
}

// TestLMCacheAllWorkersSilent: if no prefill worker sends notifications, decode workers run whole
// requests, without a wait for each request, also those that had to wait for capacity.
func TestLMCacheAllWorkersSilent(t *testing.T) {
	g := startLMCache(t, func(o *sim.Options) { o.LMCacheProxy = "" }, withNotifyWait(50*time.Millisecond))
	began := time.Now()
	for i := range 8 {
		g.wantSameAnswers(t, harness.RequestForms(60+i, "")[i%4])
	}
	tried := float64(time.Since(began) / (10 * time.Second))
	if n, plain := g.Fallbacks("not_completed"), g.Fallbacks("notifications_missing"); n < 2 || n > 2+tried || n+plain != 8 {
		t.Errorf("%v waits without a notification and %v requests without a wait; want 2 and 6", n, plain)
	}
	if n := float64(len(harness.GenerateRequests(g.p))); n > 2+tried {
		t.Errorf("%v hand-overs by a worker that does not tell; want 2", n)
	}
	fill := func(work time.Duration) {
		for _, k := range g.AllRanks() {
			k.PendingWork.Add(int64(work))
		}
	}
	fill(time.Minute)
	var took time.Duration
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.wantSameAnswers(t, harness.RequestForms(80, "")[0])
	}()
	waits := func() bool { return g.Metric(`sluice_admission_waiting_requests{class="default"}`) == 1 }
	testwait.UntilWithin(t, 20*time.Second, "a request waits for capacity", waits)
	began, plain := time.Now(), g.Fallbacks("notifications_missing")
	fill(-time.Minute)
	<-done
	if took = time.Since(began); took > 5*time.Second || g.Fallbacks("notifications_missing") > plain+1 {
		t.Errorf("a request that had waited was served %s after there was capacity, with %v notes; want at once, with one", took, g.Fallbacks("notifications_missing")-plain)
	}
}

// TestLMCacheWaitDisabled: workers that are configured to send no notifications
// (pd_skip_proxy_notification) have written the KV when they answer.
func TestLMCacheWaitDisabled(t *testing.T) {
	g := startLMCache(t, func(o *sim.Options) { o.LMCacheProxy, o.EarlyNotify = "", true }, withNotifyWait(0))
	for _, f := range harness.RequestForms(70, "") {
		if a := g.wantSameAnswers(t, f); a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Errorf("%s: no prefill: %v", f.Name, a.Header)
		}
	}
	if local, received := g.promptTokens(); local != 0 || received == 0 {
		t.Errorf("decode computed %d tokens of prompts itself, took %d", local, received)
	}
	if n := g.Fallbacks("not_completed") + g.Fallbacks("notifications_missing"); n != 0 {
		t.Errorf("%v fall-backs", n)
	}
}
