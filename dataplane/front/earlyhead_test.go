package front

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

const (
	comment   = ": keep-alive\n\n"
	streamDoc = `{"model":"m","stream":true}`
)

// dispatching calls MarkDispatched before h.
func dispatching(h func(x Exchange)) func(x Exchange) {
	return func(x Exchange) {
		x.MarkDispatched()
		h(x)
	}
}

// head reads the head of a response.
func (c *client) head() *http.Response {
	c.t.Helper()
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		c.t.Fatalf("no head: %v", err)
	}
	return resp
}

// comments reads n comments.
func (c *client) comments(resp *http.Response, n int) {
	c.t.Helper()
	got := make([]byte, n*len(comment))
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != strings.Repeat(comment, n) {
		c.t.Fatalf("%q (%v), want %d comments", got, err, n)
	}
}

// rest reads the body to its end, without comments.
func (c *client) rest(resp *http.Response) string {
	c.t.Helper()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("%q, then %v", body, err)
	}
	return strings.ReplaceAll(string(body), comment, "")
}

// expectServes reports whether the connection serves another request.
func (c *client) expectServes() {
	c.t.Helper()
	c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
	if resp, _ := c.readResponse(); resp.StatusCode != 200 {
		c.t.Errorf("%d on the kept connection", resp.StatusCode)
	}
}

// The head is sent before an engine has responded, comments follow until the engine's first byte,
// and the rest of the stream is unchanged.
func TestHeadBeforeEngineHead(t *testing.T) { withBothRelayModes(t, testHeadBeforeEngineHead) }

func testHeadBeforeEngineHead(t *testing.T, by RelayMode) {
	answer, first := make(chan struct{}), make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		<-answer
		_, _ = io.WriteString(nc, streamHead)
		<-first
		_, _ = io.WriteString(nc, chunk(helloStream))
		testwait.Pace(30 * time.Millisecond) // no comments are sent after the engine's first byte
		_, err := io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by, EarlyHeaders: true, KeepAlive: 2 * time.Millisecond}, dispatching(relayTo(e, endHook(ends))))
	c := r.dial()
	for range 2 {
		c.send(chatPost(streamDoc, "X-Request-Id: mine"))
		resp := c.head()
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || resp.Header.Get("X-Request-Id") != "mine" {
			t.Fatalf("head %v", resp)
		}
		c.comments(resp, 3)
		answer <- struct{}{}
		c.comments(resp, 3)
		first <- struct{}{}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.TrimLeft(strings.ReplaceAll(string(body), comment, ""), "\n"); got != helloStream+"data: [DONE]\n\n" || !strings.HasSuffix(string(body), got) {
			t.Errorf("body %q", body)
		}
		wantEnd(t, ends, relay.Completed)
		c.expectServes()
	}
}

// Without EarlyHeaders comments are sent only after the engine's head.
func TestCommentsAfterEngineHead(t *testing.T) { withBothRelayModes(t, testCommentsAfterEngineHead) }

func testCommentsAfterEngineHead(t *testing.T, by RelayMode) {
	first := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		<-first
		_, err := io.WriteString(nc, chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by, KeepAlive: 2 * time.Millisecond}, dispatching(relayTo(e, endHook(ends))))
	c := r.dial()
	for range 2 {
		c.send(chatPost(streamDoc))
		resp := c.head()
		if resp.Header.Get("X-Sluice-Worker") != "w1" || resp.Header.Get("x-engine") != "one" {
			t.Errorf("head %v", resp.Header)
		}
		c.comments(resp, 4)
		first <- struct{}{}
		if got := c.rest(resp); got != helloStream+"data: [DONE]\n\n" {
			t.Errorf("body %q", got)
		}
		wantEnd(t, ends, relay.Completed)
		c.expectServes()
	}
}

