package families

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
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

// lmcacheFleet is one prefill worker and some decode workers of two tensor-parallel ranks, with
// notifications over ZMQ, and an aggregated reference engine.
type lmcacheFleet struct {
	p, whole *sim.Engine
	d        []*sim.Engine
	*harness.Router
}

func startLMCache(t *testing.T, prefill func(*sim.Options), cfg func(*config.Config)) *lmcacheFleet {
	t.Helper()
	return startLMCacheOf(t, 2, prefill, cfg)
}

// startLMCacheOf starts an lmcacheFleet with a number of decode workers.
func startLMCacheOf(t *testing.T, decode int, prefill func(*sim.Options), cfg func(*config.Config)) *lmcacheFleet {
	t.Helper()
	port := harness.FreePort(t)
	g := &lmcacheFleet{whole: harness.StartSim(t, nil), d: make([]*sim.Engine, decode)}
	g.p = harness.StartSim(t, func(o *sim.Options) {
		o.PD, o.Role, o.LMCacheProxy = "lmcache", "prefill", fmt.Sprintf("tcp://127.0.0.1:%d", port)
		if prefill != nil {
			prefill(o)
		}
	})
	workers := []config.Worker{harness.SimWorker(g.p, worker.Prefill, "p0")}
	for i := range g.d {
		g.d[i] = harness.StartSim(t, harness.UsingPD("lmcache", "decode"))
		side := strconv.Itoa(g.d[i].SidePort())
		w := harness.SimWorker(g.d[i], worker.Decode, fmt.Sprintf("d%d", i))
		w.Options = map[string][]string{"init_port": {side, side}, "alloc_port": {side, side}}
		workers = append(workers, w)
	}
	g.Router = harness.StartRouter(t, harness.AllOf(harness.UsingFamily("lmcache"), func(c *config.Config) {
		c.LMCache.ProxyPort = port
		c.Tokens.Timeout = 10 * time.Second
		if cfg != nil {
			cfg(c)
		}
	}), workers...)
	return g
}

func (g *lmcacheFleet) wantSameAnswers(t *testing.T, f harness.RequestForm) *harness.Answer {
	t.Helper()
	a := harness.Post(t, g.URL+f.Path, f.Body)
	harness.WantSameAnswer(t, f.Name, a, harness.Post(t, g.whole.URL()+f.Path, f.Body))
	return a
}

// promptTokens returns how many prompt tokens the decode workers computed and received.
func (g *lmcacheFleet) promptTokens() (local, received int) {
	for _, d := range g.d {
		s := d.Stats().Sum()
		local, received = local+s.LocalCompute, received+s.External+s.LocalHit
	}
	return local, received
}

// TestLMCacheFamily: whatever the order of prefill's response and the notifications, decode runs on
// the worker to which prefill wrote, after everything was written. The client receives the output of
// the reference engine.
func TestLMCacheFamily(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		prefill func(*sim.Options)
		fault   *sim.Fault
	}{
		{"as it comes", nil, nil},
		{"notified before the answer", func(o *sim.Options) { o.EarlyNotify = true }, nil},
		{"the older message", func(o *sim.Options) { o.OldNotify = true }, nil},
		{"notified late", nil, &sim.Fault{Kind: sim.Slow, Path: "notify", Delay: 60 * time.Millisecond}},
		{"notified twice", nil, &sim.Fault{Kind: sim.Malformed, Path: "notify"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := startLMCache(t, c.prefill, nil)
			if c.fault != nil {
				g.p.Fault(*c.fault)
			}
			for _, f := range harness.RequestForms(10, "") {
				began := time.Now()
				a := g.wantSameAnswers(t, f)
				if a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
					t.Errorf("%s: no prefill: %v", f.Name, a.Header)
				}
				if c.fault != nil && c.fault.Kind == sim.Slow && time.Since(began) < c.fault.Delay {
					t.Errorf("%s: decode did not wait for the notifications", f.Name)
				}
			}
			if local, received := g.promptTokens(); local != 0 || received == 0 {
				t.Errorf("decode computed %d tokens of prompts itself, took %d", local, received)
			}
			for _, d := range g.d {
				for _, rec := range harness.GenerateRequests(d) {
					if rec.Path != "/v1/completions" || harness.Member(t, rec.Body, "kv_transfer_params") != "" || harness.Member(t, rec.Body, "max_tokens") != "11" {
						t.Errorf("decode was sent %s %s", rec.Path, rec.Body)
					}
				}
			}
			if n := g.Metric(`sluice_kv_notifications_total{outcome="received"}`); n < 8 {
				t.Errorf("%v notifications counted for 4 requests of two ranks", n)
			}
			if n := g.Fallbacks("not_completed") + g.Fallbacks("decode_only"); n != 0 {
				t.Errorf("%v fall-backs", n)
			}
			harness.WantIdle(t, g.Router, 10*time.Second, g.d[0], g.d[1])
		})
	}
}

