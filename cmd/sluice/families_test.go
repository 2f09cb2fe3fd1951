package main

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
	"sluice/router/worker"
)

// promptWords is a prompt of n words, another one for each salt.
func promptWords(n, salt int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "word%d ", (i*7+salt*131)%997)
	}
	return b.String()
}

// requestForm is one request in the forms a client may send it.
type requestForm struct{ name, path, body string }

func requestForms(salt int, extra string) []requestForm {
	text, _ := json.Marshal(promptWords(60, salt))
	chat := `{"model":"sim","messages":[{"role":"user","content":` + string(text) + `}],"max_tokens":12` + extra
	comp := `{"model":"sim","prompt":` + string(text) + `,"max_tokens":12` + extra
	return []requestForm{
		{"chat", "/v1/chat/completions", chat + `}`},
		{"chat streamed", "/v1/chat/completions", chat + `,"stream":true,"stream_options":{"include_usage":true}}`},
		{"completions", "/v1/completions", comp + `}`},
		{"completions streamed", "/v1/completions", comp + `,"stream":true,"stream_options":{"include_usage":true}}`},
	}
}

// usage finds prompt and completion tokens in an answer or in a stream's usage
// event.
func (a *answer) usage(t *testing.T) [2]int {
	t.Helper()
	found := [2]int{-1, -1}
	for _, line := range strings.Split(string(a.Body), "\n") {
		var v struct {
			Usage *struct {
				P int `json:"prompt_tokens"`
				C int `json:"completion_tokens"`
			} `json:"usage"`
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(line, "data: ")), &v) == nil && v.Usage != nil {
			found = [2]int{v.Usage.P, v.Usage.C}
		}
	}
	return found
}

// wantSameAnswer compares an answer with that of one engine that did it all.
func wantSameAnswer(t *testing.T, what string, got, want *answer) {
	t.Helper()
	if got.Status != 200 || got.text(t) != want.text(t) || want.text(t) == "" || got.usage(t) != want.usage(t) {
		t.Errorf("%s: status %d\ntext  %q %v\nwant  %q %v\n%s", what, got.Status, got.text(t), got.usage(t), want.text(t), want.usage(t), got.Body)
	}
	if n := strings.Count(string(got.Body), "data: [DONE]"); strings.HasPrefix(got.Header.Get("Content-Type"), "text/event-stream") && n != 1 {
		t.Errorf("%s: %d times [DONE]", what, n)
	}
	for _, private := range []string{"encoded_opaque_state", "first_tok\"", "disagg_prefill_resp", "receiver_host", "remote_host"} {
		if strings.Contains(string(got.Body), private) {
			t.Errorf("%s: the client sees %s: %s", what, private, got.Body)
		}
	}
}

func usingFamily(name string) func(*config.Config) {
	return func(c *config.Config) {
		c.PD.Family = name
		c.Schedule.Policy = "round_robin"
	}
}

func allOf(fs ...func(*config.Config)) func(*config.Config) {
	return func(c *config.Config) {
		for _, f := range fs {
			f(c)
		}
	}
}

func usingPD(pd, r string) func(*sim.Options) {
	return func(o *sim.Options) { o.PD, o.Role = pd, r }
}

