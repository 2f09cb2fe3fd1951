package front

import (
	"io"
	"net"
	"net/http"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// A connection whose stream an event loop drives has no connState. It gets one again for its next
// request, for a pipelined request, and for its end.
func TestLoopStreamHasNoConnState(t *testing.T) {
	goOn := make(chan bool)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
		if !<-goOn {
			return false
		}
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{}, relayTo(e, endHook(ends)))
	begin := func() *client {
		c := r.dial()
		for range 2 { // the second time on a connection that has had a stream
			c.send(chatPost(streamDoc))
			r.waitStreamsOnLoops(RelayLoop, 1)
			of := r.connOf(c)
			testwait.Until(t, "the return of what the connection is served with to its pool", func() bool { return of.connState == nil })
			if len(ends) > 0 {
				t.Fatal("the stream has ended")
			}
			goOn <- true
			if resp, body := c.readResponse(); resp.StatusCode != 200 || body != helloStream+"data: [DONE]\n\n" {
				t.Fatalf("%d %q", resp.StatusCode, body)
			}
			wantEnd(t, ends, relay.Completed)
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			if resp, body := c.readResponse(); resp.StatusCode != 200 || body != "ok\n" {
				t.Fatalf("%d %q", resp.StatusCode, body)
			}
		}
		c.send(chatPost(streamDoc))
		r.waitStreamsOnLoops(RelayLoop, 1)
		return c
	}

	c := begin()
	c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
	receivedByKernel(t, r.connOf(c))
	goOn <- true
	c.readResponse()
	wantEnd(t, ends, relay.Completed)
	if resp, body := c.readResponse(); resp.StatusCode != 400 {
		t.Errorf("a request that came before the stream's end: %d %q", resp.StatusCode, body)
	}
	_ = c.Close()
	testwait.Until(t, "the end of the connection", func() bool { return r.server.conns.len() == 0 })

	c = begin()
	goOn <- false
	c.readResponse() // with an error event
	wantEnd(t, ends, relay.EngineClosed)
	_ = c.Close()

	c = begin()
	_ = c.Close()
	wantEnd(t, ends, relay.ClientGone)
	goOn <- false
	testwait.Until(t, "the end of the connections", func() bool { return r.server.conns.len() == 0 })
}
