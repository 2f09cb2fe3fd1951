package families

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// allowPrefillOnly makes max_tokens: 0 request prefill only, like the header.
func allowPrefillOnly(c *config.Config) { c.Steering.PrefillOnly = "any" }

var prefillOnlyPrompt = strings.Repeat("a prompt that many will begin with, ", 20)

// TestPrefillOnly: a prefill-only request fills the cache of a prefill worker and leaves no blocks
// leased there. The next request with the prompt finds it cached.
func TestPrefillOnly(t *testing.T) {
	for _, c := range []struct{ name, header, replaced string }{
		{"by max_tokens", "", `"max_tokens":0,"stream":true`},
		{"by header", "true", `"max_tokens":40,"n":2`},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, allowPrefillOnly, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			body := strings.Replace(harness.ChatOf(prefillOnlyPrompt), `"max_tokens":4`, c.replaced, 1)
			headers := []string{"X-Request-Id", "warm"}
			if c.header != "" {
				headers = append(headers, "X-Sluice-Prefill-Only", c.header)
			}
			a := harness.Post(t, r.URL+"/v1/chat/completions", body, headers...)
			w := a.PrefillOnly(t)
			if w.Worker != "p0" || w.Role != "prefill" || w.CachedBefore == nil || *w.CachedBefore != 0 || w.PromptTokens < 100 || w.Blocks != w.PromptTokens/w.BlockSize {
				t.Errorf("%s", a.Body)
			}
			if !strings.HasPrefix(a.Header.Get("X-Sluice-Plan"), "prefill_only; reason=") || a.Header.Get("X-Sluice-Worker") != "p0" {
				t.Errorf("%v", a.Header)
			}
			if n := len(harness.GenerateRequests(d)); n != 0 {
				t.Errorf("%d decodes", n)
			}
			if s := p.Stats(); s.Ranks[0].BlocksLeased != 0 || s.Ranks[0].LeasesCreated != 0 {
				t.Errorf("%d blocks leased on the prefill worker, %d leases given", s.Ranks[0].BlocksLeased, s.Ranks[0].LeasesCreated)
			}
			testwait.UntilWithin(t, 10*time.Second, "the prompt is found", func() bool {
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(prefillOnlyPrompt))
				return a.Status == 200 && a.Header.Get("X-Sluice-Cached-Tokens") != "0"
			})
			again := harness.Post(t, r.URL+"/v1/chat/completions", body, headers...).PrefillOnly(t)
			if again.CachedBefore == nil || *again.CachedBefore < again.PromptTokens-2*again.BlockSize {
				t.Errorf("again: %+v", again)
			}
			if o := r.Outcome(t, "warm").Outcome; o.Status != 200 || o.OutputTokens != 0 {
				t.Errorf("%+v", o)
			}
			testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
		})
	}
}

// TestPrefillOnlyOnEveryEndpoint: every endpoint that computes a prompt accepts prefill-only requests,
// on aggregated workers too.
func TestPrefillOnlyOnEveryEndpoint(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, allowPrefillOnly, harness.SimWorker(e, worker.Aggregated, "w0"))
	for path, body := range map[string]string{
		"/v1/chat/completions":   `{"model":"sim","messages":[{"role":"user","content":"hello there, warm me"}],"max_completion_tokens":0}`,
		"/v1/completions":        `{"model":"sim","prompt":"hello there, warm me","max_tokens":0}`,
		"/v1/responses":          `{"model":"sim","input":"hello there, warm me","max_output_tokens":0}`,
		"/v1/messages":           `{"model":"sim","messages":[{"role":"user","content":"hello there, warm me"}],"max_tokens":0}`,
		"/inference/v1/generate": `{"model":"sim","token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"sampling_params":{"max_tokens":0}}`,
	} {
		a := harness.Post(t, r.URL+path, body)
		if a.Status != 200 || a.PrefillOnly(t).Role != "aggregated" {
			t.Errorf("%s: %d %s", path, a.Status, a.Body)
		}
	}
	for _, rec := range harness.GenerateRequests(e) {
		if strings.Contains(string(rec.Body), `tokens":0`) {
			t.Errorf("the engine was asked for no token: %s", rec.Body)
		}
	}
}

