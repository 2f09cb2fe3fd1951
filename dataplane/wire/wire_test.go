package wire

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// handlerFunc makes a Handler of a function.
type handlerFunc func(*Stream)

func (f handlerFunc) ServeStream(s *Stream) { f(s) }

// countedItem answers with as many items as the payload's first four bytes say, each
// of the size that the next four say.
func countedItem(s *Stream) {
	n, size := binary.BigEndian.Uint32(s.Payload), binary.BigEndian.Uint32(s.Payload[4:])
	item := make([]byte, size)
	for i := range n {
		binary.BigEndian.PutUint32(item, i)
		if s.Stopped() {
			s.End(nil)
			return
		}
		if s.Send(item) != nil {
			return
		}
	}
}

func itemRequest(n, size int) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, uint32(n)), uint32(size))
}

// sockets are the three kinds of connection, each with a way to dial it.
var sockets = []string{"unix", "tcp", "tls"}

func serve(t testing.TB, kind string, opt Options) (srv *Server, dial func(DialOptions) *Client, addr string) {
	t.Helper()
	srv, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	var conf *tls.Config
	switch kind {
	case "unix":
		addr = "unix://" + filepath.Join(t.TempDir(), "r.sock")
		_, err = srv.Listen(addr)
	case "tcp":
		var a net.Addr
		if a, err = srv.Listen("tcp://127.0.0.1:0"); err == nil {
			addr = "tcp://" + a.String()
		}
	case "tls":
		var a net.Addr
		cert, pool := certificate(t)
		if a, err = srv.ListenTLS("127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}}); err == nil {
			addr = "tcp://" + a.String()
		}
		conf = &tls.Config{RootCAs: pool, ServerName: "localhost"}
	}
	if err != nil {
		t.Fatal(err)
	}
	return srv, func(d DialOptions) *Client {
		t.Helper()
		d.TLS = conf
		c, err := Dial(context.Background(), addr, d)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}, addr
}

func certificate(t testing.TB) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// drain reads a stream to its end and checks that the items come in order.
func drain(t testing.TB, s *ClientStream) (items int, err error) {
	t.Helper()
	for {
		p, ok, err := s.Recv(context.Background())
		if !ok {
			return items, err
		}
		if got := int(binary.BigEndian.Uint32(p)); got != items {
			t.Fatalf("item %d where %d was due", got, items)
		}
		items++
	}
}

func TestManyStreamsOnOneConnection(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			srv, dial, _ := serve(t, kind, Options{Handler: handlerFunc(countedItem)})
			c := dial(DialOptions{Window: 4 << 10}) // far less than the items: credits must flow
			var wg sync.WaitGroup
			for i := range 100 {
				wg.Go(func() {
					s, err := c.Open(itemRequest(200+i, 64))
					if err != nil {
						t.Error(err)
						return
					}
					if n, err := drain(t, s); n != 200+i || err != nil {
						t.Errorf("%d items, %v; want %d", n, err, 200+i)
					}
				})
			}
			wg.Wait()
			testwait.Until(t, "all streams are gone", func() bool { return srv.Stats().Streams == 0 && srv.Stats().Requests == 0 })
		})
	}
}

func TestLargeRequestsAndItems(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			echo := handlerFunc(func(s *Stream) { _ = s.Send(s.Payload) })
			_, dial, _ := serve(t, kind, Options{Handler: echo, MaxFrame: 3 << 20})
			c := dial(DialOptions{Window: 1})
			for _, size := range []int{0, 1, 4095, 64 << 10, 3 << 20} {
				body := bytes.Repeat([]byte{byte(size), 7, 9}, size/3+1)[:size]
				s, err := c.Open(body)
				if err != nil {
					t.Fatal(err)
				}
				got, ok, err := s.Recv(context.Background())
				if !ok || err != nil || !bytes.Equal(got, body) {
					t.Fatalf("%d bytes: got %d, %v, %v", size, len(got), ok, err)
				}
			}
			if _, err := c.Open(make([]byte, 3<<20+1)); err == nil || !strings.Contains(err.Error(), CodeTooLarge) {
				t.Errorf("over the limit: %v", err)
			}
		})
	}
}

