package upstream

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// long bounds what must happen; tests never wait that long unless they fail.
const long = 20 * time.Second

// engine is a server that does what a script says with every connection.
type engine struct {
	ln    net.Listener
	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
}

// peer is one accepted connection; n counts them from 0.
type peer struct {
	net.Conn
	br *bufio.Reader
	n  int
}

// request reads one request and gives its body; ok is false at the end.
func (p *peer) request() (req *http.Request, body string, ok bool) {
	req, err := http.ReadRequest(p.br)
	if err != nil {
		return nil, "", false
	}
	b, err := io.ReadAll(req.Body)
	return req, string(b), err == nil
}

func (p *peer) send(s string) { _, _ = io.WriteString(p, s) }

// gone waits until the client has closed the connection.
func (p *peer) gone() {
	_, _ = io.Copy(io.Discard, p.br)
}

func answer(body string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func newEngine(t testing.TB, script func(p *peer)) *engine {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &engine{ln: ln}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for n := 0; ; n++ {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, nc)
			s.mu.Unlock()
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				defer nc.Close()
				script(&peer{Conn: nc, br: bufio.NewReader(nc), n: n})
			}()
		}
	}()
	t.Cleanup(s.stop)
	return s
}

func (s *engine) stop() {
	s.ln.Close()
	s.mu.Lock()
	for _, c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// echo answers every request with its body.
func echo(p *peer) {
	for {
		_, body, ok := p.request()
		if !ok {
			return
		}
		p.send(answer(body))
	}
}

func (s *engine) endpoint(t testing.TB, opt Options) *Endpoint {
	t.Helper()
	e, err := NewEndpoint("http://"+s.ln.Addr().String(), opt)
	if err != nil {
		t.Fatal(err)
	}
	e.staleWindow = long // a loaded machine must not turn a retry into a failure
	t.Cleanup(e.Close)
	return e
}

func post(body string) *Request {
	return &Request{Method: "POST", Path: "/v1/completions", Body: [][]byte{[]byte(body)},
		Fields: []Field{{"Content-Type", "application/json"}}, Deadline: time.Now().Add(long)}
}

// request does one request and gives the body of its answer.
func request(e *Endpoint, req *Request, call *Call) (string, error) {
	resp, err := e.Do(req, call)
	if err != nil {
		return "", err
	}
	defer resp.Release()
	b, err := resp.ReadAll(nil, 64<<20)
	return string(b), err
}

func mustRequest(t testing.TB, e *Endpoint, body string) {
	t.Helper()
	if got, err := request(e, post(body), nil); err != nil || got != body {
		t.Fatalf("asked %q: %q, %v", body, got, err)
	}
}

// noLeaks fails t when goroutines or open connections outlive it. Call it
// first, so that it runs after the other clean-ups.
func noLeaks(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		testwait.Until(t, fmt.Sprintf("%d goroutines as before", before), func() bool { return runtime.NumGoroutine() <= before })
	})
}

func phaseOf(t testing.TB, err error) Phase {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("%v (%T) is not an *Error", err, err)
	}
	if !strings.HasPrefix(e.Error(), "upstream: cannot ") {
		t.Errorf("error text %q", e)
	}
	return e.Phase
}

// alwaysScript is Options.TLS of one configuration, whatever the engine's host; nil of none.
func alwaysScript(c *tls.Config) func(string) *tls.Config {
	if c == nil {
		return nil
	}
	return func(string) *tls.Config { return c }
}
