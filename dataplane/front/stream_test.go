package front

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/relay"
)

const helloStream = `data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}` + "\n\n"

func endHook(ends chan relay.Result) func() RelayHooks {
	return func() RelayHooks {
		return RelayHooks{OnEnd: func(r relay.Result) { ends <- r }}
	}
}

func wantEnd(t *testing.T, ends chan relay.Result, cause relay.Cause) relay.Result {
	t.Helper()
	select {
	case r := <-ends:
		if r.Cause != cause {
			t.Errorf("stream ended by %v (%v), want %v", r.Cause, r.Err, cause)
		}
		return r
	case <-time.After(patience):
		t.Fatal("OnEnd was not called")
	}
	return relay.Result{}
}

func TestConnectionServesOnAfterAStream(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 16)
	r := start(t, Options{}, relayTo(e, endHook(ends)))
	c := r.dial()
	for i := range 8 {
		c.send(chatPost(`{"model":"m","stream":true}`, "X-Request-Id: abc"))
		resp, body := c.answer()
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
		if resp, body := c.answer(); resp.StatusCode != 200 || body != "ok\n" {
			t.Fatalf("livez after stream %d: %d %q", i, resp.StatusCode, body)
		}
	}
	if n := r.s.conns.len(); n != 1 {
		t.Errorf("%d connections counted, want 1", n)
	}
	if got := strings.Join(r.seen.endings(), ","); got != strings.Repeat(","+chat+" 200", 8)[1:] {
		t.Errorf("endings %s", got)
	}
}
