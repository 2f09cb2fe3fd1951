package front

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// shortIdleTimeout is how long a retiring server keeps unused connections in these tests.
const shortIdleTimeout = 50 * time.Millisecond

func (r *testServer) retire(limit time.Duration) <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.server.retire(context.Background(), nil, shortIdleTimeout, limit) }()
	return done
}

// splitWriter delays the second half of each write while it is switched on.
type splitWriter struct {
	net.Conn
	holdBack bool
	unsent   []byte
}

func (f *splitWriter) Write(p []byte) (int, error) {
	now := p
	if f.holdBack {
		now = p[:len(p)/2]
		f.unsent = append(f.unsent, p[len(p)/2:]...)
	}
	_, err := f.Conn.Write(now)
	return len(p), err
}

// A retiring server serves a request that has begun, on either path and however little of it has
// arrived, even if it is complete only after the idle connections have been closed.
func TestRetireServesStartedRequests(t *testing.T) {
	t.Parallel()
	const (
		page   = "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
		odd    = "GET /livez?a HTTP/1.1\r\nHost: a\r\n\r\n"
		header = "PROXY TCP4 10.1.2.3 10.0.0.1 1234 80\r\n"
	)
	proxy := Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}
	for _, k := range []struct {
		name   string
		opt    Options
		prefix string // of each connection
		before string // a request before
		begun  int    // bytes of what follows
		halved bool   // and of those half
	}{
		{name: "a byte", begun: 1},
		{name: "half a head", begun: 60},
		{name: "a head", begun: len(chatPost(hello)) - len(hello)},
		{name: "half a body", begun: len(chatPost(hello)) - 5},
		{name: "kept alive", before: page, begun: 60},
		{name: "kept alive by fasthttp", before: odd, begun: 60},
		{name: "TLS", opt: Options{TLS: testTLS()}, begun: 60},
		{name: "TLS, kept alive", opt: Options{TLS: testTLS()}, before: page, begun: 60},
		{name: "TLS, half a record", opt: Options{TLS: testTLS()}, before: page, begun: 60, halved: true},
		{name: "half a PROXY header", opt: Options{Proxies: proxy}, prefix: header, begun: 20},
		{name: "behind a PROXY header", opt: Options{Proxies: proxy}, prefix: header, begun: len(header) + 60},
	} {
		t.Run(k.name, func(t *testing.T) {
			r := start(t, k.opt, echo)
			dial := func() (*client, *splitWriter) {
				c := r.dial()
				capture := &splitWriter{Conn: c.Conn}
				if k.opt.TLS == nil {
					return newClient(t, capture), capture
				}
				return newClient(t, tls.Client(capture, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})), capture
			}
			unused, _ := dial()
			unused.send(k.prefix + page)
			unused.readResponse()
			c, capture := dial()
			request := k.prefix + chatPost(hello)
			if k.before != "" {
				c.send(k.prefix + k.before)
				c.readResponse()
				request = chatPost(hello)
			}
			capture.holdBack = k.halved
			c.send(request[:k.begun])
			capture.holdBack = false
			testwait.Until(t, "both accepted", func() bool { return r.server.conns.len() == 2 })
			done := r.retire(testTimeout)
			unused.expectClosed()
			select {
			case err := <-done:
				t.Fatalf("Retire returned %v with a request that had begun", err)
			case <-time.After(5 * drainPoll):
			}
			if _, err := capture.Conn.Write(capture.unsent); err != nil {
				t.Fatal(err)
			}
			c.send(request[k.begun:])
			if resp, body := c.readResponse(); resp.StatusCode != 200 || !resp.Close || body != hello {
				t.Errorf("%d %v %q", resp.StatusCode, resp.Header, body)
			}
			c.expectClosed()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// slowCloseListener returns a connection that it had already accepted when it was closed.
type slowCloseListener struct {
	net.Listener
	closing chan struct{}
	pending net.Conn
}

func (l *slowCloseListener) Close() error {
	close(l.closing)
	return l.Listener.Close()
}

func (l *slowCloseListener) Accept() (net.Conn, error) {
	<-l.closing
	nc := l.pending
	if l.pending = nil; nc == nil {
		return nil, net.ErrClosed
	}
	testwait.Pace(5 * drainPoll) // it waits for a processor
	return nc, nil
}

// A connection that is accepted while the listener closes is served.
func TestRetireServesTheLastAccepted(t *testing.T) {
	s, err := New(Options{Handler: handlerFunc(echo)})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, nc)
	c.send(chatPost(hello)[:60])
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(&slowCloseListener{Listener: ln, closing: make(chan struct{}), pending: accepted})
	}()
	testwait.Until(t, "accepting", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.ln != nil })
	retired := make(chan error, 1)
	go func() { retired <- s.retire(context.Background(), nil, shortIdleTimeout, testTimeout) }()
	select {
	case err := <-retired:
		t.Fatalf("Retire returned %v before a request that had begun was served", err)
	case <-time.After(10 * drainPoll):
	}
	c.send(chatPost(hello)[60:])
	if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	for _, done := range []chan error{retired, served} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// An incomplete head delays a retiring server no longer than the head timeout or the drain's
