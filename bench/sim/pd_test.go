package sim

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/testwait"
)

// idPrompt is a prompt of n ids as JSON, different for every salt.
func idPrompt(n, salt int) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprint(300 + (i*7+salt*131)%1000)
	}
	return "[" + strings.Join(ids, ",") + "]"
}

const prefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

func prefill(t testing.TB, p *Engine, prompt string, headers ...string) string {
	t.Helper()
	a := post(t, p, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":1,"stream":false,"kv_transfer_params":`+prefillParams+`}`, headers...)
	if a.status != 200 || a.handle() == "null" {
		t.Fatalf("prefill: %d %s", a.status, a.body)
	}
	return a.handle()
}

func decode(t testing.TB, d *Engine, prompt, handle string, headers ...string) answer {
	t.Helper()
	return post(t, d, "/v1/completions", decodeBody(prompt, handle, 8, false), headers...)
}

func decodeBody(prompt, handle string, tokens int, stream bool) string {
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"return_token_ids":true,"stream":%v,"kv_transfer_params":%s}`, prompt, tokens, stream, handle)
}

func startPair(t testing.TB, o Options) (p, d *Engine) {
	o.Role = "prefill"
	p = fastOptions(t, o)
	o.Role = "decode"
	return p, fastOptions(t, o)
}

func TestHandOver(t *testing.T) {
	p, d := startPair(t, Options{Ranks: 2})
	prompt := idPrompt(200, 1)
	h := prefill(t, p, prompt, "X-Request-Id", "pd-1", "X-data-parallel-rank", "1")
	var keys []string
	dec := json.NewDecoder(strings.NewReader(h))
	for depth, key := 0, true; ; {
		tok, err := dec.Token()
		if err != nil {
			break
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
			} else if depth--; depth == 1 {
				key = true
			}
			if v == '{' {
				key = true
			}
		default:
			if depth == 1 && key {
				keys = append(keys, fmt.Sprint(v))
				key = false
			} else if depth == 1 {
				key = true
			}
		}
	}
	want := "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode remote_prefill_cached_tokens"
	if got := strings.Join(keys, " "); got != want {
		t.Errorf("keys of the handle:\n got %s\nwant %s", got, want)
	}
	if !regexp.MustCompile(`"remote_request_id":"cmpl-pd-1-0-[0-9a-f]{8}"`).MatchString(h) || !strings.Contains(h, p.EngineID()+`_dp1"`) {
		t.Errorf("identity in the handle: %s", h)
	}
	if s := p.Stats().Ranks[1]; s.BlocksLeased != 13 || s.Leases != 1 || s.BlocksTotal-s.BlocksFree != 13 {
		t.Errorf("after prefill: %+v", s)
	}
	a := decode(t, d, prompt, h, "X-data-parallel-rank", "1")
	plain := post(t, p, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":8,"ignore_eos":true,"return_token_ids":true}`)
	if a.status != 200 || fmt.Sprint(a.ids()) != fmt.Sprint(plain.ids()) || len(a.ids()) != 8 {
		t.Errorf("decode gave %d %v, the same prompt without hand-over %v", a.status, a.ids(), plain.ids())
	}
	testwait.Until(t, "blocks released", func() bool {
		s := p.Stats().Ranks[1]
		return s.BlocksLeased == 0 && s.LeasesReleased == 1 && s.BlocksFree == s.BlocksTotal
	})
	s := d.Stats().Ranks[1]
	if s.External != 200 || s.LocalCompute != 0 || s.Transfers != 1 || s.TransferBytes != 199*(128<<10) || s.BlocksFree != s.BlocksTotal {
		t.Errorf("decode side: %+v", s)
	}
	// The pulled blocks are in decode's own cache now: no second transfer is needed.
	h = prefill(t, p, prompt)
	if !strings.Contains(h, `"remote_prefill_cached_tokens":192`) && !strings.Contains(h, `"remote_prefill_cached_tokens":0`) {
		t.Errorf("cached tokens in the handle: %s", h)
	}
	decode(t, d, prompt, h, "X-data-parallel-rank", "1")
	testwait.Until(t, "second lease released", func() bool { return p.Stats().Sum().BlocksLeased == 0 })
	if s := d.Stats().Ranks[1]; s.LocalHit != 192 {
		t.Errorf("second decode hit %d tokens locally, want 192", s.LocalHit)
	}
}

func TestDecodeN(t *testing.T) {
	p, d := startPair(t, Options{})
	prompt := idPrompt(100, 2)
	h := prefill(t, p, prompt)
	a := post(t, d, "/v1/completions", `{"prompt":`+prompt+`,"max_tokens":3,"ignore_eos":true,"n":3,"kv_transfer_params":`+h+`}`)
	if a.status != 200 || len(a.json["choices"].([]any)) != 3 {
		t.Fatalf("n=3: %d %s", a.status, a.body)
	}
	if s := d.Stats().Sum(); s.Transfers != 1 || s.LocalHit != 2*96 {
		t.Errorf("n=3: %+v", s)
	}
	testwait.Until(t, "released", func() bool { return p.Stats().Sum().BlocksLeased == 0 })
}

