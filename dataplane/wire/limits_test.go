package wire

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestFloodIsBounded: a client that asks and asks and reads nothing is closed before what
// waits for it grows without bound, whatever it asks.
func TestFloodIsBounded(t *testing.T) {
	over := make(chan struct{})
	defer close(over)
	wait := handlerFunc(func(s *Stream) {
		gone := make(chan struct{})
		s.Watch(nil, func() { close(gone) })
		select {
		case <-gone:
		case <-over:
		}
	})
	for _, c := range []struct {
		name  string
		kinds []string
		ask   func(dst []byte, id uint32) []byte
	}{
		{"pings", sockets, func(dst []byte, _ uint32) []byte { return appendFrame(dst, Ping, 0, make([]byte, maxPing)) }},
		{"refused", []string{"tcp"}, func(dst []byte, id uint32) []byte { return appendFrame(dst, Request, id, nil) }},
		{"killed", []string{"unix"}, func(dst []byte, id uint32) []byte {
			return appendFrame(appendFrame(dst, Request, id, []byte("x")), Kill, id, nil)
		}},
	} {
		for _, kind := range c.kinds {
			t.Run(c.name+"/"+kind, func(t *testing.T) {
				opt := Options{Handler: wait, WriteTimeout: time.Hour, Heartbeat: time.Hour, QueueBytes: 64 << 10}
				if c.name == "refused" {
					opt.MaxStreams = 1
				}
				srv, _, addr := serve(t, kind, opt)
				nc := rawHello(t, kind, addr, 1000)
				most := 0
				id := uint32(0)
				for by := time.Now().Add(60 * time.Second); ; {
					var p []byte
					for range 1000 {
						id++
						p = c.ask(p, id)
					}
					_ = nc.SetWriteDeadline(by)
					_, err := nc.Write(p)
					for _, c := range srv.all() {
						c.out.mu.Lock()
						most = max(most, len(c.out.queue))
						c.out.mu.Unlock()
					}
					if ne, ok := err.(net.Error); ok && ne.Timeout() {
						t.Fatalf("not closed after %d frames", id)
					}
					if err != nil {
						break
					}
				}
				if most > 3*minOwnBytes {
					t.Errorf("%d bytes waited to be read", most)
				}
				testwait.Until(t, "nothing is left", func() bool { st := srv.Stats(); return st.Conns == 0 && st.Streams == 0 && st.Requests == 0 })
			})
		}
	}
}

// TestSlowRequest: a request that does not become whole in its time holds its memory
// no longer, however steadily its bytes drip.
func TestSlowRequest(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			srv, _, addr := serve(t, kind, Options{Handler: handlerFunc(func(*Stream) {}), ReadTimeout: 200 * time.Millisecond})
			nc := rawHello(t, kind, addr, 1000)
			if _, err := nc.Write(appendHeader(nil, Request, 1, 100_000)); err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "the payload has its room", func() bool { return srv.Stats().Requests > 0 })
			stop := make(chan struct{})
			defer close(stop)
			go func() {
				for tick := time.NewTicker(10 * time.Millisecond); ; {
					select {
					case <-stop:
						tick.Stop()
						return
					case <-tick.C:
						if _, err := nc.Write([]byte{0}); err != nil {
							return
						}
					}
				}
			}()
			_ = nc.SetReadDeadline(time.Now().Add(60 * time.Second))
			h, payload, err := nc.in.next(1 << 20)
			if err != nil || h.kind != Fail {
				t.Fatalf("%s, %v; want ERROR", h.kind, err)
			}
			if e := readError(payload); e.Code != CodeProtocol || !strings.Contains(e.Message, "was not complete after 200ms") {
				t.Errorf("%v", e)
			}
			testwait.Until(t, "nothing is left", func() bool { st := srv.Stats(); return st.Conns == 0 && st.Requests == 0 })
		})
	}
}

// TestHalfClosed: a caller that closes its sending side has left, whole requests and
// halves alike, and nothing of it stays.
func TestHalfClosed(t *testing.T) {
	for _, kind := range sockets {
		for _, cut := range []int{headerSize + 8, headerSize + 3, 5} {
			t.Run(kind, func(t *testing.T) {
				ended := make(chan error, 1)
				h := handlerFunc(func(s *Stream) {
					gone := make(chan struct{})
					s.Watch(nil, func() { close(gone) })
					<-gone
					ended <- s.Err()
				})
				srv, _, addr := serve(t, kind, Options{Handler: h})
				nc := rawHello(t, kind, addr, 1000)
				request := appendFrame(nil, Request, 1, binary.BigEndian.AppendUint64(nil, 7))
				if _, err := nc.Write(request[:cut]); err != nil {
					t.Fatal(err)
				}
				if cut == len(request) {
					testwait.Until(t, "the request runs", func() bool { return srv.Stats().Streams == 1 })
				}
				if err := nc.Conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
					t.Fatal(err)
				}
				_ = nc.SetReadDeadline(time.Now().Add(60 * time.Second))
				if _, err := io.ReadAll(nc); err != nil && !strings.Contains(err.Error(), "reset") {
					t.Errorf("the connection is not closed: %v", err)
				}
				if cut == len(request) {
					if err := <-ended; err != ErrConnClosed {
						t.Errorf("the stream ended with %v", err)
					}
				}
				testwait.Until(t, "nothing is left", func() bool { st := srv.Stats(); return st.Conns == 0 && st.Streams == 0 && st.Requests == 0 })
			})
		}
	}
}

// Rejected connections are logged at intervals, with their number: any peer may
// connect, as often as he likes.
func TestHandshakeErrorsAreRateLimited(t *testing.T) {
	var mu sync.Mutex
	logged := new(strings.Builder)
	log := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return logged.Write(p)
	}), nil))
	began := time.Now()
	_, _, addr := serve(t, "unix", Options{Handler: handlerFunc(countedItem), Token: "t0ken", Log: log})
	for range 20 {
		if c, err := Dial(context.Background(), addr, DialOptions{Token: "another"}); err == nil {
			c.Close()
			t.Fatal("a stranger was let in")
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if n, most := strings.Count(logged.String(), "unauthorized"), 1+int(time.Since(began)/handshakeErrorInterval); n < 1 || n > most {
		t.Errorf("%d lines for 20 strangers; want 1 to %d:\n%s", n, most, logged)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
