package families

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestConcurrentLegs: each leg waits for the other, as in real engines. If the router sent the legs
// one after the other, the request would never end.
func TestConcurrentLegs(t *testing.T) {
	meet := make(chan struct{})
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		meet <- struct{}{}
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) { <-meet; harness.AnswerOK(w, r) })
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	for i, f := range harness.SGLangEndpoints {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(f.More))
		if a.Status != 200 || a.Text(t) != "ok" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || a.Header.Get("X-Sluice-Worker") != "d0" {
			t.Errorf("%s: status %d, headers %v, body %s", f.Name, a.Status, a.Header, a.Body)
		}
		if p.Room(t, i) != d.Room(t, i) {
			t.Errorf("%s: prefill is in room %s, decode in %s", f.Name, p.Room(t, i), d.Room(t, i))
		}
	}
	if p.Room(t, 0) == p.Room(t, 1) {
		t.Errorf("two requests share the room %s", p.Room(t, 0))
	}
	harness.WantNoLoad(t, r)
	for _, rank := range r.AllRanks() {
		if n, prefill := rank.Computed.Load(), rank.ID.Worker == "p0"; prefill && n == 0 {
			t.Error("prefill's work is not taken for done: its rate is never learned")
		}
	}
}

// TestSilentPrefillEndsWithDecode: a prefill leg that never answers ends soon after its decode leg
// and releases its rank. In the past it reserved the rank's load until timeouts.prefill.
func TestSilentPrefillEndsWithDecode(t *testing.T) {
	t.Parallel()
	p := harness.StartScripted(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	d := harness.StartScripted(t, harness.AnswerOK)
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	for _, f := range harness.SGLangEndpoints {
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(f.More)); a.Status != 200 || a.Text(t) != "ok" {
			t.Errorf("%s: status %d, body %s", f.Name, a.Status, a.Body)
		}
	}
	harness.WantNoLoad(t, r)
}

func TestNativeGenerateInTwoLegs(t *testing.T) {
	p := harness.StartScripted(t, harness.ReplyHandler(200, `{"text":"o","meta_info":{"finish_reason":{"type":"length","length":1}}}`))
	d := harness.StartScripted(t, harness.ReplyHandler(200, `{"text":"ok","meta_info":{"prompt_tokens":2,"completion_tokens":1,"cached_tokens":0}}`))
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	a := harness.Post(t, r.URL+"/generate", `{"text":["a","b"],"sampling_params":{"max_new_tokens":3}}`)
	if a.Status != 200 || !strings.Contains(string(a.Body), `"text":"ok"`) {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	testwait.UntilWithin(t, 5*time.Second, "prefill has its leg", func() bool { return p.Requests() == 1 })
	for _, e := range []*harness.ScriptedEngine{p, d} {
		var v struct {
			Room []json.Number `json:"bootstrap_room"`
			Host []string      `json:"bootstrap_host"`
			Port []int         `json:"bootstrap_port"`
		}
		if err := json.Unmarshal([]byte(e.Bodies[0]), &v); err != nil || len(v.Room) != 2 || len(v.Host) != 2 || len(v.Port) != 2 || v.Room[0] == v.Room[1] {
			t.Errorf("%v: a batch of two needs two rooms of its own: %s", err, e.Bodies[0])
		}
	}
}

// TestPrefillFailsDuringDecode: when prefill fails, in any way, the router cancels decode at once
// and runs both legs again, with another prefill worker and a new bootstrap room. The client does
// not notice.
func TestPrefillFailsDuringDecode(t *testing.T) {
	t.Parallel()
	breaks := map[string]http.HandlerFunc{
		"500":   harness.ReplyHandler(500, `{"error":{"message":"KVTransferError"}}`),
		"503":   harness.ReplyHandler(503, `{}`),
		"reset": func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, "", true) },
		"half": func(w http.ResponseWriter, _ *http.Request) {
			harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", false)
		},
		"not HTTP": func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, "hello\r\n\r\n", false) },
		"head only": func(w http.ResponseWriter, _ *http.Request) {
			harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", true)
		},
	}
	for name, fail := range breaks {
		for _, f := range harness.SGLangEndpoints {
			t.Run(name+"/"+f.Name, func(t *testing.T) {
				var failed atomic.Bool
				var failedAt, cutAt atomic.Int64
				arrived := make(chan struct{}, 4)
				prefill := func(w http.ResponseWriter, r *http.Request) {
					select { // decode has received its leg
					case <-arrived:
					case <-r.Context().Done():
						return
					}
					if failed.CompareAndSwap(false, true) {
						failedAt.Store(time.Now().UnixNano())
						fail(w, r)
						return
					}
					harness.ReplyJSON(w, 200, harness.WholeAnswer)
				}
				p0, p1 := harness.StartScripted(t, prefill), harness.StartScripted(t, prefill)
				d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
					first := !failed.Load()
					arrived <- struct{}{}
					if !first {
						harness.AnswerOK(w, r)
						return
					}
					if f.More != "" { // decode sends only the head; nothing may reach the client
						w.Header().Set("Content-Type", "text/event-stream")
						w.(http.Flusher).Flush()
					}
					<-r.Context().Done()
					cutAt.Store(time.Now().UnixNano())
				})
				r := harness.StartRouter(t, harness.SGLangPD, p0.WithBootstrap("p0"), p1.WithBootstrap("p1"), d.Worker(worker.Decode, "d0"))
				a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(f.More))
				if a.Status != 200 || a.Text(t) != "ok" {
					t.Fatalf("status %d: %s", a.Status, a.Body)
				}
				if d.Requests() != 2 || d.Room(t, 0) == d.Room(t, 1) {
					t.Errorf("decode saw %d requests, rooms %s and %s; want two, in rooms of their own", d.Requests(), d.Room(t, 0), d.Room(t, 1))
				}
				testwait.UntilWithin(t, 5*time.Second, "each prefill worker has had one leg", func() bool { return p0.Requests() == 1 && p1.Requests() == 1 })
				testwait.UntilWithin(t, 5*time.Second, "decode's first leg is cut", func() bool { return cutAt.Load() != 0 })
				if took := time.Duration(cutAt.Load() - failedAt.Load()); took > harness.AbortSlack {
					t.Errorf("decode was cut %s after prefill failed", took)
				}
				harness.WantNoLoad(t, r)
			})
		}
	}
}

