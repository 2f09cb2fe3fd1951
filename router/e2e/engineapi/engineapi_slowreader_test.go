package engineapi

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
	"sluice/dataplane/rawsocket"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// streamingEngine is an engine that streams as fast as the router reads, and then keeps the
// connection open.
type streamingEngine struct {
	*harness.ScriptedEngine
	sentEvents atomic.Int64 // events accepted by the socket
	gone       chan struct{}
	limit      int // number of events; 0: no limit
}

func startStreamingEngine(t *testing.T, limit int) *streamingEngine {
	e := &streamingEngine{limit: limit, gone: make(chan struct{}, 16)}
	e.ScriptedEngine = harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		nc, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer nc.Close()
		e.serveStream(nc)
		_, _ = io.Copy(io.Discard, nc) // until the router closes the connection
		e.gone <- struct{}{}
	})
	return e
}

func (e *streamingEngine) serveStream(nc net.Conn) {
	if _, err := io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"); err != nil {
		return
	}
	raw, err := nc.(*net.TCPConn).SyscallConn()
	if err != nil {
		return
	}
	for i := 0; e.limit == 0 || i < e.limit; i++ {
		event := fmt.Sprintf(`data: {"id":"c","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null,"token_ids":[%d]}]}`+"\n\n", i)
		if _, err := fmt.Fprintf(nc, "%x\r\n%s\r\n", len(event), event); err != nil {
			return
		}
	}
	arrived := testwait.Poll(harness.TestTimeout, func() bool {
		sent := false
		err = raw.Control(func(fd uintptr) { sent = rawsocket.Unsent(int(fd)) == 0 })
		return err != nil || sent
	})
	if err != nil || !arrived {
		return
	}
	e.sentEvents.Store(int64(e.limit))
}

// testWithStreamingEngine starts a router with the given relay driver over one streamingEngine. Its
// timeouts are longer than a test.
func testWithStreamingEngine(t *testing.T, driver string, limit int) (*harness.Router, *streamingEngine) {
	t.Helper()
	e := startStreamingEngine(t, limit)
	on := harness.WithEngineAPI(harness.SocketIn(t))
	r := harness.StartRouter(t, func(c *config.Config) {
		on(c)
		c.Relay.Driver = driver
		c.Timeouts.Write, c.Timeouts.StreamIdle, c.Timeouts.Decode = time.Hour, time.Hour, time.Hour
	}, e.Worker(worker.Aggregated, "e0"))
	return r, e
}

// TestEngineAPIDeadlineOfSlowReader: the deadline also ends the request of a caller that does not
// read, whatever output waits for it, and the router releases the engine.
func TestEngineAPIDeadlineOfSlowReader(t *testing.T) {
	t.Parallel()
	const ms = 3000 // enough for the request to start streaming on any machine
	for _, driver := range harness.Drivers {
		for endpoint, run := range map[string]func(t *testing.T, r *harness.Router, e *streamingEngine){
			"unix": func(t *testing.T, r *harness.Router, e *streamingEngine) { deadlineOverSocket(t, r, e, "unix", ms) },
			"tcp":  func(t *testing.T, r *harness.Router, e *streamingEngine) { deadlineOverSocket(t, r, e, "tcp", ms) },
			"HTTP": func(t *testing.T, r *harness.Router, e *streamingEngine) { deadlineOverHTTP(t, r, e, ms) },
		} {
			t.Run(driver+"/"+endpoint, func(t *testing.T) {
				t.Parallel()
				r, e := testWithStreamingEngine(t, driver, 0)
				run(t, r, e)
				wantDeadlines(t, r)
			})
		}
	}
}

func deadlineOverSocket(t *testing.T, r *harness.Router, e *streamingEngine, network string, ms int) {
	harness.DialEngine(t, r, network).Close()
	c, err := client.Dial(context.Background(), harness.WireAddr(r, network), client.Options{Window: 500})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	req := harness.EngineAPIRequest(harness.TokenIDs(20, 1), 1_000_000)
	req.Context.TimeoutMS = ms
	s := harness.StartEngineAPI(t, c, req)
	waitChan(t, e.gone, "the engine is left")
	testwait.UntilWithin(t, harness.TestTimeout, "the stream is ended", func() bool { return r.Wire.Stats().Streams == 0 })
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	a := harness.ReadEngineAPI(ctx, s)
	if !client.TimedOut(a.Err) || a.Failure != nil || len(a.Tokens[0]) == 0 {
		t.Errorf("ended with %v, %v behind %d tokens; want what fits the window, and the end of code deadline", a.Err, a.Failure, len(a.Tokens[0]))
	}
}

func deadlineOverHTTP(t *testing.T, r *harness.Router, e *streamingEngine, ms int) {
	nc, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	body := fmt.Sprintf(`{"model":"sim","token_ids":[1,2,3],"stop_conditions":{"max_tokens":1000000},"context":{"timeout_ms":%d}}`, ms)
	if _, err := fmt.Fprintf(nc, "POST /v1/engine/generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	waitChan(t, e.gone, "the engine is left")
	_ = nc.SetReadDeadline(time.Now().Add(harness.TestTimeout))
	if b, err := io.ReadAll(nc); len(b) == 0 || err != nil && !strings.Contains(err.Error(), unix.ECONNRESET.Error()) {
		t.Errorf("%d bytes, %v; want what fits the sockets, and the connection's end", len(b), err)
	}
}

// TestEngineAPIStopBehindReader: a slow reader that stops receives all output that the engine had
// sent, even the part that the router had no buffer space to read before.
func TestEngineAPIStopBehindReader(t *testing.T) {
	const n = 300 // 50 KB: more than the router reads at once, less than a socket buffers
	for _, driver := range harness.Drivers {
		t.Run(driver, func(t *testing.T) {
			r, e := testWithStreamingEngine(t, driver, n)
			harness.DialEngine(t, r, "unix").Close()
			c, err := client.Dial(context.Background(), harness.WireAddr(r, "unix"), client.Options{Window: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s := harness.StartEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(20, 1), 1_000_000))
			testwait.UntilWithin(t, harness.TestTimeout, "all lies in the router's sockets", func() bool { return e.sentEvents.Load() == n })
			s.Stop()
			waitChan(t, e.gone, "the engine is left")
			ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
			defer cancel()
			a := harness.ReadEngineAPI(ctx, s)
			if a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" || len(a.Tokens[0]) != n || a.Usage == nil || a.Usage.Completion != n {
				t.Fatalf("%v, %v, %q, %+v behind %d of %d tokens", a.Err, a.Failure, a.Finish[0], a.Usage, len(a.Tokens[0]), n)
			}
			for i, id := range a.Tokens[0] {
				if id != uint32(i) {
					t.Fatalf("token %d is %d", i, id)
				}
			}
		})
	}
}

func waitChan(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(harness.TestTimeout):
		t.Fatalf("%s: not within %v", what, harness.TestTimeout)
	}
}