func TestPromptIDsInHandle(t *testing.T) {
	p, d := startPair(t, Options{})
	body := `"messages":[{"role":"user","content":"Hello there, how are you today my friend"}],"max_tokens":%d,"ignore_eos":true,"return_token_ids":true`
	a := post(t, p, "/v1/chat/completions", fmt.Sprintf(`{`+body+`,"kv_transfer_params":%s}`, 1, prefillParams))
	ids, _ := json.Marshal(a.json["prompt_token_ids"])
	h := strings.TrimSuffix(a.handle(), "}") + `,"prompt_token_ids":` + string(ids) + `}`
	b := post(t, d, "/v1/chat/completions", fmt.Sprintf(`{`+body+`,"kv_transfer_params":%s}`, 6, h))
	c := post(t, p, "/v1/chat/completions", fmt.Sprintf(`{`+body+`}`, 6))
	if b.status != 200 || fmt.Sprint(b.ids()) != fmt.Sprint(c.ids()) {
		t.Errorf("decode with prompt ids: %d %v, want %v", b.status, b.ids(), c.ids())
	}
}

// TestPromptIDsReplaceText: ids in kv_transfer_params are the prompt in every API that renders a chat, on a
// prefill leg and without a connector. Releases before 0.32 and an echo render the text.
func TestPromptIDsReplaceText(t *testing.T) {
	ids := idPrompt(40, 5)
	for _, c := range []struct {
		path, body string
		opt        Options
		count      int
	}{
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, Options{}, 40},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, Options{PD: "storage"}, 40},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, Options{PD: "orchestrated"}, 40},
		{"/v1/messages", `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, Options{}, 40},
		{"/v1/responses", `"input":"x","max_output_tokens":1`, Options{}, 40},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"max_tokens":1`, Options{Release: "0.31"}, 0},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"x"}],"max_tokens":1,"echo":true`, Options{}, 0},
	} {
		e := fastOptions(t, c.opt)
		a := post(t, e, c.path, `{`+c.body+`,"kv_transfer_params":{"do_remote_decode":true,"prompt_token_ids":`+ids+`}}`)
		if a.status != 200 {
			t.Fatalf("%s: %d %s", c.path, a.status, a.body)
		}
		usage := a.json["usage"].(map[string]any)
		n, ok := usage["prompt_tokens"].(float64)
		if !ok {
			n = usage["input_tokens"].(float64)
		}
		if want := c.count; int(n) == 40 != (want == 40) {
			t.Errorf("%s with %+v: %v prompt tokens; want %d, 0 for those of the text", c.path, c.opt, n, want)
		}
	}
	e := fastOptions(t, Options{})
	if a := post(t, e, "/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"prompt_token_ids":[1,"2"]}}`); a.status != 400 {
		t.Errorf("ids that are not numbers: %d %s; want 400", a.status, a.body)
	}
}

func TestLeaseExpires(t *testing.T) {
	for _, mode := range []string{"stale", "error", "crash"} {
		t.Run(mode, func(t *testing.T) {
			p, d := startPair(t, Options{Lease: 50 * time.Millisecond, Expired: mode})
			prompt := idPrompt(64, 3)
			h := prefill(t, p, prompt)
			testwait.Until(t, "lease expired", func() bool {
				s := p.Stats().Sum()
				return s.LeasesExpired == 1 && s.BlocksLeased == 0 && s.BlocksFree == s.BlocksTotal
			})
			a := decode(t, d, prompt, h)
			if want := map[bool]int{true: 200, false: 500}[mode == "stale"]; a.status != want {
				t.Errorf("decode after expiry: %d %s, want %d", a.status, a.body, want)
			}
			testwait.Until(t, "late notification counted", func() bool { return p.Stats().Sum().LateNotifications == 1 })
			if n := d.Stats().Sum().GarbageReads; n != 1 {
				t.Errorf("%d garbage reads counted", n)
			}
			if mode == "crash" {
				testwait.Until(t, "decode dead", func() bool { return !d.Alive() })
			}
		})
	}
}

// TestHeartbeat: a queued decode keeps the lease alive far beyond its length.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	for attempt := 1; ; attempt++ {
		widest := watchGaps(t)
		s, status := heartbeats(t)
		gap := widest()
		if status == 200 && s.LeasesExpired == 0 && s.Heartbeats >= 3 {
			return
		}
		// Of a lease of 3 s a heartbeat, sent every half second, leaves 2: a machine that
		// stands still for longer lets it run out, as it should.
		if gap < 500*time.Millisecond || attempt == 10 {
			t.Fatalf("status %d, prefill %+v; at most %v between two looks", status, s, gap)
		}
		t.Logf("the machine stood still for %v: again", gap)
	}
}

