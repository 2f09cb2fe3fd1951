package front

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// unusedSoon is how long a server that retires waits here for unused connections.
const unusedSoon = 50 * time.Millisecond

func (r *rig) retire(limit time.Duration) <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.s.retire(context.Background(), nil, unusedSoon, limit) }()
	return done
}

// faucet holds back the second half of each write while it is told to.
type faucet struct {
	net.Conn
	holds bool
	held  []byte
}

func (f *faucet) Write(p []byte) (int, error) {
	now := p
	if f.holds {
		now = p[:len(p)/2]
		f.held = append(f.held, p[len(p)/2:]...)
	}
	_, err := f.Conn.Write(now)
	return len(p), err
}

// A request that has begun is served, in whatever lane and however little of it is there,
// though it is whole only when those that wait for one have been closed.
func TestRetireServesWhatHasBegun(t *testing.T) {
	const (
		page   = "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
		odd    = "GET /livez?a HTTP/1.1\r\nHost: a\r\n\r\n"
		header = "PROXY TCP4 10.1.2.3 10.0.0.1 1234 80\r\n"
	)
	proxy := Proxies{Trusted: networks(t, "127.0.0.1"), Protocol: ProtocolRequired}
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
			dial := func() (*client, *faucet) {
				c := r.dial()
				tap := &faucet{Conn: c.Conn}
				if k.opt.TLS == nil {
					return newClient(t, tap), tap
				}
				return newClient(t, tls.Client(tap, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})), tap
			}
			unused, _ := dial()
			unused.send(k.prefix + page)
			unused.answer()
			c, tap := dial()
			request := k.prefix + chatPost(hello)
			if k.before != "" {
				c.send(k.prefix + k.before)
				c.answer()
				request = chatPost(hello)
			}
			tap.holds = k.halved
			c.send(request[:k.begun])
			tap.holds = false
			until(t, "both accepted", func() bool { return r.s.conns.len() == 2 })
			done := r.retire(patience)
			unused.closed()
			select {
			case err := <-done:
				t.Fatalf("Retire returned %v with a request that had begun", err)
			case <-time.After(5 * drainPoll):
			}
			if _, err := tap.Conn.Write(tap.held); err != nil {
				t.Fatal(err)
			}
			c.send(request[k.begun:])
			if resp, body := c.answer(); resp.StatusCode != 200 || !resp.Close || body != hello {
				t.Errorf("%d %v %q", resp.StatusCode, resp.Header, body)
			}
			c.closed()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// lateListener gives a connection that it had accepted when it was closed.
type lateListener struct {
	net.Listener
	closing chan struct{}
	late    net.Conn
}

func (l *lateListener) Close() error {
	close(l.closing)
	return l.Listener.Close()
}

func (l *lateListener) Accept() (net.Conn, error) {
	<-l.closing
	nc := l.late
	if l.late = nil; nc == nil {
		return nil, net.ErrClosed
	}
	time.Sleep(5 * drainPoll) // it waits for a processor
	return nc, nil
}

// A connection that was accepted as the listener closed is served.
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
	go func() { served <- s.Serve(&lateListener{Listener: ln, closing: make(chan struct{}), late: accepted}) }()
	until(t, "accepting", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.ln != nil })
	retired := make(chan error, 1)
	go func() { retired <- s.retire(context.Background(), nil, unusedSoon, patience) }()
	select {
	case err := <-retired:
		t.Fatalf("Retire returned %v before a request that had begun was served", err)
	case <-time.After(10 * drainPoll):
	}
	c.send(chatPost(hello)[60:])
	if resp, body := c.answer(); resp.StatusCode != 200 || body != hello {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	for _, done := range []chan error{retired, served} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Half a head holds up a server that retires no longer than the time of a head, or the
// drain's.
func TestRetireEnds(t *testing.T) {
	for name, k := range map[string]struct {
		head, limit time.Duration
		status      int
		cut         bool
	}{
		"by the head's time":  {100 * time.Millisecond, patience, 408, false},
		"by the drain's time": {patience, 100 * time.Millisecond, 503, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, Options{HeadTimeout: k.head}, echo)
			c := r.dial()
			c.send(chatPost(hello)[:60])
			until(t, "it has begun", func() bool { return underway(r) == 1 })
			done := r.retire(k.limit)
			if resp, _ := c.answer(); resp.StatusCode != k.status {
				t.Errorf("%d, want %d", resp.StatusCode, k.status)
			}
			c.closed()
			if err := <-done; errors.Is(err, context.DeadlineExceeded) != k.cut {
				t.Errorf("Retire: %v", err)
			}
		})
	}
}

// What lies in a connection's socket and what its goroutine has of a request count alike,
// and nothing else does.
func TestIdleLooksAtTheSocket(t *testing.T) {
	s := laneServer(t)
	ours, theirs := linked(t)
	defer theirs.Close()
	c, served := s.admit(ours, addressOf(ours)), make(chan struct{})
	if !c.idle() {
		t.Error("nothing has come")
	}
	_, _ = io.WriteString(theirs, "P")
	if c.underway() || c.idle() {
		t.Error("a byte lies in the socket")
	}
	go func() { s.serveConn(c); close(served) }()
	until(t, "it was read", c.underway)
	if c.idle() || c.active.Load() {
		t.Error("half a head, which is closed to make room, but not by a drain")
	}
	_, _ = io.WriteString(theirs, sized("")[1:])
	answer := newClient(t, theirs)
	answer.answer()
	until(t, "the next one is waited for", c.idle)
	_ = theirs.Close()
	<-served
}

// At SIGTERM a request that has begun on a new connection is told to go elsewhere.
func TestDrainAnswersHalfAHead(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	c.send(chatPost(hello)[:60])
	until(t, "accepted", func() bool { return r.s.conns.len() == 1 })
	done := make(chan error, 1)
	go func() {
		_, err := shutdown(r, patience)
		done <- err
	}()
	until(t, "draining", r.s.draining.Load)
	time.Sleep(5 * drainPoll)
	c.send(chatPost(hello)[60:])
	if resp, _ := c.answer(); resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(Draining) {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	c.closed()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What is whole only when the drain's time is over would be cut without a word.
func TestRequestBehindTheDrain(t *testing.T) {
	r := start(t, Options{}, echo)
	r.s.Leave()
	r.s.cutting.Store(true)
	c := r.dial()
	c.send(chatPost(hello))
	if resp, _ := c.answer(); resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(Draining) {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	if n := r.calls.Load(); n != 0 {
		t.Errorf("the handler was called %d times", n)
	}
}

// Nor is what begins then waited for.
func TestHalfARequestBehindTheDrain(t *testing.T) {
	onWires(t, func(t *testing.T, opt Options, dial func(*rig) *client) {
		opt.HeadTimeout = 5 * time.Second
		for _, raw := range []string{chatPost(hello)[:60], chunkedHead} {
			r := start(t, opt, echo)
			r.s.Leave()
			r.s.cutting.Store(true)
			c := dial(r)
			c.send(raw)
			if resp, _ := c.answer(); resp.StatusCode != 503 {
				t.Errorf("%q: %d %v", raw, resp.StatusCode, resp.Header)
			}
		}
	})
}
