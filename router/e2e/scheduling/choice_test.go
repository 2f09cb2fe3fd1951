package scheduling

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// wantAffinity sends the first and second turns of several conversations, and checks that the
// second turn goes to the worker of the first. body returns a request for a conversation's words.
func wantAffinity(t *testing.T, r *harness.Router, path string, body func(words string) string, awaitIndex func(*testing.T)) {
	t.Helper()
	for i := range 6 {
		words := fmt.Sprintf("talk %d: %s", i, strings.Repeat(harness.Prompt, 2))
		one := harness.Post(t, r.URL+path, body(words))
		harness.WantStatus(t, one, 200)
		awaitIndex(t)
		two := harness.Post(t, r.URL+path, body(words+" and then the sun came up over the river and the fox went home to its den"))
		harness.WantStatus(t, two, 200)
		if a, b := one.Header.Get("X-Sluice-Worker"), two.Header.Get("X-Sluice-Worker"); a != b {
			t.Errorf("talk %d went to %s, then to %s", i, a, b)
		}
		if n, _ := strconv.Atoi(two.Header.Get("X-Sluice-Cached-Tokens")); n < 32 {
			t.Errorf("talk %d: %d cached tokens predicted", i, n)
		}
		awaitIndex(t)
	}
}

// TestEveryEventEncodingIsUnderstood: events in every encoding pass ZMQ, decoder and index, and
// determine the choice.
func TestEveryEventEncodingIsUnderstood(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		encoding, engine string
		bytes            bool
	}{
		{"vllm-array", "vllm", false}, {"vllm-map", "vllm", false}, {"vllm-map", "vllm", true}, {"sglang-array", "sglang", false}, {"sglang-map", "sglang", false},
	} {
		t.Run(fmt.Sprint(k.encoding, " bytes=", k.bytes), func(t *testing.T) {
			mod := func(o *sim.Options) { o.Encoding, o.Engine, o.BytesHashes = k.encoding, k.engine, k.bytes }
			a, b := harness.StartSim(t, mod), harness.StartSim(t, mod)
			r := harness.StartRouter(t, nil, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
			wantAffinity(t, r, "/v1/chat/completions", harness.ChatOf, func(t *testing.T) { harness.AwaitIndexed(t, r, a, b) })
			for _, id := range []string{"a", "b"} {
				for _, kind := range []string{"malformed", "gaps", "orphans"} {
					if n := r.Metric(`sluice_kv_feed_total{worker="` + id + `",rank="0",kind="` + kind + `"}`); n != 0 {
						t.Errorf("%s: %v %s", id, n, kind)
					}
				}
			}
		})
	}
}

func TestTokenSources(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	for _, k := range []struct{ mode, source string }{{"auto", "engine"}, {"engine", "engine"}, {"text", "text"}} {
		t.Run(k.mode, func(t *testing.T) {
			r := harness.StartRouter(t, func(c *config.Config) { c.Tokens.Mode = k.mode }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
			awaitIndex := func(t *testing.T) { harness.AwaitIndexed(t, r, a, b) }
			if k.mode == "text" {
				awaitIndex = func(*testing.T) {}
			}
			wantAffinity(t, r, "/v1/chat/completions", func(w string) string { return harness.ChatOf(k.mode + w) }, awaitIndex)
			if n := r.Metric(`sluice_prompts_total{source="` + k.source + `"}`); n == 0 {
				t.Errorf("no prompt's tokens came from %s", k.source)
			}
			id := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("explained "+k.mode)).Header.Get("X-Request-Id")
			if got := r.Explain(t, id).Decisions[0].PromptSource; got != k.source {
				t.Errorf("the explain record says %q, want %q", got, k.source)
			}
		})
	}
	t.Run("ids", func(t *testing.T) {
		r := harness.StartRouter(t, func(c *config.Config) { c.Tokens.Mode = "ids" }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
		a.ForgetRequests()
		b.ForgetRequests()
		for _, path := range []string{"/v1/completions", "/inference/v1/generate"} {
			wantAffinity(t, r, path, func(w string) string {
				ids := strings.ReplaceAll(strings.Trim(fmt.Sprint(sim.Tokenize(path+w)), "[]"), " ", ",")
				if path == "/v1/completions" {
					return `{"model":"sim","prompt":[` + ids + `],"max_tokens":4}`
				}
				return `{"token_ids":[` + ids + `],"sampling_params":{"max_tokens":4}}`
			}, func(t *testing.T) { harness.AwaitIndexed(t, r, a, b) })
		}
		for _, rec := range append(a.Requests(), b.Requests()...) {
			if rec.Path == "/tokenize" {
				t.Error("an engine was asked to tokenize ids")
			}
		}
	})
}

// TestMembersForTokenizers: an engine is asked for the ids of a prompt with the members that its own
// /tokenize takes.
func TestMembersForTokenizers(t *testing.T) {
	t.Parallel()
	for engine, want := range map[string][2]string{ // what the body has, and what it has not
		"vllm":   {`"add_generation_prompt"`, `"tool_choice"`},
		"sglang": {`"tool_choice"`, `"add_generation_prompt"`},
	} {
		e := harness.StartSim(t, func(o *sim.Options) { o.Engine = engine })
		r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "a"))
		body := `{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"` + harness.Prompt + `"}],"tool_choice":"none","add_generation_prompt":true}`
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body), 200)
		asked := ""
		for _, rec := range e.Requests() {
			if rec.Path == "/tokenize" {
				asked += string(rec.Body)
			}
		}
		if !strings.Contains(asked, want[0]) || strings.Contains(asked, want[1]) {
			t.Errorf("%s was asked %s; want %s and not %s", engine, asked, want[0], want[1])
		}
	}
}

