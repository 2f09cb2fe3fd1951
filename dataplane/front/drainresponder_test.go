package front

import (
	"bytes"
	"io"
	"log/slog"
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

// logBuffer is a log in memory.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// A request whose response has not begun at the drain's deadline gets a 503 in its protocol's form,
// however and whenever its handler ends.
func TestDrainRespondsToPendingRequests(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	type handler struct {
		name string
		run  func(x Exchange, left <-chan struct{}, ends chan relay.Result)
	}
	handlers := []handler{
		{"an error when the client is gone", func(x Exchange, left <-chan struct{}, _ chan relay.Result) {
			<-left
			x.Error(ClientGone, "", "gone", 0)
		}},
		{"an answer that comes late", func(x Exchange, left <-chan struct{}, _ chan relay.Result) {
			<-left
			testwait.Pace(50 * time.Millisecond)
			echo(x)
		}},
		{"a stream that comes late", func(x Exchange, left <-chan struct{}, ends chan relay.Result) {
			<-left
			call := new(upstream.Call)
			resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, call)
			if err != nil {
				t.Error(err)
				return
			}
			x.Relay(resp, call, endHook(ends)())
		}},
		{"a panic", func(_ Exchange, left <-chan struct{}, _ chan relay.Result) { <-left; panic("of the test") }},
		{"its own end of time pending", func(x Exchange, left <-chan struct{}, _ chan relay.Result) {
			x.FailAt(time.Now().Add(time.Hour), UpstreamTimeout, "the time is over")
			<-left
			x.Error(ClientGone, "", "gone", 0)
		}},
	}
	faces := []struct{ path, form string }{
		{chat, `"type":"service_unavailable"`},
		{"/v1/messages", `{"type":"error","error":{"type":"overloaded_error"`},
		{"/v1/responses", `"type":"service_unavailable"`},
	}
	for i, h := range handlers {
		face := faces[i%len(faces)]
		t.Run(h.name, func(t *testing.T) {
			for try := 1; ; try++ {
				var log logBuffer
				entered, ends := make(chan struct{}), make(chan relay.Result, 1)
				r := start(t, Options{Log: log.logger()}, func(x Exchange) {
					left := make(chan struct{})
					x.OnClientGone(func() { close(left) })
					x.SetHeader("X-Sluice-Worker", "w0")
					close(entered)
					h.run(x, left, ends)
				})
				c := r.dial()
				c.send(post(face.path, hello, "X-Request-Id: mine"))
				<-entered
				took, err := shutdown(r, 20*time.Millisecond)
				if err == nil {
					t.Error("Shutdown says that nothing was cut")
				}
				r.observed.mu.Lock()
				refusals := r.observed.refused[Drained]
				r.observed.mu.Unlock()
				if refusals == 0 && took >= finalResponseTime && try < tries {
					continue // the machine was suspended for longer than the test allows
				}
				resp, body := c.readResponse()
				if resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != "drained" || resp.Header.Get("Retry-After") != "1" || resp.Header.Get("X-Request-Id") != "mine" {
					t.Errorf("answered with %d, %v", resp.StatusCode, resp.Header)
				}
				contains(t, body, face.form, "shutting down")
				c.expectClosed()
				testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
				testwait.Until(t, "its end", func() bool { return len(r.observed.endings()) == 1 })
				if got := r.observed.endings(); got[0] != face.path+" 503" {
					t.Errorf("the observer was notified of %q", got)
				}
				r.observed.mu.Lock()
				if n := r.observed.refused; n[Drained] != 1 || n[ClientGone] != 0 {
					t.Errorf("refusals %v", n)
				}
				r.observed.mu.Unlock()
				if text := log.String(); strings.Count(text, "reason=drained") != 1 || !strings.Contains(text, "request=mine") {
					t.Errorf("log: %s", text)
				}
				if h.name == "a stream that comes late" {
					wantEnd(t, ends, relay.Drained)
				}
				return
			}
		})
	}
}

// At the drain's deadline a stream whose head was sent early gets an error event, and a request
// whose body is incomplete gets the 503.
func TestDrainRespondsToIncompleteRequests(t *testing.T) {
	for try := 1; ; try++ {
		entered := make(chan struct{})
		r := start(t, Options{EarlyHeaders: true}, dispatching(func(x Exchange) {
			left := make(chan struct{})
			x.OnClientGone(func() { close(left) })
			close(entered)
			<-left
			x.Error(ClientGone, "", "gone", 0)
		}))
		streaming, sending := r.dial(), r.dial()
		streaming.send(chatPost(streamDoc))
		<-entered
		resp := streaming.head()
		sending.send(strings.TrimSuffix(chatPost(hello), "}"))
		testwait.Until(t, "both are in flight", func() bool {
			n := 0
			for _, c := range r.server.conns.snapshot() {
				if c.drainTarget.Load() != nil {
					n++
				}
			}
			return n == 2
		})
		took, _ := shutdown(r, 20*time.Millisecond)
		r.observed.mu.Lock()
		refusals := r.observed.refused[Drained]
		r.observed.mu.Unlock()
		if refusals < 2 && took >= finalResponseTime && try < tries {
			continue // the machine was suspended for longer than the test allows
		}
		if rest := streaming.rest(resp); !strings.Contains(rest, "shutting down") || !strings.HasSuffix(rest, "data: [DONE]\n\n") {
			t.Errorf("the stream ended with %q", rest)
		}
		if resp, body := sending.readResponse(); resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != "drained" {
			t.Errorf("the body on its way: %d %v %s", resp.StatusCode, resp.Header, body)
		}
		return
	}
}

