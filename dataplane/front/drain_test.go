package front

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

func shutdown(r *testServer, limit time.Duration) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	began := time.Now()
	err = r.server.Shutdown(ctx)
	return time.Since(began), err
}

func TestIdleShutdownIsQuick(t *testing.T) {
	r := start(t, Options{}, echo)
	used, unused := r.dial(), r.dial()
	used.send(chatPost(hello))
	used.readResponse()
	testwait.Until(t, "both counted", func() bool { return r.server.conns.len() == 2 })
	took, err := shutdown(r, testTimeout)
	if err != nil {
		t.Error(err)
	}
	if took > 2*time.Second {
		t.Errorf("idle shutdown took %v", took)
	}
	used.expectClosed()
	unused.expectClosed()
	if _, err := net.Dial("tcp", r.addr); err == nil {
		t.Error("still listening")
	}
	if err := r.server.Serve(otherListener(t)); err != nil {
		t.Errorf("Serve after Shutdown: %v", err)
	}
}

func otherListener(t *testing.T) net.Listener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// A drain waits for a stream and for a waiting request, and refuses new requests on kept-alive
// connections.
func TestDrainWaits(t *testing.T) { withBothRelayModes(t, testDrainWaits) }

func testDrainWaits(t *testing.T, by RelayMode) {
	free := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
		<-free
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	stream := relayTo(e, endHook(ends))
	waiting := make(chan struct{})
	r := start(t, Options{RelayMode: by}, func(x Exchange) {
		if x.Request().Endpoint.Kind == Embeddings {
			close(waiting)
			<-free
			echo(x)
			return
		}
		stream(x)
	})
	streaming, short, late := r.dial(), r.dial(), r.dial()
	streaming.send(chatPost(hello))
	short.send(post("/v1/embeddings", hello))
	<-waiting
	// On a connection that has served a request, an incomplete head counts as a request in
	// progress.
	late.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
	late.readResponse()
	late.send(atHost)
	testwait.Until(t, "streaming", func() bool { return len(r.observed.endings()) == 0 && r.calls.Load() == 2 })
	testwait.Until(t, "late request begun", func() bool {
		n := 0
		r.server.conns.mu.Lock()
		defer r.server.conns.mu.Unlock()
		for _, c := range r.server.conns.conns {
			if c.active.Load() {
				n++
			}
		}
		return n == 3
	})
	done := make(chan error, 1)
	go func() {
		_, err := shutdown(r, testTimeout)
		done <- err
	}()
	testwait.Until(t, "draining", r.server.draining.Load)
	late.send("Content-Length: 13\r\n\r\n" + hello)
	resp, body := late.readResponse()
	if resp.StatusCode != 503 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(Draining) || resp.Header.Get("Retry-After") == "" {
		t.Errorf("late request: %d %v %s", resp.StatusCode, resp.Header, body)
	}
	late.expectClosed()
	select {
	case err := <-done:
		t.Fatalf("Shutdown returned %v with a stream and a request in flight", err)
	default:
	}
	close(free)
	if resp, body := short.readResponse(); resp.StatusCode != 200 || !resp.Close || body != hello {
		t.Errorf("waiting request: %d %v %q", resp.StatusCode, resp.Close, body)
	}
	if _, body := streaming.readResponse(); !strings.HasSuffix(body, "[DONE]\n\n") {
		t.Errorf("stream: %q", body)
	}
	wantEnd(t, ends, relay.Completed)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// At its deadline a drain cuts the remaining streams, and ends waiting handlers through
// OnClientGone.
func TestDrainCancelsAtDeadline(t *testing.T) { withBothRelayModes(t, testDrainCancelsAtDeadline) }

func testDrainCancelsAtDeadline(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
		_, _ = nc.Read(make([]byte, 1))
		return false
	})
	ends := make(chan relay.Result, 1)
	stream := relayTo(e, endHook(ends))
	waiting := make(chan struct{})
	r := start(t, Options{RelayMode: by}, func(x Exchange) {
		if x.Request().Endpoint.Kind == Embeddings {
			gone := make(chan struct{})
			x.OnClientGone(func() { close(gone) })
			close(waiting)
			<-gone
			x.Error(ClientGone, "", "cut", 0)
			return
		}
		stream(x)
	})
	streaming, short := r.dial(), r.dial()
	streaming.send(chatPost(hello))
	if _, err := streaming.br.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	short.send(post("/v1/embeddings", hello))
	<-waiting
	took, err := shutdown(r, 100*time.Millisecond)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown: %v", err)
	}
	if took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	wantEnd(t, ends, relay.Drained)
	if rest, err := io.ReadAll(streaming.br); took < finalResponseTime && (err != nil || !strings.Contains(string(rest), "the router is shutting down") || !strings.HasSuffix(string(rest), "data: [DONE]\n\n\r\n0\r\n\r\n")) {
		t.Errorf("the client was left with %q, %v", rest, err)
	}
	if n := r.server.conns.len(); n != 0 {
		t.Errorf("%d connections left", n)
	}
}

// A drain may cut a connection at the moment when its stream ends.
func TestShutdownDuringStreamEnd(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testShutdownDuringStreamEnd)
}

func testShutdownDuringStreamEnd(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	for range 60 {
		ends := make(chan relay.Result, 8)
		r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
		for range 8 {
			r.dial().send(chatPost(hello))
		}
		<-ends
		r.stop()
	}
}

// A server that has served, streamed, refused and shut down leaves no goroutines or descriptors.
func TestShutdownReleasesEverything(t *testing.T) {
	withBothRelayModes(t, testShutdownReleasesEverything)
}

func testShutdownReleasesEverything(t *testing.T, by RelayMode) {
	round := func() {
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
			return true
		})
		ends := make(chan relay.Result, 64)
		r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
		for i := range 20 {
			c := r.dial()
			c.send(chatPost(hello))
			c.readResponse()
			wantEnd(t, ends, relay.Completed)
			if i%2 == 0 {
				c.send(chatPost("nonsense"))
				c.readResponse()
			}
			_ = c.Close()
		}
		r.stop()
		e.ep.Close()
	}
	round() // creates what exists once per process
	goroutines, files := runtime.NumGoroutine(), countFiles(t)
	round()
	testwait.Until(t, fmt.Sprintf("goroutines back to %d", goroutines), func() bool { return runtime.NumGoroutine() <= goroutines+1 })
	testwait.Until(t, fmt.Sprintf("files back to %d", files), func() bool { return countFiles(t) <= files+1 })
}

func countFiles(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc")
	}
	return len(list)
}
