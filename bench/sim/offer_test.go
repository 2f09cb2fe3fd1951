package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// mooncakeParams are both legs' kv_transfer_params for the rank of p.
func mooncakeParams(t testing.TB, p *Engine, rank int, id string) (prefill, decode string) {
	t.Helper()
	host, port := p.Bootstrap()
	_, body := get(t, fmt.Sprintf("http://%s:%d/query", host, port))
	var ranks map[string]struct {
		EngineID string                       `json:"engine_id"`
		Addr     map[string]map[string]string `json:"worker_addr"`
	}
	if err := json.Unmarshal([]byte(body), &ranks); err != nil || ranks[fmt.Sprint(rank)].Addr["0"]["0"] == "" {
		t.Fatalf("/query: %v %s", err, body)
	}
	return fmt.Sprintf(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%q}`, id),
		fmt.Sprintf(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":%q,"remote_bootstrap_addr":"http://%s:%d","transfer_id":%q}`, ranks[fmt.Sprint(rank)].EngineID, host, port, id)
}

func prefillBody(prompt, params string) string {
	return `{"prompt":` + prompt + `,"max_tokens":1,"ignore_eos":true,"kv_transfer_params":` + params + `}`
}

func TestMooncake(t *testing.T) {
	p, d := startPair(t, Options{PD: "mooncake", Ranks: 2})
	prompt := idPrompt(200, 1)
	for i, decodeFirst := range []bool{true, false} {
		pp, dp := mooncakeParams(t, p, 1, fmt.Sprint("T", i))
		started, got := make(chan struct{}), make(chan answer, 1)
		if decodeFirst {
			go func() {
				close(started)
				a, _ := tryPost(d.URL()+"/v1/completions", decodeBody(prompt, dp, 8, false))
				got <- a
			}()
			<-started
			testwait.Until(t, "decode waits", func() bool { return d.Stats().Sum().Waiting == 1 })
		}
		a := post(t, p, "/v1/completions", prefillBody(prompt, pp), "X-data-parallel-rank", "1")
		if a.status != 200 || a.handle() != "null" {
			t.Fatalf("prefill: %d %s; want 200 without a handle", a.status, a.body)
		}
		if !decodeFirst {
			if s := p.Stats().Ranks[1]; s.BlocksLeased != 13 {
				t.Errorf("prefill offers %d blocks, want 13", s.BlocksLeased)
			}
			got <- post(t, d, "/v1/completions", decodeBody(idPrompt(200, 1), dp, 8, false))
		}
		plain := post(t, fastOptions(t, Options{}), "/v1/completions", decodeBody(prompt, "null", 8, false))
		if da := <-got; da.status != 200 || fmt.Sprint(da.ids()) != fmt.Sprint(plain.ids()) {
			t.Errorf("decode: %d %s, want the tokens %v", da.status, da.body, plain.ids())
		}
		wantIdle(t, p, d)
	}
	if s := d.Stats().Sum(); s.LocalCompute != 0 || s.Transfers == 0 {
		t.Errorf("decode: %+v", s)
	}
}

