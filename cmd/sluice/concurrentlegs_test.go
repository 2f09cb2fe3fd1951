package main

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

	"sluice/router/config"
	"sluice/router/worker"
)

// These tests run the families whose two legs go out at once over scripted
// engines: what is sent where, and what the end of one leg does to the other.

const (
	wholeAnswer  = `{"id":"x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	streamChunk  = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"ok\"}}]}\n\n"
	streamEnding = "data: [DONE]\n\n"
)

// sglangPD leaves the engines' tokenizers alone: a leg on a connection that was
// used before and is reset is sent once more, which these tests do not mean.
func sglangPD(c *config.Config) { c.PD.Family, c.Tokens.Mode = "sglang", "text" }

// withBootstrap is a prefill worker whose bootstrap port is known. Nothing
// listens there: engines meet at it, not the router.
func (s *scriptedEngine) withBootstrap(id string) config.Worker {
	w := s.worker(worker.Prefill, id)
	w.Options = map[string][]string{"bootstrap_port": {"8998"}}
	return w
}

// room is what a request of the scripted engine named as its bootstrap room.
func (s *scriptedEngine) room(t *testing.T, i int) string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if i >= len(s.bodies) {
		t.Fatalf("the engine saw %d requests, want more than %d", len(s.bodies), i)
	}
	var v struct {
		Room json.Number `json:"bootstrap_room"`
	}
	if err := json.Unmarshal([]byte(s.bodies[i]), &v); err != nil || v.Room == "" {
		t.Fatalf("no room in %s (%v)", s.bodies[i], err)
	}
	return v.Room.String()
}

// answerOK is a decode's good answer in the form asked for.
func answerOK(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if !strings.Contains(string(body), `"stream":true`) {
		replyJSON(w, 200, wholeAnswer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, streamChunk+streamEnding)
}

var sglangEndpoints = []struct{ name, more string }{{"whole", ""}, {"stream", `,"stream":true`}}

// Each leg waits for the other, as the engines do: sent one after the other, the
// request would never end.
func TestConcurrentLegs(t *testing.T) {
	meet := make(chan struct{})
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) { meet <- struct{}{}; replyJSON(w, 200, wholeAnswer) })
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) { <-meet; answerOK(w, r) })
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	for i, f := range sglangEndpoints {
		a := post(t, r.URL+"/v1/chat/completions", chat(f.more))
		if a.Status != 200 || a.text(t) != "ok" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || a.Header.Get("X-Sluice-Worker") != "d0" {
			t.Errorf("%s: status %d, headers %v, body %s", f.name, a.Status, a.Header, a.Body)
		}
		if p.room(t, i) != d.room(t, i) {
			t.Errorf("%s: prefill is in room %s, decode in %s", f.name, p.room(t, i), d.room(t, i))
		}
	}
	if p.room(t, 0) == p.room(t, 1) {
		t.Errorf("two requests share the room %s", p.room(t, 0))
	}
	wantNoLoad(t, r)
	for _, rank := range r.AllRanks() {
		if n, prefill := rank.Computed.Load(), rank.ID.Worker == "p0"; prefill && n == 0 {
			t.Error("prefill's work is not taken for done: its rate is never learned")
		}
	}
}

// wantNoLoad waits until no leg is booked anywhere.
func wantNoLoad(t *testing.T, r *testRouter) {
	t.Helper()
	eventually(t, 10*time.Second, "no load is booked any more", func() bool {
		for _, w := range r.Fleet.View().Workers {
			for _, rank := range w.Ranks {
				if rank.Requests.Load() != 0 || rank.PrefillTokens.Load() != 0 || rank.DecodeBlocks.Load() != 0 {
					return false
				}
			}
		}
		return true
	})
}

// TestSilentPrefillEndsWithDecode: a prefill leg that never answers ends soon after its decode
// leg, and lets go of its rank. Before, it kept the rank's load until timeouts.prefill.
func TestSilentPrefillEndsWithDecode(t *testing.T) {
	p := startScripted(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	d := startScripted(t, answerOK)
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	for _, f := range sglangEndpoints {
		if a := post(t, r.URL+"/v1/chat/completions", chat(f.more)); a.Status != 200 || a.text(t) != "ok" {
			t.Errorf("%s: status %d, body %s", f.name, a.Status, a.Body)
		}
	}
	wantNoLoad(t, r)
}

func TestNativeGenerateInTwoLegs(t *testing.T) {
	p := startScripted(t, replyHandler(200, `{"text":"o","meta_info":{"finish_reason":{"type":"length","length":1}}}`))
	d := startScripted(t, replyHandler(200, `{"text":"ok","meta_info":{"prompt_tokens":2,"completion_tokens":1,"cached_tokens":0}}`))
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	a := post(t, r.URL+"/generate", `{"text":["a","b"],"sampling_params":{"max_new_tokens":3}}`)
	if a.Status != 200 || !strings.Contains(string(a.Body), `"text":"ok"`) {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	eventually(t, 5*time.Second, "prefill has its leg", func() bool { return p.requests() == 1 })
	for _, e := range []*scriptedEngine{p, d} {
		var v struct {
			Room []json.Number `json:"bootstrap_room"`
			Host []string      `json:"bootstrap_host"`
			Port []int         `json:"bootstrap_port"`
		}
		if err := json.Unmarshal([]byte(e.bodies[0]), &v); err != nil || len(v.Room) != 2 || len(v.Host) != 2 || len(v.Port) != 2 || v.Room[0] == v.Room[1] {
			t.Errorf("%v: a batch of two needs two rooms of its own: %s", err, e.bodies[0])
		}
	}
}

// When prefill fails, in whatever way, decode is cut at once, and the pair is
// run again with another prefill worker in a new room; the client sees nothing
// of it.
func TestPrefillFailsDuringDecode(t *testing.T) {
	breaks := map[string]http.HandlerFunc{
		"500":   replyHandler(500, `{"error":{"message":"KVTransferError"}}`),
		"503":   replyHandler(503, `{}`),
		"reset": func(w http.ResponseWriter, _ *http.Request) { replyRaw(w, "", true) },
		"half": func(w http.ResponseWriter, _ *http.Request) {
			replyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", false)
		},
		"not HTTP": func(w http.ResponseWriter, _ *http.Request) { replyRaw(w, "hello\r\n\r\n", false) },
		"head only": func(w http.ResponseWriter, _ *http.Request) {
			replyRaw(w, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", true)
		},
	}
	for name, fail := range breaks {
		for _, f := range sglangEndpoints {
			t.Run(name+"/"+f.name, func(t *testing.T) {
				var failed atomic.Bool
				var failedAt, cutAt atomic.Int64
				arrived := make(chan struct{}, 4)
				prefill := func(w http.ResponseWriter, r *http.Request) {
					select { // decode has its leg by now
					case <-arrived:
					case <-r.Context().Done():
						return
					}
					if failed.CompareAndSwap(false, true) {
						failedAt.Store(time.Now().UnixNano())
						fail(w, r)
						return
					}
					replyJSON(w, 200, wholeAnswer)
				}
				p0, p1 := startScripted(t, prefill), startScripted(t, prefill)
				d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
					first := !failed.Load()
					arrived <- struct{}{}
					if !first {
						answerOK(w, r)
						return
					}
					if f.more != "" { // the head alone goes out; nothing may reach the client
						w.Header().Set("Content-Type", "text/event-stream")
						w.(http.Flusher).Flush()
					}
					<-r.Context().Done()
					cutAt.Store(time.Now().UnixNano())
				})
				r := startRouter(t, sglangPD, p0.withBootstrap("p0"), p1.withBootstrap("p1"), d.worker(worker.Decode, "d0"))
				a := post(t, r.URL+"/v1/chat/completions", chat(f.more))
				if a.Status != 200 || a.text(t) != "ok" {
					t.Fatalf("status %d: %s", a.Status, a.Body)
				}
				if d.requests() != 2 || d.room(t, 0) == d.room(t, 1) {
					t.Errorf("decode saw %d requests, rooms %s and %s; want two, in rooms of their own", d.requests(), d.room(t, 0), d.room(t, 1))
				}
				eventually(t, 5*time.Second, "each prefill worker has had one leg", func() bool { return p0.requests() == 1 && p1.requests() == 1 })
				eventually(t, 5*time.Second, "decode's first leg is cut", func() bool { return cutAt.Load() != 0 })
				if took := time.Duration(cutAt.Load() - failedAt.Load()); took > abortSlack {
					t.Errorf("decode was cut %s after prefill failed", took)
				}
				wantNoLoad(t, r)
			})
		}
	}
}

// A prefill that ends badly when its request has long been answered has nothing to do with
// the requests that came after it, whose legs run in memory that others had before.
func TestPrefillFailsAfterItsRequest(t *testing.T) {
	const rounds = 100
	answered := make(chan struct{}, rounds)
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		<-answered
		time.Sleep(3 * time.Millisecond) // the next request's decode is under way
		replyJSON(w, 400, `{"error":{"message":"too late"}}`)
	})
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(5 * time.Millisecond)
		answerOK(w, r)
	})
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	for i := range rounds {
		if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 200 || a.text(t) != "ok" {
			t.Fatalf("request %d: status %d: %s", i, a.Status, a.Body)
		}
		answered <- struct{}{}
	}
	wantNoLoad(t, r)
	if p.requests() != rounds || d.requests() != rounds {
		t.Errorf("prefill saw %d requests and decode %d; want %d of each", p.requests(), d.requests(), rounds)
	}
}

// When decode fails, prefill is cut at once and the pair runs again in a new room.
func TestFailedDecodeCancelsPrefill(t *testing.T) {
	for name, fail := range map[string]http.HandlerFunc{
		"500":   replyHandler(500, `{"error":{"message":"x"}}`),
		"reset": func(w http.ResponseWriter, _ *http.Request) { replyRaw(w, "", true) },
		"half": func(w http.ResponseWriter, _ *http.Request) {
			replyRaw(w, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", false)
		},
		"first byte": func(w http.ResponseWriter, _ *http.Request) {
			replyRaw(w, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", false)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var failed atomic.Bool
			arrived, cut := make(chan struct{}, 4), make(chan struct{}, 4)
			p := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
				first := !failed.Load()
				arrived <- struct{}{}
				if !first {
					replyJSON(w, 200, wholeAnswer)
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
				answerOK(w, r)
			}
			d0, d1 := startScripted(t, decode), startScripted(t, decode)
			r := startRouter(t, sglangPD, p.withBootstrap("p0"), d0.worker(worker.Decode, "d0"), d1.worker(worker.Decode, "d1"))
			a := post(t, r.URL+"/v1/chat/completions", chat(`,"stream":true`))
			if a.Status != 200 || a.text(t) != "ok" {
				t.Fatalf("status %d: %s", a.Status, a.Body)
			}
			select {
			case <-cut:
			case <-time.After(5 * time.Second):
				t.Error("the first prefill was not cut")
			}
			if p.requests() != 2 || p.room(t, 0) == p.room(t, 1) {
				t.Errorf("prefill saw %d requests, rooms %s, %s; want two rooms", p.requests(), p.room(t, 0), p.room(t, 1))
			}
			wantNoLoad(t, r)
		})
	}
}

// What prefill refuses as the client's mistake goes to the client, once.
func TestPrefillRefusesDuringDecode(t *testing.T) {
	p := startScripted(t, replyHandler(400, `{"object":"error","message":"prompt too long","type":"BadRequestError","code":400}`))
	d, arrived, cut := hangingHandler()
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), startScripted(t, d).worker(worker.Decode, "d0"))
	a := post(t, r.URL+"/v1/chat/completions", chat(""))
	if a.Status != 400 || !strings.Contains(string(a.Body), "prompt too long") {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	if len(arrived) > 0 {
		receiveTime(t, cut, "decode is cut")
	}
	if p.requests() != 1 {
		t.Errorf("prefill was asked %d times", p.requests())
	}
	wantNoLoad(t, r)
}

// A decode that has made a token has all the KV: a prefill that fails then is no
// reason to end its stream.
func TestPrefillFailsInMidStream(t *testing.T) {
	seen := make(chan struct{})
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) { <-seen; replyJSON(w, 500, `{}`) })
	prefillEnded := make(chan struct{})
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, streamChunk)
		w.(http.Flusher).Flush()
		<-prefillEnded
		io.WriteString(w, streamChunk+streamEnding)
	})
	r := startRouter(t, sglangPD, p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	l := startRequest(t, r, "mid", chat(`,"stream":true`))
	l.event(t)
	close(seen)
	eventually(t, 5*time.Second, "the router knows that prefill failed", func() bool {
		return r.metric(`sluice_legs_total{leg="prefill",outcome="5xx"}`) == 1
	})
	time.Sleep(20 * time.Millisecond) // a cut would come now
	close(prefillEnded)
	l.nc.SetReadDeadline(time.Now().Add(5 * time.Second))
	rest := ""
	for !strings.Contains(rest, "[DONE]") {
		line, err := l.br.ReadString('\n')
		if rest += line; err != nil {
			t.Fatalf("the rest of the stream is %q, %v", rest, err)
		}
	}
	if strings.Contains(rest, `"error"`) || !strings.Contains(rest, `"ok"`) {
		t.Errorf("the rest of the stream is %q", rest)
	}
	wantNoLoad(t, r)
}

// A stream that begins with an error event is a decode that failed: SGLang answers
// 200 before it waits for the KV. What speaks of the request is the client's.
func TestStreamBeginsWithAnError(t *testing.T) {
	for _, c := range []struct {
		code int
		runs int32
	}{{500, 2}, {400, 1}} {
		var runs atomic.Int32
		p, q := startScripted(t, replyHandler(200, wholeAnswer)), startScripted(t, replyHandler(200, wholeAnswer))
		decode := func(w http.ResponseWriter, r *http.Request) {
			if runs.Add(1) > 1 {
				answerOK(w, r)
				return
			}
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"error\":{\"object\":\"error\",\"message\":\"KVTransferError\",\"code\":%d}}\n\n%s", c.code, streamEnding)
			w.(http.Flusher).Flush()
		}
		d, e := startScripted(t, decode), startScripted(t, decode)
		r := startRouter(t, sglangPD, p.withBootstrap("p0"), q.withBootstrap("p1"), d.worker(worker.Decode, "d0"), e.worker(worker.Decode, "d1"))
		a := post(t, r.URL+"/v1/chat/completions", chat(`,"stream":true`))
		if n := runs.Load(); a.Status != 200 || n != c.runs || strings.Contains(string(a.Body), `"error"`) != (c.runs == 1) {
			t.Errorf("code %d: %d decodes, status %d: %s", c.code, n, a.Status, a.Body)
		}
		wantNoLoad(t, r)
	}
}

// TestAbortedGenerateIsRunAgain: SGLang's /generate reports a request that its engine aborted
// as a 200 whose finish_reason has a status, of a stream in its first event and of a whole
// answer in its only object. The router reads that status as an engine's failure.
func TestAbortedGenerateIsRunAgain(t *testing.T) {
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
						replyJSON(w, 200, object)
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					fmt.Fprintf(w, "data: %s\n\n%s", object, streamEnding)
					w.(http.Flusher).Flush()
				}
				p, q := startScripted(t, replyHandler(200, good)), startScripted(t, replyHandler(200, good))
				d, e := startScripted(t, decode), startScripted(t, decode)
				workers, tokens := []config.Worker{p.withBootstrap("p0"), q.withBootstrap("p1"), d.worker(worker.Decode, "d0"), e.worker(worker.Decode, "d1")}, mode
				if mode == "aggregated" {
					workers, tokens = []config.Worker{d.worker(worker.Aggregated, "d0"), e.worker(worker.Aggregated, "d1")}, "text"
				}
				r := startRouter(t, func(c *config.Config) { c.PD.Family, c.Tokens.Mode = "sglang", tokens }, workers...)
				a := post(t, r.URL+"/generate", `{`+prompt+k.more+`,"sampling_params":{"max_new_tokens":1}}`)
				if n := runs.Load(); a.Status != 200 || n != k.runs || strings.Contains(string(a.Body), `"abort"`) != (k.runs == 1) {
					t.Errorf("%s: %s%s, %s of status %d: %d decodes, want %d; status %d: %s", mode, name, k.more, k.message, k.status, n, k.runs, a.Status, a.Body)
				}
				wantNoLoad(t, r)
			}
		}
	}
}

// The copy that the leg beside decode has of its body is counted like the body: what
// the budget does not hold is refused, and all comes back.
func TestConcurrentPrefillUsesBodyBudget(t *testing.T) {
	free := make(chan struct{})
	p := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-free
		replyJSON(w, 200, wholeAnswer)
	})
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-free
		replyJSON(w, 200, wholeAnswer)
	})
	r := startRouter(t, allOf(sglangPD, func(c *config.Config) { c.Limits.MaxBody, c.Limits.BodyBudget = 64<<10, 256<<10 }),
		p.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%s"}]}`, strings.Repeat("word ", 8<<10))
	answers := make(chan *answer, 3)
	for range 3 {
		go func() {
			a, err := tryPost(context.Background(), r.URL+"/v1/chat/completions", body)
			if err != nil {
				t.Error(err)
			}
			answers <- a
		}()
	}
	if a := <-answers; a != nil {
		wantReason(t, a, 503, "memory_budget")
	}
	close(free)
	for range 2 {
		if a := <-answers; a != nil && a.Status != 200 {
			wantReason(t, a, 503, "memory_budget")
		}
	}
	wantNoLoad(t, r)
	eventually(t, 5*time.Second, "the budget is whole again", func() bool { return r.metric("sluice_memory_budget_used_bytes") == 0 })
}