// TestAffinityWithoutEvents: for engines without events the router predicts cached blocks from its
// own choices.
func TestAffinityWithoutEvents(t *testing.T) {
	off := func(o *sim.Options) { o.KVEvents = "off" }
	a, b := harness.StartSim(t, off), harness.StartSim(t, off)
	r := harness.StartRouter(t, nil, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	wantAffinity(t, r, "/v1/chat/completions", harness.ChatOf, func(*testing.T) {})
}

// TestAffinityWithoutEventConnection: engines whose events the router cannot receive, for example
// behind a firewall that passes only HTTP, are predicted like engines without events.
func TestAffinityWithoutEventConnection(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	unreachable := []string{"tcp://" + ln.Addr().String()}
	for name, cut := range map[string]func(w *config.Worker, e *sim.Engine){
		"no events": func(w *config.Worker, _ *sim.Engine) { w.KVEvents, w.KVReplay = unreachable, unreachable },
		"no replay": func(w *config.Worker, e *sim.Engine) { w.KVEvents, w.KVReplay = e.KVEndpoints(), unreachable },
	} {
		t.Run(name, func(t *testing.T) {
			var workers []config.Worker
			for _, id := range []string{"a", "b"} {
				e := harness.StartSim(t, nil)
				w := harness.SimWorker(e, worker.Aggregated, id)
				cut(&w, e)
				workers = append(workers, w)
			}
			r := harness.StartRouter(t, func(c *config.Config) { c.Schedule.InFlightWeight = 0 }, workers...)
			wantAffinity(t, r, "/v1/chat/completions", harness.ChatOf, func(*testing.T) {})
		})
	}
}

// TestTwoBlockSizes: in a fleet with two block sizes the look-up for each rank uses its own size.
func TestTwoBlockSizes(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, func(o *sim.Options) { o.BlockSize = 32 })
	r := harness.StartRouter(t, nil, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	where := map[string]int{}
	wantAffinity(t, r, "/v1/chat/completions", func(w string) string { return harness.ChatOf(w) }, func(t *testing.T) { harness.AwaitIndexed(t, r, a, b) })
	for i := range 24 { // ties are broken at random
		where[harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint("other ", i, harness.Prompt))).Header.Get("X-Sluice-Worker")]++
	}
	if where["a"] == 0 || where["b"] == 0 {
		t.Errorf("24 prompts went %v", where)
	}
}

// TestCacheSaltParts: requests with different cache salts share no cached blocks.
func TestCacheSaltParts(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"cache_salt":"one"`)), 200)
	harness.AwaitIndexed(t, r, e)
	for salt, cached := range map[string]bool{"one": true, "two": false} {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"cache_salt":"`+salt+`"`))
		if got := a.Header.Get("X-Sluice-Cached-Tokens") != "0"; got != cached {
			t.Errorf("salt %s: %s cached tokens predicted", salt, a.Header.Get("X-Sluice-Cached-Tokens"))
		}
		if got := cachedTokens(t, a) > 0; got != cached {
			t.Errorf("salt %s: the engine found %d", salt, cachedTokens(t, a))
		}
		harness.AwaitIndexed(t, r, e)
	}
}

// TestLostEventsAreReplayed: the router has lost event batches replayed.
func TestLostEventsAreReplayed(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("first "+harness.Prompt)), 200)
	harness.AwaitIndexed(t, r, e)
	e.Fault(sim.Fault{Kind: sim.LoseEvents, N: 3})
	for i := range 5 {
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint(i, harness.Prompt))), 200)
	}
	harness.AwaitIndexed(t, r, e)
	if n := r.Metric(`sluice_kv_feed_total{worker="w0",rank="0",kind="gaps"}`); n == 0 {
		t.Error("no gap was seen: the test shows nothing")
	}
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("0"+harness.Prompt))
	if got, found := a.Header.Get("X-Sluice-Cached-Tokens"), cachedTokens(t, a); got != strconv.Itoa(found) || found == 0 {
		t.Errorf("%s predicted, %d found", got, found)
	}
}

