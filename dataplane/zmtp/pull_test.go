package zmtp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

func listen(t testing.TB, opt Options) *Pull {
	t.Helper()
	if opt.Endpoint == "" {
		opt.Endpoint = "tcp://127.0.0.1:*"
	}
	if opt.Message == nil {
		opt.Message = func([]byte) {}
	}
	p, err := Listen(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func dial(t testing.TB, p *Pull) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(p.Endpoint(), "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

func writeMessage(t testing.TB, c net.Conn, parts ...[]byte) {
	t.Helper()
	if _, err := c.Write(joined(parts...)); err != nil {
		t.Fatal(err)
	}
}

// wantBytes reads what is wanted next of our side.
func wantBytes(t testing.TB, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("read %q, want %q: %v", got, want, err)
	}
}

// wantClosed reads until our side has closed.
func wantClosed(t testing.TB, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Fatalf("the connection goes on: %v", err)
	}
}

// messageRecorder is a Message that keeps all.
type messageRecorder struct {
	mu  sync.Mutex
	all []string
}

func (k *messageRecorder) take(m []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, string(m))
}

func (k *messageRecorder) String() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return strings.Join(k.all, ",")
}

// The exchange of RFC 23, byte for byte, and a heartbeat of RFC 37.
func TestWire(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	c := dial(t, p)
	wantBytes(t, c, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL"+strings.Repeat("\x00", 48))
	for _, b := range ourGreeting { // byte by byte
		writeMessage(t, c, []byte{b})
	}
	wantBytes(t, c, "\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL")
	writeMessage(t, c, handshakeBytes()[greetingBytes:], short(0, "one"), short(flagMore, "no"), short(0, "no"))
	writeMessage(t, c, short(flagCommand, "\x04PING\x00\x64abc"), long(0, "two"))
	wantBytes(t, c, "\x04\x08\x04PONGabc")
	testwait.Until(t, "both messages", func() bool { return got.String() == "one,two" })
	if s := p.Stats(); s.Conns != 1 || s.Multipart != 1 || s.PeerErrors+s.AtCapacity+s.NotAllowed != 0 {
		t.Errorf("%+v", s)
	}
	c.Close()
	testwait.Until(t, "the connection is forgotten", func() bool { return p.Stats().Conns == 0 })
	if s := p.Stats(); s.PeerErrors != 0 {
		t.Errorf("a peer that closes counts as broken: %+v", s)
	}
}

func TestNetworksAtAccept(t *testing.T) {
	var got messageRecorder
	var log bytes.Buffer
	away := listen(t, Options{Message: got.take, Networks: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	c := dial(t, away)
	c.Write(joined(handshakeBytes(), short(0, "m"))) // may be refused already
	if b, err := io.ReadAll(c); len(b) > 0 {
		t.Errorf("a stranger is greeted: %q, %v", b, err)
	}
	testwait.Until(t, "it is counted", func() bool { return away.Stats().NotAllowed == 1 })
	away.Close()
	if got.String() != "" || !strings.Contains(log.String(), "127.0.0.1") || !strings.Contains(log.String(), "networks") {
		t.Errorf("heard %q; the log: %s", got.String(), log.String())
	}
	at := []string{"tcp://127.0.0.1:*", "tcp://*:*"}
	if l, err := net.Listen("tcp6", "[::1]:0"); err == nil {
		l.Close()
		at = append(at, "tcp://[::]:0") // where 127.0.0.1 comes as ::ffff:127.0.0.1
	}
	for _, at := range at {
		home := listen(t, Options{Endpoint: at, Networks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
		_, port, _ := net.SplitHostPort(strings.TrimPrefix(home.Endpoint(), "tcp://"))
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(30 * time.Second))
		wantBytes(t, c, string(ourGreeting[:]))
		c.Close()
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	p := listen(t, Options{Conns: 3, PerHost: 2})
	for range 2 {
		wantBytes(t, dial(t, p), string(ourGreeting[:]))
	}
	over := dial(t, p)
	if b, _ := io.ReadAll(over); len(b) > 0 {
		t.Errorf("a third connection of one host is greeted: %q", b)
	}
	testwait.Until(t, "it is counted", func() bool { return p.Stats().AtCapacity == 1 })
	if s := p.Stats(); s.Conns != 2 {
		t.Errorf("%+v", s)
	}
	all := listen(t, Options{Conns: 1})
	first := dial(t, all)
	wantBytes(t, first, string(ourGreeting[:]))
	if b, _ := io.ReadAll(dial(t, all)); len(b) > 0 {
		t.Error("a second connection of all is greeted")
	}
	first.Close()
	testwait.Until(t, "the place is free", func() bool { return all.Stats().Conns == 0 })
	wantBytes(t, dial(t, all), string(ourGreeting[:]))
}

func TestSlowPeersAreClosed(t *testing.T) {
	p := listen(t, Options{Handshake: 50 * time.Millisecond, Frame: time.Hour})
	silent, half := dial(t, p), dial(t, p)
	writeMessage(t, half, ourGreeting[:40])
	wantClosed(t, silent)
	wantClosed(t, half)
	testwait.Until(t, "both are counted", func() bool { return p.Stats().PeerErrors == 2 && p.Stats().Conns == 0 })

	var got messageRecorder
	q := listen(t, Options{Frame: 50 * time.Millisecond, Message: got.take})
	idle, stuck := dial(t, q), dial(t, q)
	writeMessage(t, idle, handshakeBytes())
	writeMessage(t, stuck, handshakeBytes(), short(0, "m"), short(0, "rest")[:3])
	wantClosed(t, stuck)
	testwait.Until(t, "one is counted", func() bool { return q.Stats().PeerErrors == 1 && q.Stats().Conns == 1 })
	writeMessage(t, idle, short(0, "later")) // silence between frames is not a fault
	testwait.Until(t, "the idle one is heard", func() bool { return got.String() == "m,later" })
}

// A peer that always leaves the next frame begun, but goes on, is not given up.
func TestSteadyPeerIsKept(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Frame: 10 * time.Second, Message: got.take})
	c := &conn{pull: p, tcp: dial(t, p).(*net.TCPConn)}
	c.session = session{maxFrame: testMaxFrame, onMessage: func([]byte) {}, onMultipart: func() {}, send: func([]byte) error { return nil }}
	feed := func(b []byte) { c.advance(copy(c.free(), b)); c.armReadDeadline() }
	feed(handshakeBytes())
	if c.deadlineSet {
		t.Error("a deadline between frames")
	}
	whole := short(0, "frame")
	feed(whole[:3])
	if !c.deadlineSet {
		t.Error("no deadline within a frame")
	}
	was := c.consumedAtDeadline
	feed(whole[3:5])
	if c.consumedAtDeadline != was {
		t.Error("the deadline moved, and no frame has ended")
	}
	feed(joined(whole[5:], whole[:2]))
	if !c.deadlineSet || c.consumedAtDeadline == was {
		t.Error("the deadline is that of the frame before")
	}
	feed(whole[2:])
	if c.deadlineSet {
		t.Error("a deadline after the frame")
	}
}

// A message without end, in frames of a permitted size: nothing of it is kept.
func TestMessageWithoutEnd(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	c := dial(t, p)
	writeMessage(t, c, handshakeBytes())
	part := bytes.Repeat(long(flagMore, strings.Repeat("x", 4096)), 64)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const sent = 64 << 20
	for range sent / len(part) {
		if _, err := c.Write(part); err != nil {
			t.Fatal(err)
		}
	}
	writeMessage(t, c, short(0, "the end"), short(0, "next"))
	testwait.Until(t, "the message after it", func() bool { return got.String() == "next" })
	runtime.ReadMemStats(&after)
	t.Logf("a message of %d MiB: %d KiB allocated", sent>>20, (after.TotalAlloc-before.TotalAlloc)>>10)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
		t.Errorf("%d KiB were allocated", n>>10)
	}
	if s := p.Stats(); s.Multipart != 1 {
		t.Errorf("%+v", s)
	}
}

// PINGs whose answers nobody reads cost their sender the connection, not memory.
func TestUnreadPongs(t *testing.T) {
	p := listen(t, Options{})
	c := dial(t, p)
	writeMessage(t, c, handshakeBytes())
	pings := bytes.Repeat(short(flagCommand, "\x04PING\x00\x00"+strings.Repeat("c", 16)), 4096)
	for err := error(nil); err == nil; {
		_, err = c.Write(pings)
	}
	testwait.Until(t, "it is closed", func() bool { s := p.Stats(); return s.PeerErrors == 1 && s.Conns == 0 })
}

func TestListenRefuses(t *testing.T) {
	ten := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for _, k := range []struct {
		endpoint string
		networks []netip.Prefix
		want     string
	}{
		{"", nil, "want tcp://HOST:PORT"},
		{"8500", nil, "want tcp://HOST:PORT"},
		{"tcp://127.0.0.1", nil, "want tcp://HOST:PORT"},
		{"tcp://:8500", nil, "want a host"},
		{"tcp://nowhere.invalid:1", nil, "nowhere.invalid"},
		{"tcp://127.0.0.1:99999", nil, "port"},
		{"tcp://[::1]:*", ten, "no network of"},
		{"tcp://127.0.0.1:*", []netip.Prefix{netip.MustParsePrefix("fd00::/8")}, "no network of"},
	} {
		p, err := Listen(Options{Endpoint: k.endpoint, Networks: k.networks, Message: func([]byte) {}})
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", k.endpoint)) || !strings.Contains(err.Error(), k.want) {
			t.Errorf("%q: %v; want %q", k.endpoint, err, k.want)
		}
	}
	p := listen(t, Options{})
	if _, err := Listen(Options{Endpoint: p.Endpoint(), Message: func([]byte) {}}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a port that is taken: %v", err)
	}
}

// Close ends everything, however far a connection is.
func TestClose(t *testing.T) {
	before := runtime.NumGoroutine()
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	var conns []net.Conn
	for i := range 30 {
		c := dial(t, p)
		switch i % 3 {
		case 1:
			writeMessage(t, c, handshakeBytes(), short(0, "m"))
		case 2:
			writeMessage(t, c, handshakeBytes(), short(0, "m"), []byte{0, 9, 'p'})
		}
		conns = append(conns, c)
	}
	testwait.Until(t, "all are in", func() bool { return p.Stats().Conns == 30 && strings.Count(got.String(), "m") == 20 })
	p.Close()
	p.Close()
	select {
	case <-p.Done():
	default:
		t.Error("Done is open after Close")
	}
	for _, c := range conns {
		wantClosed(t, c)
	}
	if s := p.Stats(); s.Conns != 0 || s.PeerErrors != 0 {
		t.Errorf("%+v", s)
	}
	testwait.Until(t, "its goroutines have ended", func() bool { return runtime.NumGoroutine() <= before+1 })
	if c, err := net.Dial("tcp", strings.TrimPrefix(p.Endpoint(), "tcp://")); err == nil {
		c.Close()
		t.Error("it listens after Close")
	}
}

// A peer that sends without a pause, so that the socket is never found empty, does not
// hold Close up.
func TestCloseUnderAFlood(t *testing.T) {
	var peer net.Conn
	flood := make(chan struct{})
	var once sync.Once
	next := bytes.Repeat(short(0, "m"), 2)
	more := 0
	p := listen(t, Options{Message: func([]byte) {
		if more++; more%2 == 1 { // for each two that are taken, two more are there
			peer.Write(next)
		}
		once.Do(func() { close(flood) })
	}})
	peer = dial(t, p)
	writeMessage(t, peer, handshakeBytes(), next, next)
	<-flood
	done := make(chan struct{})
	go func() { p.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		peer.Close()
		t.Error("Close waits for the peer")
	}
}