// TestPrefillFailsAfterItsRequest: a prefill that fails long after its request was answered does not
// affect later requests, although their legs reuse pooled memory.
func TestPrefillFailsAfterItsRequest(t *testing.T) {
	t.Parallel()
	const rounds = 100
	// A channel a request: under load the leg of a request can arrive after that of the next one.
	var answered [rounds]chan struct{}
	for i := range answered {
		answered[i] = make(chan struct{})
	}
	var d *harness.ScriptedEngine
	p := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Seed int }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Errorf("the body of a prefill leg: %v", err)
		}
		select {
		case <-answered[body.Seed]:
		case <-r.Context().Done(): // the leg was cancelled, or the test has failed
			return
		}
		if next := body.Seed + 1; next < rounds { // its prefill leg may fail only while the next request's decode runs
			testwait.Poll(harness.TestTimeout, func() bool { return d.Requests() > next })
		}
		harness.ReplyJSON(w, 400, `{"error":{"message":"too late"}}`)
	})
	d = harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		testwait.Pace(5 * time.Millisecond)
		harness.AnswerOK(w, r)
	})
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	for i := range rounds {
		body := harness.Chat(fmt.Sprintf(`,"seed":%d`, i))
		if a := harness.Post(t, r.URL+"/v1/chat/completions", body); a.Status != 200 || a.Text(t) != "ok" {
			t.Fatalf("request %d: status %d: %s", i, a.Status, a.Body)
		}
		close(answered[i])
	}
	harness.WantNoLoad(t, r)
	if p.Requests() != rounds || d.Requests() != rounds {
		t.Errorf("prefill saw %d requests and decode %d; want %d of each", p.Requests(), d.Requests(), rounds)
	}
}

