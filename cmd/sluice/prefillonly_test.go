package main

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// prefillOnlyAnswer is what a prefill-only request is answered with.
type prefillOnlyAnswer struct {
	Object       string `json:"object"`
	Worker       string `json:"worker"`
	Role         string `json:"role"`
	PromptTokens int    `json:"prompt_tokens"`
	CachedBefore *int   `json:"cached_tokens_before"`
	Blocks       int    `json:"blocks"`
	BlockSize    int    `json:"block_size"`
}

func (a *answer) prefillOnly(t *testing.T) (w prefillOnlyAnswer) {
	t.Helper()
	if err := json.Unmarshal(a.Body, &w); err != nil || a.Status != 200 || w.Object != "sluice.prefill" {
		t.Fatalf("%d %s (%v)", a.Status, a.Body, err)
	}
	return w
}

// allowPrefillOnly has max_tokens: 0 ask for prefill alone, as the header does.
func allowPrefillOnly(c *config.Config) { c.Steering.PrefillOnly = "any" }

var prefillOnlyPrompt = strings.Repeat("a prompt that many will begin with, ", 20)

// TestPrefillOnly warms a prefill worker, leaves nothing pinned there, and the
// next request of that prompt finds it.
func TestPrefillOnly(t *testing.T) {
	for _, c := range []struct{ name, header, replaced string }{
		{"by max_tokens", "", `"max_tokens":0,"stream":true`},
		{"by header", "true", `"max_tokens":40,"n":2`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
			r := startRouter(t, allowPrefillOnly, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
			body := strings.Replace(chatOf(prefillOnlyPrompt), `"max_tokens":4`, c.replaced, 1)
			headers := []string{"X-Request-Id", "warm"}
			if c.header != "" {
				headers = append(headers, "X-Sluice-Prefill-Only", c.header)
			}
			a := post(t, r.URL+"/v1/chat/completions", body, headers...)
			w := a.prefillOnly(t)
			if w.Worker != "p0" || w.Role != "prefill" || w.CachedBefore == nil || *w.CachedBefore != 0 || w.PromptTokens < 100 || w.Blocks != w.PromptTokens/w.BlockSize {
				t.Errorf("%s", a.Body)
			}
			if !strings.HasPrefix(a.Header.Get("X-Sluice-Plan"), "prefill_only; reason=") || a.Header.Get("X-Sluice-Worker") != "p0" {
				t.Errorf("%v", a.Header)
			}
			if n := len(generateRequests(d)); n != 0 {
				t.Errorf("%d decodes", n)
			}
			if s := p.Stats(); s.Ranks[0].BlocksPinned != 0 || s.Ranks[0].LeasesCreated != 0 {
				t.Errorf("%d blocks pinned on the prefill worker, %d leases given", s.Ranks[0].BlocksPinned, s.Ranks[0].LeasesCreated)
			}
			eventually(t, 10*time.Second, "the prompt is found", func() bool {
				a := post(t, r.URL+"/v1/chat/completions", chatOf(prefillOnlyPrompt))
				return a.Status == 200 && a.Header.Get("X-Sluice-Cached-Tokens") != "0"
			})
			again := post(t, r.URL+"/v1/chat/completions", body, headers...).prefillOnly(t)
			if again.CachedBefore == nil || *again.CachedBefore < again.PromptTokens-2*again.BlockSize {
				t.Errorf("again: %+v", again)
			}
			if o := r.outcome(t, "warm").Outcome; o.Status != 200 || o.OutputTokens != 0 {
				t.Errorf("%+v", o)
			}
			eventually(t, 5*time.Second, "nothing is booked", func() bool { return r.reservedLoad() == "" })
		})
	}
}

// Every endpoint that computes a prompt can be asked, on aggregated workers too.
func TestPrefillOnlyOnEveryEndpoint(t *testing.T) {
	e := startSim(t, nil)
	r := startRouter(t, allowPrefillOnly, simWorker(e, worker.Aggregated, "w0"))
	for path, body := range map[string]string{
		"/v1/chat/completions":   `{"model":"sim","messages":[{"role":"user","content":"hello there, warm me"}],"max_completion_tokens":0}`,
		"/v1/completions":        `{"model":"sim","prompt":"hello there, warm me","max_tokens":0}`,
		"/v1/responses":          `{"model":"sim","input":"hello there, warm me","max_output_tokens":0}`,
		"/v1/messages":           `{"model":"sim","messages":[{"role":"user","content":"hello there, warm me"}],"max_tokens":0}`,
		"/inference/v1/generate": `{"model":"sim","token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"sampling_params":{"max_tokens":0}}`,
	} {
		a := post(t, r.URL+path, body)
		if a.Status != 200 || a.prefillOnly(t).Role != "aggregated" {
			t.Errorf("%s: %d %s", path, a.Status, a.Body)
		}
	}
	for _, rec := range generateRequests(e) {
		if strings.Contains(string(rec.Body), `tokens":0`) {
			t.Errorf("the engine was asked for no token: %s", rec.Body)
		}
	}
}

