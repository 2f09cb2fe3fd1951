package front

import (
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// disconnectKinds are the ways in which a client disconnects.
var disconnectKinds = map[string]func(c *client){
	"close": func(c *client) { _ = c.Close() },
	"reset": func(c *client) {
		_ = c.Conn.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	},
	"half-close": func(c *client) { _ = c.Conn.(*net.TCPConn).CloseWrite() },
	"close behind a pipelined request": func(c *client) {
		c.send(chatPost(probeBody))
		_ = c.Close()
	},
}

// promptly is a hundred times the documented delay, for a loaded machine.
// TestClientFailsInEveryProtocol checks the documented delay itself.
const promptly = 10 * time.Second

func TestClientGoneDuringHandler(t *testing.T) {
	for name, leave := range disconnectKinds {
		t.Run(name, func(t *testing.T) {
			entered, notified := make(chan struct{}), make(chan time.Time, 1)
			r := start(t, Options{}, func(x Exchange) {
				if string(x.Request().Doc.Body) == probeBody {
					return
				}
				if x.ClientGone() {
					t.Error("gone before it left")
				}
				done := make(chan struct{})
				x.OnClientGone(func() { t.Error("the replaced call was made") })
				x.OnClientGone(func() { notified <- time.Now(); close(done) })
				close(entered)
				select {
				case <-done:
				case <-time.After(testTimeout):
				}
				if !x.ClientGone() {
					t.Error("Gone is false after the client left")
				}
				// The client has disconnected already: a new function is called at once.
				again := make(chan struct{})
				x.OnClientGone(func() { close(again) })
				select {
				case <-again:
				case <-time.After(testTimeout):
					t.Error("OnGone after the client left was not made")
				}
				x.Error(ClientGone, "", "gone", 0)
			})
			c := r.dial()
			c.send(chatPost(hello))
			<-entered
			left := time.Now()
			leave(c)
			select {
			case at := <-notified:
				if took := at.Sub(left); took > promptly {
					t.Errorf("notified after %v", took)
				} else {
					t.Logf("notified after %v", took)
				}
			case <-time.After(testTimeout):
				t.Fatal("not notified")
			}
			testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
		})
	}
}

func TestClientGoneDuringStream(t *testing.T) { withBothRelayModes(t, testClientGoneDuringStream) }

func testClientGoneDuringStream(t *testing.T, by RelayMode) {
	for name, leave := range disconnectKinds {
		t.Run(name, func(t *testing.T) {
			cut := make(chan time.Time, 1)
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, streamHead+chunk(helloStream))
				// The engine is silent from here on: only the client watch sees the disconnect.
				var b [1]byte
				_, _ = nc.Read(b[:])
				cut <- time.Now()
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
			buf := make([]byte, len(helloStream))
			if _, err := io.ReadFull(resp.Body, buf); err != nil {
				t.Fatal(err)
			}
			left := time.Now()
			leave(c)
			select {
			case at := <-cut:
				if took := at.Sub(left); took > promptly {
					t.Errorf("engine cut after %v", took)
				} else {
					t.Logf("engine cut after %v", took)
				}
			case <-time.After(testTimeout):
				t.Fatal("engine not cut")
			}
			wantEnd(t, ends, relay.ClientGone)
			if name == "half-close" { // the client may still read, and gets the error
				rest, err := io.ReadAll(resp.Body)
				if contains(t, string(rest), `"type":"client_closed_request"`); err != nil {
					t.Error(err)
				}
			}
			testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
		})
	}
}

func TestClientGoneOnReusedConnection(t *testing.T) {
	var notified atomic.Int64
	entered := make(chan struct{})
	r := start(t, Options{}, func(x Exchange) {
		if string(x.Request().Doc.Body) == hello {
			x.OnClientGone(func() { notified.Add(1) })
			echo(x)
			return
		}
		gone := make(chan struct{})
		x.OnClientGone(func() { close(gone) })
		close(entered)
		<-gone
		echo(x)
	})
	c := r.dial()
	for range 5 {
		c.send(chatPost(hello))
		c.readResponse()
	}
	c.send(chatPost(probeBody))
	<-entered
	_ = c.Close()
	testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
	if n := notified.Load(); n != 0 {
		t.Errorf("%d calls of requests that had ended", n)
	}
}

// After OnClientGone(nil) returns, f does not run any more. An unguarded variable makes the race
// detector check this.
func TestOnClientGoneIsExact(t *testing.T) {
	var made atomic.Int64
	r := start(t, Options{}, func(x Exchange) {
		unguarded := 0
		x.OnClientGone(func() { unguarded++; made.Add(1) })
		testwait.Pace(time.Duration(rand.IntN(300)) * time.Microsecond)
		x.OnClientGone(nil)
		unguarded++
		if unguarded > 2 {
			t.Error("called more than once")
		}
		unguarded = -1 << 40
		echo(x)
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 60 {
				c := r.dial()
				c.send(chatPost(hello))
				testwait.Pace(time.Duration(rand.IntN(600)) * time.Microsecond)
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	testwait.Until(t, "connections closed", func() bool { return r.server.conns.len() == 0 })
	t.Logf("%d of 480 clients were seen to leave", made.Load())
	if n := r.server.clientWatcher.Len(); n != 0 {
		t.Errorf("%d connections are still watched", n)
	}
}

// If the client disconnects at any moment around the hand-over from fasthttp to the relay, the end
// is reported once and no connection is left open.
func TestClientGoneAroundHijack(t *testing.T) { withBothRelayModes(t, testClientGoneAroundHijack) }

func testClientGoneAroundHijack(t *testing.T, by RelayMode) {
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, streamHead+chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return err == nil
	})
	var relays, ends, failed atomic.Int64
	r := start(t, Options{RelayMode: by}, func(x Exchange) {
		call := new(upstream.Call)
		x.OnClientGone(call.Cancel)
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, call)
		if err != nil {
			failed.Add(1)
			x.Error(ClientGone, "", err.Error(), 0)
			return
		}
		relays.Add(1)
		x.Relay(resp, call, RelayHooks{Handler: streamHooks{end: func(relay.Result) { ends.Add(1) }}})
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 60 {
				c := r.dial()
				c.send(chatPost(hello))
				testwait.Pace(time.Duration(rand.IntN(1500)) * time.Microsecond)
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	testwait.Until(t, "connections closed", func() bool { return r.server.conns.len() == 0 })
	if relays.Load() != ends.Load() || relays.Load() == 0 {
		t.Errorf("%d relays, %d ends", relays.Load(), ends.Load())
	}
	t.Logf("%d relayed, %d cut before", relays.Load(), failed.Load())
}