// A refusal after the head has been sent becomes an error event in the client's protocol. The
// stream ends as the protocol requires, and the connection serves another request.
func TestErrorAfterHead(t *testing.T) {
	engineSays := func(status, contentType, body string) func(x Exchange) {
		return func(x Exchange) {
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, err := fmt.Fprintf(nc, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", status, contentType, len(body), body)
				return err == nil
			})
			resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Release()
			all, _ := resp.ReadAll(nil, 1<<20)
			x.Reply(resp, all)
		}
	}
	const oaDone = "data: [DONE]\n\n"
	for _, k := range []struct {
		name, path string
		answer     func(x Exchange)
		want       string
		closes     bool
	}{
		{"refusal, chat", chat, func(x Exchange) { x.Error(NoWorker, "", "none \"here\"", time.Second) },
			`data: {"error":{"message":"none \"here\"; try again after 1 s","type":"service_unavailable","param":null,"code":503}}` + "\n\n" + oaDone, false},
		{"refusal, messages", "/v1/messages", func(x Exchange) { x.Error(UpstreamTimeout, "", "late", 0) },
			"event: error\n" + `data: {"type":"error","error":{"type":"timeout_error","message":"late"},"request_id":"mine"}` + "\n\n", false},
		{"refusal, responses", "/v1/responses", func(x Exchange) { x.Error(UpstreamFailed, "", "gone", 0) },
			"event: error\n" + `data: {"type":"error","code":"upstream_error","message":"gone","param":null,"sequence_number":0}` + "\n\n", false},
		{"an engine's 400, chat", chat, engineSays("400 Bad Request", "application/json", "{\"error\":{\n\"message\":\"too long\",\"code\":400}}\n"),
			`data: {"error":{ "message":"too long","code":400}}` + "\n\n" + oaDone, false},
		{"an engine's old 400, chat", chat, engineSays("400 Bad Request", "application/json", `{"object":"error","message":"too long"}`),
			`data: {"error":{"message":"too long","type":"invalid_request_error","param":null,"code":400}}` + "\n\n" + oaDone, false},
		{"an engine's 400, messages", "/v1/messages", engineSays("400 Bad Request", "application/json", `{"type":"error","error":{"type":"invalid_request_error","message":"no"}}`),
			"event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"no"}}` + "\n\n", false},
		{"an engine's 400 of another form, messages", "/v1/messages", engineSays("400 Bad Request", "application/json", `{"error":{"message":"no","type":"BadRequestError"}}`),
			"event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"no"},"request_id":"mine"}` + "\n\n", false},
		{"an engine's 400, responses", "/v1/responses", engineSays("400 Bad Request", "application/json", `{"error":{"message":"no"}}`),
			"event: error\n" + `data: {"type":"error","code":"invalid_request_error","message":"no","param":null,"sequence_number":0}` + "\n\n", false},
		{"an engine's 429, chat", chat, engineSays("429 Too Many Requests\r\nRetry-After: 7", "application/json", `{"error":{"message":"full","type":"x","code":429}}`),
			`data: {"error":{"message":"full; try again after 7 s","type":"server_overloaded","param":null,"code":429}}` + "\n\n" + oaDone, false},
		{"an engine's 429, messages", "/v1/messages", engineSays("429 Too Many Requests", "text/plain", "full"),
			"event: error\n" + `data: {"type":"error","error":{"type":"rate_limit_error","message":"the engine answered with status 429"},"request_id":"mine"}` + "\n\n", false},
		{"a key's limit", chat, func(x Exchange) { x.Error(KeyLimitReached, "", "slow down", 3*time.Second) },
			`data: {"error":{"message":"slow down; try again after 3 s","type":"rate_limit_error","param":null,"code":"rate_limit_exceeded"}}` + "\n\n" + oaDone, false},
		{"an engine that says nothing, chat", chat, engineSays("204 No Content", "application/json", ""),
			`data: {"error":{"message":"the engine answered with status 204 and no event stream","type":"upstream_error","param":null,"code":502}}` + "\n\n" + oaDone, false},
		{"an engine that says nothing, messages", "/v1/messages", engineSays("200 OK", "text/plain", ""),
			"event: error\n" + `data: {"type":"error","error":{"type":"api_error","message":"the engine answered with status 200 and no event stream"},"request_id":"mine"}` + "\n\n", false},
		{"an engine's page", chat, engineSays("500 Oops", "text/html", "<html>"),
			`data: {"error":{"message":"the engine answered with status 500","type":"upstream_error","param":null,"code":500}}` + "\n\n" + oaDone, false},
		{"an engine's events with a Content-Length", chat, engineSays("200 OK", "text/event-stream", helloStream), helloStream, false},
		{"a whole answer", chat, func(x Exchange) { x.ReplyJSON(200, []byte(`{"choices":[]}`)) }, `data: {"choices":[]}` + "\n\n" + oaDone, false},
		{"events that are whole", chat, func(x Exchange) { x.ReplyEvents([]byte(helloStream)) }, helloStream, false},
		{"no events at all", chat, func(x Exchange) { x.ReplyEvents(nil) }, "", false},
		{"a panic", chat, func(Exchange) { panic("here") },
			`data: {"error":{"message":"the router failed on this request","type":"internal_error","param":null,"code":500}}` + "\n\n" + oaDone, true},
	} {
		t.Run(k.name, func(t *testing.T) {
			answer := make(chan struct{})
			r := start(t, Options{EarlyHeaders: true, KeepAlive: 2 * time.Millisecond}, dispatching(func(x Exchange) {
				<-answer
				k.answer(x)
			}))
			c := r.dial()
			c.send(post(k.path, streamDoc, "X-Request-Id: mine"))
			resp := c.head()
			c.comments(resp, 2)
			close(answer)
			if got := c.rest(resp); got != k.want {
				t.Errorf("got  %q\nwant %q", got, k.want)
			}
			if k.closes {
				c.expectClosed()
			} else {
				c.expectServes()
			}
			testwait.Until(t, "the end is observed", func() bool { return len(r.observed.endings()) >= 1 })
			if got := r.observed.endings()[0]; got != k.path+" 200" {
				t.Errorf("ended %q", got)
			}
		})
	}
}

// A server that begins to drain after it has sent an early head serves one more request, which
// the head allows, and closes the connection with its response. An earlier close could lose
// that request.
func TestDisconnectAfterHead(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	for name, then := range map[string]func(x Exchange){
		"a stream":  relayTo(e, func() RelayHooks { return RelayHooks{} }),
		"a refusal": func(x Exchange) { x.Error(NoWorker, "", "none", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			answer := make(chan struct{})
			r := start(t, Options{EarlyHeaders: true}, dispatching(func(x Exchange) {
				<-answer
				then(x)
			}))
			c := r.dial()
			c.send(chatPost(streamDoc))
			resp := c.head()
			r.server.CloseAfterResponse()
			close(answer)
			if got := c.rest(resp); resp.Close || got == "" {
				t.Fatalf("%q behind %v", got, resp)
			}
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			if resp, _ := c.readResponse(); resp.StatusCode != 200 || !resp.Close {
				t.Errorf("the request behind it: %v", resp)
			}
			c.expectClosed()
		})
	}
}

// After an early head a request may be retried, and the stream follows in any framing of the
// engine.
func TestRetryAfterHead(t *testing.T) { withBothRelayModes(t, testRetryAfterHead) }

func testRetryAfterHead(t *testing.T, by RelayMode) {
	const events = helloStream + "data: [DONE]\n\n"
	tried, again := make(chan struct{}), make(chan struct{})
	dead := startEngine(t, func(net.Conn, *http.Request) bool {
		tried <- struct{}{}
		<-again
		return false
	})
	for name, answer := range map[string]string{
		"chunked":  streamHead + chunk(events) + "0\r\n\r\n",
		"sized":    fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(events), events),
		"to close": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + events,
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, answer)
				return strings.Contains(answer, "chunked")
			})
			ends := make(chan relay.Result, 1)
			r := start(t, Options{RelayMode: by, EarlyHeaders: true, KeepAlive: 2 * time.Millisecond}, dispatching(func(x Exchange) {
				if _, err := dead.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, nil); err == nil {
					t.Error("the dead engine answered")
				}
				relayTo(e, endHook(ends))(x)
			}))
			c := r.dial()
			c.send(chatPost(streamDoc))
			resp := c.head()
			<-tried
			c.comments(resp, 2)
			again <- struct{}{}
			if got := c.rest(resp); got != events {
				t.Errorf("body %q", got)
			}
			wantEnd(t, ends, relay.Completed)
			c.expectServes()
		})
	}
}

