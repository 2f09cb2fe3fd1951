package families

import (
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

func TestAggregatedPassesBytesThrough(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	body := `{"x_unknown":{"b":1,"a":[2]},"seed":9007199254740993,"model":"sim","messages":[{"role":"user","content":"caf\u00e9 ☕"}],"max_tokens":8}`
	direct := harness.Post(t, e.URL()+"/v1/chat/completions", body, "X-Request-Id", "same")
	routed := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "same")
	if direct.Status != 200 || routed.Status != 200 {
		t.Fatalf("direct %d, routed %d: %s", direct.Status, routed.Status, routed.Body)
	}
	if direct.Text(t) != routed.Text(t) || routed.Text(t) == "" {
		t.Errorf("text differs: direct %q, routed %q", direct.Text(t), routed.Text(t))
	}
	if got := routed.Header.Get("X-Request-Id"); got != "same" {
		t.Errorf("X-Request-Id is %q, want same", got)
	}
	if got := routed.Header.Get("X-Sluice-Worker"); got != "w0" {
		t.Errorf("X-Sluice-Worker is %q, want w0", got)
	}
	recs := e.Requests()
	last := recs[len(recs)-1]
	if string(last.Body) != body {
		t.Errorf("the engine saw\n%s\nwant the client's bytes\n%s", last.Body, body)
	}
}

func TestAggregatedStream(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	whole := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	streamed := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true,"stream_options":{"include_usage":true}`))
	if streamed.Status != 200 || !strings.HasPrefix(streamed.Header.Get("Content-Type"), "text/event-stream") {
		t.Fatalf("status %d, type %q: %s", streamed.Status, streamed.Header.Get("Content-Type"), streamed.Body)
	}
	if whole.Text(t) != streamed.Text(t) || whole.Text(t) == "" {
		t.Errorf("whole %q, streamed %q", whole.Text(t), streamed.Text(t))
	}
	if !strings.HasSuffix(string(streamed.Body), "data: [DONE]\n\n") {
		t.Errorf("the stream does not end with [DONE]: %q", streamed.Body)
	}
}

func TestPrefillThenDecode(t *testing.T) {
	p, d, alone := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
		for _, stream := range []string{"", `,"stream":true`, `,"n":1`} {
			// Each prompt is new, because decode does not pull blocks that it has cached. It ends within
			// a sentence, because an engine may generate nothing after a complete one.
			text := path + stream + harness.Prompt + " And"
			body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":12%s}`, text, stream)
			if path == "/v1/completions" {
				body = fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":12%s}`, text, stream)
			}
			want := harness.Post(t, alone.URL()+path, body)
			before := d.Stats().Sum().Transfers
			got := harness.Post(t, r.URL+path, body, "X-Request-Id", "pd-1")
			if got.Status != 200 || got.Text(t) != want.Text(t) || got.Text(t) == "" {
				t.Fatalf("%s%s: status %d, text %q; an engine alone says %q", path, stream, got.Status, got.Text(t), want.Text(t))
			}
			if d.Stats().Sum().Transfers == before {
				t.Errorf("%s%s: no KV was transferred", path, stream)
			}
			if got.Header.Get("X-Sluice-Prefill-Worker") != "p0" || got.Header.Get("X-Sluice-Worker") != "d0" {
				t.Errorf("workers %q, %q; want p0, d0", got.Header.Get("X-Sluice-Prefill-Worker"), got.Header.Get("X-Sluice-Worker"))
			}
			if strings.Contains(string(got.Body), "remote_block_ids") {
				t.Errorf("%s%s: the handle reached the client: %s", path, stream, got.Body)
			}
			pr, dr := lastGenerating(p), lastGenerating(d)
			if pr.Header("X-Request-Id") != "pd-1" || dr.Header("X-Request-Id") != "pd-1" {
				t.Errorf("ids on the legs: %q, %q; want pd-1 on both", pr.Header("X-Request-Id"), dr.Header("X-Request-Id"))
			}
		}
	}
	testwait.UntilWithin(t, 5*time.Second, "no block is leased", func() bool { return p.Stats().Sum().BlocksLeased == 0 })
}

