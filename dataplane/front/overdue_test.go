package front

import (
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// TestOverdue: who has no answer when his time is over is told so at once, and the
// connection ends, whatever the handler has still to do and answers afterwards.
func TestOverdue(t *testing.T) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	for name, late := range map[string]func(x *Exchange){
		"an error":  func(x *Exchange) { x.Error(ClientGone, "", "gone", 0) },
		"an answer": echo,
		"events":    func(x *Exchange) { x.ReplyEvents([]byte(helloStream)) },
		"a stream": func(x *Exchange) {
			call := new(upstream.Call)
			resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Doc.Body}}, call)
			if err != nil {
				t.Error(err)
				return
			}
			x.Relay(resp, call, endHook(ends)())
		},
		"a panic":       func(*Exchange) { panic("of the test") },
		"a whole reply": func(x *Exchange) { x.Error(UpstreamFailed, "", "late", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			goOn, left := make(chan struct{}), make(chan struct{})
			r := start(t, Options{}, func(x *Exchange) {
				x.OnGone(func() { close(left) })
				x.Overdue(time.Now().Add(20*time.Millisecond), Deadline, "the time is over")
				<-goOn
				if !x.Gone() {
					t.Error("to the handler the client is still there")
				}
				x.OnGone(nil)
				late(x)
			})
			c := r.dial()
			c.send(chatPost(hello, "X-Request-Id: mine"))
			resp, body := c.answer()
			if resp.StatusCode != 504 || !resp.Close || resp.Header.Get("X-Request-Id") != "mine" || resp.Header.Get("X-Sluice-Reason") != string(Deadline) {
				t.Errorf("answered with %d, %v", resp.StatusCode, resp.Header)
			}
			contains(t, body, "the time is over")
			c.closed() // before the handler goes on
			select {
			case <-left:
			case <-time.After(patience):
				t.Error("the handler was not told")
			}
			close(goOn)
			if name == "a stream" {
				wantEnd(t, ends, relay.Deadline)
			}
			until(t, "the connection is closed", func() bool { return r.s.conns.len() == 0 })
			if got := r.seen.endings(); len(got) != 1 || got[0] != chat+" 504" {
				t.Errorf("the observer was told of %q", got)
			}
		})
	}
}

// TestNotOverdue: an answer that has begun ends the watch over the time, and its
// connection serves on.
func TestNotOverdue(t *testing.T) { onBoth(t, testNotOverdue) }

func testNotOverdue(t *testing.T, by Relay) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
		return true
	})
	streams := relayTo(e, func() RelayHooks { return RelayHooks{} })
	watches := make(chan *pulse, 3)
	r := start(t, Options{Relay: by}, func(x *Exchange) {
		x.Overdue(time.Now().Add(time.Hour), Deadline, "the time is over")
		watches <- x.early
		if string(x.Doc.Body) == probeDoc {
			echo(x)
			return
		}
		streams(x)
	})
	c := r.dial()
	for i, body := range []string{probeDoc, hello, probeDoc} {
		c.send(chatPost(body))
		if resp, got := c.answer(); resp.StatusCode != 200 || resp.Close || len(got) == 0 {
			t.Errorf("answered with %d, %q", resp.StatusCode, got)
		}
		if w := <-watches; !w.isOver() || w.stop() {
			t.Errorf("answer %d: the watch goes on", i)
		}
	}
}

func (p *pulse) isOver() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over
}
