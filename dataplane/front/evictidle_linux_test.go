package front

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// evictedConns evicts idle connections, regardless of evictInterval.
func (r *testServer) evictedConns() (freed uint64) {
	_, _, before := r.server.FDStats()
	r.server.fdStats.evictedAt.Store(0)
	r.server.evictIdle()
	_, _, after := r.server.FDStats()
	return after - before
}

// Connections that wait for a request are evicted before those with an incomplete head, and these
// before one whose request has arrived.
func TestIdleConnectionsAreEvicted(t *testing.T) {
	r := start(t, Options{}, echo)
	idle := r.dial()
	idle.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
	idle.readResponse()
	half := r.dial()
	half.send(chatPost(hello)[:60])
	testwait.Until(t, "the incomplete head is in the queue", func() bool { return r.pendingHeadCount() == 1 })

	// A connection that is accepted and whose goroutine has not run yet.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	here, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = here.Close() })
	there, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if r.server.admit(there, netip.MustParseAddr("127.0.0.1")) == nil {
		t.Fatal("not admitted")
	}
	unread := newClient(t, here)
	unread.send(chatPost(hello))
	testwait.Until(t, "a request in its socket", func() bool {
		for _, c := range r.server.conns.snapshot() {
			if c.hasUnread() {
				return true
			}
		}
		return false
	})

	if n := r.evictedConns(); n != 1 {
		t.Errorf("%d connections closed, want the idle one", n)
	}
	idle.expectClosed()
	testwait.Until(t, "the idle one's end", func() bool { return r.server.conns.len() == 2 })
	if n := r.pendingHeadCount(); n != 1 {
		t.Errorf("%d half heads left, want 1", n)
	}
	if n := r.evictedConns(); n != 1 {
		t.Errorf("%d connections closed, want the one of half a head", n)
	}
	half.expectClosed()
	testwait.Until(t, "the half head's end", func() bool { return r.server.conns.len() == 1 })
	if n := r.evictedConns(); n != 0 {
		t.Errorf("%d connections closed with a request in each", n)
	}
	for _, c := range r.server.conns.snapshot() {
		go r.server.serveConn(c)
	}
	if resp, body := unread.readResponse(); resp.StatusCode != 200 || body != hello {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

// The request after a PROXY header is a first request: its first byte is due within the head
// timeout, and until then the connection has no goroutine.
func TestFirstRequestAfterProxyHeader(t *testing.T) {
	r := start(t, Options{
		HeadTimeout: 300 * time.Millisecond, IdleTimeout: testTimeout,
		Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired},
	}, echo)
	for _, more := range []string{"", "POST"} {
		c := r.dial()
		began := time.Now()
		c.send("PROXY TCP4 10.1.2.3 10.0.0.1 1234 80\r\n" + more)
		testwait.Until(t, "the head is in the queue", func() bool { return r.pendingHeadCount() == 1 })
		if more != "" {
			if resp, _ := c.readResponse(); resp.StatusCode != 408 {
				t.Errorf("%q: %d", more, resp.StatusCode)
			}
		}
		c.expectClosed()
		if took := time.Since(began); took > testTimeout/2 {
			t.Errorf("%q had %v", more, took)
		}
	}
}

// A connection that ends within its PROXY header is closed at once.
func TestPartialProxyHeaderThenEOF(t *testing.T) {
	r := start(t, Options{HeadTimeout: testTimeout, Proxies: Proxies{Trusted: networks(t, "127.0.0.1"), ProxyProtocol: ProxyProtocolRequired}}, echo)
	c := r.dial()
	c.send("PROXY TCP4 10.1")
	testwait.Until(t, "accepted", func() bool { return r.server.conns.len() == 1 })
	began := time.Now()
	if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the end", func() bool { return r.server.conns.len() == 0 })
	if took := time.Since(began); took > testTimeout/2 {
		t.Errorf("held for %v", took)
	}
}

// A head timeout that a reload has shortened applies from the next byte of a head.
func TestReloadShorterHeadTimeout(t *testing.T) {
	r := start(t, Options{HeadTimeout: testTimeout}, echo)
	c := r.dial() // is accepted after a second without a byte
	testwait.Until(t, "the head is in the queue", func() bool { return r.pendingHeadCount() == 1 })
	opt := r.server.initial
	opt.HeadTimeout = 300 * time.Millisecond
	if err := r.server.Change(opt); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c.send("POST")
	if resp, _ := c.readResponse(); resp.StatusCode != 408 {
		t.Errorf("%d", resp.StatusCode)
	}
	if took := time.Since(began); took > testTimeout/2 {
		t.Errorf("had %v", took)
	}
}

// A head that exceeds its limit is refused before its end, even if the limit is less than the
// size of the read-ahead.
func TestHeadOverSmallLimit(t *testing.T) {
	r := start(t, Options{HeadTimeout: testTimeout, MaxHeadBytes: 4 << 10}, echo)
	c := r.dial()
	began := time.Now()
	c.send("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Pad: " + strings.Repeat("p", 4<<10))
	if resp, _ := c.readResponse(); resp.StatusCode != 431 {
		t.Errorf("%d", resp.StatusCode)
	}
	if took := time.Since(began); took > testTimeout/2 {
		t.Errorf("after %v", took)
	}
}