// heartbeats has decode wait for a hand-over that takes longer than prefill's lease lasts.
func heartbeats(t *testing.T) (prefillRank RankStats, status int) {
	t.Helper()
	o := Options{Lease: 3 * time.Second}
	p := fastOptions(t, o)
	o.Cost.Handshake = 5 * time.Second
	o.Speed = 1
	d := fastOptions(t, o)
	prompt := idPrompt(64, 4)
	a := decode(t, d, prompt, prefill(t, p, prompt))
	s := p.Stats().Sum()
	if s.LeasesExpired == 0 {
		testwait.Until(t, "released", func() bool { return p.Stats().Sum().LeasesReleased == 1 })
	}
	return s, a.status
}

// watchGaps polls the clock until the function that it returns is called; that function
// returns the longest time between two polls.
func watchGaps(t *testing.T) (widest func() time.Duration) {
	stop, found := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		most, last := time.Duration(0), time.Now()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			over := false
			select {
			case <-tick.C:
			case <-stop:
				over = true
			case <-t.Context().Done():
				over = true
			}
			now := time.Now()
			most, last = max(most, now.Sub(last)), now
			if over {
				found <- most
				return
			}
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-found
	}
}

func TestIncompleteHandle(t *testing.T) {
	prompt := idPrompt(40, 5)
	for name, h := range map[string]string{
		"alone":   `{"do_remote_prefill":true}`,
		"empty":   `{"do_remote_prefill":true,"remote_block_ids":[ ],"remote_engine_id":"x","remote_request_id":"y","remote_host":"127.0.0.1","remote_port":1}`,
		"nested":  `{"do_remote_prefill":true,"remote_block_ids":[[]],"remote_engine_id":"x","remote_request_id":"y","remote_host":"127.0.0.1","remote_port":1}`,
		"null":    `{"do_remote_prefill":true,"remote_block_ids":null}`,
		"crashes": `{"do_remote_prefill":true}`,
	} {
		t.Run(name, func(t *testing.T) {
			for mode, status := range map[string]int{"crash": 500, "error": 500, "recompute": 200} {
				d := fastOptions(t, Options{Incomplete: mode})
				if a := decode(t, d, prompt, h); a.status != status {
					t.Errorf("%s: status %d, want %d: %s", mode, a.status, status, a.body)
				}
				if mode == "crash" {
					testwait.Until(t, "dead", func() bool { _, err := tryPost(d.URL()+"/v1/completions", `{}`); return err != nil })
				} else if !d.Alive() {
					t.Errorf("%s: engine died", mode)
				}
				if n := d.Stats().Sum().IncompleteHandles; n != 1 {
					t.Errorf("%s: %d incomplete handles counted", mode, n)
				}
			}
		})
	}
	// Any other member missing is a warning and a local prefill.
	d := fastOptions(t, Options{})
	if a := decode(t, d, prompt, `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_host":"127.0.0.1","remote_port":1}`); a.status != 200 {
		t.Errorf("without engine id: %d %s", a.status, a.body)
	}
	if s := d.Stats().Sum(); s.LocalCompute != 40 || s.Transfers != 0 {
		t.Errorf("without engine id: %+v", s)
	}
}

func TestPullFails(t *testing.T) {
	p, d := startPair(t, Options{PullTimeout: 100 * time.Millisecond})
	prompt := idPrompt(40, 6)
	h := prefill(t, p, prompt)
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	if a := decode(t, d, prompt, h); a.status != 500 || !strings.Contains(string(a.body), "Internal server error") {
		t.Errorf("decode from a restarted prefill: %d %s", a.status, a.body)
	}
	s := d.Stats().Sum()
	if s.TransfersFailed != 1 || s.BlocksFree != s.BlocksTotal {
		t.Errorf("decode side: %+v", s)
	}
}

func TestPrefillStreamHasNoHandle(t *testing.T) {
	p := fastOptions(t, Options{})
	a := post(t, p, "/v1/completions", `{"prompt":[300,301],"max_tokens":1,"stream":true,"kv_transfer_params":`+prefillParams+`}`)
	if strings.Contains(string(a.body), "kv_transfer_params") {
		t.Errorf("streamed prefill carries a handle: %s", a.body)
	}
}

