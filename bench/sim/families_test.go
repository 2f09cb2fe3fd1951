package sim

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/faults"
	"sluice/bench/testwait"
)

// fullText is the undisturbed answer to a prompt.
func fullText(t *testing.T, prompt string, tokens int) string {
	t.Helper()
	e := fastOptions(t, Options{})
	a := post(t, e, "/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true}`, prompt, tokens))
	return a.text()
}

func TestOrchestrated(t *testing.T) {
	d := fastOptions(t, Options{PD: "orchestrated", Role: "decode"})
	prompt := idPrompt(100, 1)
	a := post(t, d, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":8,"ignore_eos":true,"disagg_prefill_resp":{"choices":[{"text":"x"}]}}`)
	if a.status != 200 || a.text() != fullText(t, prompt, 8) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if s := d.Stats().Ranks[0]; s.External != 100 || s.LocalCompute != 0 {
		t.Errorf("the KV was computed here: %+v", s)
	}
	for _, resp := range []string{`{}`, `{"choices":[]}`, `"x"`} {
		if a := post(t, d, "/v1/completions", `{"prompt":[1],"disagg_prefill_resp":`+resp+`}`); a.status != 400 {
			t.Errorf("disagg_prefill_resp %s: %d", resp, a.status)
		}
	}
}

func TestTRTLLM(t *testing.T) {
	p, d := fastOptions(t, Options{Engine: "trtllm", Role: "prefill"}), fastOptions(t, Options{Engine: "trtllm", Role: "decode"})
	prompt := idPrompt(100, 2)
	a := post(t, p, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":50,"disaggregated_params":{"request_type":"context_only"}}`)
	var ctx struct {
		Choices []struct {
			Params json.RawMessage `json:"disaggregated_params"`
		} `json:"choices"`
		IDs []uint32 `json:"prompt_token_ids"`
	}
	if err := json.Unmarshal(a.body, &ctx); err != nil || len(ctx.IDs) != 100 || a.choice()["finish_reason"] != "length" {
		t.Fatalf("%v %s", err, a.body)
	}
	if n := p.Stats().Ranks[0].Leases; n != 1 {
		t.Errorf("%d leases after the context", n)
	}
	gen := strings.Replace(string(ctx.Choices[0].Params), "context_only", "generation_only", 1)
	a = post(t, d, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":8,"ignore_eos":true,"stream":true,"disaggregated_params":`+gen+`}`)
	if streamText(a.body) != fullText(t, prompt, 8) || !strings.Contains(string(a.body), `"disaggregated_params":{"request_type":"generation_only"`) {
		t.Errorf("%s", a.body)
	}
	if s := d.Stats().Ranks[0]; s.Transfers != 1 || s.GarbageReads != 0 {
		t.Errorf("%+v", s)
	}
	testwait.Until(t, "the context server's blocks are free", func() bool { return p.Stats().Ranks[0].Leases == 0 })
	bad := strings.Replace(gen, `"first_gen_tokens":[`, `"first_gen_tokens":[7`, 1)
	if a = post(t, d, "/v1/completions", `{"prompt":`+prompt+`,"disaggregated_params":`+bad+`}`); a.status != 400 || !strings.HasPrefix(string(a.body), `{"object":"error"`) {
		t.Errorf("a first token that is not the prompt's: %d %s", a.status, a.body)
	}
}

// notificationProxy is a router's PULL socket.
func notificationProxy(t *testing.T) (string, func(within time.Duration) string) {
	t.Helper()
	s, err := zmq.NewSocket(zmq.PULL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, _ := s.GetLastEndpoint()
	return at, func(within time.Duration) string {
		s.SetRcvtimeo(within)
		b, err := s.RecvBytes(0)
		if err != nil {
			return ""
		}
		return string(b)
	}
}

func TestLMCache(t *testing.T) {
	at, recv := notificationProxy(t)
	d := fastOptions(t, Options{PD: "lmcache", Role: "decode"})
	prompt := idPrompt(100, 3)
	ask := func(p *Engine) answer {
		return post(t, p, "/v1/completions", fmt.Sprintf(`{"prompt":%s,"max_tokens":1,"kv_transfer_params":{"ret_first_tok":true,"disagg_spec":{"req_id":"r-1","receiver_host":"127.0.0.1","receiver_init_port":[%d,%[2]d],"receiver_alloc_port":[%[2]d,%[2]d]}}}`, prompt, d.SidePort()))
	}
	p := fastOptions(t, Options{PD: "lmcache", Role: "prefill", LMCacheProxy: at})
	a := ask(p)
	var v struct {
		P struct {
			First uint32 `json:"first_tok"`
		} `json:"kv_transfer_params"`
	}
	if json.Unmarshal(a.body, &v); v.P.First == 0 {
		t.Fatalf("%s", a.body)
	}
	const notif = "\x82\xa4type\xaaProxyNotif\xa6req_id\xa3r-1"
	for range 2 {
		if got := recv(10 * time.Second); got != notif {
			t.Fatalf("%q", got)
		}
	}
	if got := recv(30 * time.Millisecond); got != "" {
		t.Errorf("a third notification: %q", got)
	}
	next := strings.TrimSuffix(prompt, "]") + fmt.Sprintf(",%d]", v.P.First)
	b := post(t, d, "/v1/completions", `{"prompt":`+next+`,"max_tokens":7,"ignore_eos":true}`)
	if a.text()+b.text() != fullText(t, prompt, 8) {
		t.Errorf("%q + %q, want %q", a.text(), b.text(), fullText(t, prompt, 8))
	}
	if s := d.Stats().Ranks[0]; s.External != 101 || s.LocalCompute != 0 {
		t.Errorf("%+v", s)
	}
	p.Fault(faults.Fault{Kind: faults.Stall, Path: "notify", N: 1})
	ask(p)
	if recv(10*time.Second) == "" || recv(30*time.Millisecond) != "" {
		t.Error("want one of two notifications with a lost one")
	}
	old := fastOptions(t, Options{PD: "lmcache", Role: "prefill", LMCacheProxy: at, OldNotify: true, EarlyNotify: true})
	ask(old)
	if got := recv(10 * time.Second); !strings.Contains(got, "NixlProxyNotif") {
		t.Errorf("%q", got)
	}
}

func TestSharedStorage(t *testing.T) {
	store := uuid() // the process keeps stores
	p, d := fastOptions(t, Options{PD: "storage", Store: store}), fastOptions(t, Options{PD: "storage", Store: store})
	prompt := idPrompt(100, 4)
	ask := func(e *Engine, threshold string) answer {
		return post(t, e, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":8,"ignore_eos":true,"cache_hit_threshold":`+threshold+`}`)
	}
	if a := ask(d, "0.8"); a.choice()["finish_reason"] != "cache_threshold" || a.text() != "" {
		t.Fatalf("%s", a.body)
	}
	ask(p, "0")
	if a := ask(d, "0.8"); a.text() != fullText(t, prompt, 8) {
		t.Errorf("%s", a.body)
	}
	if s := d.Stats().Ranks[0]; s.Transfers != 1 || s.BlocksFree != s.BlocksTotal {
		t.Errorf("%+v", s)
	}
}

// TestFamiliesAreComplete compares the families that the engine implements with those that
// Options.PD accepts.
func TestFamiliesAreComplete(t *testing.T) {
	if got := slices.Sorted(maps.Keys(pdFamilies)); !slices.Equal(got, PDFamilies()) {
		t.Errorf("implemented are %v; Options.PD accepts %v", got, PDFamilies())
	}
}