// TestExplainShowsAllTerms: the explain record of the admin API contains, for each leg, every
// candidate with the terms whose sum is its cost.
func TestExplainShowsAllTerms(t *testing.T) {
	p0, p1, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p0, worker.Prefill, "p0"), harness.SimWorker(p1, worker.Prefill, "p1"), harness.SimWorker(d, worker.Decode, "d0"))
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 200)
	harness.AwaitIndexed(t, r, p0, p1, d)
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "why"), 200)
	rec := r.Explain(t, "why")
	if rec.RequestID != "why" || len(rec.Decisions) != 2 || rec.Outcome == nil || rec.Outcome.Status != 200 || rec.Outcome.PromptTokens == 0 {
		t.Fatalf("record %+v", rec)
	}
	for i, leg := range []string{"prefill", "decode"} {
		dec := rec.Decisions[i]
		if dec.Leg != leg || dec.Chosen == "" || len(dec.Shown) != 2-i || dec.PromptTokens == 0 {
			t.Errorf("decision %+v", dec)
		}
		for _, c := range dec.Shown {
			sum := c.Terms.Prefill + c.Terms.Transfer + c.Terms.Queue + c.Terms.Waiting + c.Terms.Decode + c.Terms.Pressure + c.Terms.Eviction + c.Terms.Others
			if diff := sum - c.Cost; diff > 0.01 || diff < -0.01 {
				t.Errorf("%s: cost %v is not the sum of %+v", c.Rank, c.Cost, c.Terms)
			}
			if c.Feed != "live" {
				t.Errorf("%s: feed %s", c.Rank, c.Feed)
			}
		}
	}
	warmest := func(c schedule.Candidate) bool { return c.Cached > 0 }
	chosen := rec.Decisions[0].Shown[0]
	for _, c := range rec.Decisions[0].Shown {
		if c.Chosen {
			chosen = c
		}
	}
	if !warmest(chosen) {
		t.Errorf("prefill went to %+v, where nothing is cached", chosen)
	}
}

// TestBurstSpreads: a burst of requests without cached blocks spreads over the workers.
func TestBurstSpreads(t *testing.T) {
	t.Parallel()
	cost := sim.Cost{Step: 5 * time.Millisecond}
	var workers []config.Worker
	var engines []*sim.Engine
	for i := range 4 {
		e := harness.StartSim(t, func(o *sim.Options) { o.Speed, o.Cost = 1, cost })
		engines = append(engines, e)
		workers = append(workers, harness.SimWorker(e, worker.Aggregated, fmt.Sprint("w", i)))
	}
	// With this rate most requests wait in the router, and each goes to the rank that is free next. Otherwise all are sent
	// at once, and a load that an engine reports in that moment decides which one gets fewer.
	r := harness.StartRouter(t, func(c *config.Config) { c.Schedule.PrefillMS = 1 }, workers...)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			a, err := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint(i, " ", harness.Prompt)))
			if err != nil || a.Status != 200 {
				t.Errorf("%v %+v", err, a)
			}
		})
	}
	wg.Wait()
	for i, e := range engines {
		if n := e.Stats().Sum().Requests; n < 30 || n > 70 {
			t.Errorf("w%d took %d of 200 requests, want about 50", i, n)
		}
	}
	testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
}

// TestEmbeddingsAreNotCachedPrompts: a request without a cacheable prompt is placed by load alone,
// not by the cached blocks of an earlier request.
func TestEmbeddingsAreNotCachedPrompts(t *testing.T) {
	a := harness.StartSim(t, func(o *sim.Options) { o.KVEvents = "off" })
	r := harness.StartRouter(t, nil, harness.SimWorker(a, worker.Aggregated, "a"))
	chat := fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("a long prompt ", 200))
	for range 8 {
		for range 2 {
			if got := harness.Post(t, r.URL+"/v1/chat/completions", chat); got.Status != 200 {
				t.Fatal(got.Status)
			}
		}
		got := harness.Post(t, r.URL+"/v1/embeddings", `{"model":"sim","input":"hello"}`)
		if cached := got.Header.Get("X-Sluice-Cached-Tokens"); got.Status != 200 || cached != "" && cached != "0" {
			t.Fatalf("status %d, %q cached tokens predicted", got.Status, cached)
		}
	}
}
