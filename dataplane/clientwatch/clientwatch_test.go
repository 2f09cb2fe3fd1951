package clientwatch

import (
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// connect returns both ends of a TCP connection and the descriptor access of the first.
func connect(t *testing.T) (server *net.TCPConn, client net.Conn, raw syscall.RawConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err = net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	for { // another process may still dial the port's former owner
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if c.RemoteAddr().String() == client.LocalAddr().String() {
			server = c.(*net.TCPConn)
			break
		}
	}
	if raw, err = server.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	return server, client, raw
}

func start(t *testing.T) *Watcher {
	t.Helper()
	w, err := NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// A close, a half-close and a reset by the client each call the handler once, also if it is set
// afterwards.
func TestDisconnect(t *testing.T) {
	for name, end := range map[string]func(*net.TCPConn) error{
		"close":      (*net.TCPConn).Close,
		"half-close": (*net.TCPConn).CloseWrite,
		"reset": func(c *net.TCPConn) error {
			_ = c.SetLinger(0)
			return c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := start(t)
			_, client, raw := connect(t)
			var watch Watch
			if err := w.Add(&watch, raw); err != nil {
				t.Fatal(err)
			}
			var calls, late atomic.Int32
			watch.SetFunc(func() { calls.Add(1) })
			testwait.Holds(t, 20*time.Millisecond, "no call while the client is connected", func() bool { return calls.Load() == 0 && !watch.Gone() })
			if err := end(client.(*net.TCPConn)); err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "the call", func() bool { return calls.Load() == 1 })
			watch.SetFunc(func() { late.Add(1) })
			testwait.Until(t, "the call of a handler that is set afterwards", func() bool { return late.Load() == 1 })
			if !watch.Gone() || calls.Load() != 1 {
				t.Errorf("gone %v, %d calls of the first handler", watch.Gone(), calls.Load())
			}
		})
	}
}

// SetFunc(nil) waits for a handler that runs.
func TestSetFuncWaits(t *testing.T) {
	var watch Watch
	began, goOn := make(chan bool), make(chan bool)
	var ended atomic.Bool
	watch.SetFunc(func() {
		close(began)
		<-goOn
		ended.Store(true)
	})
	watch.MarkGone()
	<-began
	returned := make(chan bool)
	go func() {
		watch.SetFunc(nil)
		returned <- ended.Load()
	}()
	select {
	case <-returned:
		t.Fatal("SetFunc returned while the handler ran")
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	if !<-returned {
		t.Error("SetFunc returned before the handler had ended")
	}
}

// An event of a closed connection does not reach the connection that has its slot.
func TestLateEvent(t *testing.T) {
	w := start(t)
	_, _, first := connect(t)
	_, _, second := connect(t)
	var a, b Watch
	if err := w.Add(&a, first); err != nil {
		t.Fatal(err)
	}
	old := a.id
	w.Remove(&a, first)
	if err := w.Add(&b, second); err != nil {
		t.Fatal(err)
	}
	if uint32(b.id) != uint32(old) {
		t.Fatalf("slots %d and %d: the second connection has not the first one's", uint32(old), uint32(b.id))
	}
	w.event(old)
	if b.Gone() || a.Watched() || w.Len() != 1 {
		t.Errorf("gone %v, the removed one watched %v, %d watched", b.Gone(), a.Watched(), w.Len())
	}
	w.event(b.id)
	if !b.Gone() {
		t.Error("the event of the second connection is lost")
	}
}

// CancelStream calls the handler of a stream, and no other.
func TestCancelStream(t *testing.T) {
	var watch Watch
	calls := 0
	h := handlerFunc(func() { calls++ })
	watch.SetHandler(h)
	if watch.CancelStream() || calls != 0 {
		t.Fatal("the handler of a request was called as that of a stream")
	}
	watch.SetStream(h)
	if !watch.CancelStream() || calls != 1 || watch.CancelStream() {
		t.Errorf("%d calls, want one", calls)
	}
}
