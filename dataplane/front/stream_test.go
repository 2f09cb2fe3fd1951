package front

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

const helloStream = `data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}` + "\n\n"

func endHook(ends chan relay.Result) func() RelayHooks {
	return func() RelayHooks {
		return RelayHooks{Handler: streamHooks{end: func(r relay.Result) { ends <- r }}}
	}
}

func wantEnd(t *testing.T, ends chan relay.Result, cause relay.Cause) relay.Result {
	t.Helper()
	return wantEndIn(t, ends, cause, testTimeout)
}

func wantEndIn(t *testing.T, ends chan relay.Result, cause relay.Cause, timeout time.Duration) relay.Result {
	t.Helper()
	select {
	case r := <-ends:
		if r.Cause != cause {
			t.Errorf("stream ended by %v (%v), want %v", r.Cause, r.Err, cause)
		}
		return r
	case <-time.After(timeout):
		t.Fatal("End was not called")
	}
	return relay.Result{}
}

func TestConnectionIsReusedAfterStream(t *testing.T) {
	withBothRelayModes(t, testConnectionIsReusedAfterStream)
}

func testConnectionIsReusedAfterStream(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 16)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	for i := range 8 {
		c.send(chatPost(`{"model":"m","stream":true}`, "X-Request-Id: abc"))
		resp, body := c.readResponse()
		if resp.StatusCode != 200 || body != helloStream+"data: [DONE]\n\n" {
			t.Fatalf("answer %d: %d %q", i, resp.StatusCode, body)
		}
		if got := resp.Header["X-Request-Id"]; len(got) != 1 || got[0] != "abc" {
			t.Errorf("X-Request-Id %q, want one abc", got)
		}
		if resp.Header.Get("x-engine") != "one" || resp.Header.Get("X-Sluice-Worker") != "w1" {
			t.Errorf("headers %v", resp.Header)
		}
		wantEnd(t, ends, relay.Completed)
		c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != "ok\n" {
			t.Fatalf("livez after stream %d: %d %q", i, resp.StatusCode, body)
		}
	}
	if n := r.server.conns.len(); n != 1 {
		t.Errorf("%d connections counted, want 1", n)
	}
	if got := strings.Join(r.observed.endings(), ","); got != strings.Repeat(","+chat+" 200", 8)[1:] {
		t.Errorf("endings %s", got)
	}
}

// An HTTP/1.1 client gets the engine's framing unchanged. A body without framing gets chunks.
func TestStreamFramings(t *testing.T) { withBothRelayModes(t, testStreamFramings) }

func testStreamFramings(t *testing.T, by RelayMode) {
	const body = "data: [DONE]\n\n"
	for name, k := range map[string]struct {
		head, raw string
		kept      bool
	}{
		"chunked":  {"Transfer-Encoding: chunked\r\n", chunk(body[:5]) + chunk(body[5:]) + "0\r\nx-trailer: 1\r\n\r\n", true},
		"length":   {"Content-Length: 14\r\n", body, true},
		"to close": {"", body, true},
		"empty":    {"Content-Length: 0\r\n", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, "HTTP/1.1 203 Fine\r\nContent-Type: text/event-stream\r\n"+k.head+"\r\n"+k.raw)
				return k.head != ""
			})
			ends := make(chan relay.Result, 1)
			r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
			c := r.dial()
			c.send(chatPost(hello))
			resp, got := c.readResponse()
			if resp.StatusCode != 203 || (got != body && name != "empty") {
				t.Errorf("%d %q", resp.StatusCode, got)
			}
			if resp.Close == k.kept {
				t.Errorf("close %v, want kept %v", resp.Close, k.kept)
			}
			<-ends
			if !k.kept {
				c.expectClosed()
				return
			}
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			if resp, _ := c.readResponse(); resp.StatusCode != 200 {
				t.Errorf("after the stream: %d", resp.StatusCode)
			}
		})
	}
}

// Trailers reach the client, and the connection stays open.
func TestTrailersOfAStream(t *testing.T) { withBothRelayModes(t, testTrailersOfAStream) }

