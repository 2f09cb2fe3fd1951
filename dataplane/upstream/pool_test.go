package upstream

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

func TestReuse(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, echo).endpoint(t, Options{})
	for _, body := range []string{"a", "", strings.Repeat("b", 20<<10), strings.Repeat("c", 3<<20), "d"} {
		mustRequest(t, e, body)
	}
	if s := e.Stats(); s.Dialed != 1 || s.Reused != 4 || s.Open != 1 || s.Idle != 1 || s.Retried != 0 {
		t.Errorf("%+v", s)
	}
}

// Connections that may not be used again are closed, and the engine sees it.
func TestNotReused(t *testing.T) {
	for name, c := range map[string]struct {
		response string
		leave    bool // do not read the body
		get      bool
	}{
		"Connection: close":       {response: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"},
		"close in a list":         {response: "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\nok"},
		"HTTP/1.0":                {response: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"},
		"body left":               {response: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", leave: true},
		"chunked body left":       {response: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", leave: true},
		"bytes behind the body":   {response: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n"},
		"bytes behind the chunks": {response: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nx"},
		"204 with a length":       {response: "HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n"},
		"304 with chunks":         {response: "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", get: true},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			gone := make(chan struct{})
			e := newEngine(t, func(p *peer) {
				if _, _, ok := p.request(); ok {
					p.send(c.response)
				}
				p.gone()
				close(gone)
			}).endpoint(t, Options{})
			req := post("x")
			if c.get {
				req.Method, req.Redirects = "GET", true
			}
			resp, err := e.Do(req, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !c.leave {
				if b, err := resp.ReadAll(nil, 100); err != nil || resp.Status == 200 && string(b) != "ok" {
					t.Fatalf("%q, %v", b, err)
				}
			}
			resp.Release()
			<-gone
			if s := e.Stats(); s.Open != 0 || s.Idle != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestHTTP10KeepAlive(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for {
			if _, _, ok := p.request(); !ok {
				return
			}
			p.send("HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx")
		}
	}).endpoint(t, Options{})
	mustRequest(t, e, "x")
	mustRequest(t, e, "x")
	if s := e.Stats(); s.Dialed != 1 {
		t.Errorf("%+v", s)
	}
}

func TestMaxConnsAndMaxIdle(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, echo).endpoint(t, Options{MaxConns: 3, MaxIdle: 2})
	var held []*Response
	for range 3 {
		resp, err := e.Do(post("x"), nil)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, resp)
	}
	_, err := e.Do(post("x"), nil)
	if !errors.Is(err, ErrTooManyConns) || phaseOf(t, err) != PhaseDial {
		t.Errorf("fourth: %v", err)
	}
	for _, resp := range held {
		if _, err := resp.ReadAll(nil, 10); err != nil {
			t.Fatal(err)
		}
		resp.Release()
	}
	if s := e.Stats(); s.Open != 2 || s.Idle != 2 {
		t.Errorf("%+v", s)
	}
	mustRequest(t, e, "y")
}

// Idle connections are taken newest first, and end at their time by themselves.
func TestIdleTimeout(t *testing.T) {
	noLeaks(t)
	var ends sync.WaitGroup
	ends.Add(3)
	e := newEngine(t, func(p *peer) { defer ends.Done(); echo(p) }).endpoint(t, Options{IdleTimeout: 50 * time.Millisecond})
	var held []*Response
	for range 3 {
		resp, err := e.Do(post("x"), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = resp.ReadAll(nil, 10)
		held = append(held, resp)
	}
	for _, resp := range held {
		resp.Release()
	}
	ends.Wait()
	testwait.Until(t, "no connection left", func() bool { s := e.Stats(); return s.Open == 0 && s.Idle == 0 })
	e2 := newEngine(t, echo).endpoint(t, Options{})
	a, err := e2.Do(post("a"), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := e2.Do(post("b"), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = a.ReadAll(nil, 10)
	_, _ = b.ReadAll(nil, 10)
	newest := b.c
	a.Release()
	b.Release()
	c, err := e2.Do(post("c"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.c != newest {
		t.Error("not the newest idle connection")
	}
	c.Release()
}

// A connection is not used again at its age, whether it lies idle then or comes back
// later; a request that it is busy with is not disturbed.
func TestMaxAge(t *testing.T) {
	noLeaks(t)
	const age = time.Hour
	e := newEngine(t, echo).endpoint(t, Options{MaxAge: age, IdleTimeout: long})
	mustRequest(t, e, "a")
	first := e.newest()
	if first.tooOld(now()+age*7/8-time.Minute, age) || !first.tooOld(now()+age*9/8, age) || first.tooOld(now()+age, 0) {
		t.Errorf("made at %v, let off %v: want it too old after %v give or take an eighth", first.dialedAt, first.ageJitter, age)
	}
	first.dialedAt -= 2 * age // while it is idle
	mustRequest(t, e, "b")
	if s := e.Stats(); s.Aged != 1 || s.Dialed != 2 || s.Open != 1 {
		t.Errorf("idle: %+v", s)
	}
	resp, err := e.Do(post("in progress"), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.c.dialedAt -= 2 * age
	if b, err := resp.ReadAll(nil, 100); err != nil || string(b) != "in progress" {
		t.Errorf("%q, %v", b, err)
	}
	resp.Release()
	if s := e.Stats(); s.Aged != 2 || s.Open != 0 || s.Idle != 0 {
		t.Errorf("busy: %+v", s)
	}
}

func TestClose(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, echo).endpoint(t, Options{})
	mustRequest(t, e, "x")
	resp, err := e.Do(post("in progress"), nil)
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
	if b, err := resp.ReadAll(nil, 100); err != nil || string(b) != "in progress" {
		t.Errorf("%q, %v", b, err)
	}
	resp.Release()
	if s := e.Stats(); s.Open != 0 || s.Idle != 0 {
		t.Errorf("%+v", s)
	}
	// A request that was placed here before goes through, and leaves nothing open.
	mustRequest(t, e, "late")
	if s := e.Stats(); s.Dialed != 2 || s.Open != 0 || s.Idle != 0 {
		t.Errorf("after a request behind Close: %+v", s)
	}
}

// The first request ends without an answer on the kept-alive connection.
func TestStaleIdleIsRetriedOnce(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, func(p *peer) {
		if p.n > 0 {
			echo(p)
			return
		}
		_, body, _ := p.request()
		p.send(answer(body))
		p.request() // and leave
	}).endpoint(t, Options{})
	mustRequest(t, e, "one")
	mustRequest(t, e, "two")
	if s := e.Stats(); s.Retried != 1 || s.Dialed != 2 || s.Open != 1 {
		t.Errorf("%+v", s)
	}
}

// A large body meets the closed connection while it is being written.
func TestStaleIdleLargeBody(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, func(p *peer) {
		if p.n > 0 {
			echo(p)
			return
		}
		_, body, _ := p.request()
		p.send(answer(body))
		_, _ = p.br.ReadByte()
	}).endpoint(t, Options{})
	mustRequest(t, e, "one")
	mustRequest(t, e, strings.Repeat("x", 8<<20))
	if s := e.Stats(); s.Retried != 1 || s.Dialed != 2 {
		t.Errorf("%+v", s)
	}
}

func TestNoRetry(t *testing.T) {
	for name, c := range map[string]struct {
		script  func(p *peer)
		dialed  uint64
		retried uint64
	}{
		"fresh connection": {func(p *peer) {
			if p.n == 0 { // the warm-up's
				_, body, _ := p.request()
				p.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\n" + body)
				return
			}
			p.request()
		}, 2, 0},
		"part of an answer came": {func(p *peer) {
			_, body, _ := p.request()
			p.send(answer(body))
			p.request()
			p.send("HTTP/1.1 2")
		}, 1, 0},
		"stale, and the fresh one fails too": {func(p *peer) {
			if p.n == 0 {
				_, body, _ := p.request()
				p.send(answer(body))
			}
			p.request()
		}, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			e := newEngine(t, c.script).endpoint(t, Options{})
			mustRequest(t, e, "warm")
			_, err := request(e, post("x"), nil)
			if err == nil {
				t.Fatal("no error")
			}
			if p := phaseOf(t, err); p != PhaseHead && p != PhaseWrite {
				t.Errorf("phase %v: %v", p, err)
			}
			if s := e.Stats(); s.Dialed != c.dialed || s.Retried != c.retried || s.Open != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// The request was sent on a stale connection and cannot be sent again: that is
// not PhaseDial, because the engine may have seen it.
func TestRetryCannotDial(t *testing.T) {
	var srv *engine
	srv = newEngine(t, func(p *peer) {
		_, body, _ := p.request()
		p.send(answer(body))
		p.request()
		srv.ln.Close()
	})
	e := srv.endpoint(t, Options{})
	mustRequest(t, e, "one")
	_, err := request(e, post("two"), nil)
	if err == nil || phaseOf(t, err) == PhaseDial {
		t.Errorf("%v", err)
	}
	if s := e.Stats(); s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

// A connection that ends late may have ended in the middle of the work: that
// is for the caller to judge.
func TestNoRetryWhenLate(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		_, body, _ := p.request()
		p.send(answer(body))
		p.request()
	}).endpoint(t, Options{})
	e.staleWindow = 0
	mustRequest(t, e, "one")
	_, err := request(e, post("two"), nil)
	if s := e.Stats(); err == nil || phaseOf(t, err) == PhaseDial || s.Retried != 0 || s.Dialed != 1 {
		t.Errorf("%v, %+v", err, s)
	}
}

// A close that the kernel already knows costs no retry.
func TestClosedIdleNoticed(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, func(p *peer) {
		_, body, _ := p.request()
		p.send(answer(body))
		if p.n > 0 {
			echo(p)
		}
	}).endpoint(t, Options{})
	mustRequest(t, e, "one")
	testwait.Until(t, "the kernel knows", func() bool {
		c := e.newest()
		return c != nil && c.peerClosed()
	})
	mustRequest(t, e, "two")
	if s := e.Stats(); s.Stale != 1 || s.Retried != 0 || s.Dialed != 2 {
		t.Errorf("%+v", s)
	}
}

// Bytes nobody asked for on an idle connection never become an answer, however soon the
// next request comes, and over TLS neither.
func TestUnexpectedBytes(t *testing.T) {
	some := httptest.NewTLSServer(nil) // for its certificate
	some.Close()
	pool := x509.NewCertPool()
	pool.AddCert(some.Certificate())
	secure, trust := &tls.Config{Certificates: some.TLS.Certificates}, &tls.Config{RootCAs: pool}
	for name, c := range map[string]struct{ server, client *tls.Config }{"plain": {}, "TLS": {secure, trust}} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			idle, sent := make(chan struct{}), make(chan struct{})
			srv := newEngine(t, func(p *peer) {
				if c.server != nil {
					p.Conn = tls.Server(p.Conn, c.server)
					p.br.Reset(p.Conn)
				}
				_, body, _ := p.request()
				p.send(answer(body))
				if p.n == 0 {
					_, body, _ = p.request()
					p.send(answer(body)) // the connection was used again
					<-idle
					p.send(answer("smuggled"))
					close(sent)
				}
				echo(p)
			})
			scheme := "http://"
			if c.server != nil {
				scheme = "https://"
			}
			e, err := NewEndpoint(scheme+srv.ln.Addr().String(), Options{TLS: alwaysScript(c.client), ConnectTimeout: long})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.Close)
			mustRequest(t, e, "one")
			mustRequest(t, e, "two")
			close(idle)
			<-sent
			time.Sleep(5 * time.Millisecond)
			e.newest().idleSince = now()
			mustRequest(t, e, "three")
			if s := e.Stats(); s.Reused != 1 || s.Dialed != 2 {
				t.Errorf("%+v, want a connection for two requests and one for the third", s)
			}
		})
	}
}

// crypto/tls reports a part of a TLS record as nothing and keeps it: it counts.
func TestPartOfARecord(t *testing.T) {
	noLeaks(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	nc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	peer, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	u, err := newTLSTransport(nc.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	record := append([]byte{23, 3, 3, 1, 4}, make([]byte, 260)...)
	for _, size := range []int{1, 3, 5, 7, 264, 265, 1000} {
		for at, sent := 0, bytes.Repeat(record, 3); at < len(sent); {
			n := min(size, len(sent)-at)
			if _, err := peer.Write(sent[at : at+n]); err != nil {
				t.Fatal(err)
			}
			p := make([]byte, n)
			if u.nonBlocking = at%2 == 0; u.nonBlocking {
				testwait.Until(t, "it has come", func() bool { got, _ := u.Read(p); p = p[got:]; return len(p) == 0 })
			} else if _, err := io.ReadFull(u, p); err != nil {
				t.Fatal(err)
			}
			if at += n; u.inRecord() != (at%len(record) != 0) {
				t.Fatalf("by %d, behind %d bytes of records of %d: midway %v", size, at, len(record), u.inRecord())
			}
		}
	}
}

// Other bounds hold at once: for connections that lie idle, for those in progress when
// their request ends, for new ones.
func TestChangeOfBounds(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, echo).endpoint(t, Options{IdleTimeout: long})
	hold := func(n int) (held []*Response) {
		for range n {
			resp, err := e.Do(post("x"), nil)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = resp.ReadAll(nil, 10)
			held = append(held, resp)
		}
		return held
	}
	release := func(held []*Response) {
		for _, resp := range held {
			resp.Release()
		}
	}
	held := hold(4)
	e.Reload(ReloadableOptions{MaxConns: 3, IdleTimeout: long})
	if _, err := e.Do(post("y"), nil); !errors.Is(err, ErrTooManyConns) {
		t.Errorf("a fifth of three: %v", err)
	}
	release(held)
	if s := e.Stats(); s.Open != 3 || s.Idle != 3 {
		t.Errorf("of four three are kept: %+v", s)
	}
	e.Reload(ReloadableOptions{MaxConns: 5, IdleTimeout: long})
	release(hold(5))
	if s := e.Stats(); s.Open != 5 {
		t.Errorf("five again: %+v", s)
	}
	// A shorter time closes those that have it behind them, with nobody asking; a longer
	// one keeps what the shorter one's timer would have closed.
	e.Reload(ReloadableOptions{IdleTimeout: time.Millisecond})
	testwait.Until(t, "idle connections are closed", func() bool { s := e.Stats(); return s.Open == 0 && s.Idle == 0 })
	e.Reload(ReloadableOptions{IdleTimeout: long})
	held = hold(2)
	release(held[:1])
	e.Reload(ReloadableOptions{IdleTimeout: long, MaxAge: time.Nanosecond})
	release(held[1:])
	if s := e.Stats(); s.Aged != 1 || s.Open != 1 {
		t.Errorf("too old when its request ended: %+v", s)
	}
	mustRequest(t, e, "z")
	if s := e.Stats(); s.Aged != 3 || s.Open != 0 {
		t.Errorf("too old to be taken, and when made: %+v", s)
	}
	b, err := NewEndpoint("http://"+blackhole(t), Options{ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	b.Reload(ReloadableOptions{ConnectTimeout: 20 * time.Millisecond})
	if _, err := b.Do(post("x"), nil); !errors.Is(err, ErrTimeout) {
		t.Errorf("connecting: %v", err)
	}
}

// newest is the connection that the next request gets.
func (e *Endpoint) newest() *conn {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.idle) == 0 {
		return nil
	}
	return e.idle[len(e.idle)-1]
}