// If an engine dies or stalls after its head and before its first byte, the client gets one error
// event and both connections end.
func TestEngineFailsDuringComments(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testEngineFailsDuringComments)
}

func testEngineFailsDuringComments(t *testing.T, by RelayMode) {
	for _, k := range []struct {
		name  string
		early bool
		cause relay.Cause
	}{
		{"closed", false, relay.EngineClosed}, {"closed", true, relay.EngineClosed},
		{"silent", false, relay.EngineStalled}, {"silent", true, relay.EngineStalled},
	} {
		t.Run(fmt.Sprintf("%s, early %v", k.name, k.early), func(t *testing.T) {
			fail := make(chan struct{})
			end := sync.OnceFunc(func() { close(fail) })
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, streamHead)
				<-fail
				return false
			})
			defer end() // otherwise the engine would not end after a failure below
			opt := Options{RelayMode: by, EarlyHeaders: k.early, KeepAlive: 2 * time.Millisecond}
			if k.cause == relay.EngineStalled {
				opt.StreamIdleTimeout = 300 * time.Millisecond
			}
			ends := make(chan relay.Result, 1)
			r := start(t, opt, dispatching(relayTo(e, endHook(ends))))
			c := r.dial()
			c.send(chatPost(streamDoc))
			resp := c.head()
			c.comments(resp, 2)
			if k.cause == relay.EngineClosed {
				end()
			}
			got := c.rest(resp)
			if strings.Count(got, `"upstream_error"`) != 1 || !strings.HasSuffix(got, "data: [DONE]\n\n") {
				t.Errorf("body %q", got)
			}
			wantEnd(t, ends, k.cause)
			c.expectServes()
			if s := e.ep.Stats(); s.Open != 0 {
				t.Errorf("%d engine connections are left", s.Open)
			}
		})
	}
}