func TestLMCacheNotificationNeverComes(t *testing.T) {
	g := startLMCache(t, nil, func(c *config.Config) { c.PD.Lease, c.PD.LeaseMargin = time.Second, 900*time.Millisecond })
	g.p.Fault(sim.Fault{Kind: sim.Stall, Path: "notify"}) // one of two ranks sends no notification
	began := time.Now()
	for _, f := range harness.RequestForms(11, "")[:2] {
		g.wantSameAnswers(t, f)
	}
	if took := time.Since(began); took < 200*time.Millisecond || g.Fallbacks("not_completed") != 2 {
		t.Errorf("after %s, %v waits given up; want 2, of 100ms each", took, g.Fallbacks("not_completed"))
	}
}

func TestLMCacheClientAbortsWhileWaiting(t *testing.T) {
	g := startLMCache(t, nil, nil)
	g.p.Fault(sim.Fault{Kind: sim.Stall, Path: "notify"})
	f := harness.RequestForms(12, "")[0]
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { harness.TryPost(ctx, g.URL+f.Path, f.Body, "X-Request-Id", "gone-1") })
	testwait.UntilWithin(t, 10*time.Second, "prefill has answered", func() bool { return g.p.Stats().Sum().GeneratedTokens == 1 })
	time.Sleep(20 * time.Millisecond) // until the router has the response; nothing shows that it waits
	cancel()
	wg.Wait()
	if rec := g.Outcome(t, "gone-1"); rec.Outcome.Reason != "client_gone" {
		t.Errorf("%+v", rec.Outcome)
	}
	if n := len(harness.GenerateRequests(g.d[0])) + len(harness.GenerateRequests(g.d[1])); n != 0 {
		t.Errorf("decode was sent %d requests of nobody", n)
	}
	harness.WantIdle(t, g.Router, 10*time.Second, g.d[0], g.d[1])
}

func TestLMCacheFailures(t *testing.T) {
	t.Parallel()
	t.Run("prefill", func(t *testing.T) {
		g := startLMCache(t, nil, nil)
		g.p.Fault(sim.Fault{Kind: sim.Status, Leg: "prefill"})
		for _, f := range harness.RequestForms(13, "") {
			g.wantSameAnswers(t, f)
		}
		if g.Fallbacks("decode_only") != 4 {
			t.Errorf("%v decode-only runs, want 4", g.Fallbacks("decode_only"))
		}
	})
	for _, kind := range []sim.FaultKind{sim.Status, sim.Reset, sim.Crash} {
		t.Run("decode "+kind.String(), func(t *testing.T) {
			g := startLMCache(t, nil, nil)
			g.d[0].Fault(sim.Fault{Kind: kind, Leg: "decode"})
			for _, f := range harness.RequestForms(14, "") {
				g.wantSameAnswers(t, f)
			}
			if g.d[0].Stats().Faults == 0 {
				t.Error("the failing worker was never chosen: the test shows nothing")
			}
			if local, _ := g.promptTokens(); local != 0 {
				t.Errorf("decode computed %d tokens: a pair that failed was not run again as a pair", local)
			}
		})
	}
	t.Run("decode in mid-stream", func(t *testing.T) {
		g := startLMCache(t, nil, nil)
		for _, d := range g.d {
			d.Fault(sim.Fault{Kind: sim.StreamFail, Leg: "decode", After: 2})
		}
		f := harness.RequestForms(15, "")[1]
		a := harness.Post(t, g.URL+f.Path, f.Body)
		if s := string(a.Body); a.Status != 200 || !strings.Contains(s, `"error":{`) || strings.Count(s, "data: [DONE]") != 1 || !strings.Contains(s, `"role":"assistant"`) {
			t.Errorf("%d %s", a.Status, s)
		}
	})
}

