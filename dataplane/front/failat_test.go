package front

import (
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// TestFailAt checks that a client without a response at its deadline gets the error at once, and
// that the connection ends, whatever the handler still does.
func TestFailAt(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	for name, late := range map[string]func(x Exchange){
		"an error":  func(x Exchange) { x.Error(ClientGone, "", "gone", 0) },
		"an answer": echo,
		"events":    func(x Exchange) { x.ReplyEvents([]byte(helloStream)) },
		"a stream": func(x Exchange) {
			call := new(upstream.Call)
			resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, call)
			if err != nil {
				t.Error(err)
				return
			}
			x.Relay(resp, call, endHook(ends)())
		},
		"a panic":       func(Exchange) { panic("of the test") },
		"a whole reply": func(x Exchange) { x.Error(UpstreamFailed, "", "late", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			goOn, left := make(chan struct{}), make(chan struct{})
			r := start(t, Options{}, func(x Exchange) {
				x.OnClientGone(func() { close(left) })
				x.FailAt(time.Now().Add(20*time.Millisecond), Deadline, "the time is over")
				<-goOn
				if !x.ClientGone() {
					t.Error("to the handler the client is still there")
				}
				x.OnClientGone(nil)
				late(x)
			})
			c := r.dial()
			c.send(chatPost(hello, "X-Request-Id: mine"))
			resp, body := c.readResponse()
			if resp.StatusCode != 504 || !resp.Close || resp.Header.Get("X-Request-Id") != "mine" || resp.Header.Get("X-Sluice-Reason") != string(Deadline) {
				t.Errorf("answered with %d, %v", resp.StatusCode, resp.Header)
			}
			contains(t, body, "the time is over")
			c.expectClosed() // before the handler goes on
			select {
			case <-left:
			case <-time.After(testTimeout):
				t.Error("the handler was not notified")
			}
			close(goOn)
			if name == "a stream" {
				wantEnd(t, ends, relay.Deadline)
			}
			testwait.Until(t, "the connection is closed", func() bool { return r.server.conns.len() == 0 })
			if got := r.observed.endings(); len(got) != 1 || got[0] != chat+" 504" {
				t.Errorf("the observer was notified of %q", got)
			}
		})
	}
}

// TestFailAtAfterResponse checks that a response that has begun cancels FailAt, and that the
// connection serves another request.
func TestFailAtAfterResponse(t *testing.T) { withBothRelayModes(t, testFailAtAfterResponse) }

func testFailAtAfterResponse(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	streams := relayTo(e, func() RelayHooks { return RelayHooks{} })
	watches := make(chan *keepAliveWriter, 3)
	r := start(t, Options{RelayMode: by}, func(x Exchange) {
		x.FailAt(time.Now().Add(time.Hour), Deadline, "the time is over")
		watches <- x.(*httpExchange).keepAlive
		if string(x.Request().Doc.Body) == probeBody {
			echo(x)
			return
		}
		streams(x)
	})
	c := r.dial()
	for i, body := range []string{probeBody, hello, probeBody} {
		c.send(chatPost(body))
		if resp, got := c.readResponse(); resp.StatusCode != 200 || resp.Close || len(got) == 0 {
			t.Errorf("answered with %d, %q", resp.StatusCode, got)
		}
		if w := <-watches; !w.isStopped() || w.stop() {
			t.Errorf("answer %d: the watch goes on", i)
		}
	}
}

func (p *keepAliveWriter) isStopped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stopped
}
