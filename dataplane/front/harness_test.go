package front

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// testTimeout bounds the wait for an expected event. A passing test never waits that long.
const testTimeout = 20 * time.Second

// handlerFunc is a Handler made of a function.
type handlerFunc func(x Exchange)

func (f handlerFunc) ServeInference(x Exchange) { f(x) }

// testServer is a Server on a loopback listener.
type testServer struct {
	t        testing.TB
	server   *Server
	addr     string
	calls    atomic.Int64 // of the handler
	observed recorder
	done     chan error
}

// recorder is an Observer that counts.
type recorder struct {
	mu          sync.Mutex
	accepted    int
	refused     map[Reason]int
	ended       []string // "path status"
	incomplete  []string // "path cause" of whole answers
	panics      int
	open        int
	closedConns int // calls of Connections with a smaller number
}

func (r *recorder) Accepted() { r.mu.Lock(); r.accepted++; r.mu.Unlock() }
func (r *recorder) Refused(_ string, reason Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refused == nil {
		r.refused = make(map[Reason]int)
	}
	r.refused[reason]++
}
func (r *recorder) ResponseIncomplete(endpoint string, cause relay.Cause) {
	r.mu.Lock()
	r.incomplete = append(r.incomplete, endpoint+" "+cause.String())
	r.mu.Unlock()
}
func (r *recorder) ResponseEnded(endpoint string, status int, _ time.Duration) {
	r.mu.Lock()
	r.ended = append(r.ended, fmt.Sprintf("%s %d", endpoint, status))
	r.mu.Unlock()
}
func (r *recorder) Panicked(string, any, []byte) { r.mu.Lock(); r.panics++; r.mu.Unlock() }
func (r *recorder) Connections(open int) {
	r.mu.Lock()
	if open < r.open {
		r.closedConns++
	}
	r.open = open
	r.mu.Unlock()
}

func (r *recorder) endings() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.ended...)
}

// echo answers with the request body.
func echo(x Exchange) { x.ReplyJSON(200, x.Request().Doc.Body) }

func start(t testing.TB, opt Options, h func(x Exchange)) *testServer {
	t.Helper()
	r := &testServer{t: t, done: make(chan error, 1)}
	opt.Handler = handlerFunc(func(x Exchange) {
		r.calls.Add(1)
		h(x)
	})
	if opt.Observer == nil {
		opt.Observer = &r.observed
	}
	if opt.Pages == nil {
		opt.Pages = testPages{}
	}
	s, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.server, r.addr = s, ln.Addr().String()
	go func() { r.done <- s.Serve(ln) }()
	t.Cleanup(r.stop)
	return r
}

func (r *testServer) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = r.server.Shutdown(ctx)
	select {
	case err := <-r.done:
		if err != nil {
			r.t.Errorf("Serve: %v", err)
		}
		r.done <- nil
	case <-time.After(testTimeout):
		r.t.Error("Serve did not return")
	}
}

type testPages struct{}

func (testPages) Models() (int, []byte)     { return 200, []byte(`{"object":"list","data":[]}`) }
func (testPages) Ready(bool) (int, []byte)  { return 503, []byte(`{"waiting_for":"a worker"}`) }
func (testPages) Health(bool) (int, []byte) { return 200, []byte(`{"status":"ok"}`) }
func (testPages) Version() (int, []byte)    { return 200, []byte(`{"version":"test"}`) }
func (testPages) Metrics(w io.Writer, accept string) string {
	_, _ = io.WriteString(w, "sluice_test 1\n")
	return "text/plain; accepted=" + accept
}

// client is a raw connection to the test server.
type client struct {
	net.Conn
	t  testing.TB
	br *bufio.Reader
}

func (r *testServer) dial() *client {
	r.t.Helper()
	nc, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(testTimeout))
	return newClient(r.t, nc)
}

// connOf waits for the server's side of c and returns it. The server may have others: another test
// process that still dials the former owner of this port is accepted here.
func (r *testServer) connOf(c *client) (of *conn) {
	r.t.Helper()
	testwait.Until(r.t, "the server's side of the connection", func() bool {
		for _, open := range r.server.conns.snapshot() {
			if open.RemoteAddr().String() == c.LocalAddr().String() {
				of = open
			}
		}
		return of != nil
	})
	return of
}

func newClient(t testing.TB, nc net.Conn) *client { return &client{nc, t, bufio.NewReader(nc)} }

func (c *client) send(text string) {
	c.t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

// readResponse reads one response with its body.
func (c *client) readResponse() (*http.Response, string) {
	c.t.Helper()
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		c.t.Fatalf("no answer: %v", err)
	}
	for resp.StatusCode == 100 {
		if resp, err = http.ReadResponse(c.br, nil); err != nil {
			c.t.Fatalf("no answer after 100: %v", err)
		}
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("body: %v after %q", err, body)
	}
	return resp, string(body)
}

