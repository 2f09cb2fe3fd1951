package front

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// upperCaser is a Converter that converts each complete event to upper case.
type upperCaser struct {
	chunks  upstream.Chunks
	partial []byte
	out     []byte
	ended   bool
}

func (s *upperCaser) Convert(p []byte) ([]byte, error) {
	s.out = s.out[:0]
	for len(p) > 0 && !s.chunks.Done() {
		n, payload, err := s.chunks.Next(p)
		if err != nil {
			return nil, err
		}
		s.partial, p = append(s.partial, payload...), p[n:]
	}
	if at := bytes.LastIndex(s.partial, []byte("\n\n")); at >= 0 {
		whole := s.partial[:at+2]
		s.out = append(s.out, chunk(strings.ToUpper(string(whole)))...)
		s.partial = s.partial[at+2:]
	}
	if s.chunks.Done() && !s.ended {
		s.ended = true
		s.out = append(s.out, "0\r\n\r\n"...)
	}
	return s.out, nil
}

func (s *upperCaser) End(cause relay.Cause) []byte {
	if s.ended {
		return nil
	}
	s.ended = true
	return []byte(chunk("ENDED BY "+cause.String()+"\n\n") + "0\r\n\r\n")
}

func testWithUpperCaser(e *engine, hooks func() RelayHooks) func(x Exchange) {
	relays := relayTo(e, hooks)
	return func(x Exchange) {
		x.Request().Converter = func(chunked bool) relay.Converter { return new(upperCaser) }
		relays(x)
	}
}

// TestConverter checks that a Converter works for streams on event loops too, and that the
// connection serves another request.
func TestConverter(t *testing.T) { withBothRelayModes(t, testConverter) }

func testConverter(t *testing.T, by RelayMode) {
	const n = 300
	go1 := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		for i := range n {
			if _, err := io.WriteString(nc, chunk(fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":\"word %d\"}]}\n\n", i))); err != nil {
				return false
			}
			if i == 0 {
				<-go1
			}
		}
		_, _ = io.WriteString(nc, chunk("data: [DO")+chunk("NE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 16)
	r := start(t, Options{RelayMode: by}, testWithUpperCaser(e, endHook(ends)))
	c := r.dial()
	for i := range 3 {
		c.send(chatPost(`{"model":"m","stream":true}`))
		if i == 0 {
			r.waitStreamsOnLoops(by, 1)
			close(go1)
		}
		resp, body := c.readResponse()
		if resp.StatusCode != 200 || strings.Count(body, "WORD ") != n || !strings.HasSuffix(body, "DATA: [DONE]\n\n") || strings.Contains(body, "word") {
			t.Fatalf("answer %d: %d %q", i, resp.StatusCode, body)
		}
		wantEnd(t, ends, relay.Completed)
	}
}

// TestConverterEnds checks that nothing of an incomplete event reaches the client if the engine
// disconnects, and that the client's connection stays open.
func TestConverterEnds(t *testing.T) { withBothRelayModes(t, testConverterEnds) }

func testConverterEnds(t *testing.T, by RelayMode) {
	for _, left := range []string{"", chunk("data: {\"ha"), "20\r\ndata: {\"half a chunk"} {
		notified := make(chan struct{})
		e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
			_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
			<-notified
			_, _ = io.WriteString(nc, left)
			return false
		})
		ends := make(chan relay.Result, 16)
		r := start(t, Options{RelayMode: by}, testWithUpperCaser(e, endHook(ends)))
		c := r.dial()
		c.send(chatPost(`{"model":"m","stream":true}`))
		r.waitStreamsOnLoops(by, 1)
		close(notified)
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != strings.ToUpper(helloStream)+"ENDED BY engine_closed\n\n" {
			t.Errorf("left behind %q: %d %q", left, resp.StatusCode, body)
		}
		wantEnd(t, ends, relay.EngineClosed)
		c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
		if resp, _ := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("the connection is not used again: %d", resp.StatusCode)
		}
	}
}

// TestClientDeadline checks that the client's deadline ends a stream that the client does not
// read, and the engine's call, long before any timeout.
func TestClientDeadline(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testClientDeadline)
}

func testClientDeadline(t *testing.T, by RelayMode) {
	gone := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		defer close(gone)
		_, _ = io.WriteString(nc, streamHead)
		for {
			if _, err := io.WriteString(nc, chunk("data: {\"x\":\""+strings.Repeat("x", 10_000)+"\"}\n\n")); err != nil {
				return false
			}
		}
	})
	ends := make(chan relay.Result, 16)
	r := start(t, Options{RelayMode: by, WriteTimeout: time.Hour}, func(x Exchange) {
		call, end := new(upstream.Call), time.Now().Add(200*time.Millisecond)
		x.OnClientGone(call.Cancel)
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}, Deadline: end}, call)
		if err != nil {
			x.Error(UpstreamFailed, "", err.Error(), 0)
			return
		}
		x.Relay(resp, call, RelayHooks{ClientDeadline: end, Handler: streamHooks{end: func(res relay.Result) { ends <- res }}})
	})
	c := r.dial()
	c.send(strings.Replace(chatPost(`{"model":"m","stream":true}`), "\r\n", "\r\nConnection: close\r\n", 1))
	select {
	case <-gone:
	case <-time.After(testTimeout):
		t.Fatal("the engine is still read")
	}
	select {
	case res := <-ends:
		if res.Cause != relay.Deadline { // whether or not its sockets were full
			t.Errorf("ended by %v (%v)", res.Cause, res.Err)
		}
	case <-time.After(testTimeout):
		t.Fatal("the stream goes on")
	}
	// The stream's end ends the connection, or was cut: either way the client reads it at once.
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
}