// TestFailedDecodeCancelsPrefill: when decode fails, the router cancels prefill at once and runs
// both legs again with a new bootstrap room.
func TestFailedDecodeCancelsPrefill(t *testing.T) {
	for name, fail := range map[string]http.HandlerFunc{
		"500":   harness.ReplyHandler(500, `{"error":{"message":"x"}}`),
		"reset": func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, "", true) },
		"half": func(w http.ResponseWriter, _ *http.Request) {
			harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", false)
		},
		"first byte": func(w http.ResponseWriter, _ *http.Request) {
			harness.ReplyRaw(w, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", false)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var failed atomic.Bool
			arrived, cut := make(chan struct{}, 4), make(chan struct{}, 4)
			p := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
				first := !failed.Load()
				arrived <- struct{}{}
				if !first {
					harness.ReplyJSON(w, 200, harness.WholeAnswer)
					return
				}
				<-r.Context().Done()
				cut <- struct{}{}
			})
			decode := func(w http.ResponseWriter, r *http.Request) {
				<-arrived
				if failed.CompareAndSwap(false, true) {
					fail(w, r)
					return
				}
				harness.AnswerOK(w, r)
			}
			d0, d1 := harness.StartScripted(t, decode), harness.StartScripted(t, decode)
			r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d0.Worker(worker.Decode, "d0"), d1.Worker(worker.Decode, "d1"))
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`))
			if a.Status != 200 || a.Text(t) != "ok" {
				t.Fatalf("status %d: %s", a.Status, a.Body)
			}
			select {
			case <-cut:
			case <-time.After(5 * time.Second):
				t.Error("the first prefill was not cut")
			}
			if p.Requests() != 2 || p.Room(t, 0) == p.Room(t, 1) {
				t.Errorf("prefill saw %d requests, rooms %s, %s; want two rooms", p.Requests(), p.Room(t, 0), p.Room(t, 1))
			}
			harness.WantNoLoad(t, r)
		})
	}
}

// TestPrefillRefusesDuringDecode: a 4xx response of prefill goes to the client, without a retry.
func TestPrefillRefusesDuringDecode(t *testing.T) {
	p := harness.StartScripted(t, harness.ReplyHandler(400, `{"object":"error","message":"prompt too long","type":"BadRequestError","code":400}`))
	d, arrived, cut := harness.HangingHandler()
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), harness.StartScripted(t, d).Worker(worker.Decode, "d0"))
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	if a.Status != 400 || !strings.Contains(string(a.Body), "prompt too long") {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if len(arrived) > 0 {
		harness.ReceiveTime(t, cut, "decode is cut")
	}
	if p.Requests() != 1 {
		t.Errorf("prefill was asked %d times", p.Requests())
	}
	harness.WantNoLoad(t, r)
}

// TestPrefillFailsInMidStream: a decode that has generated a token has all the KV, so a prefill that
// fails afterwards does not end its stream.
func TestPrefillFailsInMidStream(t *testing.T) {
	seen := make(chan struct{})
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) { <-seen; harness.ReplyJSON(w, 500, `{}`) })
	prefillEnded := make(chan struct{})
	var cancelled atomic.Bool
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		context.AfterFunc(r.Context(), func() { cancelled.Store(true) })
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, harness.StreamChunk)
		w.(http.Flusher).Flush()
		<-prefillEnded
		io.WriteString(w, harness.StreamChunk+harness.StreamEnding)
	})
	r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	l := harness.StartRequest(t, r, "mid", harness.Chat(`,"stream":true`))
	l.Event(t)
	close(seen)
	testwait.UntilWithin(t, 5*time.Second, "the router knows that prefill failed", func() bool {
		return r.Metric(`sluice_legs_total{leg="prefill",outcome="5xx"}`) == 1
	})
	testwait.Holds(t, 20*time.Millisecond, "decode is not cancelled", func() bool { return !cancelled.Load() })
	close(prefillEnded)
	l.Nc.SetReadDeadline(time.Now().Add(5 * time.Second))
	rest := ""
	for !strings.Contains(rest, "[DONE]") {
		line, err := l.Br.ReadString('\n')
		if rest += line; err != nil {
			t.Fatalf("the rest of the stream is %q, %v", rest, err)
		}
	}
	if strings.Contains(rest, `"error"`) || !strings.Contains(rest, `"ok"`) {
		t.Errorf("the rest of the stream is %q", rest)
	}
	harness.WantNoLoad(t, r)
}

// TestStreamBeginsWithAnError: the router treats a stream that begins with an error event as a
// failed decode, because SGLang answers 200 before it waits for the KV. An error about the request
// itself goes to the client.
func TestStreamBeginsWithAnError(t *testing.T) {
	for _, c := range []struct {
		code int
		runs int32
	}{{500, 2}, {400, 1}} {
		var runs atomic.Int32
		p, q := harness.StartScripted(t, harness.ReplyHandler(200, harness.WholeAnswer)), harness.StartScripted(t, harness.ReplyHandler(200, harness.WholeAnswer))
		decode := func(w http.ResponseWriter, r *http.Request) {
			if runs.Add(1) > 1 {
				harness.AnswerOK(w, r)
				return
			}
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"error\":{\"object\":\"error\",\"message\":\"KVTransferError\",\"code\":%d}}\n\n%s", c.code, harness.StreamEnding)
			w.(http.Flusher).Flush()
		}
		d, e := harness.StartScripted(t, decode), harness.StartScripted(t, decode)
		r := harness.StartRouter(t, harness.SGLangPD, p.WithBootstrap("p0"), q.WithBootstrap("p1"), d.Worker(worker.Decode, "d0"), e.Worker(worker.Decode, "d1"))
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`))
		if n := runs.Load(); a.Status != 200 || n != c.runs || strings.Contains(string(a.Body), `"error"`) != (c.runs == 1) {
			t.Errorf("code %d: %d decodes, status %d: %s", c.code, n, a.Status, a.Body)
		}
		harness.WantNoLoad(t, r)
	}
}