// A client that leaves takes both legs down, before decode's head and after it.
func TestClientAbortsBothLegs(t *testing.T) {
	for _, after := range []string{"before the head", "in the stream"} {
		t.Run(after, func(t *testing.T) {
			prefill, prefillArrived, prefillCancelled := hangingHandler()
			decode, decodeArrived, decodeCancelled := hangingHandler()
			if after == "in the stream" {
				decode = func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					w.Header().Set("Content-Type", "text/event-stream")
					io.WriteString(w, streamChunk)
					w.(http.Flusher).Flush()
					decodeArrived <- time.Now()
					<-r.Context().Done()
					decodeCancelled <- time.Now()
				}
			}
			r := startRouter(t, sglangPD, startScripted(t, prefill).withBootstrap("p0"), startScripted(t, decode).worker(worker.Decode, "d0"))
			l := startRequest(t, r, "left", chat(`,"stream":true`))
			receiveTime(t, prefillArrived, "prefill has its leg")
			receiveTime(t, decodeArrived, "decode has its leg")
			if after == "in the stream" {
				l.event(t)
			}
			abortedAt := l.disconnect()
			for what, c := range map[string]chan time.Time{"prefill": prefillCancelled, "decode": decodeCancelled} {
				if took := receiveTime(t, c, what+" is cut").Sub(abortedAt); took > abortSlack {
					t.Errorf("%s was cut %s after the client left", what, took)
				}
			}
			wantNoLoad(t, r)
		})
	}
}

