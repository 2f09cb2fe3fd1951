package upstream

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unsafe"

	"sluice/bench/testwait"
)

func TestRequestAsSent(t *testing.T) {
	got := make(chan string, 1)
	srv := newEngine(t, func(p *peer) {
		buf := make([]byte, 4096)
		n, _ := p.Read(buf)
		got <- string(buf[:n])
		p.send(answer("x"))
	})
	e, err := NewEndpoint("http://"+srv.ln.Addr().String()+"/base/", Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	req := &Request{Method: "POST", Path: "/v1/x?y=z", Body: [][]byte{[]byte("ab"), nil, []byte("c")}, Deadline: time.Now().Add(long),
		Fields: []Field{{"Host", "evil"}, {"content-length", "99"}, {"Transfer-Encoding", "chunked"}, {"Connection", "close"}, {"TE", "x"},
			{"Upgrade", "h2c"}, {"Expect", "100-continue"}, {"Proxy-Authorization", "x"}, {"X-Request-Id", "r1"}, {"Authorization", "Bearer \xc3\xa4"}}}
	if _, err := request(e, req, nil); err != nil {
		t.Fatal(err)
	}
	want := "POST /base/v1/x?y=z HTTP/1.1\r\nHost: " + srv.ln.Addr().String() + "\r\nX-Request-Id: r1\r\nAuthorization: Bearer \xc3\xa4\r\nContent-Length: 3\r\n\r\nabc"
	if s := <-got; s != want {
		t.Errorf("sent %q\nwant %q", s, want)
	}
	if e.URL() != "http://"+srv.ln.Addr().String()+"/base" {
		t.Errorf("URL %q", e.URL())
	}
}

func TestBadRequests(t *testing.T) {
	e := newEngine(t, echo).endpoint(t, Options{})
	for name, req := range map[string]Request{
		"method":         {Method: "GET /x HTTP/1.1\r\n", Path: "/"},
		"no method":      {Path: "/"},
		"path":           {Method: "GET", Path: "/x HTTP/1.1\r\nX: y"},
		"no path":        {Method: "GET"},
		"relative":       {Method: "GET", Path: "x"},
		"name":           {Method: "GET", Path: "/", Fields: []Field{{"A\r\nB", "x"}}},
		"empty name":     {Method: "GET", Path: "/", Fields: []Field{{"", "x"}}},
		"value":          {Method: "GET", Path: "/", Fields: []Field{{"A", "x\r\nB: y"}}},
		"value with NUL": {Method: "GET", Path: "/", Fields: []Field{{"A", "x\x00"}}},
	} {
		if _, err := e.Do(&req, nil); err == nil || phaseOf(t, err) != PhaseDial {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s := e.Stats(); s.Dialed != 0 {
		t.Errorf("%+v", s)
	}
}

func TestNewEndpoint(t *testing.T) {
	for raw, ok := range map[string]bool{
		"http://h:1": true, "http://h": true, "https://h/p/": true, "http://[::1]:8000": true,
		"": false, "h:1": false, "ftp://h": false, "http://": false, "http://u:p@h": false, "http://h?q": false, "http://h#f": false,
		"http://h:99999999999999x": false, "http://h/\x01": false, "http:///x": false,
	} {
		e, err := NewEndpoint(raw, Options{})
		if (err == nil) != ok {
			t.Errorf("%q: %v", raw, err)
		}
		if err != nil && !strings.Contains(err.Error(), "want http://host:port") {
			t.Errorf("%q: %v says not what would do", raw, err)
		}
		if err == nil {
			e.Close()
		}
	}
}

func TestTimeouts(t *testing.T) {
	for name, c := range map[string]struct {
		sent  string
		req   Request
		phase Phase
	}{
		"head":              {"", Request{HeadTimeout: 30 * time.Millisecond}, PhaseHead},
		"half a head":       {"HTTP/1.1 200", Request{HeadTimeout: 30 * time.Millisecond}, PhaseHead},
		"deadline in head":  {"", Request{HeadTimeout: long, Deadline: time.Now().Add(time.Hour)}, PhaseHead},
		"deadline in body":  {ok + "Content-Length: 5\r\n\r\nhe", Request{HeadTimeout: long, Deadline: time.Now().Add(time.Hour)}, PhaseBody},
		"deadline in chunk": {ok + "Transfer-Encoding: chunked\r\n\r\n5\r\nhe", Request{HeadTimeout: long, Deadline: time.Now().Add(time.Hour)}, PhaseBody},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			gone := make(chan struct{}, 100)
			e := newEngine(t, func(p *peer) {
				p.request()
				p.send(c.sent)
				p.gone()
				gone <- struct{}{}
			}).endpoint(t, Options{})
			req := c.req
			req.Method, req.Path = "GET", "/"
			for tries, late := uint64(1), 150*time.Millisecond; ; tries, late = tries+1, 2*late {
				if !c.req.Deadline.IsZero() {
					req.Deadline = time.Now().Add(late)
				}
				start := time.Now()
				_, err := request(e, &req, nil)
				if !errors.Is(err, ErrTimeout) {
					t.Errorf("%v", err)
				}
				if took := time.Since(start); took < 25*time.Millisecond {
					t.Errorf("timed out after %v", took)
				}
				if s := e.Stats(); s.Open != 0 || s.TimedOut != tries {
					t.Errorf("%+v", s)
				}
				if phaseOf(t, err) == c.phase {
					<-gone
					break
				}
				// A busy machine may come no further by then; late, but no earlier.
				if phaseOf(t, err) > c.phase || c.req.Deadline.IsZero() || late > long {
					t.Fatal(err)
				}
			}
		})
	}
}

func TestDeadlinePassed(t *testing.T) {
	e := newEngine(t, echo).endpoint(t, Options{})
	mustRequest(t, e, "x")
	_, err := e.Do(&Request{Method: "GET", Path: "/", Deadline: time.Now().Add(-time.Hour)}, nil)
	if !errors.Is(err, ErrTimeout) || phaseOf(t, err) != PhaseDial {
		t.Errorf("%v", err)
	}
}

func TestConnectTimeout(t *testing.T) {
	e, err := NewEndpoint("http://"+blackhole(t), Options{ConnectTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Do(post("x"), nil)
	if !errors.Is(err, ErrTimeout) || phaseOf(t, err) != PhaseDial || e.Stats().Open != 0 {
		t.Errorf("%v, %+v", err, e.Stats())
	}
}

func TestRefused(t *testing.T) {
	srv := newEngine(t, echo)
	e := srv.endpoint(t, Options{})
	srv.stop()
	_, err := e.Do(post("x"), nil)
	if err == nil || errors.Is(err, ErrTimeout) || phaseOf(t, err) != PhaseDial {
		t.Errorf("%v", err)
	}
}

func TestWriteTimeout(t *testing.T) {
	noLeaks(t)
	release := make(chan struct{})
	e := newEngine(t, func(p *peer) { <-release }).endpoint(t, Options{WriteTimeout: 50 * time.Millisecond})
	defer close(release)
	_, err := e.Do(&Request{Method: "POST", Path: "/", Body: [][]byte{make([]byte, 12<<20)}, Deadline: time.Now().Add(300 * time.Millisecond)}, nil)
	if !errors.Is(err, ErrTimeout) || phaseOf(t, err) != PhaseWrite {
		t.Errorf("%v", err)
	}
}

// A deadline armed for one request must not end the next, which has longer,
// nor one that has none.
func TestDeadlineOfAnEarlierRequest(t *testing.T) {
	wait := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		for i := 0; ; i++ {
			_, body, ok := p.request()
			if !ok {
				return
			}
			if i == 1 || i == 2 {
				<-wait
			}
			p.send(answer(body))
		}
	}).endpoint(t, Options{IdleTimeout: long})
	mustRequest(t, e, "first")
	for i, req := range []*Request{post("long"), {Method: "GET", Path: "/"}} {
		armed := now() + 20*time.Millisecond
		e.newest().setReadDeadline(armed) // as an earlier request would have left it
		done := make(chan error, 1)
		go func() { _, err := request(e, req, nil); done <- err }()
		testwait.Until(t, "the old deadline has passed", func() bool { return now() > armed+10*time.Millisecond })
		wait <- struct{}{}
		if err := <-done; err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
	}
	mustRequest(t, e, "last")
	if s := e.Stats(); s.Dialed != 1 || s.TimedOut != 0 {
		t.Errorf("%+v", s)
	}
}

// An engine that refuses early and closes is heard, though the body could not
// be sent whole.
func TestEarlyRefusal(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, func(p *peer) {
		req, err := http.ReadRequest(p.br)
		if err != nil {
			return
		}
		p.send("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
		_, _ = io.Copy(io.Discard, req.Body)
	}).endpoint(t, Options{})
	resp, err := e.Do(post(strings.Repeat("x", 1<<20)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Release()
	if b, err := resp.ReadAll(nil, 10); resp.Status != 413 || string(b) != "no" || err != nil {
		t.Errorf("%d %q %v", resp.Status, b, err)
	}
}

// An engine that refuses early and then neither reads nor closes is heard just as well, and
// what it says before, of a request that it goes on to read, is not a refusal.
func TestEarlyRefusalThatReadsNoMore(t *testing.T) {
	noLeaks(t)
	const body = 32 << 20 // more than the sockets hold
	for name, c := range map[string]struct {
		says string
		goes func(p *peer, body io.Reader)
		want int
	}{
		"it stands still": {"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno", func(p *peer, _ io.Reader) { _, _ = p.br.Peek(1); <-time.After(2 * time.Second) }, 413},
		"it goes on after a hint": {"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", func(p *peer, body io.Reader) {
			testwait.Pace(2 * earlyRefusalCheck)
			_, _ = io.Copy(io.Discard, body)
			p.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
		}, 200},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, func(p *peer) {
				req, err := http.ReadRequest(p.br)
				if err != nil {
					return
				}
				p.send(c.says)
				c.goes(p, req.Body)
			}).endpoint(t, Options{})
			began := time.Now()
			resp, err := e.Do(post(strings.Repeat("x", body)), nil)
			if err != nil {
				t.Fatal(err)
			}
			took := time.Since(began)
			b, err := resp.ReadAll(nil, 10)
			if resp.Status != c.want || string(b) != "no" || err != nil {
				t.Errorf("%d %q %v", resp.Status, b, err)
			}
			resp.Release()
			if s := e.Stats(); c.want == 413 && (s.Idle != 0 || took > 1900*time.Millisecond) {
				t.Errorf("after %v: %+v", took, s)
			}
		})
	}
}