// TestAbortedGenerateIsRunAgain: SGLang's /generate reports a request that its engine aborted with
// status 200 and a status in finish_reason, in the first event of a stream or in the object of a
// response that is not streamed. The router treats that status as a failure of the engine.
func TestAbortedGenerateIsRunAgain(t *testing.T) {
	t.Parallel()
	const (
		aborted = `{%s"output_ids":[],"meta_info":{"id":"a","finish_reason":{"type":"abort","message":"%s","status_code":%d,"err_type":"InternalServerError"},"prompt_tokens":2,"completion_tokens":0,"cached_tokens":0}}`
		good    = `{"text":"ok","output_ids":[5],"meta_info":{"id":"a","finish_reason":{"type":"length","length":1},"prompt_tokens":2,"completion_tokens":1,"cached_tokens":0}}`
	)
	for _, mode := range []string{"text", "tokens", "aggregated"} {
		for name, prompt := range map[string]string{"text": `"text":"hello there"`, "batch": `"text":["hello there","b"]`, "input_ids": `"input_ids":[1,2]`} {
			for _, k := range []struct {
				more, message string
				status        int
				runs          int32
			}{
				{`,"stream":true`, "Decode transfer failed with exception KVTransferError(bootstrap_room=7): x", 500, 2},
				{`,"stream":true`, "other", 500, 2},
				{`,"stream":true`, "other", 400, 1},
				{``, "Decode transfer failed with exception KVTransferError(bootstrap_room=7): x", 500, 2},
				{``, "other", 500, 2},
				{``, "other", 400, 1},
			} {
				text := `"text":"",`
				if name == "input_ids" {
					text = ""
				}
				first, second := fmt.Sprintf(aborted, text, k.message, k.status), good
				if name == "batch" && k.more == "" {
					first, second = "["+good+","+first+"]", "["+good+","+good+"]"
				}
				var runs atomic.Int32
				decode := func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					object := first
					if runs.Add(1) > 1 {
						object = second
					}
					if k.more == "" {
						harness.ReplyJSON(w, 200, object)
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					fmt.Fprintf(w, "data: %s\n\n%s", object, harness.StreamEnding)
					w.(http.Flusher).Flush()
				}
				p, q := harness.StartScripted(t, harness.ReplyHandler(200, good)), harness.StartScripted(t, harness.ReplyHandler(200, good))
				d, e := harness.StartScripted(t, decode), harness.StartScripted(t, decode)
				workers, tokens := []config.Worker{p.WithBootstrap("p0"), q.WithBootstrap("p1"), d.Worker(worker.Decode, "d0"), e.Worker(worker.Decode, "d1")}, mode
				if mode == "aggregated" {
					workers, tokens = []config.Worker{d.Worker(worker.Aggregated, "d0"), e.Worker(worker.Aggregated, "d1")}, "text"
				}
				r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family, c.Tokens.Mode = "sglang", tokens }, workers...)
				a := harness.Post(t, r.URL+"/generate", `{`+prompt+k.more+`,"sampling_params":{"max_new_tokens":1}}`)
				if n := runs.Load(); a.Status != 200 || n != k.runs || strings.Contains(string(a.Body), `"abort"`) != (k.runs == 1) {
					t.Errorf("%s: %s%s, %s of status %d: %d decodes, want %d; status %d: %s", mode, name, k.more, k.message, k.status, n, k.runs, a.Status, a.Body)
				}
				harness.WantNoLoad(t, r)
			}
		}
	}
}

