package front

import (
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
)

// pendingHeadCount returns the number of connections in the pending-header queue, 0 before the
// server has started, -1 if the queue's map and its heap differ in size.
func (r *testServer) pendingHeadCount() int {
	r.server.mu.Lock()
	l := r.server.pendingHeads
	r.server.mu.Unlock()
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.byFD) != len(l.deadlines) {
		return -1
	}
	return len(l.byFD)
}

// A connection that has sent an incomplete head, or nothing, has no goroutine. Heads that become
// complete are served; the others get a 408 and are closed.
func TestPartialHeadsUseNoGoroutine(t *testing.T) {
	const n = 200
	r := start(t, Options{HeadTimeout: 3 * time.Second}, echo)
	before := runtime.NumGoroutine()
	clients := make([]*client, n)
	request := chatPost(hello)
	for i := range clients {
		clients[i] = r.dial()
		clients[i].send(request[:1+i%len(request)/2])
	}
	silent := r.dial() // is accepted after a second
	testwait.Until(t, "all waiting", func() bool { return r.pendingHeadCount() == n+1 })
	if more := runtime.NumGoroutine() - before; more > n/10 {
		t.Errorf("%d goroutines more for %d half heads", more, n)
	}
	for i, c := range clients[:n/2] {
		c.send(request[1+i%len(request)/2:])
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
			t.Fatalf("half head %d: %d %s", i, resp.StatusCode, body)
		}
		c.send(request) // the connection serves another request
		if resp, _ := c.readResponse(); resp.StatusCode != 200 {
			t.Fatalf("half head %d, once more: %d", i, resp.StatusCode)
		}
	}
	gone := clients[n-1]
	_ = gone.Close()
	testwait.Until(t, "one less", func() bool { return r.pendingHeadCount() == n/2 })
	for _, c := range clients[n/2 : n-1] {
		if resp, body := c.readResponse(); resp.StatusCode != 408 || !strings.Contains(body, headTimeoutMessage) {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		c.expectClosed()
	}
	silent.expectClosed()
	testwait.Until(t, "the end of all that was waiting", func() bool { return r.server.conns.len() == n/2 && r.pendingHeadCount() == 0 })
}

// pendingBytes returns how many bytes have been read of the head of a connection in the queue; -1 if it is not there.
func (r *testServer) pendingBytes(of *conn) int {
	r.server.mu.Lock()
	l := r.server.pendingHeads
	r.server.mu.Unlock()
	if l == nil {
		return -1
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.byFD {
		if c == of {
			return int(c.readAhead.w)
		}
	}
	return -1
}

// A head that arrives byte by byte is served, also on a connection that has had a request.
func TestHeadByteByByte(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	for range 2 {
		request := chatPost(hello)
		for i := range request {
			c.send(request[i : i+1])
			testwait.Pace(100 * time.Microsecond)
		}
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
	}
}

// The last byte of a body wakes its reader, whatever wake threshold was set for the head.
func TestLastByteOfPartialHead(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	request, began := chatPost(hello), time.Now()
	c.send(request[:10])
	testwait.Until(t, "its wait", func() bool { return r.pendingHeadCount() == 1 })
	last := len(request) - 1
	c.send(request[10:last])
	testwait.Until(t, "the rest's wait", func() bool { return r.pendingHeadCount() == 0 })
	testwait.Holds(t, 100*time.Millisecond, "a goroutine reads the rest", func() bool { return r.pendingHeadCount() == 0 })
	c.send(request[last:])
	if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if took := time.Since(began); took > 8*time.Second { // at the deadline the server would read what has arrived
		t.Errorf("it took %v", took)
	}
}

// The kernel reports input of an incomplete head only when enough bytes have arrived to end it.
func TestTricklingHeadsWakeNoGoroutine(t *testing.T) {
	t.Parallel()
	r := start(t, Options{HeadTimeout: 2 * time.Second}, echo)
	c := r.dial()
	c.send("POST /v1")
	of := r.connOf(c)
	testwait.Until(t, "its wait", func() bool { return r.pendingBytes(of) == len("POST /v1") })
	lowest := 0
	if err := of.raw.Control(func(fd uintptr) {
		lowest, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT)
	}); err != nil {
		t.Fatal(err)
	}
	if lowest != len(headEnd) {
		t.Errorf("the poller is notified at %d bytes, want %d", lowest, len(headEnd))
	}
	c.send("/ch")
	testwait.Holds(t, 100*time.Millisecond, "the rest of the head is not read", func() bool {
		return r.pendingBytes(of) == len("POST /v1")
	})
	if resp, _ := c.readResponse(); resp.StatusCode != 408 {
		t.Errorf("%d", resp.StatusCode)
	}
}

func TestMissingForHeadEnd(t *testing.T) {
	for head, want := range map[string]int{
		"": 4, "G": 4, "GET / HTTP/1.1\r": 3, "GET / HTTP/1.1\r\n": 2, "GET / HTTP/1.1\r\nHost: a\r\n\r": 1,
		"\r\r": 3, "\n\n": 4, "\r\n\n": 4,
	} {
		if got := missingForHeadEnd([]byte(head)); got != want {
			t.Errorf("%q: %d, want %d", head, got, want)
		}
	}
}

// A client that sends an incomplete head and closes its side gets the same response from the queue
// as from a goroutine.
func TestPartialHeadThenEOF(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	c.send("POST /v1/chat")
	testwait.Until(t, "its wait", func() bool { return r.pendingHeadCount() == 1 })
	if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if resp, body := c.readResponse(); resp.StatusCode != 400 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if _, err := io.ReadAll(c.br); err != nil {
		t.Error(err)
	}
	testwait.Until(t, "its end", func() bool { return r.server.conns.len() == 0 })
}