// TestLMCacheUnsupportedRequests: requests that the family does not support run on one worker, with
// the reason recorded, or are refused if the configuration says so.
func TestLMCacheUnsupportedRequests(t *testing.T) {
	requests := map[string]string{
		"tools":            `{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}]}`,
		"media":            `{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`,
		"reasoning":        `{"model":"sim","max_tokens":5,"messages":[{"role":"user","content":"a"}],"reasoning_effort":"high"}`,
		"multiple_choices": `{"model":"sim","max_tokens":5,"n":2,"messages":[{"role":"user","content":"a"}]}`,
	}
	g := startLMCache(t, nil, nil)
	for why, body := range requests {
		a := harness.Post(t, g.URL+"/v1/chat/completions", body)
		if a.Status != 200 || g.Fallbacks(why) != 1 || a.Header.Get("X-Sluice-Prefill-Worker") != "" {
			t.Errorf("%s: %d, counted %v: %s", why, a.Status, g.Fallbacks(why), a.Body)
		}
	}
	if n := len(harness.GenerateRequests(g.p)); n != 0 {
		t.Errorf("prefill was sent %d of them", n)
	}
	strict := startLMCache(t, nil, func(c *config.Config) { c.PD.DecodeOnlyFallback = false })
	for why, body := range requests {
		if why == "multiple_choices" {
			continue
		}
		a := harness.Post(t, strict.URL+"/v1/chat/completions", body)
		if msg, _, _ := a.ErrorOf(t); a.Status != 400 || !strings.Contains(msg, why) || !strings.Contains(msg, "decode_only_fallback") {
			t.Errorf("%s with pd.decode_only_fallback off: %d %s", why, a.Status, msg)
		}
	}
}

func TestLMCacheEnds(t *testing.T) {
	g := startLMCache(t, nil, nil)
	for _, f := range harness.RequestForms(16, "") {
		one := strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":1`, 1)
		g.wantSameAnswers(t, harness.RequestForm{Name: f.Name + ", one token", Path: f.Path, Body: one})
		two := strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":2`, 1)
		g.wantSameAnswers(t, harness.RequestForm{Name: f.Name + ", two tokens", Path: f.Path, Body: two})

		// A stop string that begins in the first token and ends in the second.
		text := harness.Post(t, g.whole.URL()+f.Path, two).Text(t)
		stop, _ := json.Marshal(text[1:])
		stopped := strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":12,"stop":[`+string(stop)+`]`, 1)
		g.wantSameAnswers(t, harness.RequestForm{Name: f.Name + ", a stop string over the splice point", Path: f.Path, Body: stopped})

		// The first token is the last one.
		first, _ := json.Marshal(harness.Post(t, g.whole.URL()+f.Path, one).Text(t))
		final := strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":12,"include_stop_str_in_output":true,"stop":[`+string(first)+`]`, 1)
		g.wantSameAnswers(t, harness.RequestForm{Name: f.Name + ", a stop at the first token", Path: f.Path, Body: final})
	}
	// A chat without a limit runs to its own end, not to the 16 tokens of completions.
	text, _ := json.Marshal(harness.PromptWords(30, 17))
	body := `{"model":"sim","messages":[{"role":"user","content":` + string(text) + `}],"seed":5}`
	a := g.wantSameAnswers(t, harness.RequestForm{Name: "no limit", Path: "/v1/chat/completions", Body: body})
	if a.Header.Get("X-Sluice-Prefill-Worker") == "" {
		t.Error("a chat without max_tokens was not handed over")
	}
}