// A decode engine of SGLang never gets a request without a room: where prefill
// cannot be had the client is told.
func TestNoDecodeWithoutBootstrapRoom(t *testing.T) {
	bad := startScripted(t, replyHandler(503, `{}`))
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	r := startRouter(t, sglangPD, bad.withBootstrap("p0"), d.worker(worker.Decode, "d0"))
	if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 502 || !strings.Contains(string(a.Body), "cannot prefill") {
		t.Errorf("status %d: %s", a.Status, a.Body)
	}
	for i := range d.requests() {
		d.room(t, i)
	}
	if a := post(t, r.URL+"/v1/messages", `{"model":"sim","max_tokens":3,"messages":[]}`); a.Status != 404 || !strings.Contains(string(a.Body), "family sglang") {
		t.Errorf("an endpoint without hand-over: status %d: %s", a.Status, a.Body)
	}

	only := launchRouter(t, func(c *config.Config) { sglangPD(c); c.Timeouts.PoolWait = 50 * time.Millisecond }, d.worker(worker.Decode, "d0"))
	eventually(t, 10*time.Second, "the model is known", func() bool { return len(only.Fleet.View().Models) > 0 })
	wantReason(t, post(t, only.URL+"/v1/chat/completions", chat("")), 503, "no_prefill_worker")
}

