package front

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// partialEventSize is how much of an event the engine sends.
const partialEventSize = 30 << 10

// TestPartialEventsUseBudget checks that incomplete events use the memory budget of bodies, at most
// half of it. A stream that finds no budget ends with an error event, and in the end all memory
// is released.
func TestPartialEventsUseBudget(t *testing.T) { withBothRelayModes(t, testPartialEventsUseBudget) }

func testPartialEventsUseBudget(t *testing.T, by RelayMode) {
	const budget, streams = 512 << 10, 12 // half of the budget: 4 streams
	half := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", partialEventSize)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+chunk(half))
		_, _ = nc.Read(make([]byte, 1))
		return false
	})
	ends := make(chan relay.Result, streams)
	r := start(t, Options{RelayMode: by, MaxBodyBytes: 64 << 10, BodyBudgetBytes: budget}, func(x Exchange) {
		call := new(upstream.Call)
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, call)
		if err != nil {
			t.Error(err)
			return
		}
		x.Relay(resp, call, endHook(ends)())
	})
	clients := make([]*client, streams)
	for i := range clients {
		clients[i] = r.dial()
		clients[i].send(post(chat, streamDoc))
		resp := clients[i].head()
		got := make([]byte, len(helloStream))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != helloStream {
			t.Fatalf("stream %d: %q (%v)", i, got, err)
		}
		if i < budget/2/(64<<10) {
			testwait.Until(t, "the half event is counted", func() bool { return r.server.BodyBytes() >= int64(i+1)*(64<<10) })
			continue
		}
		rest, err := io.ReadAll(resp.Body)
		if err != nil || !strings.HasPrefix(string(rest), `data: {"error":{"message":"the memory budget`) ||
			!strings.Contains(string(rest), `"code":503`) || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
			t.Fatalf("stream %d: %q (%v)", i, rest, err)
		}
		if res := <-ends; res.Cause != relay.BudgetExhausted || !res.Reusable {
			t.Errorf("stream %d: %+v", i, res)
		}
		if used := r.server.BodyBytes(); used > budget/2 {
			t.Errorf("%d bytes of events are held, over %d", used, budget/2)
		}
	}
	for _, c := range clients {
		_ = c.Close()
	}
	testwait.Until(t, "all memory back", func() bool { return r.server.BodyBytes() == 0 })
}

// TestPartialHeadsUseBudget checks that incomplete heads of more than a page use the memory budget
// of bodies. A client that finds it exhausted is refused; the others are served when their
// heads are complete.
func TestPartialHeadsUseBudget(t *testing.T) {
	const budget, fit = 64 << 10, 4
	r := start(t, Options{MaxBodyBytes: 16 << 10, BodyBudgetBytes: budget}, echo)
	half := "GET /livez HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X-A: "+strings.Repeat("b", 493)+"\r\n", 20)
	var clients []*client
	for i := range fit {
		c := r.dial()
		c.send(half)
		clients = append(clients, c)
		testwait.Until(t, "a half head is counted", func() bool { return r.server.BodyBytes() == int64(i+1)*(16<<10) })
	}
	for range 3 {
		c := r.dial()
		c.send(half)
		if resp, body := c.readResponse(); resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != string(BudgetExhausted) || resp.Header.Get("Retry-After") == "" {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		c.expectClosed()
	}
	small := r.dial() // uses one page, which is not counted
	small.send("GET /livez HTTP/1.1\r\nHost:")
	testwait.Until(t, "a short half head waits", func() bool { return r.pendingHeadCount() == fit+1 })
	small.send(" a\r\n\r\n")
	if resp, _ := small.readResponse(); resp.StatusCode != 200 {
		t.Errorf("behind a short half head: %d", resp.StatusCode)
	}
	for _, c := range clients[1:] {
		c.send("\r\n")
		if resp, body := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
	_ = clients[0].Close()
	testwait.Until(t, "all memory back", func() bool { return r.server.BodyBytes() == 0 })
}

// TestHalfHeadsOverTLSAreCounted checks that incomplete heads over TLS use the memory budget of
// bodies too, and that complete heads are served even if it is exhausted.
func TestHalfHeadsOverTLSAreCounted(t *testing.T) {
	const budget, fit = 64 << 10, 4
	r := start(t, Options{MaxBodyBytes: 16 << 10, BodyBudgetBytes: budget, TLS: testTLS()}, echo)
	half := "GET /livez HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X-A: "+strings.Repeat("b", 493)+"\r\n", 20)
	var clients []*client
	for i := range fit {
		c := dialTLS(r.dial())
		c.send(half)
		clients = append(clients, c)
		testwait.Until(t, "a half head is counted", func() bool { return r.server.BodyBytes() == int64(i+1)*(16<<10) })
	}
	for range 3 {
		c := dialTLS(r.dial())
		c.send(half)
		if resp, body := c.readResponse(); resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != string(BudgetExhausted) || resp.Header.Get("Retry-After") == "" {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
	}
	whole := dialTLS(r.dial())
	for range 2 {
		whole.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
		if resp, _ := whole.readResponse(); resp.StatusCode != 200 {
			t.Errorf("a head that comes whole: %d", resp.StatusCode)
		}
	}
	for _, c := range clients[1:] {
		c.send("\r\n")
		if resp, body := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
	_ = clients[0].Close()
	testwait.Until(t, "all memory back", func() bool { return r.server.BodyBytes() == 0 })
}

// TestSendBuffersAreBounded checks that the kernel's send buffer is bounded for non-streaming
// responses: for a long response, and from the second short one.
func TestSendBuffersAreBounded(t *testing.T) {
	// fasthttp serves a target with a query.
	byFasthttp := strings.Replace(chatPost(hello), "/v1/chat/completions", "/v1/chat/completions?a=b", 1)
	for name, k := range map[string]struct {
		size, requests int
		request        string
	}{
		"a long answer":               {1 << 20, 1, chatPost(hello)},
		"two short ones":              {100, 2, chatPost(hello)},
		"a long answer, by fasthttp":  {1 << 20, 1, byFasthttp},
		"two short ones, by fasthttp": {100, 2, byFasthttp},
	} {
		t.Run(name, func(t *testing.T) {
			answer := `"` + strings.Repeat("x", k.size) + `"`
			r := start(t, Options{}, func(x Exchange) { x.ReplyJSON(200, []byte(answer)) })
			c := r.dial()
			for range k.requests {
				c.send(k.request)
				if _, body := c.readResponse(); body != answer {
					t.Fatalf("an answer of %d bytes, want %d", len(body), len(answer))
				}
			}
			size := 0
			for _, served := range r.server.conns.snapshot() {
				_ = served.raw.Control(func(fd uintptr) { size, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF) })
			}
			if size != 2*streamSendBuffer {
				t.Errorf("the send buffer may have %d bytes, want %d", size, 2*streamSendBuffer)
			}
		})
	}
}