// expectClosed waits for the server to close the connection, and fails on bytes.
func (c *client) expectClosed() {
	c.t.Helper()
	rest, err := io.ReadAll(c.br)
	if err != nil && !isReset(err) {
		c.t.Fatalf("the connection was not closed: %v", err)
	}
	if len(rest) > 0 {
		c.t.Fatalf("bytes after the last answer: %q", rest)
	}
}

func isReset(err error) bool {
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

func post(path, body string, fields ...string) string {
	head := "POST " + path + " HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
	for _, f := range fields {
		head += f + "\r\n"
	}
	return head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body)
}

const chat = "/v1/chat/completions"

func chatPost(body string, fields ...string) string { return post(chat, body, fields...) }

// engine is a real TCP server that answers every request with the same raw
// bytes, written by serve.
type engine struct {
	t    testing.TB
	addr string
	ep   *upstream.Endpoint

	wg sync.WaitGroup
}

// startEngine runs an engine. serve writes the response to one request and returns whether the
// connection is kept.
func startEngine(t testing.TB, serve func(nc net.Conn, req *http.Request) bool) *engine {
	t.Helper()
	return startEngineTLS(t, false, serve)
}

// startEngineTLS is startEngine for an engine that may speak TLS: then serve gets a tls.Conn.
func startEngineTLS(t testing.TB, useTLS bool, serve func(nc net.Conn, req *http.Request) bool) *engine {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, addr: ln.Addr().String()}
	url, opt := "http://"+e.addr, upstream.Options{}
	if useTLS {
		some := httptest.NewTLSServer(nil) // for its certificate
		some.Close()
		ln = tls.NewListener(ln, &tls.Config{Certificates: some.TLS.Certificates})
		trust := &tls.Config{RootCAs: x509.NewCertPool()}
		trust.RootCAs.AddCert(some.Certificate())
		url, opt.TLS = "https://"+e.addr, func(string) *tls.Config { return trust }
	}
	e.ep, err = upstream.NewEndpoint(url, opt)
	if err != nil {
		t.Fatal(err)
	}
	e.wg.Add(1)
	go func() {
		defer e.wg.Done()
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			e.wg.Add(1)
			go func() {
				defer e.wg.Done()
				defer nc.Close()
				br := bufio.NewReader(nc)
				for {
					req, err := http.ReadRequest(br)
					if err != nil {
						return
					}
					body, _ := io.ReadAll(req.Body)
					req.Body = io.NopCloser(bytes.NewReader(body))
					if !serve(nc, req) {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		e.ep.Close()
		e.wg.Wait()
	})
	return e
}

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nx-engine: one\r\n" +
	"x-request-id: engine-made\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

// streamHooks is a StreamHandler made of functions, which may be nil.
type streamHooks struct {
	token func()
	end   func(relay.Result)
}

func (f streamHooks) FirstToken() {
	if f.token != nil {
		f.token()
	}
}

func (f streamHooks) Ended(res relay.Result) {
	if f.end != nil {
		f.end(res)
	}
}

func (streamHooks) NextEngine(relay.Interruption, ClientGoneNotifier) (*upstream.Response, *upstream.Call) {
	return nil, nil
}

// relayTo is a handler that sends the request to e and relays the response.
func relayTo(e *engine, hooks func() RelayHooks) func(x Exchange) {
	return func(x Exchange) {
		call := new(upstream.Call)
		x.OnClientGone(call.Cancel)
		resp, err := e.ep.Do(&upstream.Request{
			Method: "POST", Path: x.Request().Endpoint.Path,
			Fields: x.ForwardFields(nil), Body: [][]byte{x.Request().Doc.Body},
		}, call)
		if err != nil {
			x.Error(UpstreamFailed, "", err.Error(), 0)
			return
		}
		x.SetHeader("X-Sluice-Worker", "w1")
		x.Relay(resp, call, hooks())
	}
}

// withBothRelayModes runs test in each RelayMode.
func withBothRelayModes(t *testing.T, test func(t *testing.T, by RelayMode)) {
	for _, by := range []RelayMode{RelayLoop, RelayGoroutine} {
		t.Run(string(by), func(t *testing.T) { test(t, by) })
	}
}

// waitStreamsOnLoops waits until event loops drive n streams of r. It returns at once if r has no
// event loops.
func (r *testServer) waitStreamsOnLoops(by RelayMode, n int) {
	r.t.Helper()
	if by != RelayLoop || runtime.GOOS != "linux" {
		return
	}
	testwait.Until(r.t, fmt.Sprintf("%d streams on loops", n), func() bool {
		_, streams := r.server.Loops()
		return streams == n
	})
}

func contains(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q does not contain %q", text, p)
		}
	}
}
