package front

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// testSuccessor is another server as a Successor. It gets a descriptor of its own, like another
// process.
type testSuccessor struct {
	to       *Server
	refuses  atomic.Bool
	accepted atomic.Int64
	mu       sync.Mutex
	about    []PassedState
}

func (h *testSuccessor) Pass(fd int, about PassedState) bool {
	if h.refuses.Load() {
		return false
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return false
	}
	if !h.to.Adopt(own, about) {
		_ = unix.Close(own)
		return false
	}
	h.mu.Lock()
	h.about = append(h.about, about)
	h.mu.Unlock()
	h.accepted.Add(1)
	return true
}

// names answers with the name of the server that handles the request.
func names(name string) func(x Exchange) {
	return func(x Exchange) { x.ReplyJSON(200, fmt.Appendf(nil, "%q", name)) }
}

// startPassing begins to retire r's server in favour of a successor.
func (r *testServer) startPassing(ctx context.Context, successor Successor, unused time.Duration) <-chan error {
	done := make(chan error, 1)
	go func() { done <- r.server.retire(ctx, successor, unused, testTimeout) }()
	return done
}

func wantFrom(t *testing.T, c *client, server string) *http.Response {
	t.Helper()
	c.send(chatPost(hello))
	resp, body := c.readResponse()
	if resp.StatusCode != 200 || body != fmt.Sprintf("%q", server) {
		t.Errorf("%d %q, want an answer of the %s server", resp.StatusCode, body, server)
	}
	return resp
}

