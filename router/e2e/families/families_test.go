package families

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func TestOrchestratedFamily(t *testing.T) {
	p, d, whole := harness.StartSim(t, harness.UsingPD("orchestrated", "prefill")), harness.StartSim(t, harness.UsingPD("orchestrated", "decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, harness.UsingFamily("orchestrated"), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i, f := range harness.RequestForms(1, "") {
		harness.WantSameAnswer(t, f.Name, harness.Post(t, r.URL+f.Path, f.Body, "X-Request-Id", "r"+fmt.Sprint(i)), harness.Post(t, whole.URL()+f.Path, f.Body))
	}
	for i, rec := range harness.GenerateRequests(d) {
		resp := harness.Member(t, rec.Body, "disagg_prefill_resp")
		if !strings.Contains(resp, `-r`+fmt.Sprint(i)+`"`) || !json.Valid([]byte(resp)) {
			t.Errorf("decode was given %s", resp)
		}
	}
	if s := d.Stats().Sum(); s.External == 0 || s.LocalCompute != 0 {
		t.Errorf("decode computed %d tokens of prompts, took %d", s.LocalCompute, s.External)
	}
	p.Fault(sim.Fault{Kind: sim.Malformed, N: 1})
	f := harness.RequestForms(2, "")[1]
	harness.WantSameAnswer(t, "a prefill answer that is none", harness.Post(t, r.URL+f.Path, f.Body), harness.Post(t, whole.URL()+f.Path, f.Body))
	if r.Fallbacks("incomplete_handle") != 1 || r.Fallbacks("decode_only") != 1 {
		t.Error("the answer that is none was not counted")
	}
	harness.WantIdle(t, r, 10*time.Second, p, d)
}

func TestOrchestratedLabels(t *testing.T) {
	p, d := harness.StartSim(t, harness.UsingPD("orchestrated", "prefill")), harness.StartSim(t, harness.UsingPD("orchestrated", "decode"))
	pw, dw := harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0")
	pw.Labels, dw.Labels = []string{"llama-p"}, []string{"llama-d"}
	for _, c := range []struct{ prefill, decode, missing string }{{"llama-p", "llama-d", ""}, {"other", "llama-d", "other"}, {"llama-p", "none", "none"}} {
		r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("orchestrated"), func(cfg *config.Config) {
			cfg.PD.PrefillLabels, cfg.PD.DecodeLabels = []string{c.prefill}, []string{c.decode}
			cfg.Timeouts.PoolWait, cfg.PD.DecodeOnlyFallback = 20*time.Millisecond, false
		}), pw, dw)
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "label-1")
		if c.missing == "" {
			harness.WantStatus(t, a, 200)
			continue
		}
		if msg, _, _ := a.ErrorOf(t); a.Status != 503 || !strings.Contains(msg, `"`+c.missing+`"`) || a.Header.Get("X-Request-Id") != "label-1" {
			t.Errorf("%+v: %d %q %v", c, a.Status, msg, a.Header)
		}
	}
}

func TestTRTLLMFamily(t *testing.T) {
	trt := func(r string) func(*sim.Options) { return func(o *sim.Options) { o.Engine, o.Role = "trtllm", r } }
	p, d, whole := harness.StartSim(t, trt("prefill")), harness.StartSim(t, trt("decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, harness.UsingFamily("trtllm"), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, f := range harness.RequestForms(3, "") {
		harness.WantSameAnswer(t, f.Name, harness.Post(t, r.URL+f.Path, f.Body), harness.Post(t, whole.URL()+f.Path, f.Body))
	}
	for _, rec := range harness.GenerateRequests(d) {
		ids := "prompt_token_ids"
		if rec.Path == "/v1/completions" {
			ids = "prompt"
		}
		if !strings.HasPrefix(harness.Member(t, rec.Body, ids), "[") {
			t.Errorf("decode tokenizes again: %s", rec.Body)
		}
	}
	if s := d.Stats().Sum(); s.Transfers != 4 || s.GarbageReads != 0 {
		t.Errorf("%d transfers, %d garbage reads; want 4, 0", s.Transfers, s.GarbageReads)
	}
	for _, more := range []string{"", `,"stream":true`} {
		body := `{"model":"sim","max_tokens":9,"messages":[{"role":"user","content":"call it"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"required"` + more + `}`
		if a := harness.Post(t, r.URL+"/v1/chat/completions", body); a.Status != 200 || !bytes.Contains(a.Body, []byte(`"tool_calls":[{`)) || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Errorf("a tool call%s: %d %s", more, a.Status, a.Body)
		}
	}

	// The first token is the last one: nothing is decoded.
	d.ForgetRequests()
	for _, f := range harness.RequestForms(4, "") {
		first := harness.Post(t, whole.URL()+f.Path, strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":1`, 1)).Text(t)
		stop, _ := json.Marshal(first)
		body := strings.Replace(f.Body, `"max_tokens":12`, `"max_tokens":12,"include_stop_str_in_output":true,"stop":[`+string(stop)+`]`, 1)
		harness.WantSameAnswer(t, f.Name+", final", harness.Post(t, r.URL+f.Path, body), harness.Post(t, whole.URL()+f.Path, body))
	}
	if n := len(harness.GenerateRequests(d)); n != 0 {
		t.Errorf("decode was sent %d requests that prefill had answered", n)
	}

	for _, kind := range []sim.FaultKind{sim.NoHandle, sim.BadHandle} {
		p.Fault(sim.Fault{Kind: kind, Leg: "prefill", N: 1})
		f := harness.RequestForms(5, "")[1]
		harness.WantSameAnswer(t, kind.String(), harness.Post(t, r.URL+f.Path, f.Body), harness.Post(t, whole.URL()+f.Path, f.Body))
	}
	if r.Fallbacks("incomplete_handle") != 2 {
		t.Errorf("%v incomplete handles counted, want 2", r.Fallbacks("incomplete_handle"))
	}
}

// TestTRTLLMEventsWithEscapedNames: the router compares the Content-Type without case, and forwards
// events that it edits as they arrive instead of buffering the stream.
func TestTRTLLMEventsWithEscapedNames(t *testing.T) {
	trt := func(r string) func(*sim.Options) { return func(o *sim.Options) { o.Engine, o.Role = "trtllm", r } }
	p, d := harness.StartSim(t, trt("prefill")), harness.StartSim(t, trt("decode"))
	to, err := url.Parse(d.URL())
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan struct{}) // closed once the client has the first events
	proxy := &httputil.ReverseProxy{
		FlushInterval: -1,
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ModifyResponse: func(resp *http.Response) error {
			if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
				resp.Header.Set("Content-Type", "Text/Event-Stream; charset=utf-8")
				resp.Body = &pausedBody{ReadCloser: resp.Body, seen: seen}
			}
			return nil
		},
	}
	front := httptest.NewServer(proxy)
	t.Cleanup(front.Close)
	dw := harness.SimWorker(d, worker.Decode, "d0")
	dw.URL = front.URL
	r := harness.StartRouter(t, harness.UsingFamily("trtllm"), harness.SimWorker(p, worker.Prefill, "p0"), dw)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", r.URL+"/v1/chat/completions", strings.NewReader(harness.RequestForms(3, "")[1].Body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("no head while the engine waits behind its first events: %v", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 || resp.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatalf("no event while the engine waits behind its first ones: %v", err)
	}
	close(seen)
	if rest, err := io.ReadAll(resp.Body); err != nil || !bytes.Contains(rest, []byte("data: [DONE]")) || bytes.Contains(rest, []byte("disaggregated_params")) {
		t.Errorf("%v %s", err, rest)
	}
}

