package front

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/relay"
)

// A connection whose request had arrived at the accept, and whose stream an event loop drives, is
// in no poller but the client watcher's. Go's poller would allocate memory for it that is never
// freed.
func TestStreamIsNotInNetpoller(t *testing.T) {
	goOn := make(chan bool)
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		for _, event := range []string{helloStream, "data: [DONE]\n\n"} {
			<-goOn
			_, _ = io.WriteString(nc, chunk(event))
		}
		_, _ = io.WriteString(nc, "0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{}, relayTo(e, endHook(ends)))
	pollers := 0
	// A connection that is silent for a second is accepted before its request arrives.
	for range 20 {
		c := r.dial()
		c.send(chatPost(streamDoc))
		r.waitStreamsOnLoops(RelayLoop, 1)
		goOn <- true
		for got := ""; !strings.HasSuffix(got, chunk(helloStream)); { // an event loop has relayed it
			b, err := c.br.ReadByte()
			if err != nil {
				t.Fatal(err)
			}
			got += string(b)
		}
		of := r.connOf(c)
		if _, ok := of.Conn.(*rawsocket.Conn); !ok {
			t.Fatalf("accepted as a %T", of.Conn)
		}
		pollers = pollersOf(t, int(of.fd))
		goOn <- true
		wantEnd(t, ends, relay.Completed)
		_ = c.Close()
		testwait.Until(t, "the end of the connection", func() bool { return r.server.conns.len() == 0 })
		if pollers == 1 {
			return
		}
	}
	t.Errorf("the client's descriptor is in %d pollers, want the watcher's alone", pollers)
}

// pollersOf returns how many epoll instances of this process watch fd.
func pollersOf(t *testing.T, fd int) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fdinfo")
	if err != nil {
		t.Skip(err)
	}
	for _, f := range all {
		info, _ := os.ReadFile("/proc/self/fdinfo/" + f.Name())
		for line := range strings.Lines(string(info)) {
			var of int
			if _, err := fmt.Sscanf(line, "tfd: %d ", &of); err == nil && of == fd {
				n++
			}
		}
	}
	return n
}

// gatedTestListener is a listener that must not accept yet, like those of package hotrestart.
type gatedTestListener struct {
	net.Listener
	opened chan struct{}
	closed chan struct{}
}

func (g *gatedTestListener) Opened() (net.Listener, error) {
	select {
	case <-g.opened:
		return g.Listener, nil
	case <-g.closed:
		return nil, net.ErrClosed
	}
}

func (g *gatedTestListener) Close() error {
	close(g.closed)
	return g.Listener.Close()
}

// A server accepts nothing from a gated listener before it opens, and a server that stops does not
// wait for it.
func TestServeGatedListener(t *testing.T) {
	for _, opens := range []bool{true, false} {
		s, err := New(Options{Handler: handlerFunc(echo)})
		if err != nil {
			t.Fatal(err)
		}
		g := &gatedTestListener{otherListener(t), make(chan struct{}), make(chan struct{})}
		done := make(chan error, 1)
		go func() { done <- s.Serve(g) }()
		nc, err := net.Dial("tcp", g.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if _, err := io.WriteString(nc, "GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		testwait.Until(t, "serving", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.ln != nil
		})
		testwait.Holds(t, 10*time.Millisecond, "no connection is accepted before the gate opens", func() bool { return s.conns.len() == 0 })
		if opens {
			close(g.opened)
			_ = nc.SetReadDeadline(time.Now().Add(testTimeout))
			if answer, err := io.ReadAll(nc); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 200 ") {
				t.Errorf("%q %v", answer, err)
			}
		}
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(testTimeout):
			t.Fatal("Serve waits on")
		}
	}
}