func TestTLS(t *testing.T) {
	noLeaks(t)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s", r.TLS.ServerName, b)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	_, port, _ := net.SplitHostPort(srv.Listener.Addr().String())
	e, err := NewEndpoint("https://127.0.0.1:"+port, Options{TLS: alwaysScript(&tls.Config{RootCAs: roots, ServerName: "example.com"}), ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, body := range []string{"a", strings.Repeat("b", 1<<20), "c"} {
		if got, err := request(e, post(body), nil); err != nil || got != "example.com "+body {
			t.Fatalf("%.40q, %v", got, err)
		}
	}
	if s := e.Stats(); s.Dialed != 1 {
		t.Errorf("%+v", s)
	}
	other, err := NewEndpoint("https://127.0.0.1:"+port, Options{TLS: alwaysScript(&tls.Config{RootCAs: roots, ServerName: "other.test"}), ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.Do(post("x"), nil); err == nil || phaseOf(t, err) != PhaseDial {
		t.Errorf("a certificate of another name: %v", err)
	}
}

func TestGet(t *testing.T) {
	srv := newEngine(t, func(p *peer) {
		for {
			req, _, ok := p.request()
			if !ok {
				return
			}
			p.send(answer(req.Method + " " + req.URL.String()))
		}
	})
	e := srv.endpoint(t, Options{})
	status, body, err := e.Get("/health?x", long, 100)
	if status != 200 || string(body) != "GET /health?x" || err != nil {
		t.Errorf("%d %q %v", status, body, err)
	}
	if _, _, err := e.Get("/health", long, 3); !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v", err)
	}
}

// A small leg is one write and one read: step runs once for each, and nothing
// else touches the socket.
func TestTwoSystemCalls(t *testing.T) {
	e := newEngine(t, fixed).endpoint(t, Options{})
	req := &Request{Method: "POST", Path: "/", Body: [][]byte{make([]byte, 100)}}
	if _, err := request(e, req, nil); err != nil {
		t.Fatal(err)
	}
	c := e.newest()
	steps := 0
	c.acquireExchange()
	own := c.stepFunc
	c.stepFunc = func(fd uintptr) bool { steps++; return own(fd) }
	defer func(x *exchange) { x.stepFunc = own }(c.exchange)
	c.idleSince = now() // as under load
	resp, err := e.Do(req, nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.c != c || steps != 2 || int64(c.w-c.r) != resp.ContentLength {
		t.Errorf("%d steps; %d of %d body bytes came with the head", steps, c.w-c.r, resp.ContentLength)
	}
	_, _ = resp.ReadAll(nil, 100)
	resp.Release()
}

func TestDoAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	e := newEngine(t, fixed).endpoint(t, Options{})
	req := &Request{Method: "POST", Path: "/v1/completions", Body: [][]byte{[]byte(`{"model":"m"}`)}, Fields: []Field{{"X-Request-Id", "1"}}, HeadTimeout: time.Minute}
	var dst []byte
	if n := testing.AllocsPerRun(500, func() {
		var call Call
		resp, err := e.Do(req, &call)
		if err == nil {
			dst, err = resp.ReadAll(dst[:0], 1000)
			resp.Release()
		}
		if err != nil {
			t.Fatal(err)
		}
	}); n >= 2 { // the call is the caller's one
		t.Errorf("%v allocations a request", n)
	}
}

// fixed answers anything that comes with one fixed JSON response.
func fixed(p *peer) {
	buf := make([]byte, 64<<10)
	resp := []byte("HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 03:56:43 GMT\r\nserver: uvicorn\r\ncontent-length: 26\r\ncontent-type: application/json\r\n\r\n{\"object\":\"text_complete\"}")
	for {
		if _, err := p.Read(buf); err != nil {
			return
		}
		if _, err := p.Write(resp); err != nil {
			return
		}
	}
}

// BenchmarkDo is one small JSON leg on a kept-alive connection, the answering
// side in the same process included.
func BenchmarkDo(b *testing.B) {
	e := newEngine(b, fixed).endpoint(b, Options{})
	req := &Request{Method: "POST", Path: "/v1/completions", Body: [][]byte{[]byte(`{"model":"m","prompt":[1,2,3]}`)},
		Fields: []Field{{"Content-Type", "application/json"}, {"X-Request-Id", "0123456789"}}, HeadTimeout: time.Minute}
	var dst []byte
	var call Call
	b.ReportAllocs()
	for b.Loop() {
		resp, err := e.Do(req, &call)
		if err != nil {
			b.Fatal(err)
		}
		if dst, err = resp.ReadAll(dst[:0], 1<<20); err != nil {
			b.Fatal(err)
		}
		resp.Release()
	}
}

// BenchmarkHead is the parse of a typical engine's response head.
func BenchmarkHead(b *testing.B) {
	head := []byte("HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 03:56:43 GMT\r\nserver: uvicorn\r\ncontent-length: 607\r\ncontent-type: application/json\r\nvary: Origin\r\n\r\n")
	var h headParser
	b.ReportAllocs()
	for b.Loop() {
		h.reset(0)
		if done, err := h.parse(head); !done || err != nil {
			b.Fatal(err)
		}
	}
}

// TestStreamSize: there are thousands of streams, each with a connection that is lent, and
// a few bytes more would take that into the next size class.
func TestStreamSize(t *testing.T) {
	if size := unsafe.Sizeof(conn{}); size > 192 {
		t.Errorf("a connection has %d bytes; a size class ends at 192", size)
	}
}

// TestWaitUsesNoBuffer: thousands may wait for an answer's head, or for the first byte of
// its body, until a prompt is computed.
func TestWaitUsesNoBuffer(t *testing.T) {
	headNow, bodyNow := make(chan struct{}), make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		<-headNow
		p.send("HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 2\r\n\r\n")
		<-bodyNow
		p.send("ok")
	}).endpoint(t, Options{})
	req := post(strings.Repeat("x", 8<<10))
	c, err := e.dial(req, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.open.Add(manyConnections)
	defer e.open.Add(-manyConnections)
	type step struct {
		w        int
		blk, buf bool
	}
	c.acquireExchange()
	own := c.stepFunc
	defer func(x *exchange) { x.stepFunc = own }(c.exchange)
	waits := make(chan step, 64)
	c.stepFunc = func(fd uintptr) bool {
		done := own(fd)
		if !done {
			waits <- step{c.w, c.blk != nil, len(c.buf) > len(headBlock{})}
		}
		return done
	}
	seen := make(chan [2]step, 1)
	go func() {
		head := <-waits
		close(headNow)
		body := <-waits
		for ; body.w == 0; body = <-waits { // woken for nothing
		}
		close(bodyNow)
		seen <- [2]step{head, body}
	}()
	if _, err := c.roundTrip(req, nil, now()); err != nil {
		t.Fatal(err)
	}
	first, err := c.resp.Peek()
	if err != nil || string(first) != "ok" || string(c.resp.Header("X-A")) != "b" {
		t.Fatalf("%q, header %q: %v", first, c.resp.Header("X-A"), err)
	}
	for i, s := range <-seen {
		if s.blk || s.buf || (i == 0) != (s.w == 0) {
			t.Errorf("wait %d: %+v: want no block", i, s)
		}
	}
	if b, err := c.resp.ReadAll(nil, 10); err != nil || string(b) != "ok" {
		t.Errorf("%q, %v", b, err)
	}
	c.resp.Release()
}
