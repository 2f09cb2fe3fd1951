package front

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/valyala/fasthttp/fasthttputil"

	"sluice/dataplane/clientwatch"
	"sluice/dataplane/http1"
	"sluice/dataplane/relay"
)

// The code that runs for every request allocates nothing but the request id.
func TestAllocations(t *testing.T) {
	if raceOn {
		t.Skip("the race detector makes pools forget")
	}
	raw := []byte("Host: a\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nContent-Length: 1234\r\n\r\n")
	method, target, protocol := []byte("POST"), []byte(chat), []byte("HTTP/1.1")
	var h http1.Head
	if n := testing.AllocsPerRun(100, func() { h.Parse(method, target, protocol, raw) }); n != 0 {
		t.Errorf("the guard allocates %v times", n)
	}

	c := &conn{srv: &Server{clientWatcher: &clientwatch.Watcher{}}}
	x := Exchange(&httpExchange{c: c, srv: c.srv})
	f := func() {}
	if n := testing.AllocsPerRun(100, func() { x.OnClientGone(f); x.OnClientGone(nil) }); n != 0 {
		t.Errorf("the watch allocates %v times", n)
	}

	s, err := New(Options{Handler: handlerFunc(echo)})
	if err != nil {
		t.Fatal(err)
	}
	ln := fasthttputil.NewInmemoryListener()
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	nc, err := ln.Dial()
	if err != nil {
		t.Fatal(err)
	}
	request := []byte(chatPost(doc(1000), "X-Request-Id: abc"))
	if _, err := nc.Write(request); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 64<<10)
	size, err := nc.Read(answer)
	if err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(nc)
	n := testing.AllocsPerRun(500, func() {
		_, _ = nc.Write(request)
		_, _ = io.ReadFull(br, answer[:size])
	})
	if n > 2 {
		t.Errorf("a request allocates %v times, want 1: the string of its id", n)
	}
	_ = nc.Close()
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	<-done
}

// An event on its way from an engine's socket to a client's allocates nothing, in any
// protocol.
func TestEventAllocatesNothing(t *testing.T) { withBothRelayModes(t, testEventAllocatesNothing) }

func testEventAllocatesNothing(t *testing.T, by RelayMode) {
	if raceOn {
		t.Skip("the race detector makes pools forget")
	}
	const events = 500
	for _, p := range protocolEndings {
		conns := make(chan net.Conn, 1)
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(nc, streamHead+chunk(p.event))
			conns <- nc
			_, _ = nc.Read(make([]byte, 1)) // until the router closes the connection
			return false
		})
		ends := make(chan relay.Result, 1)
		r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
		c := r.dial()
		c.send(post(p.path, streamDoc))
		for line := ""; line != "\r\n"; { // the head
			var err error
			if line, err = c.br.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		engine, event := <-conns, []byte(chunk(p.event))
		got := make([]byte, len(event))
		if _, err := io.ReadFull(c.br, got); err != nil {
			t.Fatal(err)
		}
		r.waitStreamsOnLoops(by, 1)
		pass := func() {
			if _, err := engine.Write(event); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c.br, got); err != nil {
				t.Fatal(err)
			}
		}
		for range 50 {
			pass()
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range events {
			pass()
		}
		runtime.ReadMemStats(&after)
		if n := float64(after.Mallocs-before.Mallocs) / events; n > .1 { // other goroutines allocate now and then
			t.Errorf("%s: %.2f allocations an event", strings.TrimPrefix(p.path, "/v1/"), n)
		}
		_ = c.Close()
		wantEnd(t, ends, relay.ClientGone)
	}
}

// TestStreamSize checks that a stream fits its size class. There are thousands of streams, and a
// few more bytes would move each to the next size class.
func TestStreamSize(t *testing.T) {
	if size := unsafe.Sizeof(stream{}); size > 160 {
		t.Errorf("a stream has %d bytes; a size class ends at 160", size)
	}
	if size := unsafe.Sizeof(conn{}); size > 240 {
		t.Errorf("a client's connection has %d bytes; a size class ends at 240", size)
	}
}