func testTrailersOfAStream(t *testing.T, by RelayMode) {
	free := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
		<-free // an event loop drives the stream by then
		_, _ = io.WriteString(nc, "0\r\nX-Took: 1\r\n")
		testwait.Pace(time.Millisecond)
		_, err := io.WriteString(nc, "X-Sum: a\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	for range 2 {
		c.send(chatPost(streamDoc))
		resp := c.head()
		if _, err := io.ReadFull(resp.Body, make([]byte, len(helloStream))); err != nil {
			t.Fatal(err)
		}
		r.waitStreamsOnLoops(by, 1)
		free <- struct{}{}
		if rest := c.rest(resp); rest != "" || resp.Trailer.Get("X-Took") != "1" || resp.Trailer.Get("X-Sum") != "a" {
			t.Errorf("%q, trailers %v", rest, resp.Trailer)
		}
		wantEnd(t, ends, relay.Completed)
		c.expectServes()
	}
	if s := e.ep.Stats(); s.Dialed != 1 {
		t.Errorf("%+v: the engine's connection was not kept", s)
	}
}

// A malformed trailer, or one that may be only in a head, is an engine error: the client does not
// get it, and neither connection is used again.
func TestForbiddenTrailersOfAStream(t *testing.T) {
	withBothRelayModes(t, testForbiddenTrailersOfAStream)
}

func testForbiddenTrailersOfAStream(t *testing.T, by RelayMode) {
	for _, line := range []string{"Set-Cookie: a=b", "content-length: 1", "X-A"} {
		free := make(chan struct{})
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
			<-free
			_, err := io.WriteString(nc, "0\r\n"+line+"\r\n\r\n")
			return err == nil
		})
		ends := make(chan relay.Result, 1)
		r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
		c := r.dial()
		c.send(chatPost(streamDoc))
		resp := c.head()
		if _, err := io.ReadFull(resp.Body, make([]byte, len(helloStream))); err != nil {
			t.Fatal(err)
		}
		r.waitStreamsOnLoops(by, 1)
		close(free)
		if rest, err := io.ReadAll(resp.Body); err == nil || len(rest) > 0 || len(resp.Trailer) > 0 {
			t.Errorf("%q: %q (%v), trailers %v", line, rest, err, resp.Trailer)
		}
		if res := wantEnd(t, ends, relay.EngineMalformed); res.Reusable || !errors.Is(res.Err, upstream.ErrProtocol) {
			t.Errorf("%q: %+v", line, res)
		}
		testwait.Until(t, "both connections are closed", func() bool { return r.server.conns.len() == 0 && e.ep.Stats().Open == 0 })
	}
}

// A client that expects "100 Continue" gets it, and then its stream.
func TestExpectContinueBeforeAStream(t *testing.T) {
	withBothRelayModes(t, testExpectContinueBeforeAStream)
}

func testExpectContinueBeforeAStream(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		if len(req.Header["Expect"]) > 0 {
			t.Error("the engine got an Expect header")
		}
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	for range 2 {
		c.send(strings.TrimSuffix(chatPost(streamDoc, "Expect: 100-continue"), streamDoc))
		if line, err := c.br.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
			t.Fatalf("%q (%v)", line, err)
		}
		_, _ = c.br.ReadString('\n')
		c.send(streamDoc)
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != helloStream {
			t.Errorf("%d %q", resp.StatusCode, body)
		}
		wantEnd(t, ends, relay.Completed)
		c.expectServes()
	}
}

// A response to HEAD has no body, for a page or another path, before and after a stream.
func TestHeadAroundAStream(t *testing.T) { withBothRelayModes(t, testHeadAroundAStream) }

func testHeadAroundAStream(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	for range 2 {
		for path, status := range map[string]int{"/livez": 200, chat: 405, "/nowhere": 404} {
			c.send("HEAD " + path + " HTTP/1.1\r\nHost: a\r\n\r\n")
			resp, err := http.ReadResponse(c.br, &http.Request{Method: "HEAD"})
			if err != nil || resp.StatusCode != status {
				t.Fatalf("HEAD %s: %v, %v", path, resp, err)
			}
		}
		c.send(chatPost(streamDoc))
		if _, body := c.readResponse(); body != helloStream {
			t.Errorf("stream %q", body)
		}
		wantEnd(t, ends, relay.Completed)
	}
}