// TestConcurrentPrefillUsesBodyBudget: the copy of the body for the concurrent prefill leg counts
// against limits.memory_budget like the body itself. Requests beyond the budget are refused, and the
// whole budget is returned.
func TestConcurrentPrefillUsesBodyBudget(t *testing.T) {
	free := make(chan struct{})
	p := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-free
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-free
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	r := harness.StartRouter(t, harness.AllOf(harness.SGLangPD, func(c *config.Config) {
		c.Limits.MaxBody, c.Limits.MemoryBudget = 64<<10, 256<<10
		c.Admission.Mode = "off" // all are sent at once
	}),
		p.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%s"}]}`, strings.Repeat("word ", 8<<10))
	answers := make(chan *harness.Answer, 3)
	for range 3 {
		go func() {
			a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", body)
			if err != nil {
				t.Error(err)
			}
			answers <- a
		}()
	}
	if a := <-answers; a != nil {
		harness.WantReason(t, a, 503, "memory_budget")
	}
	close(free)
	for range 2 {
		if a := <-answers; a != nil && a.Status != 200 {
			harness.WantReason(t, a, 503, "memory_budget")
		}
	}
	harness.WantNoLoad(t, r)
	testwait.UntilWithin(t, 5*time.Second, "the budget is whole again", func() bool { return r.Metric("sluice_memory_budget_used_bytes") == 0 })
}

// TestClientAbortsBothLegs: when the client leaves, before or after decode's response head, the
// router cancels both legs.
func TestClientAbortsBothLegs(t *testing.T) {
	for _, after := range []string{"before the head", "in the stream"} {
		t.Run(after, func(t *testing.T) {
			prefill, prefillArrived, prefillCancelled := harness.HangingHandler()
			decode, decodeArrived, decodeCancelled := harness.HangingHandler()
			if after == "in the stream" {
				decode = func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					w.Header().Set("Content-Type", "text/event-stream")
					io.WriteString(w, harness.StreamChunk)
					w.(http.Flusher).Flush()
					decodeArrived <- time.Now()
					<-r.Context().Done()
					decodeCancelled <- time.Now()
				}
			}
			r := harness.StartRouter(t, harness.SGLangPD, harness.StartScripted(t, prefill).WithBootstrap("p0"), harness.StartScripted(t, decode).Worker(worker.Decode, "d0"))
			l := harness.StartRequest(t, r, "left", harness.Chat(`,"stream":true`))
			harness.ReceiveTime(t, prefillArrived, "prefill has its leg")
			harness.ReceiveTime(t, decodeArrived, "decode has its leg")
			if after == "in the stream" {
				l.Event(t)
			}
			abortedAt := l.Disconnect()
			for what, c := range map[string]chan time.Time{"prefill": prefillCancelled, "decode": decodeCancelled} {
				if took := harness.ReceiveTime(t, c, what+" is cut").Sub(abortedAt); took > harness.AbortSlack {
					t.Errorf("%s was cut %s after the client left", what, took)
				}
			}
			harness.WantNoLoad(t, r)
		})
	}
}