// TestAbortReleasesPrefill: a client that leaves when decode was admitted frees the
// prefill's blocks at once, in the transfer as well as after it.
func TestAbortReleasesPrefill(t *testing.T) {
	for name, cost := range map[string]cost.Model{
		"pulling":  {Handshake: time.Hour},
		"decoding": {Handshake: time.Millisecond, Step: 5 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			p := fastOptions(t, Options{})
			d := fastOptions(t, Options{Speed: 1, Cost: cost})
			prompt := idPrompt(320, 7)
			h := prefill(t, p, prompt)
			c, _ := openStream(t, d.Addr(), "/v1/completions", decodeBody(prompt, h, 100000, true), map[string]int{"decoding": 1}[name])
			testwait.Until(t, "admitted", func() bool { return d.Stats().Sum().Requests == 1 })
			c.Close()
			testwait.Until(t, "all freed", func() bool {
				ps, ds := p.Stats().Sum(), d.Stats().Sum()
				return ps.BlocksLeased == 0 && ds.BlocksFree == ds.BlocksTotal && ds.Running+ds.Waiting == 0 && ds.Aborted == 1
			})
		})
	}
}

// TestEarlyAbortLeavesBlocksLeased is vLLM's third finding: a client gone before the
// engine knew the decode leaves the prefill's blocks to the lease, and the head of its
// stream does not say that it does.
func TestEarlyAbortLeavesBlocksLeased(t *testing.T) {
	p := fastOptions(t, Options{Lease: 2 * time.Second})
	d := fastOptions(t, Options{Speed: 1, Cost: cost.Model{Admit: time.Hour}})
	prompt := idPrompt(320, 8)
	h := prefill(t, p, prompt)
	c, _ := openStream(t, d.Addr(), "/v1/completions", decodeBody(prompt, h, 10, true), 0)
	c.Close()
	testwait.Until(t, "client missed", func() bool { return d.Stats().AbortedEarly == 1 })
	if s := p.Stats().Sum(); s.LeasesReleased != 0 || s.BlocksLeased != 20 && s.LeasesExpired == 0 {
		t.Errorf("prefill side: %+v", s)
	}
	if d.Stats().Sum().Requests != 0 {
		t.Error("the engine knew the request")
	}
	testwait.Until(t, "lease expired", func() bool { return p.Stats().Sum().LeasesExpired == 1 })
}

// TestRefusedDecodeReleasesPrefill: a decode answered 4xx notifies the prefill.
func TestRefusedDecodeReleasesPrefill(t *testing.T) {
	p, d := startPair(t, Options{})
	h := prefill(t, p, idPrompt(64, 1))
	if a := post(t, d, "/v1/completions", `{"prompt":[300],"max_tokens":0,"kv_transfer_params":`+h+`}`); a.status != 400 {
		t.Errorf("status %d, want 400", a.status)
	}
	testwait.Until(t, "released", func() bool { return p.Stats().Sum().LeasesReleased == 1 })
}

func TestPrefillOverload(t *testing.T) {
	// 9 blocks of 16: a lease of 8 leaves no room for the next until it ends.
	const lease = 200 * time.Millisecond
	p := fastOptions(t, Options{Blocks: 10, Lease: lease})
	start := time.Now() // the lease begins before its answer is read, however much before
	prefill(t, p, idPrompt(120, 9))
	prefill(t, p, idPrompt(120, 10))
	if took := time.Since(start); took < lease {
		t.Errorf("second prefill got blocks after %v, while they were leased", took)
	}
}

func TestBadHandleFaults(t *testing.T) {
	p := fastOptions(t, Options{})
	p.Fault(faults.Fault{Kind: faults.BadHandle, Leg: "prefill", N: 1})
	p.Fault(faults.Fault{Kind: faults.NoHandle, Leg: "prefill", N: 1})
	body := `{"prompt":[300,301],"max_tokens":1,"kv_transfer_params":` + prefillParams + `}`
	if h := post(t, p, "/v1/completions", body).handle(); !strings.Contains(h, `"remote_block_ids":[],`) {
		t.Errorf("bad handle: %s", h)
	}
	if h := post(t, p, "/v1/completions", body).handle(); h != "null" {
		t.Errorf("no handle: %s", h)
	}
	if h := post(t, p, "/v1/completions", body).handle(); !strings.Contains(h, `"remote_block_ids":[[`) {
		t.Errorf("after the faults: %s", h)
	}
}

func TestTransferTime(t *testing.T) {
	c := cost.Model{BytesToken: 1000, Bandwidth: 1e6, Transfer: time.Second}.WithDefaults()
	if got := c.TransferTime(500); got != 1500*time.Millisecond {
		t.Errorf("transfer of 500 tokens takes %v, want 1.5s", got)
	}
	if got := c.StepTime(10, 2, 100); got != c.Step+2*c.PerSeq+10*c.PerPrefill {
		t.Errorf("step takes %v", got)
	}
	if cost.Scale(time.Second, math.Inf(1)) != 0 || cost.Scale(time.Second, 4) != 250*time.Millisecond {
		t.Error("scaling is wrong")
	}
}