// A consumer that does not read stops its own stream; the others go on.
func TestSlowConsumerBlocksOnlyItself(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			var sent atomic.Int64
			h := handlerFunc(func(s *Stream) {
				if s.ID > 1 {
					countedItem(s)
					return
				}
				for s.Send(make([]byte, 100)) == nil {
					sent.Add(1)
				}
			})
			_, dial, _ := serve(t, kind, Options{Handler: h, StallTimeout: 20 * time.Second})
			c := dial(DialOptions{Window: 1000})
			slow, err := c.Open(nil)
			if err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "the slow stream stands", func() bool { return sent.Load() >= 10 })
			for range 20 {
				s, err := c.Open(itemRequest(500, 32))
				if err != nil {
					t.Fatal(err)
				}
				if n, err := drain(t, s); n != 500 || err != nil {
					t.Fatalf("%d items, %v", n, err)
				}
			}
			if n := sent.Load(); n != 10 {
				t.Errorf("%d items of 100 bytes sent into a window of 1,000", n)
			}
			if _, ok, err := slow.Recv(context.Background()); !ok {
				t.Errorf("the slow stream: %v", err)
			}
			slow.Kill()
		})
	}
}

// A whole connection that is not read fills the socket; nothing grows without
// bound, and all of it comes once it is read.
func TestStalledConnection(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			const streams, items, size = 8, 4000, 1000
			srv, _, addr := serve(t, kind, Options{Handler: handlerFunc(countedItem), QueueBytes: 64 << 10})
			nc := rawHello(t, kind, addr, 1<<29)
			below := nc.Conn
			if secure, ok := nc.Conn.(*tls.Conn); ok {
				below = secure.NetConn()
			}
			if tcp, ok := below.(*net.TCPConn); ok {
				// Left to itself the kernel may take all of the answers in.
				if err := tcp.SetReadBuffer(64 << 10); err != nil {
					t.Fatal(err)
				}
			}
			for id := range uint32(streams) {
				if _, err := nc.Write(appendFrame(nil, Request, id+1, itemRequest(items, size))); err != nil {
					t.Fatal(err)
				}
			}
			// The server is stuck with at most its queue and the sockets' buffers.
			testwait.Until(t, "streams wait for room", func() bool {
				for _, c := range srv.all() {
					c.out.mu.Lock()
					pending, waiting := c.out.pending, len(c.out.waiters)
					c.out.mu.Unlock()
					// The sockets' buffers may have held all of a stream or two.
					if waiting > streams/2 && int64(waiting) == int64(srv.Stats().Streams) {
						if pending > 64<<10+streams*(size+headerSize) {
							t.Fatalf("%d bytes pending over a limit of %d", pending, 64<<10)
						}
						return true
					}
				}
				return false
			})
			var got [streams + 1]int
			for ended := 0; ended < streams; {
				_ = nc.SetReadDeadline(time.Now().Add(10 * time.Second))
				h, payload, err := nc.in.next(1 << 20)
				if err != nil {
					t.Fatal(err)
				}
				switch h.kind {
				case Item:
					if int(binary.BigEndian.Uint32(payload)) != got[h.stream] {
						t.Fatalf("stream %d: item %d where %d was due", h.stream, binary.BigEndian.Uint32(payload), got[h.stream])
					}
					got[h.stream]++
				case End:
					if got[h.stream] != items {
						t.Fatalf("stream %d ended after %d items", h.stream, got[h.stream])
					}
					ended++
				}
			}
		})
	}
}

// rawConn is a connection by hand, whose frames are read by in.
type rawConn struct {
	net.Conn
	in frameReader
}

func dialRaw(t testing.TB, kind, addr string) *rawConn {
	t.Helper()
	network, host, _ := strings.Cut(addr, "://")
	nc, err := net.Dial(network, host)
	if err != nil {
		t.Fatal(err)
	}
	if kind == "tls" {
		nc = tls.Client(nc, &tls.Config{InsecureSkipVerify: true})
	}
	t.Cleanup(func() { nc.Close() })
	return &rawConn{nc, frameReader{nc: nc, onReceive: func() {}}}
}

// rawHello is one behind its WELCOME.
func rawHello(t testing.TB, kind, addr string, window uint64) *rawConn {
	t.Helper()
	nc := dialRaw(t, kind, addr)
	g := greeting{protocol: protocolName, version: 1, oldest: 1, window: window}
	if _, err := nc.Write(appendFrame(nil, Hello, 0, g.append(nil))); err != nil {
		t.Fatal(err)
	}
	h, _, err := nc.in.next(maxHello)
	if err != nil || h.kind != Welcome {
		t.Fatalf("%v, %v; want WELCOME", h.kind, err)
	}
	return nc
}