// deadline.
func TestRetireEnds(t *testing.T) {
	for name, k := range map[string]struct {
		head, limit time.Duration
		status      int
		cut         bool
	}{
		"by the head's time":  {100 * time.Millisecond, testTimeout, 408, false},
		"by the drain's time": {testTimeout, 100 * time.Millisecond, 503, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, Options{HeadTimeout: k.head}, echo)
			c := r.dial()
			c.send(chatPost(hello)[:60])
			testwait.Until(t, "it has begun", func() bool { return requestsInProgress(r) == 1 })
			done := r.retire(k.limit)
			if resp, _ := c.readResponse(); resp.StatusCode != k.status {
				t.Errorf("%d, want %d", resp.StatusCode, k.status)
			}
			c.expectClosed()
			if err := <-done; errors.Is(err, context.DeadlineExceeded) != k.cut {
				t.Errorf("Retire: %v", err)
			}
		})
	}
}

// A connection is not idle if its socket has unread bytes or its goroutine has read a part of a
// request.
func TestIdleChecksSocket(t *testing.T) {
	s := pathServer(t)
	ours, theirs := socketPair(t)
	defer theirs.Close()
	c, served := s.admit(ours, remoteIP(ours)), make(chan struct{})
	if !c.idle() {
		t.Error("nothing has come")
	}
	_, _ = io.WriteString(theirs, "P")
	if c.busy() || c.idle() {
		t.Error("a byte lies in the socket")
	}
	go func() { s.serveConn(c); close(served) }()
	testwait.Until(t, "it was read", c.busy)
	if c.idle() || c.active.Load() {
		t.Error("half a head, which is closed to make room, but not by a drain")
	}
	_, _ = io.WriteString(theirs, helloPost("")[1:])
	answer := newClient(t, theirs)
	answer.readResponse()
	testwait.Until(t, "the next one is waited for", c.idle)
	_ = theirs.Close()
	<-served
}

// After SIGTERM a request that has begun on a new connection gets a 503.
func TestDrainRespondsToPartialHead(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	c.send(chatPost(hello)[:60])
	testwait.Until(t, "accepted", func() bool { return r.server.conns.len() == 1 })
	done := make(chan error, 1)
	go func() {
		_, err := shutdown(r, testTimeout)
		done <- err
	}()
	testwait.Until(t, "draining", r.server.draining.Load)
	testwait.Holds(t, 5*drainPoll, "the connection is open", func() bool { return r.server.conns.len() == 1 })
	c.send(chatPost(hello)[60:])
	if resp, _ := c.readResponse(); resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(Draining) {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	c.expectClosed()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A request that arrives after the drain's deadline gets a 503 instead of a cut connection.
func TestRequestAfterDrain(t *testing.T) {
	r := start(t, Options{}, echo)
	r.server.CloseAfterResponse()
	r.server.drainExpired.Store(true)
	c := r.dial()
	c.send(chatPost(hello))
	if resp, _ := c.readResponse(); resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(Draining) {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	if n := r.calls.Load(); n != 0 {
		t.Errorf("the handler was called %d times", n)
	}
}

// A part of a request that arrives after the drain's deadline gets a 503 at once.
func TestPartialRequestAfterDrain(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		opt.HeadTimeout = 5 * time.Second
		for _, raw := range []string{chatPost(hello)[:60], chunkedHead} {
			r := start(t, opt, echo)
			r.server.CloseAfterResponse()
			r.server.drainExpired.Store(true)
			c := dial(r)
			c.send(raw)
			if resp, _ := c.readResponse(); resp.StatusCode != 503 {
				t.Errorf("%q: %d %v", raw, resp.StatusCode, resp.Header)
			}
		}
	})
}
