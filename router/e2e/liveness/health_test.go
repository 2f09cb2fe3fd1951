package liveness

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestDeadWorkerIsExcluded: with the default intervals the router excludes a worker within 2 s
// after it dies or hangs, and includes it again once it is healthy.
func TestDeadWorkerIsExcluded(t *testing.T) {
	t.Parallel()
	const rule, slack = 2 * time.Second, time.Second // the slack is for a loaded machine
	for _, k := range []struct {
		name      string
		die, back func(*sim.Engine)
	}{
		{"killed", (*sim.Engine).Crash, func(e *sim.Engine) { e.Restart() }},
		{"refuses", func(e *sim.Engine) { e.Fault(sim.Fault{Kind: sim.Refuse}) }, (*sim.Engine).ClearFaults},
		{"hangs", func(e *sim.Engine) { e.Fault(sim.Fault{Kind: sim.Stall, Path: "/"}) }, (*sim.Engine).ClearFaults},
		{"answers 503", func(e *sim.Engine) { e.Fault(sim.Fault{Kind: sim.Status, Path: "/"}) }, (*sim.Engine).ClearFaults},
	} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
			r := harness.StartRouter(t, func(c *config.Config) { c.Health = config.Default().Health }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
			k.die(a)
			began := time.Now()
			testwait.UntilWithin(t, 10*time.Second, "a is out", func() bool { return r.State("a") == worker.Unhealthy })
			took := time.Since(began)
			t.Logf("out after %v", took.Round(time.Millisecond))
			if took > rule+slack {
				t.Errorf("out only after %v, want within %v", took, rule)
			}
			for range 5 {
				if got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); got.Status != 200 || got.Header.Get("X-Sluice-Worker") != "b" {
					t.Errorf("status %d from %q", got.Status, got.Header.Get("X-Sluice-Worker"))
				}
			}
			k.back(a)
			began = time.Now()
			testwait.UntilWithin(t, 10*time.Second, "a is back", func() bool { return r.State("a") == worker.Ready })
			t.Logf("back after %v", time.Since(began).Round(time.Millisecond))
		})
	}
}

// TestTrafficDetectsDeadWorker: failing requests reveal a dead engine before a probe does.
func TestTrafficDetectsDeadWorker(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Health.Interval = time.Minute
		c.Schedule.Policy = "round_robin"
	}, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	a.Crash()
	for range 6 {
		if got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); got.Status != 200 || got.Header.Get("X-Sluice-Worker") != "b" {
			t.Errorf("status %d from %q: a refused request runs elsewhere", got.Status, got.Header.Get("X-Sluice-Worker"))
		}
	}
	if s := r.State("a"); s != worker.Unhealthy {
		t.Errorf("a is %v after its traffic failed", s)
	}
}

// TestRestartDropsOldBlocks: an engine is killed and restarted on the same address. The first
// choice after its return does not count the blocks that it had before.
func TestRestartDropsOldBlocks(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	const incarnations = 3
	dropped := 0
	for incarnation := range incarnations {
		awaitCachedPrompt(t, r, e)
		dropped += r.Index.Len()
		if incarnation == 1 {
			// Too fast for a probe to see; the event feed or the next scrape reveals it.
			e.Restart()
			testwait.UntilWithin(t, 10*time.Second, "the old blocks are gone", func() bool { return r.Index.Len() == 0 })
		} else {
			e.Crash()
			testwait.UntilWithin(t, 5*time.Second, "w0 is out", func() bool { return r.State("w0") == worker.Unhealthy })
			e.Restart()
			testwait.UntilWithin(t, 5*time.Second, "w0 is back", func() bool { return r.State("w0") == worker.Ready })
		}
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		if a.Status != 200 || a.Header.Get("X-Sluice-Cached-Tokens") != "0" {
			t.Errorf("life %d: status %d, %s cached tokens predicted; want 0: they died with the process", incarnation, a.Status, a.Header.Get("X-Sluice-Cached-Tokens"))
		}
	}
	harness.LogFigure(t, 7, "%d ends of an engine, %d blocks that died with it, none predicted to the next request", incarnations, dropped)
}