// Idle connections of every kind continue on the other server over the same socket. The first
// server serves the requests that have begun.
func TestRetirePassesIdleConnections(t *testing.T) {
	const (
		page   = "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
		odd    = "GET /livez?a HTTP/1.1\r\nHost: a\r\n\r\n"
		header = "PROXY TCP4 10.1.2.3 10.0.0.1 1234 80\r\n"
	)
	proxy := Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}
	for _, k := range []struct {
		name    string
		opening string // of each connection
		before  string // a request before
		opt     Options
		about   PassedState
	}{
		{name: "unused", about: PassedState{Client: netip.MustParseAddr("127.0.0.1")}},
		{name: "kept alive", before: page, about: PassedState{Client: netip.MustParseAddr("127.0.0.1"), Used: true}},
		{name: "kept alive by fasthttp", before: odd, about: PassedState{Client: netip.MustParseAddr("127.0.0.1"), Used: true}},
		{name: "behind a PROXY header", opening: header, before: page, opt: Options{Proxies: proxy}, about: PassedState{Client: netip.MustParseAddr("10.1.2.3"), Used: true}},
	} {
		t.Run(k.name, func(t *testing.T) {
			first, second := start(t, k.opt, names("first")), start(t, k.opt, names("second"))
			c := first.dial()
			if k.before != "" {
				c.send(k.opening + k.before)
				c.readResponse()
			}
			testwait.Until(t, "it is idle", func() bool { return first.server.conns.len() == 1 && requestsInProgress(first) == 0 })
			begun := first.dial()
			begun.send(k.opening + chatPost(hello)[:60])
			testwait.Until(t, "half a head has come", func() bool { return first.server.conns.len() == 2 && requestsInProgress(first) == 1 })
			successor := &testSuccessor{to: second.server}
			done := first.startPassing(context.Background(), successor, testTimeout)
			testwait.Until(t, "it was passed", func() bool { return first.server.conns.len() == 1 && second.server.conns.len() == 1 })
			for range 2 {
				if resp := wantFrom(t, c, "second"); resp.Close {
					t.Error("a connection that was passed is closed by its next answer")
				}
			}
			if len(successor.about) != 1 || successor.about[0] != k.about {
				t.Errorf("got %+v, want %+v", successor.about, k.about)
			}
			begun.send(chatPost(hello)[60:])
			if resp, body := begun.readResponse(); resp.StatusCode != 200 || !resp.Close || body != `"first"` {
				t.Errorf("what had begun: %d %v %q", resp.StatusCode, resp.Header, body)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// A connection whose stream ends while its server retires is then passed.
func TestRetirePassesAfterStream(t *testing.T) {
	withBothRelayModes(t, testRetirePassesAfterStream)
}

func testRetirePassesAfterStream(t *testing.T, by RelayMode) {
	free := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
		<-free
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	first, second := start(t, Options{RelayMode: by}, relayTo(e, endHook(make(chan relay.Result, 1)))), start(t, Options{}, names("second"))
	c := first.dial()
	c.send(chatPost(hello))
	testwait.Until(t, "streaming", func() bool { return first.calls.Load() == 1 })
	if _, err := c.br.Peek(1); err != nil {
		t.Fatal(err)
	}
	done := first.startPassing(context.Background(), &testSuccessor{to: second.server}, testTimeout)
	testwait.Until(t, "retiring", func() bool { return first.server.closeAfterResponse.Load() })
	close(free)
	if resp, body := c.readResponse(); resp.Close || !strings.HasSuffix(body, "[DONE]\n\n") {
		t.Errorf("%v %q", resp.Header, body)
	}
	testwait.Until(t, "it was passed", func() bool { return second.server.conns.len() == 1 })
	wantFrom(t, c, "second")
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The retiring server goes on to serve a connection that cannot be passed, and closes it with
// its next response.
func TestRetireKeepsOtherConnections(t *testing.T) {
	for _, k := range []struct {
		name    string
		opt     Options
		refuses bool
		unused  bool
	}{
		{name: "TLS", opt: Options{TLS: testTLS()}},
		{name: "refused", refuses: true},
		{name: "refused, unused", refuses: true, unused: true},
		{name: "refused, kept alive by fasthttp", refuses: true},
	} {
		t.Run(k.name, func(t *testing.T) {
			first, second := start(t, k.opt, names("first")), start(t, Options{}, names("second"))
			successor := &testSuccessor{to: second.server}
			successor.refuses.Store(k.refuses)
			dial := func() *client {
				c := first.dial()
				if k.opt.TLS != nil {
					return newClient(t, tls.Client(c, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}))
				}
				return c
			}
			used, idle := dial(), dial()
			if !k.unused {
				for _, c := range []*client{used, idle} {
					c.send("GET /livez" + strings.Repeat("?a", strings.Count(k.name, "fasthttp")) + " HTTP/1.1\r\nHost: a\r\n\r\n")
					c.readResponse()
				}
			}
			testwait.Until(t, "accepted", func() bool { return first.server.conns.len() == 2 })
			ctx, end := context.WithCancel(context.Background())
			done := first.startPassing(ctx, successor, testTimeout)
			testwait.Until(t, "retiring", first.server.closeAfterResponse.Load)
			// The successor refuses them; a second attempt would show.
			testwait.Holds(t, 5*drainPoll, "the connections stay", func() bool { return first.server.conns.len() == 2 })
			if resp := wantFrom(t, used, "first"); !resp.Close {
				t.Error("the answer does not say that it is the last one")
			}
			used.expectClosed()
			select {
			case err := <-done:
				t.Fatalf("Retire returned %v with an idle connection", err)
			default:
			}
			end()
			idle.expectClosed()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// startAt starts a server that accepts from the same socket as ln.
func startAt(t *testing.T, ln *net.TCPListener, h func(x Exchange)) *testServer {
	t.Helper()
	file, err := ln.File()
	if err != nil {
		t.Fatal(err)
	}
	same, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Options{Handler: handlerFunc(h)})
	if err != nil {
		t.Fatal(err)
	}
	r := &testServer{t: t, server: s, addr: ln.Addr().String(), done: make(chan error, 1)}
	go func() { r.done <- s.Serve(same) }()
	t.Cleanup(r.stop)
	<-s.serveReady
	return r
}

// Clients that send requests at any moment, without a check whether their connection is closed,
// get all their responses while servers replace each other.
func TestPassedConnectionsLoseNothing(t *testing.T) {
	const clients, rounds = 48, 12
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	shared, ok := ln.(*net.TCPListener)
	if !ok {
		t.Fatal("not TCP")
	}
	server := startAt(t, shared, echo)
	stop := make(chan struct{})
	var answered, dialled, lost, passed atomic.Int64
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			var c *client
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if c == nil {
					nc, err := net.Dial("tcp", ln.Addr().String())
					if err != nil {
						t.Errorf("client %d: %v", i, err)
						return
					}
					defer nc.Close()
					_ = nc.SetDeadline(time.Now().Add(3 * testTimeout))
					c = newClient(t, nc)
					dialled.Add(1)
				}
				body := fmt.Sprintf(`{"messages":[],"user":"%d-%d"}`, i, n)
				_, err := io.WriteString(c, chatPost(body))
				var resp *http.Response
				if err == nil {
					resp, err = http.ReadResponse(c.br, nil)
				}
				if err != nil {
					lost.Add(1)
					t.Errorf("client %d, request %d: %v", i, n, err)
					return
				}
				if got, err := io.ReadAll(resp.Body); string(got) != body {
					t.Errorf("asked %s, answered %s, %v", body, got, err)
					return
				}
				answered.Add(1)
				if resp.Close {
					_ = c.Close()
					c = nil
				}
				testwait.Pace(time.Duration(rand.Int64N(int64(8 * time.Millisecond))))
			}
		})
	}
	for range rounds {
		from := answered.Load()
		testwait.Until(t, "requests are answered", func() bool { return answered.Load() > from+clients || t.Failed() })
		next := startAt(t, shared, echo)
		successor := &testSuccessor{to: next.server}
		done := make(chan error, 1)
		go func(s *Server) { done <- s.retire(context.Background(), successor, testTimeout, testTimeout) }(server.server)
		if err := <-done; err != nil {
			t.Error(err)
		}
		passed.Add(successor.accepted.Load())
		server = next
	}
	close(stop)
	all.Wait()
	t.Logf("%d servers after each other, %d requests answered, %d lost; %d connections passed, %d made", rounds, answered.Load(), lost.Load(), passed.Load(), dialled.Load())
	if passed.Load() == 0 {
		t.Error("no connection was passed")
	}
}

// A server that has stopped or has reached its connection limit adopts no connection, and the
// caller still owns the descriptor.
func TestAdoptRefuses(t *testing.T) {
	full, stopped, secure := start(t, Options{MaxConns: 1}, echo), start(t, Options{}, echo), start(t, Options{TLS: testTLS()}, echo)
	full.dial()
	testwait.Until(t, "full", func() bool { return full.server.conns.len() == 1 })
	stopped.stop()
	for name, r := range map[string]*testServer{"full": full, "stopped": stopped, "TLS": secure} {
		ours, theirs := socketPair(t)
		raw, err := ours.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) {
			if r.server.Adopt(int(fd), PassedState{Used: true}) {
				t.Errorf("%s: adopted", name)
			}
			if _, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil {
				t.Errorf("%s: the descriptor was closed: %v", name, err)
			}
		})
		_, _ = ours.Close(), theirs.Close()
	}
}
