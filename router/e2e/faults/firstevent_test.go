package faults

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestNonStreamingInitialError: a stream of an aggregated engine begins with a failure (for P/D
// families see TestPDMatrix). The router runs the request again if there is another engine, even
// if its stream could not migrate.
func TestNonStreamingInitialError(t *testing.T) {
	for _, engine := range []string{"vllm", "sglang", "trtllm"} {
		t.Run(engine, func(t *testing.T) {
			var engines [2]*sim.Engine
			var workers []config.Worker
			for i := range engines {
				engines[i] = harness.StartSim(t, func(o *sim.Options) { o.Engine = engine })
				w := harness.SimWorker(engines[i], worker.Aggregated, "w"+string(rune('0'+i)))
				w.Engine, w.KVEvents = engine, []string{"off"}
				workers = append(workers, w)
			}
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, workers...)
			want := harness.Post(t, engines[0].URL()+"/v1/chat/completions", harness.Chat(`,"seed":3`)).Text(t)
			for _, fault := range []sim.Fault{{Kind: sim.StreamFail}, {Kind: sim.StreamFail, Phase: "role"}, {Kind: sim.Truncate, Phase: "body"}} {
				id := "bad-" + fault.Kind.String() + fault.Phase
				fault.N, fault.ID = 1, id
				engines[0].Fault(fault)
				for range 2 { // round robin: one of the requests meets the fault
					a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"seed":3,"stream":true`), "X-Request-Id", id)
					if a.Status != 200 || a.Text(t) != want || strings.Count(string(a.Body), "[DONE]") != 1 {
						t.Errorf("%s: %d %s", id, a.Status, a.Body)
					}
				}
			}
			if n := engines[0].Stats().Faults; n != 3 {
				t.Errorf("%d faults struck, want 3", n)
			}
			// Without another engine the client receives the engine's error.
			for _, e := range engines {
				e.Fault(sim.Fault{Kind: sim.StreamFail, ID: "all"})
			}
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"seed":3,"stream":true`), "X-Request-Id", "all")
			if s := string(a.Body); a.Status != 200 || strings.Count(s, `"error"`) == 0 || strings.Count(s, "[DONE]") != 1 {
				t.Errorf("all fail: %d %s", a.Status, s)
			}
			testwait.UntilWithin(t, 20*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
		})
	}
}

// TestStreamErrorBeforeTokenIDs: a stream can migrate once its first event has contained the ids
// of the prompt. A stream that fails at its first event is run again from the start.
func TestStreamErrorBeforeTokenIDs(t *testing.T) {
	e0, e1 := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, harness.AllOf(harness.ShortPrefillTimeout, func(c *config.Config) { c.Tokens.Mode = "text" }), harness.SimWorker(e0, worker.Aggregated, "w0"), harness.SimWorker(e1, worker.Aggregated, "w1"))
	want := harness.Post(t, e0.URL()+"/v1/chat/completions", harness.Chat("")).Text(t)
	for _, fault := range []sim.Fault{{Kind: sim.StreamFail}, {Kind: sim.StreamFail, Status: 429}, {Kind: sim.Truncate, Phase: "body"}} {
		fault.N = 1
		e0.Fault(fault)
		for range 2 {
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`))
			if a.Status != 200 || a.Text(t) != want || strings.Count(string(a.Body), "[DONE]") != 1 {
				t.Errorf("%s %d: %d %s", fault.Kind, fault.Status, a.Status, a.Body)
			}
		}
	}
	if n := e0.Stats().Faults; n != 3 {
		t.Errorf("%d faults struck, want 3", n)
	}
}

// TestKeepAliveCommentsStartWithHead: with relay.comment_interval the router sends the response head
// without waiting for the first event, even for a stream that cannot migrate.
func TestKeepAliveCommentsStartWithHead(t *testing.T) {
	t.Parallel()
	e0, e1 := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) { c.Relay.CommentInterval = 10 * time.Millisecond }, harness.SimWorker(e0, worker.Aggregated, "w0"), harness.SimWorker(e1, worker.Aggregated, "w1"))
	for _, e := range []*sim.Engine{e0, e1} {
		e.Fault(sim.Fault{Kind: sim.Stall, Phase: "body", Delay: 500 * time.Millisecond})
	}
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"seed":3,"stream":true`))
	if a.Status != 200 || !strings.HasPrefix(string(a.Body), keepAliveComment) || strings.Count(string(a.Body), "[DONE]") != 1 {
		t.Errorf("%d %s, want comments and then the answer", a.Status, a.Body)
	}
}