func TestStopAndKill(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			ended := make(chan error, 1)
			h := handlerFunc(func(s *Stream) {
				stop, kill := make(chan struct{}), make(chan struct{})
				s.Watch(func() { close(stop) }, func() { close(kill) })
				_ = s.Send([]byte("begun"))
				select {
				case <-stop:
					_ = s.Send([]byte("last"))
					ended <- nil
				case <-kill:
					ended <- s.Err()
				}
			})
			_, dial, _ := serve(t, kind, Options{Handler: h})
			c := dial(DialOptions{})
			open := func(c *Client) *ClientStream {
				s, err := c.Open([]byte("x"))
				if err != nil {
					t.Fatal(err)
				}
				if p, ok, err := s.Recv(context.Background()); !ok || string(p) != "begun" {
					t.Fatalf("%q, %v", p, err)
				}
				return s
			}
			s := open(c)
			s.Stop()
			if p, ok, err := s.Recv(context.Background()); !ok || string(p) != "last" {
				t.Errorf("after stop: %q, %v", p, err)
			}
			if _, ok, err := s.Recv(context.Background()); ok || err != nil {
				t.Errorf("a stopped stream ends with %v; want a clean end", err)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
			s = open(c)
			s.Kill()
			if _, ok, err := s.Recv(context.Background()); ok || !errors.Is(err, ErrKilled) {
				t.Errorf("a killed stream ends with %v", err)
			}
			if err := <-ended; !errors.Is(err, ErrKilled) {
				t.Errorf("the handler sees %v", err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			s = open(c)
			time.AfterFunc(10*time.Millisecond, cancel)
			if _, ok, err := s.Recv(ctx); ok || !errors.Is(err, context.Canceled) {
				t.Errorf("a cancelled context gives %v", err)
			}
			if err := <-ended; !errors.Is(err, ErrKilled) {
				t.Errorf("the handler sees %v", err)
			}
			gone := dial(DialOptions{})
			open(gone)
			gone.nc.Close() // no farewell: as when a process dies
			if err := <-ended; !errors.Is(err, ErrConnClosed) {
				t.Errorf("the handler sees %v of a caller that vanished", err)
			}
		})
	}
}

func TestStalledClientIsEnded(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			failed := make(chan error, 1)
			h := handlerFunc(func(s *Stream) {
				for {
					if err := s.Send(make([]byte, 64)); err != nil {
						failed <- err
						return
					}
				}
			})
			srv, dial, _ := serve(t, kind, Options{Handler: h, StallTimeout: 50 * time.Millisecond})
			s, err := dial(DialOptions{Window: 256}).Open(nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := <-failed; !errors.Is(err, ErrStalled) {
				t.Errorf("the handler sees %v", err)
			}
			testwait.Until(t, "END came", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.ended })
			n := 0
			for {
				_, ok, err := s.Recv(context.Background())
				if ok {
					n++
					continue
				}
				var e *Error
				if !errors.As(err, &e) || e.Code != CodeStalled || n != 4 {
					t.Errorf("after %d items: %v", n, err)
				}
				break
			}
			if srv.Stats().Stalled != 1 {
				t.Errorf("stalled %d times", srv.Stats().Stalled)
			}
		})
	}
}