// TestMooncakeFails: a prefill that stops by itself drops the transfer, a decode
// without all three keys computes, a wrong engine id or another prompt fails.
func TestMooncakeFails(t *testing.T) {
	p, d := startPair(t, Options{PD: "mooncake", PullTimeout: 100 * time.Millisecond, AbortTimeout: 300 * time.Millisecond})
	prompt := idPrompt(64, 1)
	pp, dp := mooncakeParams(t, p, 0, "stops")
	post(t, p, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":50,"stop":[" ",".","a","e","o"],"kv_transfer_params":`+pp+`}`)
	if a := post(t, d, "/v1/completions", decodeBody(prompt, dp, 2, false)); a.status != 500 {
		t.Errorf("after a prefill that ended with stop: %d %s", a.status, a.body)
	}
	for _, missing := range []string{`"remote_engine_id":"`, `"remote_bootstrap_addr":"`, `"transfer_id":"`} {
		_, dp := mooncakeParams(t, p, 0, "x")
		if a := post(t, d, "/v1/completions", decodeBody(prompt, strings.Replace(dp, missing, `"x`+missing[1:], 1), 2, false)); a.status != 200 {
			t.Errorf("without %s: %d %s", missing, a.status, a.body)
		}
	}
	if n := d.Stats().IgnoredPD; n != 3 {
		t.Errorf("%d warnings, want 3", n)
	}
	before := d.Stats().Sum().TransfersFailed
	if a := post(t, d, "/v1/completions", decodeBody(idPrompt(64, 2), strings.Replace(dp, `"remote_engine_id":"`, `"remote_engine_id":"x`, 1), 2, false)); a.status != 500 {
		t.Errorf("unknown engine id: %d %s", a.status, a.body)
	}
	pp, dp = mooncakeParams(t, p, 0, "other")
	post(t, p, "/v1/completions", prefillBody(prompt, pp))
	if a := post(t, d, "/v1/completions", decodeBody(idPrompt(64, 3), dp, 2, false)); a.status != 500 {
		t.Errorf("another prompt: %d %s", a.status, a.body)
	}
	_, dp = mooncakeParams(t, p, 0, "never")
	if a := post(t, d, "/v1/completions", decodeBody(idPrompt(64, 4), dp, 2, false)); a.status != 500 {
		t.Errorf("a transfer nobody offers: %d %s", a.status, a.body)
	}
	if n := d.Stats().Sum().TransfersFailed - before; n != 3 {
		t.Errorf("%d failed transfers, want 3", n)
	}
	pp, _ = mooncakeParams(t, p, 0, "alone")
	post(t, p, "/v1/completions", prefillBody(prompt, pp))
	wantIdle(t, p, d) // blocks that no decode fetched are free after the timeout
	if n := p.Stats().Sum().LeasesExpired; n != 1 {
		t.Errorf("%d offers expired, want 1", n)
	}
}

// TestMooncakeAbort: decode gone while it waits gives the blocks back, before or
// after they are there.
func TestMooncakeAbort(t *testing.T) {
	p, d := startPair(t, Options{PD: "mooncake"})
	prompt := idPrompt(64, 1)
	pp, dp := mooncakeParams(t, p, 0, "early")
	ctx, cancel := context.WithCancel(context.Background())
	req, _ := http.NewRequestWithContext(ctx, "POST", d.URL()+"/v1/completions", strings.NewReader(decodeBody(prompt, dp, 8, true)))
	req.Header.Set("Content-Type", "application/json")
	go http.DefaultClient.Do(req)
	testwait.Until(t, "decode waits", func() bool { return d.Stats().Sum().Waiting == 1 })
	cancel()
	wantIdle(t, d)
	post(t, p, "/v1/completions", prefillBody(prompt, pp))
	wantIdle(t, p)
}

func TestMooncakeBootstrap(t *testing.T) {
	p := fastOptions(t, Options{PD: "mooncake", Role: "prefill"})
	host, port := p.Bootstrap()
	base := fmt.Sprintf("http://%s:%d", host, port)
	w := `{"engine_id":%q,"dp_rank":%d,"tp_rank":%d,"pp_rank":0,"addr":"127.0.0.1:1"}`
	for _, c := range []struct {
		body string
		want int
	}{
		{fmt.Sprintf(w, "E", 5, 0), 200},
		{fmt.Sprintf(w, "E", 5, 1), 200},
		{fmt.Sprintf(w, "E", 5, 1), 400}, // there already
		{fmt.Sprintf(w, "F", 5, 2), 400}, // another engine id for the rank
		{`{`, 400},
	} {
		if a, _ := tryPost(base+"/register", c.body); a.status != c.want {
			t.Errorf("register %s: %d %s, want %d", c.body, a.status, a.body, c.want)
		}
	}
	if _, body := get(t, base+"/query"); !strings.Contains(body, `"5":{"engine_id":"E","worker_addr":{"0":{"0":"127.0.0.1:1"},"1":{"0":"127.0.0.1:1"}}}`) {
		t.Errorf("query: %s", body)
	}
}

// TestPush: both legs at once, by what is known of the prefill and the common
// X-Request-Id; or one after the other with the handle.
func TestPush(t *testing.T) {
	p, d := startPair(t, Options{PD: "nixl-push"})
	prompt := idPrompt(100, 1)
	a := post(t, p, "/v1/completions", prefillBody(prompt, prefillParams), "X-Request-Id", "first")
	if !strings.Contains(a.handle(), `"transfer_mode":"push"`) || p.Stats().Sum().BlocksLeased == 0 {
		t.Fatalf("handle %s, %+v", a.handle(), p.Stats().Sum())
	}
	if da := decode(t, d, prompt, a.handle()); da.status != 200 {
		t.Errorf("decode after prefill: %d %s", da.status, da.body)
	}
	wantIdle(t, p, d)
	var h struct {
		Engine string `json:"remote_engine_id"`
		Host   string `json:"remote_host"`
		Port   int    `json:"remote_port"`
	}
	json.Unmarshal([]byte(a.handle()), &h)
	known := fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":%q,"remote_host":%q,"remote_port":%d,"tp_size":1}`, h.Engine, h.Host, h.Port)
	prompt = idPrompt(100, 2)
	got := make(chan answer, 1)
	go func() {
		a, _ := tryPost(d.URL()+"/v1/completions", decodeBody(prompt, known, 4, false), "X-Request-Id", "both")
		got <- a
	}()
	testwait.Until(t, "decode is registered", func() bool { return d.Stats().Sum().Waiting == 1 })
	post(t, p, "/v1/completions", prefillBody(prompt, prefillParams), "X-Request-Id", "both")
	if da := <-got; da.status != 200 {
		t.Errorf("decode before prefill: %d %s", da.status, da.body)
	}
	wantIdle(t, p, d)
	if s := d.Stats().Sum(); s.Transfers != 2 || s.LocalCompute != 0 {
		t.Errorf("decode: %+v", s)
	}
	// A pull engine's handle is refused in the handshake.
	pull, _ := startPair(t, Options{})
	if da := decode(t, d, idPrompt(100, 3), prefill(t, pull, idPrompt(100, 3))); da.status != 500 {
		t.Errorf("decode with a pull handle: %d %s", da.status, da.body)
	}
}