// A prefill worker whose bootstrap port nobody knows is sent its leg first, and
// what it tells goes into decode.
func TestBootstrapFromPrefillAnswer(t *testing.T) {
	member := `{"bootstrap_host":"10.0.0.9","bootstrap_port":8997,"bootstrap_room":9223372036854775807}`
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		replyJSON(w, 200, `{"id":"x","choices":[],"disaggregated_params":`+member+`}`)
	})
	d := startScripted(t, answerOK)
	r := startRouter(t, sglangPD, p.worker(worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
	if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 200 {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	if got := d.room(t, 0); got != "9223372036854775807" || !strings.Contains(d.bodies[0], `"bootstrap_host":"10.0.0.9","bootstrap_port":8997`) {
		t.Errorf("decode was sent %s", d.bodies[0])
	}
	p.room(t, 0) // prefill is never without one
	member = `{"bootstrap_host":"10.0.0.9","bootstrap_port":8997}`
	wantReason(t, post(t, r.URL+"/v1/chat/completions", chat("")), 502, "upstream_failed")
	if d.requests() != 1 {
		t.Errorf("decode got a request without a room: %s", d.bodies[1])
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

func (q *mooncakeBootstrap) forWorker(s *scriptedEngine, id string) config.Worker {
	w := s.worker(worker.Prefill, id)
	u, _ := url.Parse(q.URL)
	w.Options = map[string][]string{"bootstrap_port": {u.Port()}}
	return w
}

// The engine id is asked once, and again when a pair has failed with it.
func TestMooncakeQueriesEngineID(t *testing.T) {
	q := startMooncakeBootstrap(t)
	p := startScripted(t, replyHandler(200, wholeAnswer))
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), fmt.Sprintf(`"remote_engine_id":%q`, q.engine.Load())) {
			replyJSON(w, 500, `{"error":{"message":"unknown engine"}}`)
			return
		}
		replyJSON(w, 200, wholeAnswer)
	})
	d2 := startScripted(t, d.Config.Handler.ServeHTTP)
	r := startRouter(t, func(c *config.Config) { c.PD.Family = "mooncake" }, q.forWorker(p, "p0"), d.worker(worker.Decode, "d0"), d2.worker(worker.Decode, "d1"))
	for range 3 {
		if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 200 {
			t.Fatalf("status %d: %s", a.Status, a.Body)
		}
	}
	if n := q.queries.Load(); n != 1 {
		t.Errorf("the bootstrap server was asked %d times for three requests, want once", n)
	}
	q.engine.Store("e-2") // prefill has started anew
	if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 200 {
		t.Errorf("after a restart: status %d: %s", a.Status, a.Body)
	}
	if n := q.queries.Load(); n != 2 {
		t.Errorf("the bootstrap server was asked %d times, want once more after the failure", n)
	}
}