// TestBadFrames: what must not be is answered with ERROR, which says why, and the
// connection's end; what is only refused leaves it open.
func TestBadFrames(t *testing.T) {
	hello := func(change func(*greeting)) []byte {
		g := greeting{protocol: protocolName, version: 1, oldest: 1, token: "s3cret", window: 100}
		change(&g)
		return appendFrame(nil, Hello, 0, g.append(nil))
	}
	good := hello(func(*greeting) {})
	frame := func(k Kind, stream uint32, p string) []byte {
		return append(bytes.Clone(good), appendFrame(nil, k, stream, []byte(p))...)
	}
	for _, c := range []struct {
		name, code, say string
		send            []byte
	}{
		{"http", CodeProtocol, "want HELLO", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")},
		{"request first", CodeProtocol, "want HELLO", appendFrame(nil, Request, 1, []byte("x"))},
		{"huge hello", CodeTooLarge, "at most 4096", appendHeader(nil, Hello, 0, 1<<30)},
		{"garbage hello", CodeProtocol, "want a map", appendFrame(nil, Hello, 0, []byte{0x93, 1, 2, 3})},
		{"other protocol", CodeProtocol, `want "sluice-routed"`, hello(func(g *greeting) { g.protocol = "http" })},
		{"no token", CodeUnauthorize, "token", hello(func(g *greeting) { g.token = "" })},
		{"wrong token", CodeUnauthorize, "token", hello(func(g *greeting) { g.token = "s3cre" })},
		{"newer only", CodeVersion, "this router supports version 1", hello(func(g *greeting) { g.version, g.oldest = 9, 2 })},
		{"no window", CodeProtocol, "window 0", hello(func(g *greeting) { g.window = 0 })},
		{"second hello", CodeProtocol, "HELLO was sent twice", append(bytes.Clone(good), good...)},
		{"item", CodeProtocol, "a client must not send ITEM", frame(Item, 1, "x")},
		{"unknown kind", CodeProtocol, "kind 99", frame(99, 1, "x")},
		{"request on 0", CodeProtocol, "stream 0", frame(Request, 0, "x")},
		{"ping on 3", CodeProtocol, "want 0", frame(Ping, 3, "x")},
		{"long ping", CodeProtocol, "PING has 65", frame(Ping, 0, strings.Repeat("x", 65))},
		{"short credit", CodeProtocol, "want 4", append(frame(Request, 1, "x"), appendFrame(nil, Credit, 1, []byte{1})...)},
		{"credit of none", CodeProtocol, "never opened", frame(Credit, 7, "\x00\x00\x00\x01")},
		{"too much credit", CodeProtocol, "at most", append(frame(Request, 1, "wait"), appendFrame(nil, Credit, 1, []byte{0xff, 0xff, 0xff, 0xff})...)},
		{"ids that fall", CodeProtocol, "increasing ids", append(frame(Request, 5, "x"), appendFrame(nil, Request, 5, []byte("x"))...)},
		{"large request", CodeTooLarge, "at most 1000", append(bytes.Clone(good), appendHeader(nil, Request, 1, 1001)...)},
		{"large stop", CodeTooLarge, "at most", append(bytes.Clone(good), appendHeader(nil, Stop, 1, 5000)...)},
	} {
		for _, kind := range sockets {
			t.Run(c.name+"/"+kind, func(t *testing.T) {
				h := handlerFunc(func(s *Stream) {
					if string(s.Payload) == "wait" {
						over := make(chan struct{})
						s.Watch(func() {}, func() { close(over) })
						<-over
					}
				})
				srv, _, addr := serve(t, kind, Options{Handler: h, Token: "s3cret", MaxFrame: 1000})
				nc := dialRaw(t, kind, addr)
				var err error
				// Byte by byte as well: frames may come in any pieces.
				if kind != "unix" {
					_, err = nc.Write(c.send)
				} else {
					for i := range c.send {
						if _, err = nc.Write(c.send[i : i+1]); err != nil {
							break
						}
					}
				}
				if err != nil && !errors.Is(err, os.ErrClosed) && !strings.Contains(err.Error(), "pipe") {
					t.Fatal(err)
				}
				_ = nc.SetReadDeadline(time.Now().Add(10 * time.Second))
				for {
					h, payload, err := nc.in.next(1 << 20)
					if err != nil {
						t.Fatalf("no ERROR before %v", err)
					}
					if h.kind != Fail {
						continue
					}
					if e := readError(payload); e.Code != c.code || !strings.Contains(e.Message, c.say) {
						t.Errorf("%v; want code %s and %q", e, c.code, c.say)
					}
					break
				}
				if _, err := io.ReadAll(nc); err != nil && !strings.Contains(err.Error(), "reset") {
					t.Errorf("the connection is not closed: %v", err)
				}
				testwait.Until(t, "nothing is left", func() bool { return srv.Stats().Conns == 0 && srv.Stats().Streams == 0 })
			})
		}
	}
}

func TestRefusedStreamsKeepConnection(t *testing.T) {
	over := make(chan struct{})
	h := handlerFunc(func(s *Stream) {
		if string(s.Payload) == "wait" {
			<-over
		}
	})
	_, dial, _ := serve(t, "unix", Options{Handler: h, MaxStreams: 2, RequestBudget: 64 << 10})
	c := dial(DialOptions{})
	for range 2 {
		if _, err := c.Open([]byte("wait")); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(payload []byte, code string) {
		t.Helper()
		s, err := c.Open(payload)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = s.Recv(context.Background())
		var e *Error
		if code == "" && err == nil || errors.As(err, &e) && e.Code == code {
			return
		}
		t.Errorf("%v; want code %q", err, code)
	}
	expect([]byte("x"), CodeStreams)
	close(over)
	expectSoon := func() bool {
		s, err := c.Open([]byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = s.Recv(context.Background())
		return err == nil
	}
	testwait.Until(t, "there is room again", expectSoon)
	expect(make([]byte, 100<<10), CodeMemory)
	expect([]byte("x"), "")
}

func TestTooManyConnections(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			_, dial, addr := serve(t, kind, Options{Handler: handlerFunc(countedItem), MaxConns: 1})
			c := dial(DialOptions{})
			_, err := Dial(context.Background(), addr, DialOptions{TLS: c.opt.TLS})
			var e *Error
			if !errors.As(err, &e) || e.Code != CodeConnections {
				t.Errorf("a second connection: %v", err)
			}
			c.Close()
			testwait.Until(t, "there is room again", func() bool {
				c, err := Dial(context.Background(), addr, DialOptions{TLS: c.opt.TLS})
				if err != nil {
					return false
				}
				c.Close()
				return true
			})
		})
	}
}