// A client that disconnects while comments are sent is detected, on either path.
func TestClientGoneDuringComments(t *testing.T) { withBothRelayModes(t, testClientGoneDuringComments) }

func testClientGoneDuringComments(t *testing.T, by RelayMode) {
	for _, headed := range []bool{false, true} {
		asked, gone := make(chan struct{}), make(chan struct{})
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			close(asked)
			if headed {
				_, _ = io.WriteString(nc, streamHead)
			}
			_, _ = bufio.NewReader(nc).ReadByte()
			close(gone)
			return false
		})
		r := start(t, Options{RelayMode: by, EarlyHeaders: true, KeepAlive: 2 * time.Millisecond}, dispatching(relayTo(e, func() RelayHooks { return RelayHooks{} })))
		c := r.dial()
		c.send(chatPost(streamDoc))
		c.comments(c.head(), 2)
		<-asked // comments are sent before the router connects to an engine
		_ = c.Close()
		select {
		case <-gone:
		case <-time.After(testTimeout):
			t.Fatal("the engine's leg was not cut")
		}
		testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
	}
}

// Non-streaming responses, HTTP/1.0 clients and streams that begin in time get the engine's head.
func TestNoEarlyHead(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	opt := Options{EarlyHeaders: true, KeepAlive: time.Millisecond}
	for name, k := range map[string]struct {
		after   time.Duration
		request string
	}{
		"not streamed": {0, chatPost(hello)},
		"HTTP/1.0":     {0, strings.Replace(chatPost(streamDoc), "HTTP/1.1", "HTTP/1.0", 1)},
		"in time":      {time.Hour, chatPost(streamDoc)},
	} {
		opt.EarlyHeadersAfter = k.after
		r := start(t, opt, dispatching(func(x Exchange) {
			testwait.Pace(10 * time.Millisecond)
			relayTo(e, endHook(ends))(x)
		}))
		c := r.dial()
		c.send(k.request)
		if resp := c.head(); resp.Header.Get("x-engine") != "one" {
			t.Errorf("%s: head %v", name, resp.Header)
		}
		wantEnd(t, ends, relay.Completed)
	}
}