// TestCommentsAreNoOutput: an engine that has sent only comments has sent the client no content, so a
// request that fails then runs again. Comments before an answer reach the client.
func TestCommentsAreNoOutput(t *testing.T) {
	const comments = ": one\n\n: two\n\n"
	sse := func(behind func(w http.ResponseWriter)) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, comments)
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
			behind(w)
		}
	}
	for name, behind := range map[string]func(w http.ResponseWriter){
		"ends":   func(http.ResponseWriter) {},
		"breaks": func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"fails": func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, `data: {"error":{"message":"boom","type":"InternalServerError","code":500}}`+"\n\ndata: [DONE]\n\n")
		},
		"to the close": nil,
	} {
		bad := harness.StartScripted(t, sse(behind))
		if name == "to the close" {
			bad = harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
				harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"+comments, false)
			})
		}
		good := harness.StartSim(t, nil)
		r := harness.StartRouter(t, harness.AllOf(harness.ShortPrefillTimeout, func(c *config.Config) { c.Schedule.Policy = "round_robin" }), bad.Worker(worker.Aggregated, "bad"), harness.SimWorker(good, worker.Aggregated, "good"))
		for range 2 {
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"seed":3,"stream":true`))
			if a.Status != 200 || a.Text(t) == "" || strings.Contains(string(a.Body), `"error"`) || strings.Count(string(a.Body), "[DONE]") != 1 {
				t.Errorf("%s: %d %s", name, a.Status, a.Body)
			}
		}
		if bad.Requests() == 0 {
			t.Errorf("%s: the failing engine was never chosen: the test shows nothing", name)
		}
	}
	slow := sse(func(w http.ResponseWriter) {
		for range 20 {
			time.Sleep(100 * time.Millisecond)
			_, _ = io.WriteString(w, ": on\n\n")
			w.(http.Flusher).Flush()
		}
		_, _ = io.WriteString(w, harness.StreamChunk+harness.StreamEnding)
	})
	w0, w1 := harness.StartScripted(t, slow), harness.StartScripted(t, slow)
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.StreamIdle = 300 * time.Millisecond }, w0.Worker(worker.Aggregated, "w0"), w1.Worker(worker.Aggregated, "w1"))
	began := time.Now()
	resp, err := http.Post(r.URL+"/v1/chat/completions", "application/json", strings.NewReader(harness.Chat(`,"stream":true`)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if took := time.Since(began); took > 1500*time.Millisecond {
		t.Errorf("comments were kept from the client for %v", took)
	}
	body, err := io.ReadAll(resp.Body)
	if got := string(body); err != nil || !strings.HasPrefix(got, comments) || strings.Count(got, ": on\n") != 20 || strings.Count(got, "[DONE]") != 1 || w0.Requests()+w1.Requests() != 1 {
		t.Errorf("got %q, %v after %d requests", got, err, w0.Requests()+w1.Requests())
	}
}

// TestNativeStreamStartsWithAbort: SGLang reports in an ordinary event of /generate that the KV
// did not arrive.
func TestNativeStreamStartsWithAbort(t *testing.T) {
	t.Parallel()
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role = "sglang", role })
	}
	p, d0, d1, whole := engine("prefill"), engine("decode"), engine("decode"), harness.StartSim(t, func(o *sim.Options) { o.Engine = "sglang" })
	pw := harness.SimWorker(p, worker.Prefill, "p0")
	harness.WithBootstrap(&pw, p)
	r := harness.StartRouter(t, harness.AllOf(harness.UsingFamily("sglang"), harness.ShortPrefillTimeout), pw, harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
	const body = `{"text":"the quick brown fox jumps over the lazy dog","stream":true,"sampling_params":{"max_new_tokens":6,"sampling_seed":3,"ignore_eos":true}}`
	want := lastNative(t, harness.Post(t, whole.URL()+"/generate", body))
	d0.Fault(sim.Fault{Kind: sim.Reset, Leg: "handover", N: 1})
	for range 2 {
		a := harness.Post(t, r.URL+"/generate", body)
		if a.Status != 200 || strings.Contains(string(a.Body), `"abort"`) || lastNative(t, a) != want {
			t.Errorf("%d %s, want %q", a.Status, a.Body, want)
		}
	}
	if n := d0.Stats().Faults; n != 1 {
		t.Errorf("%d faults struck, want 1", n)
	}
	harness.WantIdle(t, r, 20*time.Second, p, d0, d1)
}

// lastNative returns the text of a /generate stream.
func lastNative(t *testing.T, a *harness.Answer) (text string) {
	t.Helper()
	var h harness.StreamRecord
	harness.EachEvent(a, &h, func(name string, v map[string]any) {
		if s, ok := v["text"].(string); ok {
			text = s
		}
	})
	if text == "" || h.Broken != nil {
		t.Errorf("no text, or %v, in %s", h.Broken, a.Body)
	}
	return text
}

// TestStreamEndsWithoutOutput lets an engine end a stream with valid framing but without output. The
// router tries another engine; without another the client receives an error.
func TestStreamEndsWithoutOutput(t *testing.T) {
	t.Parallel()
	const role = `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	for name, text := range map[string]string{"nothing": "", "a role": role, "a role and half a token": role + harness.StreamChunk[:40]} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			empty := func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				_, _ = io.Copy(io.Discard, r.Body)
				body := "0\r\n\r\n"
				if text != "" {
					body = fmt.Sprintf("%x\r\n%s\r\n", len(text), text) + body
				}
				harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"+body, false)
			}
			bad, good := harness.StartScripted(t, empty), harness.StartScripted(t, harness.AnswerOK)
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, bad.Worker(worker.Aggregated, "w0"), good.Worker(worker.Aggregated, "w1"))
			for range 2 { // round robin: one of the requests meets the fault
				if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`)); a.Status != 200 || a.Text(t) != "ok" || strings.Contains(string(a.Body), `"error"`) {
					t.Errorf("%d %s", a.Status, a.Body)
				}
			}
			if asked.Load() == 0 {
				t.Error("the engine that says nothing was not asked")
			}
			alone := harness.StartRouter(t, harness.ShortPrefillTimeout, harness.StartScripted(t, empty).Worker(worker.Aggregated, "w0"))
			a := harness.Post(t, alone.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`))
			if s := string(a.Body); a.Status != 200 || strings.Count(s, `"error"`) != 1 || strings.Count(s, "[DONE]") != 1 {
				t.Errorf("alone: %d %s", a.Status, s)
			}
		})
	}
}