// TestPrefillOnlyRefused: the router forwards requests that are not prefill-only to the engine, and
// refuses those that cannot be prefill-only.
func TestPrefillOnlyRefused(t *testing.T) {
	e := harness.StartSim(t, nil)
	at0 := []config.Worker{harness.SimWorker(e, worker.Aggregated, "w0")}
	r := harness.StartRouter(t, allowPrefillOnly, at0...)
	byDefault := harness.StartRouter(t, nil, at0...)
	off := harness.StartRouter(t, func(c *config.Config) { c.Steering.PrefillOnly = "off" }, at0...)
	only := harness.StartRouter(t, func(c *config.Config) { c.Steering.PrefillOnly = "header" }, at0...)
	lp, ld := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	lm := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "sglang"; allowPrefillOnly(c) }, harness.SimWorker(lp, worker.Prefill, "p0"), harness.SimWorker(ld, worker.Decode, "d0"))
	none := strings.Replace(harness.Chat(""), `"max_tokens":12`, `"max_tokens":0`, 1)
	for _, c := range []struct {
		name         string
		r            *harness.Router
		body, header string
		status       int
		says         string
	}{
		{"by default: the engine's own refusal", byDefault, none, "", 400, "max_tokens"},
		{"by default: the header", byDefault, none, "true", 200, "sluice.prefill"},
		{"off: the engine's own refusal", off, none, "", 400, "max_tokens"},
		{"header only: likewise", only, none, "", 400, "max_tokens"},
		{"header only: the header", only, none, "true", 200, "sluice.prefill"},
		{"off: the header", off, harness.Chat(""), "true", 400, "steering.prefill_only is off"},
		{"a word", r, harness.Chat(""), "yes", 400, "want true or false"},
		{"false", r, harness.Chat(""), "false", 200, "choices"},
		{"scores", r, `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":0,"logprobs":true}`, "", 400, "max_tokens"},
		{"a family without", lm, none, "", 400, "family sglang takes no prompt without a decode worker"},
		{"a family without, by header", lm, harness.Chat(""), "true", 400, "X-Sluice-Prefill-Only"},
		{"an unknown model", r, `{"model":"other","prompt":"x","max_tokens":0}`, "", 404, "does not exist"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := harness.Post(t, c.r.URL+"/v1/chat/completions", c.body, slices.DeleteFunc([]string{"X-Sluice-Prefill-Only", c.header}, func(string) bool { return c.header == "" })...)
			if a.Status != c.status || !strings.Contains(string(a.Body), c.says) {
				t.Errorf("%d %s; want %d with %q", a.Status, a.Body, c.status, c.says)
			}
			if c.status >= 400 {
				a.ErrorOf(t)
			}
		})
	}
}

// TestPrefillOnlyRetriesElsewhere: the router retries a failed prefill-only request on another engine,
// forwards a refusal of the request itself, and cancels the leg if the client leaves.
func TestPrefillOnlyRetriesElsewhere(t *testing.T) {
	bad := harness.StartScripted(t, harness.ReplyHandler(503, `{"error":{"message":"full"}}`))
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, func(o *sim.Options) { o.Role = "decode" })
	r := harness.StartRouter(t, allowPrefillOnly, bad.Worker(worker.Prefill, "p0"), harness.SimWorker(p, worker.Prefill, "p1"), harness.SimWorker(d, worker.Decode, "d0"))
	for i := 0; i < 50 && bad.Requests() == 0; i++ {
		body := strings.Replace(harness.ChatOf(strings.Repeat("x", i+1)), `"max_tokens":4`, `"max_tokens":0`, 1)
		if w := harness.Post(t, r.URL+"/v1/chat/completions", body).PrefillOnly(t); w.Worker != "p1" {
			t.Errorf("%+v", w)
		}
	}
	if bad.Requests() == 0 || r.Metric(`sluice_leg_retries_total{leg="prefill"}`) != 1 {
		t.Errorf("the bad one saw %d", bad.Requests())
	}
	refuses := harness.StartScripted(t, harness.ReplyHandler(400, `{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":400}}`))
	r = harness.StartRouter(t, allowPrefillOnly, refuses.Worker(worker.Aggregated, "w0"))
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Prefill-Only", "true"); a.Status != 400 || !strings.Contains(string(a.Body), "too long") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	infer, arrived, cancelled := harness.HangingHandler()
	hung := harness.StartScripted(t, http.HandlerFunc(infer))
	r = harness.StartRouter(t, allowPrefillOnly, hung.Worker(worker.Aggregated, "w0"))
	l := harness.StartRequest(t, r, "gone", harness.Chat(`,"max_completion_tokens":0`))
	harness.ReceiveTime(t, arrived, "it runs")
	abortedAt := l.Disconnect()
	harness.WantPrompt(t, "it was cut", harness.ReceiveTime(t, cancelled, "it is cut").Sub(abortedAt))
	harness.WantClientGone(t, r, "gone")
}