// awaitCachedPrompt sends the same prompt until its blocks are predicted and in the index.
func awaitCachedPrompt(t *testing.T, r *harness.Router, engines ...*sim.Engine) {
	t.Helper()
	testwait.UntilWithin(t, 10*time.Second, "cached tokens are predicted", func() bool {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		// The router predicts blocks as soon as it sends the prompt; events put them in the index.
		return a.Status == 200 && a.Header.Get("X-Sluice-Cached-Tokens") != "0" && r.Index.Len() > 0
	})
}

func TestReadyzNamesMissingParts(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	d.Crash()
	r := harness.LaunchRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	testwait.UntilWithin(t, 5*time.Second, "p0 is ready", func() bool { return r.State("p0") == worker.Ready })
	a := harness.Get(t, r.URL+"/readyz")
	harness.WantStatus(t, a, 503)
	if !strings.Contains(string(a.Body), "decode worker") {
		t.Errorf("/readyz does not say that decode is missing: %s", a.Body)
	}
	_, details := r.Pages.Ready(true)
	for _, want := range []string{"decode", "d0", "connection refused"} {
		if !strings.Contains(string(details), want) {
			t.Errorf("the details do not say %q: %s", want, details)
		}
	}
	if strings.Contains(string(a.Body), "prefill worker") {
		t.Errorf("/readyz waits for prefill, which is there: %s", a.Body)
	}
	harness.WantStatus(t, harness.Get(t, r.URL+"/health"), 503)
	harness.WantStatus(t, harness.Get(t, r.URL+"/livez"), 200)
	d.Restart()
	testwait.UntilWithin(t, 5*time.Second, "/readyz is 200", func() bool { return harness.Get(t, r.URL+"/readyz").Status == 200 })
	harness.WantStatus(t, harness.Get(t, r.URL+"/health"), 200)
	var models struct{ Data []struct{ ID string } }
	if a := harness.Get(t, r.URL+"/v1/models"); json.Unmarshal(a.Body, &models) != nil || len(models.Data) != 1 || models.Data[0].ID != "sim" {
		t.Errorf("/v1/models: %s", a.Body)
	}
	for _, w := range []string{"p0", "d0"} {
		if a := harness.Get(t, r.URL+"/metrics"); !strings.Contains(string(a.Body), `worker="`+w+`"`) {
			t.Errorf("/metrics does not know %s", w)
		}
	}
	if a := harness.Get(t, r.URL+"/version"); !strings.Contains(string(a.Body), "version") {
		t.Errorf("/version: %s", a.Body)
	}
}