// An HTTP/1.0 client gets the payload without chunks, and the end of the connection.
func TestStreamToHTTP10(t *testing.T) { withBothRelayModes(t, testStreamToHTTP10) }

func testStreamToHTTP10(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		whole := streamHead + chunk(helloStream) + chunk("data: [DONE]\n\n") + "0\r\n\r\n"
		for i := range len(whole) {
			if _, err := io.WriteString(nc, whole[i:i+1]); err != nil {
				return false
			}
		}
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(strings.Replace(helloPost("Connection: keep-alive\r\n"), "/1.1", "/1.0", 1))
	all, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := strings.Cut(string(all), "\r\n\r\n")
	if body != helloStream+"data: [DONE]\n\n" {
		t.Errorf("body %q", body)
	}
	contains(t, head, "Connection: close")
	if strings.Contains(head, "chunked") {
		t.Errorf("head %q", head)
	}
	wantEnd(t, ends, relay.Completed)
}

func TestSizedStreamToHTTP10KeepsTheConnection(t *testing.T) {
	withBothRelayModes(t, testSizedStreamToHTTP10KeepsTheConnection)
}

func testSizedStreamToHTTP10KeepsTheConnection(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
		return true
	})
	ends := make(chan relay.Result, 2)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	for range 2 {
		c.send(strings.Replace(helloPost("Connection: keep-alive\r\n"), "/1.1", "/1.0", 1))
		resp, body := c.readResponse()
		if body != "hi" || resp.Header.Get("Connection") != "keep-alive" {
			t.Errorf("%q %v", body, resp.Header)
		}
		wantEnd(t, ends, relay.Completed)
	}
}

func TestStreamWithConnectionClose(t *testing.T) {
	withBothRelayModes(t, testStreamWithConnectionClose)
}

func testStreamWithConnectionClose(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(chatPost(hello, "Connection: close"))
	if resp, body := c.readResponse(); !resp.Close || body != helloStream {
		t.Errorf("%v %q", resp.Close, body)
	}
	c.expectClosed()
}

// The client gets the head before the engine sends the body.
func TestHeadDoesNotWaitForTheBody(t *testing.T) {
	withBothRelayModes(t, testHeadDoesNotWaitForTheBody)
}

func testHeadDoesNotWaitForTheBody(t *testing.T, by RelayMode) {
	free := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		<-free
		_, _ = io.WriteString(nc, chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(chatPost(hello))
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	r.waitStreamsOnLoops(by, 1)
	close(free)
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != helloStream {
		t.Errorf("%q %v", body, err)
	}
	wantEnd(t, ends, relay.Completed)
}

func TestEngineDiesInsideAStream(t *testing.T) { withBothRelayModes(t, testEngineDiesInsideAStream) }

func testEngineDiesInsideAStream(t *testing.T, by RelayMode) {
	for name, k := range map[string]struct {
		raw  string
		kept bool
	}{
		"between events": {streamHead + chunk(helloStream), true},
		"inside a chunk": {streamHead + "ff\r\n" + helloStream + "data: {", true},
		"inside a long":  {streamHead + "fffff\r\n" + helloStream + "data: {", false},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, k.raw)
				return false
			})
			ends := make(chan relay.Result, 1)
			r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
			c := r.dial()
			c.send(chatPost(hello))
			resp, err := http.ReadResponse(c.br, nil)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			contains(t, string(body), helloStream)
			if (err == nil) != k.kept {
				t.Errorf("body ended by %v", err)
			}
			res := wantEnd(t, ends, relay.EngineClosed)
			if res.Reusable != k.kept {
				t.Errorf("reusable %v", res.Reusable)
			}
			if !k.kept {
				c.expectClosed()
				return
			}
			contains(t, string(body), `"error"`)
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			if resp, _ := c.readResponse(); resp.StatusCode != 200 {
				t.Errorf("after the stream: %d", resp.StatusCode)
			}
		})
	}
}