// TestNoDecodeWithoutBootstrapRoom: an SGLang decode engine never receives a request without a
// bootstrap room. Without a prefill worker the client receives an error.
func TestNoDecodeWithoutBootstrapRoom(t *testing.T) {
	bad := harness.StartScripted(t, harness.ReplyHandler(503, `{}`))
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	r := harness.StartRouter(t, harness.SGLangPD, bad.WithBootstrap("p0"), d.Worker(worker.Decode, "d0"))
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 502 || !strings.Contains(string(a.Body), "cannot prefill") {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	for i := range d.Requests() {
		d.Room(t, i)
	}
	if a := harness.Post(t, r.URL+"/v1/messages", `{"model":"sim","max_tokens":3,"messages":[]}`); a.Status != 404 || !strings.Contains(string(a.Body), "family sglang") {
		t.Errorf("an endpoint without hand-over: status %d: %s", a.Status, a.Body)
	}

	only := harness.LaunchRouter(t, func(c *config.Config) { harness.SGLangPD(c); c.Timeouts.PoolWait = 50 * time.Millisecond }, d.Worker(worker.Decode, "d0"))
	testwait.UntilWithin(t, 10*time.Second, "the model is known", func() bool { return len(only.Fleet.View().Models) > 0 })
	harness.WantReason(t, harness.Post(t, only.URL+"/v1/chat/completions", harness.Chat("")), 503, "no_prefill_worker")
}

// TestBootstrapFromPrefillAnswer: if the bootstrap port of a prefill worker is unknown, the router
// sends the prefill leg first and puts the data from its response into the decode leg.
func TestBootstrapFromPrefillAnswer(t *testing.T) {
	member := `{"bootstrap_host":"10.0.0.9","bootstrap_port":8997,"bootstrap_room":9223372036854775807}`
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyJSON(w, 200, `{"id":"x","choices":[],"disaggregated_params":`+member+`}`)
	})
	d := harness.StartScripted(t, harness.AnswerOK)
	r := harness.StartRouter(t, harness.SGLangPD, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	if got := d.Room(t, 0); got != "9223372036854775807" || !strings.Contains(d.Bodies[0], `"bootstrap_host":"10.0.0.9","bootstrap_port":8997`) {
		t.Errorf("decode was sent %s", d.Bodies[0])
	}
	p.Room(t, 0) // fails if the prefill leg has no room
	member = `{"bootstrap_host":"10.0.0.9","bootstrap_port":8997}`
	harness.WantReason(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 502, "upstream_failed")
	if d.Requests() != 1 {
		t.Errorf("decode got a request without a room: %s", d.Bodies[1])
	}
}

// mooncakeBootstrap is a Mooncake bootstrap server.
type mooncakeBootstrap struct {
	*httptest.Server
	queries atomic.Int32
	engine  atomic.Value
}

func startMooncakeBootstrap(t *testing.T) *mooncakeBootstrap {
	q := new(mooncakeBootstrap)
	q.engine.Store("e-1")
	q.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/query" {
			http.NotFound(w, r)
			return
		}
		q.queries.Add(1)
		fmt.Fprintf(w, `{"0":{"engine_id":%q,"worker_addr":{"0":{"0":"10.0.0.1:5000"}}}}`, q.engine.Load())
	}))
	t.Cleanup(q.Close)
	return q
}

func (q *mooncakeBootstrap) forWorker(s *harness.ScriptedEngine, id string) config.Worker {
	w := s.Worker(worker.Prefill, id)
	u, _ := url.Parse(q.URL)
	w.Options = map[string][]string{"bootstrap_port": {u.Port()}}
	return w
}

// TestMooncakeQueriesEngineID: the router queries the engine id once, and again after a request with
// it has failed.
func TestMooncakeQueriesEngineID(t *testing.T) {
	q := startMooncakeBootstrap(t)
	p := harness.StartScripted(t, harness.ReplyHandler(200, harness.WholeAnswer))
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), fmt.Sprintf(`"remote_engine_id":%q`, q.engine.Load())) {
			harness.ReplyJSON(w, 500, `{"error":{"message":"unknown engine"}}`)
			return
		}
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	d2 := harness.StartScripted(t, d.Config.Handler.ServeHTTP)
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "mooncake" }, q.forWorker(p, "p0"), d.Worker(worker.Decode, "d0"), d2.Worker(worker.Decode, "d1"))
	for range 3 {
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 {
			t.Fatalf("status %d: %s", a.Status, a.Body)
		}
	}
	if n := q.queries.Load(); n != 1 {
		t.Errorf("the bootstrap server was asked %d times for three requests, want once", n)
	}
	q.engine.Store("e-2") // prefill has restarted
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 {
		t.Errorf("after a restart: status %d: %s", a.Status, a.Body)
	}
	if n := q.queries.Load(); n != 2 {
		t.Errorf("the bootstrap server was asked %d times, want once more after the failure", n)
	}
}