// What is no prefill-only request stays the engine's to answer, and what cannot
// be is refused.
func TestPrefillOnlyRefused(t *testing.T) {
	e := startSim(t, nil)
	at0 := []config.Worker{simWorker(e, worker.Aggregated, "w0")}
	r := startRouter(t, allowPrefillOnly, at0...)
	byDefault := startRouter(t, nil, at0...)
	off := startRouter(t, func(c *config.Config) { c.Steering.PrefillOnly = "off" }, at0...)
	only := startRouter(t, func(c *config.Config) { c.Steering.PrefillOnly = "header" }, at0...)
	lp, ld := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	lm := startRouter(t, func(c *config.Config) { c.PD.Family = "sglang"; allowPrefillOnly(c) }, simWorker(lp, worker.Prefill, "p0"), simWorker(ld, worker.Decode, "d0"))
	none := strings.Replace(chat(""), `"max_tokens":12`, `"max_tokens":0`, 1)
	for _, c := range []struct {
		name         string
		r            *testRouter
		body, header string
		status       int
		says         string
	}{
		{"by default: the engine's own refusal", byDefault, none, "", 400, "max_tokens"},
		{"by default: the header", byDefault, none, "true", 200, "sluice.prefill"},
		{"off: the engine's own refusal", off, none, "", 400, "max_tokens"},
		{"header only: likewise", only, none, "", 400, "max_tokens"},
		{"header only: the header", only, none, "true", 200, "sluice.prefill"},
		{"off: the header", off, chat(""), "true", 400, "steering.prefill_only is off"},
		{"a word", r, chat(""), "yes", 400, "want true or false"},
		{"false", r, chat(""), "false", 200, "choices"},
		{"scores", r, `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":0,"logprobs":true}`, "", 400, "max_tokens"},
		{"a family without", lm, none, "", 400, "family sglang takes no prompt without a decode worker"},
		{"a family without, by header", lm, chat(""), "true", 400, "X-Sluice-Prefill-Only"},
		{"an unknown model", r, `{"model":"other","prompt":"x","max_tokens":0}`, "", 404, "does not exist"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := post(t, c.r.URL+"/v1/chat/completions", c.body, slices.DeleteFunc([]string{"X-Sluice-Prefill-Only", c.header}, func(string) bool { return c.header == "" })...)
			if a.Status != c.status || !strings.Contains(string(a.Body), c.says) {
				t.Errorf("%d %s; want %d with %q", a.Status, a.Body, c.status, c.says)
			}
			if c.status >= 400 {
				a.errorOf(t)
			}
		})
	}
}

// TestPrefillOnlyRetriesElsewhere: an engine that fails is left out; a refusal of the
// request itself passes through; a client that leaves takes the leg down.
func TestPrefillOnlyRetriesElsewhere(t *testing.T) {
	bad := startScripted(t, replyHandler(503, `{"error":{"message":"full"}}`))
	p, d := startSim(t, simRole("prefill")), startSim(t, func(o *sim.Options) { o.Role = "decode" })
	r := startRouter(t, allowPrefillOnly, bad.worker(worker.Prefill, "p0"), simWorker(p, worker.Prefill, "p1"), simWorker(d, worker.Decode, "d0"))
	for i := 0; i < 50 && bad.requests() == 0; i++ {
		body := strings.Replace(chatOf(strings.Repeat("x", i+1)), `"max_tokens":4`, `"max_tokens":0`, 1)
		if w := post(t, r.URL+"/v1/chat/completions", body).prefillOnly(t); w.Worker != "p1" {
			t.Errorf("%+v", w)
		}
	}
	if bad.requests() == 0 || r.metric(`sluice_leg_retries_total{leg="prefill"}`) != 1 {
		t.Errorf("the bad one saw %d", bad.requests())
	}
	refuses := startScripted(t, replyHandler(400, `{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":400}}`))
	r = startRouter(t, allowPrefillOnly, refuses.worker(worker.Aggregated, "w0"))
	if a := post(t, r.URL+"/v1/chat/completions", chat(""), "X-Sluice-Prefill-Only", "true"); a.Status != 400 || !strings.Contains(string(a.Body), "too long") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	infer, arrived, cancelled := hangingHandler()
	hung := startScripted(t, http.HandlerFunc(infer))
	r = startRouter(t, allowPrefillOnly, hung.worker(worker.Aggregated, "w0"))
	l := startRequest(t, r, "gone", chat(`,"max_completion_tokens":0`))
	receiveTime(t, arrived, "it runs")
	abortedAt := l.disconnect()
	wantPrompt(t, "it was cut", receiveTime(t, cancelled, "it is cut").Sub(abortedAt))
	wantClientGone(t, r, "gone")
}