func TestOrchestratedFamily(t *testing.T) {
	p, d, whole := startSim(t, usingPD("orchestrated", "prefill")), startSim(t, usingPD("orchestrated", "decode")), startSim(t, nil)
	r := startRouter(t, usingFamily("orchestrated"), simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	for i, f := range requestForms(1, "") {
		wantSameAnswer(t, f.name, post(t, r.URL+f.path, f.body, "X-Request-Id", "r"+fmt.Sprint(i)), post(t, whole.URL()+f.path, f.body))
	}
	for i, rec := range generateRequests(d) {
		resp := member(t, rec.Body, "disagg_prefill_resp")
		if !strings.Contains(resp, `-r`+fmt.Sprint(i)+`"`) || !json.Valid([]byte(resp)) {
			t.Errorf("decode was given %s", resp)
		}
	}
	if s := d.Stats().Sum(); s.External == 0 || s.LocalCompute != 0 {
		t.Errorf("decode computed %d tokens of prompts, took %d", s.LocalCompute, s.External)
	}
	p.Fault(sim.Fault{Kind: sim.Garbage, N: 1})
	f := requestForms(2, "")[1]
	wantSameAnswer(t, "a prefill answer that is none", post(t, r.URL+f.path, f.body), post(t, whole.URL()+f.path, f.body))
	if r.fallbacks("incomplete_handle") != 1 || r.fallbacks("plain_decode") != 1 {
		t.Error("the answer that is none was not counted")
	}
	wantIdle(t, r, 10*time.Second, p, d)
}

func TestOrchestratedLabels(t *testing.T) {
	p, d := startSim(t, usingPD("orchestrated", "prefill")), startSim(t, usingPD("orchestrated", "decode"))
	pw, dw := simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0")
	pw.Labels, dw.Labels = []string{"llama-p"}, []string{"llama-d"}
	for _, c := range []struct{ prefill, decode, missing string }{{"llama-p", "llama-d", ""}, {"other", "llama-d", "other"}, {"llama-p", "none", "none"}} {
		r := startRouter(t, allOf(usingFamily("orchestrated"), func(cfg *config.Config) {
			cfg.PD.PrefillLabel, cfg.PD.DecodeLabel = []string{c.prefill}, []string{c.decode}
			cfg.Timeouts.PoolWait, cfg.PD.PlainDecode = 20*time.Millisecond, false
		}), pw, dw)
		a := post(t, r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", "label-1")
		if c.missing == "" {
			wantStatus(t, a, 200)
			continue
		}
		if msg, _, _ := a.errorOf(t); a.Status != 503 || !strings.Contains(msg, `"`+c.missing+`"`) || a.Header.Get("X-Request-Id") != "label-1" {
			t.Errorf("%+v: %d %q %v", c, a.Status, msg, a.Header)
		}
	}
}

func TestTRTLLMFamily(t *testing.T) {
	trt := func(r string) func(*sim.Options) { return func(o *sim.Options) { o.Engine, o.Role = "trtllm", r } }
	p, d, whole := startSim(t, trt("prefill")), startSim(t, trt("decode")), startSim(t, nil)
	r := startRouter(t, usingFamily("trtllm"), simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	for _, f := range requestForms(3, "") {
		wantSameAnswer(t, f.name, post(t, r.URL+f.path, f.body), post(t, whole.URL()+f.path, f.body))
	}
	for _, rec := range generateRequests(d) {
		ids := "prompt_token_ids"
		if rec.Path == "/v1/completions" {
			ids = "prompt"
		}
		if !strings.HasPrefix(member(t, rec.Body, ids), "[") {
			t.Errorf("decode tokenizes again: %s", rec.Body)
		}
	}
	if s := d.Stats().Sum(); s.Transfers != 4 || s.GarbageReads != 0 {
		t.Errorf("%d transfers, %d garbage reads; want 4, 0", s.Transfers, s.GarbageReads)
	}
	for _, more := range []string{"", `,"stream":true`} {
		body := `{"model":"sim","max_tokens":9,"messages":[{"role":"user","content":"call it"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"required"` + more + `}`
		if a := post(t, r.URL+"/v1/chat/completions", body); a.Status != 200 || !bytes.Contains(a.Body, []byte(`"tool_calls":[{`)) || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Errorf("a tool call%s: %d %s", more, a.Status, a.Body)
		}
	}

	// The first token is the last: nothing is decoded.
	d.ForgetRequests()
	for _, f := range requestForms(4, "") {
		first := post(t, whole.URL()+f.path, strings.Replace(f.body, `"max_tokens":12`, `"max_tokens":1`, 1)).text(t)
		stop, _ := json.Marshal(first)
		body := strings.Replace(f.body, `"max_tokens":12`, `"max_tokens":12,"include_stop_str_in_output":true,"stop":[`+string(stop)+`]`, 1)
		wantSameAnswer(t, f.name+", final", post(t, r.URL+f.path, body), post(t, whole.URL()+f.path, body))
	}
	if n := len(generateRequests(d)); n != 0 {
		t.Errorf("decode was sent %d requests that prefill had answered", n)
	}

	for _, kind := range []sim.FaultKind{sim.NoHandle, sim.BadHandle} {
		p.Fault(sim.Fault{Kind: kind, Leg: "prefill", N: 1})
		f := requestForms(5, "")[1]
		wantSameAnswer(t, kind.String(), post(t, r.URL+f.path, f.body), post(t, whole.URL()+f.path, f.body))
	}
	if r.fallbacks("incomplete_handle") != 2 {
		t.Errorf("%v incomplete handles counted, want 2", r.fallbacks("incomplete_handle"))
	}
}

// TestTRTLLMEventsWithEscapedNames: a Content-Type is the same in whatever case; events that
// the family changes are passed on as they come, not held until the last.
func TestTRTLLMEventsWithEscapedNames(t *testing.T) {
	trt := func(r string) func(*sim.Options) { return func(o *sim.Options) { o.Engine, o.Role = "trtllm", r } }
	p, d := startSim(t, trt("prefill")), startSim(t, trt("decode"))
	to, err := url.Parse(d.URL())
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan struct{}) // the client has the first events
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
	dw := simWorker(d, worker.Decode, "d0")
	dw.URL = front.URL
	r := startRouter(t, usingFamily("trtllm"), simWorker(p, worker.Prefill, "p0"), dw)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", r.URL+"/v1/chat/completions", strings.NewReader(requestForms(3, "")[1].body))
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

// pausedBody is a body of which three events come, the first of which says nothing yet, and the
// others once seen is closed.
type pausedBody struct {
	io.ReadCloser
	seen   chan struct{}
	paused bool // those three have gone
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
	p, d, e, whole := startSim(t, trt("prefill")), startSim(t, trt("decode")), startSim(t, trt("decode")), startSim(t, nil)
	r := startRouter(t, usingFamily("trtllm"), simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"), simWorker(e, worker.Decode, "d1"))
	for i, kind := range []sim.FaultKind{sim.Status, sim.Reset} {
		d.Fault(sim.Fault{Kind: kind, Leg: "decode"})
		before := d.Stats().Faults
		for _, f := range requestForms(6+i, "") {
			wantSameAnswer(t, kind.String()+" "+f.name, post(t, r.URL+f.path, f.body), post(t, whole.URL()+f.path, f.body))
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
				return startSim(t, func(o *sim.Options) { o.PD, o.Role, o.Store = "storage", r, name })
			}
			p, d, whole := engine("prefill"), engine("decode"), startSim(t, nil)
			r := startRouter(t, allOf(usingFamily("storage"), func(c *config.Config) {
				if first {
					c.PD.CacheHitThreshold = 0.8
				}
			}), simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
			for i, f := range requestForms(8, "") {
				f.body = strings.ReplaceAll(f.body, "word", fmt.Sprintf("word%d", i)) // nothing of it is known yet
				want := post(t, whole.URL()+f.path, f.body)
				before := len(generateRequests(p))
				wantSameAnswer(t, f.name, post(t, r.URL+f.path, f.body), want)
				if n := len(generateRequests(p)) - before; n != 1 {
					t.Errorf("%s: %d prefills of a new prompt", f.name, n)
				}
				wantSameAnswer(t, f.name+" again", post(t, r.URL+f.path, f.body), want)
				if n := len(generateRequests(p)) - before; first && n != 1 || !first && n != 2 {
					t.Errorf("%s: %d prefills after the second time", f.name, n)
				}
			}
			if s := d.Stats().Sum(); s.Transfers == 0 {
				t.Error("decode took nothing from the store")
			}
			if n := r.fallbacks("declined"); first && n != 4 || !first && n != 0 {
				t.Errorf("%v trials declined", n)
			}
			wantIdle(t, r, 10*time.Second, p, d)
		})
	}
}