// TestMooncakeWithoutBootstrapServer: without the engine id there is no hand-over, and decode runs
// the request alone.
func TestMooncakeWithoutBootstrapServer(t *testing.T) {
	p, d := harness.StartScripted(t, harness.ReplyHandler(200, harness.WholeAnswer)), harness.StartScripted(t, harness.ReplyHandler(200, harness.WholeAnswer))
	w := p.Worker(worker.Prefill, "p0")
	w.Options = map[string][]string{"bootstrap_port": {"1"}}
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "mooncake" }, w, d.Worker(worker.Decode, "d0"))
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 || strings.Contains(d.Bodies[0], "kv_transfer_params") {
		t.Errorf("status %d, decode was sent %s", a.Status, d.Bodies[0])
	}
	if p.Requests() != 0 {
		t.Error("prefill worked for nobody")
	}
	if r.Fallbacks("peer_info_unavailable") != 1 || r.Fallbacks("decode_only") != 1 {
		t.Errorf("peer_info_unavailable counted %v times, decode_only %v times; want once each", r.Fallbacks("peer_info_unavailable"), r.Fallbacks("decode_only"))
	}
}

// TestPushLearnsWherePrefillListens: the router learns from an engine's first hand-over where the
// engine listens. From the second hand-over on it sends both legs concurrently.
func TestPushLearnsWherePrefillListens(t *testing.T) {
	const handle = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"transfer_mode":"push"}`
	meet := make(chan struct{})
	var n atomic.Int32
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) > 1 {
			<-meet
		}
		harness.ReplyJSON(w, 200, harness.PrefillReply(handle))
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if n.Load() > 1 || strings.HasPrefix(r.Header.Get("X-Request-Id"), "second") {
			meet <- struct{}{}
		}
		harness.AnswerOK(w, r)
	})
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "nixl-push" }, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	for _, id := range []string{"first", "second"} {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		a, err := harness.TryPost(ctx, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", id)
		cancel()
		if err != nil || a.Status != 200 {
			t.Fatalf("%s: %v, %+v", id, err, a)
		}
	}
	if !strings.Contains(d.Bodies[0], handle) {
		t.Errorf("the first decode was sent %s; want prefill's handle", d.Bodies[0])
	}
	id := p.Ids[1]
	if want := `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"remote_request_id":"chatcmpl-` + id + `","transfer_mode":"push"}`; !strings.Contains(d.Bodies[1], want) {
		t.Errorf("the second decode was sent %s; want %s", d.Bodies[1], want)
	}
	if !strings.HasPrefix(id, "second-x") || d.Ids[1] != id {
		t.Errorf("the legs' ids are %q and %q; the engines know the request by the same one", id, d.Ids[1])
	}
}

// TestPushDetectsEngineRestart: a decode that has the data of a prefill engine from before its
// restart would wait for blocks that never arrive. Prefill's response reveals the restart, and the router
// runs both legs again without waiting for decode's timeout.
func TestPushDetectsEngineRestart(t *testing.T) {
	const form = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":%q,"remote_request_id":"q","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2}`
	var engine atomic.Value
	engine.Store("e-1")
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyJSON(w, 200, harness.PrefillReply(fmt.Sprintf(form, engine.Load())))
	})
	d := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), fmt.Sprintf(`"remote_engine_id":%q`, engine.Load())) {
			<-r.Context().Done()
			return
		}
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	})
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family, c.Tokens.Mode = "nixl-push", "text" }, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	for _, e := range []string{"e-1", "e-1", "e-2", "e-2"} {
		engine.Store(e)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		a, err := harness.TryPost(ctx, r.URL+"/v1/chat/completions", harness.Chat(""))
		cancel()
		if err != nil || a.Status != 200 {
			t.Fatalf("%s: %v, %+v", e, err, a)
		}
	}
	// The stale decode leg may be cancelled before it is sent.
	if n := d.Requests(); r.Fallbacks("peer_info_stale") != 1 || n < 4 || n > 5 {
		t.Errorf("peer_info_stale counted %v times, decode saw %d legs; want once, and at most one leg more than 4 requests", r.Fallbacks("peer_info_stale"), n)
	}
	harness.WantNoLoad(t, r)
}