// Without the engine id there is no hand-over, and decode does the request alone.
func TestMooncakeWithoutBootstrapServer(t *testing.T) {
	p, d := startScripted(t, replyHandler(200, wholeAnswer)), startScripted(t, replyHandler(200, wholeAnswer))
	w := p.worker(worker.Prefill, "p0")
	w.Options = map[string][]string{"bootstrap_port": {"1"}}
	r := startRouter(t, func(c *config.Config) { c.PD.Family = "mooncake" }, w, d.worker(worker.Decode, "d0"))
	if a := post(t, r.URL+"/v1/chat/completions", chat("")); a.Status != 200 || strings.Contains(d.bodies[0], "kv_transfer_params") {
		t.Errorf("status %d, decode was sent %s", a.Status, d.bodies[0])
	}
	if p.requests() != 0 {
		t.Error("prefill worked for nobody")
	}
	if r.fallbacks("no_fact") != 1 || r.fallbacks("plain_decode") != 1 {
		t.Errorf("no_fact counted %v times, plain_decode %v times; want once each", r.fallbacks("no_fact"), r.fallbacks("plain_decode"))
	}
}

// The first hand-over of an engine tells where it listens; from the second on
// both legs go out at once.
func TestPushLearnsWherePrefillListens(t *testing.T) {
	const handle = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"transfer_mode":"push"}`
	meet := make(chan struct{})
	var n atomic.Int32
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) > 1 {
			<-meet
		}
		replyJSON(w, 200, prefillReply(handle))
	})
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if n.Load() > 1 || strings.HasPrefix(r.Header.Get("X-Request-Id"), "second") {
			meet <- struct{}{}
		}
		answerOK(w, r)
	})
	r := startRouter(t, func(c *config.Config) { c.PD.Family = "nixl-push" }, p.worker(worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
	for _, id := range []string{"first", "second"} {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		a, err := tryPost(ctx, r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", id)
		cancel()
		if err != nil || a.Status != 200 {
			t.Fatalf("%s: %v, %+v", id, err, a)
		}
	}
	if !strings.Contains(d.bodies[0], handle) {
		t.Errorf("the first decode was sent %s; want prefill's handle", d.bodies[0])
	}
	id := p.ids[1]
	if want := `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2,"remote_request_id":"chatcmpl-` + id + `","transfer_mode":"push"}`; !strings.Contains(d.bodies[1], want) {
		t.Errorf("the second decode was sent %s; want %s", d.bodies[1], want)
	}
	if !strings.HasPrefix(id, "second-x") || d.ids[1] != id {
		t.Errorf("the legs' ids are %q and %q; the engines know the request by the same one", id, d.ids[1])
	}
}

// A prefill engine that has started anew is met by nobody who was told of the old
// one: its answer shows that, and the pair runs again before decode's own long
// wait is over.
func TestPushDetectsEngineRestart(t *testing.T) {
	const form = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":%q,"remote_request_id":"q","remote_host":"10.0.0.1","remote_port":5600,"tp_size":2}`
	var engine atomic.Value
	engine.Store("e-1")
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		replyJSON(w, 200, prefillReply(fmt.Sprintf(form, engine.Load())))
	})
	d := startScripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), fmt.Sprintf(`"remote_engine_id":%q`, engine.Load())) {
			<-r.Context().Done()
			return
		}
		replyJSON(w, 200, wholeAnswer)
	})
	r := startRouter(t, func(c *config.Config) { c.PD.Family, c.Tokens.Mode = "nixl-push", "text" }, p.worker(worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
	for _, e := range []string{"e-1", "e-1", "e-2", "e-2"} {
		engine.Store(e)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		a, err := tryPost(ctx, r.URL+"/v1/chat/completions", chat(""))
		cancel()
		if err != nil || a.Status != 200 {
			t.Fatalf("%s: %v, %+v", e, err, a)
		}
	}
	// The leg of the stale pair may be cut before it is sent.
	if n := d.requests(); r.fallbacks("stale_fact") != 1 || n < 4 || n > 5 {
		t.Errorf("stale_fact counted %v times, decode saw %d legs; want once, and at most one leg more than 4 requests", r.fallbacks("stale_fact"), n)
	}
	wantNoLoad(t, r)
}