// A peer that answers no ping is closed, one that says no HELLO too; one that answers
// stays, however busy the machine: silence is counted in ticks of the server's clock.
func TestHeartbeats(t *testing.T) {
	const beat = 100 * time.Millisecond
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			srv, dial, addr := serve(t, kind, Options{Handler: handlerFunc(countedItem), Heartbeat: beat, HelloTimeout: 2 * beat})
			c := dial(DialOptions{})
			mute := rawHello(t, kind, addr, 10)
			dialRaw(t, kind, addr) // sends no HELLO
			testwait.Until(t, "only the one that answers is left", func() bool { return srv.Stats().Conns == 1 })
			_ = mute.SetReadDeadline(time.Now().Add(30 * time.Second))
			for {
				h, payload, err := mute.in.next(maxHello)
				if err != nil {
					t.Fatalf("no ERROR before %v", err)
				}
				if h.kind == Ping {
					continue
				}
				if e := readError(payload); h.kind != Fail || e.Code != CodeHeartbeat {
					t.Errorf("%s %v; want ERROR with %q", h.kind, e, CodeHeartbeat)
				}
				break
			}
			testwait.Holds(t, 8*beat, "a connection that answers pings stays open", func() bool { return c.Err() == nil })
		})
	}
}

// A server that was stopped for an hour has not listened for an hour: nobody was
// silent. From there on silence counts as before.
func TestSuspensionIsNotSilence(t *testing.T) {
	const beat = time.Second
	srv, err := New(Options{Handler: handlerFunc(countedItem), Heartbeat: beat})
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	srv.clock.start(beat / 4)
	srv.clock.last = at
	link := new(discardLink)
	c := newConn(srv, link, &net.UnixAddr{Net: "unix"})
	tick := func(after time.Duration) *Error {
		at = at.Add(after)
		return c.tick(srv.clock.tick(at))
	}
	hello := greeting{protocol: protocolName, version: 1, oldest: 1, window: 100}
	if _, bad := c.feed(appendFrame(nil, Hello, 0, hello.append(nil))); bad != nil {
		t.Fatal(bad)
	}
	steps := func(what string, n int) {
		t.Helper()
		for i := range n {
			if bad := tick(beat / 4); bad != nil {
				t.Fatalf("%s: step %d: %v", what, i, bad)
			}
		}
	}
	steps("in time", 8) // of the 13 that it may be silent
	for range 3 {
		if bad := tick(time.Hour); bad != nil {
			t.Fatalf("after an hour in which the server stood still: %v", bad)
		}
	}
	if _, bad := c.feed(appendFrame(nil, Pong, 0, nil)); bad != nil { // it had been there all the time
		t.Fatal(bad)
	}
	steps("heard of", 13)
	if bad := tick(beat / 4); bad == nil || bad.Code != CodeHeartbeat {
		t.Errorf("silent for more than three beats: %v", bad)
	}
	pings := bytes.Count(link.out, appendFrame(nil, Ping, 0, nil))
	if pings < 3 || pings > 6 {
		t.Errorf("%d pings in about seven beats of silence", pings)
	}
	c.endStreams(nil)
}

