package harness

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"sluice/router/engineapi/client"
)

// BreakableProxy forwards TCP connections to a unix socket. A test can break its connections,
// so that a caller disappears without ending its request.
type BreakableProxy struct {
	Addr string
	mu   sync.Mutex
	ends []net.Conn
}

// StartBreakableProxy listens on a free TCP port and forwards every connection to the unix socket at
// path. It stops accepting when the test ends.
func StartBreakableProxy(t *testing.T, path string) *BreakableProxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	c := &BreakableProxy{Addr: "tcp://" + ln.Addr().String()}
	go func() {
		for {
			downstream, err := ln.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("unix", path)
			if err != nil {
				downstream.Close()
				continue
			}
			c.mu.Lock()
			c.ends = append(c.ends, downstream, upstream)
			c.mu.Unlock()
			for _, copyHalf := range [][2]net.Conn{{downstream, upstream}, {upstream, downstream}} {
				go func() {
					_, _ = io.Copy(copyHalf[0], copyHalf[1])
					downstream.Close()
					upstream.Close()
				}()
			}
		}
	}()
	return c
}

// Sever closes all connections, on both sides and without an end of the requests on them. The proxy
// continues to accept new ones.
func (c *BreakableProxy) Sever() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.ends {
		e.Close()
	}
}

// RequestEnd is one of the ways in which a caller can end a request early.
type RequestEnd struct {
	Name string
	Run  func(t *testing.T, f *MatrixFleet, r *client.Request, ready func(*client.Stream))
}

// TestTimeout bounds each wait of a test. It is long because the machine may be busy.
const TestTimeout = 60 * time.Second

// RequestEnds are all ways to end a request early: by a stop or kill message on its socket, by the
// loss of its connection, and by the close of an HTTP connection. Run sends r, calls ready, and then
// ends r. ready waits for the phase of the request under test; its stream is nil over HTTP.
var RequestEnds = []RequestEnd{
	{"stop", func(t *testing.T, f *MatrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := StartEngineAPI(t, DialEngine(t, f.Router, "unix"), r)
		ready(s)
		s.Stop()
		ctx, cancel := context.WithTimeout(context.Background(), TestTimeout)
		defer cancel()
		a := ReadEngineAPI(ctx, s)
		if a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" {
			t.Fatalf("a stopped stream ends with %v, %v, %q; want a clean end that says cancelled", a.Err, a.Failure, a.Finish[0])
		}
		n := a.Usage
		if n == nil || n.Prompt != len(r.TokenIDs) || n.Completion < len(a.Tokens[0]) || n.Total != n.Prompt+n.Completion {
			t.Errorf("usage %+v behind %d tokens", n, len(a.Tokens[0]))
		}
	}},
	{"kill", func(t *testing.T, f *MatrixFleet, r *client.Request, ready func(*client.Stream)) {
		s := StartEngineAPI(t, DialEngine(t, f.Router, "tcp"), r)
		ready(s)
		s.Kill()
		ctx, cancel := context.WithTimeout(context.Background(), TestTimeout)
		defer cancel()
		if a := ReadEngineAPI(ctx, s); !client.Killed(a.Err) || len(a.Finish) > 0 {
			t.Errorf("a killed stream ends with %v, %v", a.Err, a.Finish)
		}
	}},
	{"vanish", func(t *testing.T, f *MatrixFleet, r *client.Request, ready func(*client.Stream)) {
		line := StartBreakableProxy(t, f.Router.Config.EngineAPI.UnixSocket)
		c, err := client.Dial(context.Background(), line.Addr, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := StartEngineAPI(t, c, r)
		ready(s)
		line.Sever()
		<-c.Done()
	}},
	{"close, over HTTP", func(t *testing.T, f *MatrixFleet, r *client.Request, ready func(*client.Stream)) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = TryPost(ctx, f.Router.URL+"/v1/engine/generate", EngineAPIRequestJSON(r), "X-Request-Id", r.Context.ID)
		}()
		ready(nil)
		cancel()
		<-done
	}},
}

// StartEngineAPI sends a request over a framed socket and returns its stream, of which nothing was
// read. It ends the test if the request cannot be sent.
func StartEngineAPI(t *testing.T, c *client.Client, r *client.Request) *client.Stream {
	t.Helper()
	s, err := c.Generate(r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