// TestHandleIsReadOnce: a handle is valid for one read of one prompt. The router lets decode run alone for
// requests that would read it more than once, or not at all.
func TestHandleIsReadOnce(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i, body := range []string{
		`{"model":"sim","messages":[{"role":"user","content":"%d"}],"max_tokens":4,"n":2}`,
		`{"model":"sim","messages":[{"role":"user","content":"%d"}],"max_tokens":4,"use_beam_search":true}`,
		`{"model":"sim","prompt":"%d","max_tokens":4,"best_of":3}`,
		`{"model":"sim","prompt":["%d","b"],"max_tokens":4}`,
		`{"model":"sim","token_ids":[300,301,%d],"sampling_params":{"max_tokens":4,"n":2}}`,
	} {
		path := "/v1/chat/completions"
		if strings.Contains(body, "prompt") {
			path = "/v1/completions"
		} else if strings.Contains(body, "token_ids") {
			path = "/inference/v1/generate"
		}
		got := harness.Post(t, r.URL+path, fmt.Sprintf(body, 400+i))
		if got.Status != 200 || got.Header.Get("X-Sluice-Prefill-Worker") != "" || got.Header.Get("X-Sluice-Worker") != "d0" {
			t.Errorf("%s: status %d, prefill %q, worker %q; want 200 by d0 alone", body, got.Status, got.Header.Get("X-Sluice-Prefill-Worker"), got.Header.Get("X-Sluice-Worker"))
		}
	}
	if n := p.Stats().Sum().Requests; n != 0 {
		t.Errorf("the prefill engine saw %d requests, want none", n)
	}
}

// TestPoolsWithMissingRoles: without prefill workers a decode engine runs prefill itself; without
// decode workers aggregated workers run the decode leg.
func TestPoolsWithMissingRoles(t *testing.T) {
	d := harness.StartSim(t, harness.SimRole("decode"))
	alone := harness.StartRouter(t, nil, harness.SimWorker(d, worker.Decode, "d0"))
	if a := harness.Post(t, alone.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "d0" {
		t.Errorf("decode workers only: status %d, worker %q: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
	}
	p, g := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, nil)
	both := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(g, worker.Aggregated, "a0"))
	a := harness.Post(t, both.URL+"/v1/chat/completions", harness.Chat(""))
	if a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || a.Header.Get("X-Sluice-Worker") != "a0" {
		t.Errorf("prefill and aggregated: status %d, prefill %q, worker %q", a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Header.Get("X-Sluice-Worker"))
	}
}

// lastGenerating returns the last request to an inference endpoint.
func lastGenerating(e *sim.Engine) sim.Record {
	all := e.Requests()
	for i := len(all) - 1; i >= 0; i-- {
		if strings.HasPrefix(all[i].Path, "/v1/c") {
			return all[i]
		}
	}
	return sim.Record{}
}

func TestSecondTurnFollowsPrefix(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	for i := range 6 {
		first := fmt.Sprintf(`{"role":"user","content":"%d %s"}`, i, strings.Repeat(harness.Prompt, 3))
		one := harness.Post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[%s],"max_tokens":8}`, first))
		where := one.Header.Get("X-Sluice-Worker")
		if one.Status != 200 || where == "" {
			t.Fatalf("first turn: %d %s", one.Status, one.Body)
		}
		two := fmt.Sprintf(`{"model":"sim","messages":[%s,{"role":"assistant","content":"%s"},{"role":"user","content":"go on"}],"max_tokens":8}`, first, one.Text(t))
		harness.AwaitIndexed(t, r, a, b)
		got := harness.Post(t, r.URL+"/v1/chat/completions", two)
		if got.Header.Get("X-Sluice-Worker") != where {
			t.Errorf("turn 2 went to %q, its prefix is on %q", got.Header.Get("X-Sluice-Worker"), where)
		}
		if got.Header.Get("X-Sluice-Cached-Tokens") == "0" {
			t.Errorf("no cached tokens predicted")
		}
	}
}

func TestUnknownModelErrorListsModels(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	a := harness.Post(t, r.URL+"/v1/chat/completions", `{"model":"gpt-9","messages":[]}`)
	msg, _, param := a.ErrorOf(t)
	if a.Status != 404 || param != "model" || !strings.Contains(msg, `"gpt-9"`) || !strings.Contains(msg, "sim") {
		t.Errorf("status %d, param %q, message %q; want 404 with the known models", a.Status, param, msg)
	}
	if a.Header.Get("X-Sluice-Reason") != "unknown_model" || a.Header.Get("X-Request-Id") == "" {
		t.Errorf("headers %v", a.Header)
	}
}

func TestEmptyPoolErrorNamesPool(t *testing.T) {
	t.Parallel()
	d := harness.StartSim(t, harness.SimRole("decode"))
	p := harness.StartSim(t, harness.SimRole("prefill"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.PoolWait, c.PD.DecodeOnlyFallback = 200*time.Millisecond, false },
		harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	p.Close()
	testwait.UntilWithin(t, 4*time.Second, "prefill is named", func() bool {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		if a.Status != 503 {
			return false
		}
		msg, _, _ := a.ErrorOf(t)
		return strings.Contains(msg, "prefill") && a.Header.Get("X-Sluice-Reason") == "no_prefill_worker"
	})
}