func TestDrainAndClose(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			over := make(chan struct{})
			h := handlerFunc(func(s *Stream) { <-over; _ = s.Send([]byte("late")) })
			srv, dial, addr := serve(t, kind, Options{Handler: h})
			c := dial(DialOptions{})
			s, err := c.Open(nil)
			if err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "the stream is open", func() bool { return srv.Stats().Streams == 1 })
			drained := make(chan error, 1)
			go func() { drained <- srv.Drain(context.Background()) }()
			testwait.Until(t, "new requests are refused", func() bool {
				_, err := c.Open(nil)
				var e *Error
				return errors.As(err, &e) && e.Code == CodeDraining
			})
			close(over)
			if p, ok, err := s.Recv(context.Background()); !ok || string(p) != "late" {
				t.Errorf("the stream in flight: %q, %v", p, err)
			}
			if err := <-drained; err != nil {
				t.Error(err)
			}
			srv.Close()
			select {
			case <-c.Done():
			case <-time.After(5 * time.Second):
				t.Error("the client does not see the close")
			}
			if strings.HasPrefix(addr, "unix://") {
				if _, err := os.Stat(strings.TrimPrefix(addr, "unix://")); !os.IsNotExist(err) {
					t.Errorf("the socket file is left: %v", err)
				}
			}
		})
	}
	testwait.Until(t, fmt.Sprintf("goroutines are back at %d", before), func() bool { return runtime.NumGoroutine() <= before+2 })
}

func TestSocketFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(dir, "stale")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	srv, err := New(Options{Handler: handlerFunc(countedItem)})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	if _, err := srv.Listen("unix://" + file); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("over a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "mine" {
		t.Error("the file was touched")
	}
	if _, err := srv.Listen("unix://" + stale); err != nil {
		t.Errorf("over a stale socket: %v", err)
	}
	if _, err := srv.Listen("unix://" + stale); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("over a live one: %v", err)
	}
	if _, err := srv.Listen("http://x"); err == nil {
		t.Error("an address of another kind was taken")
	}
}

func TestPanicEndsTheStream(t *testing.T) {
	_, dial, _ := serve(t, "unix", Options{Handler: handlerFunc(func(*Stream) { panic("x") })})
	s, err := dial(DialOptions{}).Open(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = s.Recv(context.Background())
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeInternal {
		t.Errorf("%v", err)
	}
}

// A server that leaves its listeners keeps its connections.
func TestCloseListeners(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			over := make(chan struct{})
			h := handlerFunc(func(s *Stream) { <-over; _ = s.Send([]byte("late")) })
			srv, dial, addr := serve(t, kind, Options{Handler: h})
			c := dial(DialOptions{})
			s, err := c.Open(nil)
			if err != nil {
				t.Fatal(err)
			}
			srv.CloseListeners()
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			if c, err := Dial(ctx, addr, DialOptions{TLS: c.opt.TLS}); err == nil {
				c.Close()
				t.Error("a connection was taken after the listener was left")
			}
			close(over)
			if p, ok, err := s.Recv(ctx); !ok || string(p) != "late" {
				t.Errorf("the stream in flight: %q, %v", p, err)
			}
			if s, err = c.Open(nil); err != nil {
				t.Fatal(err)
			}
			if p, ok, err := s.Recv(ctx); !ok || string(p) != "late" {
				t.Errorf("a stream opened later on the connection: %q, %v", p, err)
			}
		})
	}
}

// The key of the HELLO decides who may connect; streams carry it.
func TestAdmit(t *testing.T) {
	for _, kind := range sockets {
		t.Run(kind, func(t *testing.T) {
			h := handlerFunc(func(s *Stream) { _ = s.Send(fmt.Appendf(nil, "%s over unix: %t", s.Key(), s.Unix())) })
			_, dial, addr := serve(t, kind, Options{Handler: h, Token: "t0ken", Admit: func(key []byte, unix bool) *Error {
				if string(key) == "good" && unix == (kind == "unix") {
					return nil
				}
				return &Error{CodeUnauthorize, "no such key"}
			}})
			c := dial(DialOptions{Token: "t0ken", Key: "good"})
			s, err := c.Open(nil)
			if err != nil {
				t.Fatal(err)
			}
			if p, ok, err := s.Recv(context.Background()); !ok || string(p) != fmt.Sprintf("good over unix: %t", kind == "unix") {
				t.Errorf("%q, %v", p, err)
			}
			for _, opt := range []DialOptions{{Token: "t0ken"}, {Token: "t0ken", Key: "bad"}, {Key: "good"}} {
				opt.TLS = c.opt.TLS
				_, err := Dial(context.Background(), addr, opt)
				var e *Error
				if !errors.As(err, &e) || e.Code != CodeUnauthorize || strings.Contains(e.Message, "bad") {
					t.Errorf("key %q, token %q: %v", opt.Key, opt.Token, err)
				}
			}
		})
	}
}