// A client that stops reading is cut after WriteTimeout.
func TestStalledClientIsDisconnected(t *testing.T) {
	withBothRelayModes(t, testStalledClientIsDisconnected)
}

func testStalledClientIsDisconnected(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		event := chunk("data: {\"x\":\"" + strings.Repeat("y", 60<<10) + "\"}\n\n")
		for {
			if _, err := io.WriteString(nc, event); err != nil {
				return false
			}
		}
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by, WriteTimeout: 200 * time.Millisecond}, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(chatPost(hello))
	wantEnd(t, ends, relay.ClientStalled)
	testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
}

// A stream that outlives WriteTimeout many times is not cut while it flows.
func TestSlowClientIsNotDisconnected(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testSlowClientIsNotDisconnected)
}

// A client that reads 40 KB a second from full buffers is not stalled, although its socket accepts
// no new bytes for many times WriteTimeout.
func testSlowClientIsNotDisconnected(t *testing.T, by RelayMode) {
	const limit = 2 * time.Second
	if testing.Short() {
		t.Skip("twice the timeout long")
	}
	t.Parallel()
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		event := chunk("data: {\"x\":\"" + strings.Repeat("y", 60<<10) + "\"}\n\n")
		for {
			if _, err := io.WriteString(nc, event); err != nil {
				return false
			}
		}
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{RelayMode: by, WriteTimeout: limit}, relayTo(e, endHook(ends)))
	c := r.dial()
	_ = c.Conn.(*net.TCPConn).SetReadBuffer(16 << 10)
	c.send(chatPost(hello))
	piece := make([]byte, 4<<10)
	for began := time.Now(); time.Since(began) < 5*limit/2; testwait.Pace(100 * time.Millisecond) {
		if _, err := io.ReadFull(c, piece); err != nil {
			t.Fatalf("cut after %v: %v", time.Since(began), err)
		}
		select {
		case res := <-ends:
			t.Fatalf("ended: %+v", res)
		default:
		}
	}
	_ = c.Close()
	wantEnd(t, ends, relay.ClientGone)
}

func TestLongStreamIsNotDisconnected(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testLongStreamIsNotDisconnected)
}

func testLongStreamIsNotDisconnected(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		for range 30 {
			testwait.Pace(30 * time.Millisecond)
			if _, err := io.WriteString(nc, chunk(helloStream)); err != nil {
				return false
			}
		}
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	const limit = 500 * time.Millisecond
	opt := Options{RelayMode: by, WriteTimeout: limit, HeadTimeout: limit, BodyTimeout: limit}
	r := start(t, opt, relayTo(e, endHook(ends)))
	c := r.dial()
	c.send(chatPost(hello))
	if _, body := c.readResponse(); body != strings.Repeat(helloStream, 30)+"data: [DONE]\n\n" {
		t.Errorf("%d bytes", len(body))
	}
	// The wait for the next request has the idle timeout, not the head timeout.
	testwait.Holds(t, limit+200*time.Millisecond, "the connection is open", func() bool { return r.server.conns.len() == 1 })
	c.send(chatPost(hello))
	if _, body := c.readResponse(); len(body) < 100 {
		t.Errorf("second: %q", body)
	}
}

func TestPanicInHooks(t *testing.T) { withBothRelayModes(t, testPanicInHooks) }

func testPanicInHooks(t *testing.T, by RelayMode) {
	relayed := make(chan struct{}, 2)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		<-relayed // with event loops the panic is on the loop's thread
		_, _ = io.WriteString(nc, chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	for _, hooks := range []RelayHooks{
		{Handler: streamHooks{token: func() { panic("token") }}},
		{Handler: streamHooks{end: func(relay.Result) { panic("end") }}},
	} {
		r := start(t, Options{RelayMode: by}, relayTo(e, func() RelayHooks { return hooks }))
		c := r.dial()
		c.send(chatPost(hello))
		_, _ = io.ReadAll(io.LimitReader(c, 10))
		r.waitStreamsOnLoops(by, 1)
		relayed <- struct{}{}
		testwait.Until(t, "panic seen", func() bool {
			r.observed.mu.Lock()
			defer r.observed.mu.Unlock()
			return r.observed.panics == 1
		})
	}
}