// A response that begins at the drain's deadline is sent completely or not at all.
func TestDrainRacesWithResponses(t *testing.T) {
	for range 30 {
		entered, goOn := make(chan struct{}, 8), make(chan struct{})
		r := start(t, Options{}, func(x Exchange) {
			entered <- struct{}{}
			<-goOn
			echo(x)
		})
		clients := make([]*client, 8)
		for i := range clients {
			clients[i] = r.dial()
			clients[i].send(chatPost(hello))
			<-entered
		}
		go close(goOn)
		_, _ = shutdown(r, 0)
		for _, c := range clients {
			text, _ := io.ReadAll(c.br)
			switch s := string(text); {
			case s == "", strings.HasPrefix(s, "HTTP/1.1 200 ") && strings.HasSuffix(s, hello):
			case strings.HasPrefix(s, "HTTP/1.1 503 ") && strings.HasSuffix(s, "}}") && strings.Count(s, "HTTP/1.1") == 1:
			default:
				t.Fatalf("%q", s)
			}
		}
	}
}

// requestsInProgress is the number of connections with a request in progress.
func requestsInProgress(r *testServer) (n int) {
	for _, c := range r.server.conns.snapshot() {
		if c.busy() {
			n++
		}
	}
	return n
}

// A request that is incomplete at the drain's deadline, in its head or body and on either path,
// gets a response, and is not reported as a disconnected client.
func TestDrainRespondsToPartialBodies(t *testing.T) {
	t.Parallel()
	const (
		page  = "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
		odd   = "GET /livez?a HTTP/1.1\r\nHost: a\r\n\r\n"
		sized = atHost + "Content-Length: 13\r\n\r\n"
		leave = "Expect: 100-continue\r\n"
	)
	large := atHost + "X: " + strings.Repeat("y", 15000) + "\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, k := range []struct {
		name     string
		secure   bool
		before   string // a request before
		raw      string
		endpoint string // that is reported
	}{
		{name: "sized", raw: sized, endpoint: chat},
		{name: "in chunks", raw: chunkedHead, endpoint: chat},
		{name: "a large head, in chunks", raw: large},
		{name: "a large head, in chunks, and a byte", raw: large + "d", endpoint: chat},
		{name: "leave given, sized", raw: atHost + leave + "Content-Length: 13\r\n\r\n", endpoint: chat},
		{name: "leave given, in chunks", raw: atHost + leave + "Transfer-Encoding: chunked\r\n\r\n", endpoint: chat},
		{name: "kept alive by fasthttp", before: odd, raw: sized},
		{name: "half a head", raw: sized[:60]},
		{name: "half a head, kept alive", before: page, raw: sized[:60]},
		{name: "half a head, kept alive by fasthttp", before: odd, raw: sized[:60]},
		{name: "TLS, sized", secure: true, raw: sized},
		{name: "TLS, in chunks", secure: true, raw: chunkedHead},
		{name: "TLS, in chunks, and a byte", secure: true, raw: chunkedHead + "d", endpoint: chat},
		{name: "TLS, leave given", secure: true, raw: atHost + leave + "Content-Length: 13\r\n\r\n", endpoint: chat},
		{name: "TLS, kept alive", secure: true, before: page, raw: sized},
		{name: "TLS, half a head", secure: true, raw: sized[:60]},
	} {
		t.Run(k.name, func(t *testing.T) {
			for try := 1; ; try++ {
				var log logBuffer
				opt := Options{Log: log.logger()}
				if k.secure {
					opt.TLS = testTLS()
				}
				r := start(t, opt, echo)
				c := r.dial()
				if k.secure {
					c = dialTLS(c)
				}
				if k.before != "" {
					c.send(k.before)
					c.readResponse()
				}
				c.send(k.raw)
				if strings.Contains(k.raw, leave) {
					if resp, err := http.ReadResponse(c.br, nil); err != nil || resp.StatusCode != 100 {
						t.Fatalf("no leave: %v %v", resp, err)
					}
				}
				testwait.Until(t, "it is in progress", func() bool { return requestsInProgress(r) == 1 })
				time.Sleep(2 * drainPoll) // until the server has read all that was sent
				took, err := shutdown(r, 2*drainPoll)
				if err == nil {
					t.Error("Shutdown says that nothing was cut")
				}
				r.observed.mu.Lock()
				cut := len(r.observed.incomplete)
				r.observed.mu.Unlock()
				if cut > 0 && took >= finalResponseTime && try < tries {
					continue // the machine was suspended for longer than the test allows
				}
				resp, body := c.readResponse()
				if h := resp.Header; resp.StatusCode != 503 || !resp.Close ||
					h.Get("X-Sluice-Reason") != "drained" || h.Get("Retry-After") != "1" {
					t.Errorf("answered with %d, %v", resp.StatusCode, resp.Header)
				}
				contains(t, body, "shutting down")
				c.expectClosed()
				r.observed.mu.Lock()
				if n := r.observed.refused; len(n) != 1 || n[Drained] != 1 || len(r.observed.incomplete) != 0 {
					t.Errorf("refusals %v, answers cut %v", n, r.observed.incomplete)
				}
				r.observed.mu.Unlock()
				text := log.String()
				if strings.Count(text, "reason=") != 1 || strings.Count(text, "reason=drained") != 1 {
					t.Errorf("log: %s", text)
				}
				if k.endpoint != "" {
					contains(t, text, "endpoint="+k.endpoint)
				}
				return
			}
		})
	}
}