// TestRequestsWaitForTheFirstWorker: requests that arrive before there is a healthy worker wait
// for one.
func TestRequestsWaitForTheFirstWorker(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	d.Crash()
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Timeouts.PoolWait = 20 * time.Second }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			a, err := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d`, i)))
			if err != nil || a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || a.Header.Get("X-Sluice-Queue-Time") == "" {
				t.Errorf("%v %+v", err, a)
			}
		})
	}
	testwait.UntilWithin(t, 5*time.Second, "all wait", func() bool { return r.Metric("sluice_requests_accepted_total") == 10 })
	d.Restart()
	wg.Wait()
}

// TestModelsBeforeFirstProbe: the router refuses no model as unknown while it does not know the
// models of every worker. The request waits for the first worker, or for those not probed yet.
func TestModelsBeforeFirstProbe(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	path := filepath.Join(t.TempDir(), "workers.yaml")
	harness.WriteFile(t, path, "workers: []\n")
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Timeouts.PoolWait, c.Discovery.File = 300*time.Millisecond, path })
	refused := func(want string) {
		t.Helper()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		harness.WantReason(t, a, 503, "no_worker")
		if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, want) || a.Header.Get("Retry-After") == "" {
			t.Errorf("Retry-After %q, message without %q: %s", a.Header.Get("Retry-After"), want, msg)
		}
	}
	refused("none is known")
	e.Crash()
	harness.WriteFile(t, path, fmt.Sprintf("workers: [{id: w0, url: %q}]\n", e.URL()))
	testwait.UntilWithin(t, 5*time.Second, "the worker is taken in", func() bool { return r.State("w0") == worker.Joining })
	refused("the models of 1 of 1 known workers are not known yet")
	e.Restart()
	testwait.UntilWithin(t, 5*time.Second, "it is ready", func() bool { return r.State("w0") == worker.Ready })
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200)
	harness.WantReason(t, harness.Post(t, r.URL+"/v1/chat/completions", `{"model":"other","messages":[]}`), 404, "unknown_model")
}

// TestEmptyPoolErrorNamesLabels: the error about an empty pool names the requested labels.
func TestEmptyPoolErrorNamesLabels(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	wp, wd := harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0")
	wd.Labels = []string{"slow"}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Timeouts.PoolWait = 100 * time.Millisecond
		c.PD.DecodeLabels = []string{"fast", "gold"}
	}, wp, wd)
	began := time.Now()
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "empty")
	harness.WantReason(t, a, 503, "no_decode_worker")
	if waited := a.Header.Get("X-Sluice-Queue-Time"); waited == "" || a.Header.Get("X-Sluice-Waited") != waited {
		t.Errorf("X-Sluice-Queue-Time %q, its former name X-Sluice-Waited %q; want one time in both", waited, a.Header.Get("X-Sluice-Waited"))
	}
	if time.Since(began) < 100*time.Millisecond || a.Header.Get("Retry-After") == "" {
		t.Errorf("after %v, Retry-After %q; want pool_wait and a hint", time.Since(began), a.Header.Get("Retry-After"))
	}
	msg, _, _ := a.ErrorOf(t)
	for _, want := range []string{"decode", `"sim"`, "fast", "gold"} {
		if !strings.Contains(msg, want) {
			t.Errorf("message does not say %s: %s", want, msg)
		}
	}
	if o := r.Outcome(t, "empty").Outcome; o.Reason != "no_decode_worker" {
		t.Errorf("outcome %+v", o)
	}
}

// TestLabelsSelectThePool: labels restrict the workers of a role.
func TestLabelsSelectThePool(t *testing.T) {
	t.Parallel()
	p, d0, d1 := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
	w0, w1 := harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1")
	w0.Labels, w1.Labels = []string{"slow"}, []string{"x", "fast"}
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.DecodeLabels = []string{"fast"} }, harness.SimWorker(p, worker.Prefill, "p0"), w0, w1)
	for i := range 6 {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d`, i)))
		if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "d1" {
			t.Errorf("status %d on %q, want d1", a.Status, a.Header.Get("X-Sluice-Worker"))
		}
	}
}

// TestModelSelectsThePool: the model selects the pool; one model may be disaggregated and another
// not.
func TestModelSelectsThePool(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	other := harness.StartSim(t, func(o *sim.Options) { o.Model = "other" })
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"), harness.SimWorker(other, worker.Aggregated, "o0"))
	a := harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(harness.Chat(""), `"sim"`, `"other"`, 1))
	if a.Status != http.StatusOK || a.Header.Get("X-Sluice-Worker") != "o0" || a.Header.Get("X-Sluice-Prefill-Worker") != "" {
		t.Errorf("status %d, headers %v", a.Status, a.Header)
	}
	a = harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	if a.Status != http.StatusOK || a.Header.Get("X-Sluice-Worker") != "d0" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("status %d, headers %v", a.Status, a.Header)
	}
}

// TestDisaggregationDisabledForModel: the configuration may disable disaggregation for one model
// that has prefill workers.
func TestDisaggregationDisabledForModel(t *testing.T) {
	t.Parallel()
	p, d, whole := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		off := c.PD
		off.Family = "off"
		c.Models = map[string]config.Model{"sim": {PD: &off}}
	}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"), harness.SimWorker(whole, worker.Aggregated, "w0"))
	for range 4 {
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "w0" {
			t.Errorf("status %d on %q, want w0", a.Status, a.Header.Get("X-Sluice-Worker"))
		}
	}
}