// pausedBody is a response body that returns three events, the first of which has no output, and
// the others only after seen is closed.
type pausedBody struct {
	io.ReadCloser
	seen   chan struct{}
	paused bool // the three events were returned
}

func (b *pausedBody) Read(p []byte) (int, error) {
	if b.paused {
		select {
		case <-b.seen:
		case <-time.After(30 * time.Second):
			return 0, io.ErrUnexpectedEOF
		}
		return b.ReadCloser.Read(p)
	}
	var event []byte
	for bytes.Count(event, []byte("\n\n")) < 3 && len(event) < len(p) {
		var c [1]byte
		n, err := b.ReadCloser.Read(c[:])
		event = append(event, c[:n]...)
		if err != nil {
			return copy(p, event), err
		}
	}
	b.paused = true
	return copy(p, event), nil
}

func TestTRTLLMDecodeFailsOver(t *testing.T) {
	trt := func(r string) func(*sim.Options) { return func(o *sim.Options) { o.Engine, o.Role = "trtllm", r } }
	p, d, e, whole := harness.StartSim(t, trt("prefill")), harness.StartSim(t, trt("decode")), harness.StartSim(t, trt("decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, harness.UsingFamily("trtllm"), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"), harness.SimWorker(e, worker.Decode, "d1"))
	for i, kind := range []sim.FaultKind{sim.Status, sim.Reset} {
		d.Fault(sim.Fault{Kind: kind, Leg: "decode"})
		before := d.Stats().Faults
		for _, f := range harness.RequestForms(6+i, "") {
			harness.WantSameAnswer(t, kind.String()+" "+f.Name, harness.Post(t, r.URL+f.Path, f.Body), harness.Post(t, whole.URL()+f.Path, f.Body))
		}
		if d.Stats().Faults == before {
			t.Error("the failing worker was never chosen: the test shows nothing")
		}
		d.ClearFaults()
	}
}

func TestStorageFamily(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprintf("decode first %v", first), func(t *testing.T) {
			name := t.TempDir()
			engine := func(r string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.PD, o.Role, o.Store = "storage", r, name })
			}
			p, d, whole := engine("prefill"), engine("decode"), harness.StartSim(t, nil)
			r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("storage"), func(c *config.Config) {
				if first {
					c.PD.CacheHitThreshold = 0.8
				}
			}), harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			for i, f := range harness.RequestForms(8, "") {
				f.Body = strings.ReplaceAll(f.Body, "word", fmt.Sprintf("word%d", i)) // a prompt that no engine has cached
				want := harness.Post(t, whole.URL()+f.Path, f.Body)
				before := len(harness.GenerateRequests(p))
				harness.WantSameAnswer(t, f.Name, harness.Post(t, r.URL+f.Path, f.Body), want)
				if n := len(harness.GenerateRequests(p)) - before; n != 1 {
					t.Errorf("%s: %d prefills of a new prompt", f.Name, n)
				}
				harness.WantSameAnswer(t, f.Name+" again", harness.Post(t, r.URL+f.Path, f.Body), want)
				if n := len(harness.GenerateRequests(p)) - before; first && n != 1 || !first && n != 2 {
					t.Errorf("%s: %d prefills after the second time", f.Name, n)
				}
			}
			if s := d.Stats().Sum(); s.Transfers == 0 {
				t.Error("decode took nothing from the store")
			}
			if n := r.Fallbacks("declined"); first && n != 4 || !first && n != 0 {
				t.Errorf("%v trials declined", n)
			}
			harness.WantIdle(t, r, 10*time.Second, p, d)
		})
	}
}
