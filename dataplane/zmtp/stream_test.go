//go:build cgo

package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
)

func streamOptions(kind string) StreamOptions {
	return StreamOptions{Type: kind, MaxMessage: 4 << 20, Handshake: 20 * time.Second}
}

// bindSocket is a socket of libzmq that listens.
func bindSocket(t *testing.T, kind zmq.Type) (s *zmq.Socket, endpoint string) {
	t.Helper()
	s, err := zmq.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := errors.Join(s.SetLinger(0), s.SetSndhwm(0), s.SetRcvtimeo(20*time.Second), s.Bind("tcp://127.0.0.1:*")); err != nil {
		t.Fatal(err)
	}
	if endpoint, err = s.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	return s, endpoint
}

// streamReader reads a Stream as a Poller tells.
type streamReader struct {
	*Stream
	ready chan struct{}
	buf   []byte
}

func newStreamReader(t *testing.T, s *Stream, buffer int) *streamReader {
	t.Helper()
	p, err := NewPoller()
	if err != nil {
		t.Fatal(err)
	}
	l := &streamReader{Stream: s, ready: make(chan struct{}, 1), buf: make([]byte, buffer)}
	t.Cleanup(func() { s.Close(); p.Close() })
	err = p.Watch(s, func() {
		select {
		case l.ready <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// next waits for a message, or the end.
func (l *streamReader) next(t *testing.T) (Message, error) {
	t.Helper()
	late := time.After(20 * time.Second)
	for {
		if m, ok, err := l.Next(); ok || err != nil {
			return m, err
		}
		if n, _, err := l.Fill(l.buf); err != nil {
			return nil, err
		} else if n > 0 {
			continue
		}
		select {
		case <-l.ready:
		case <-late:
			t.Fatal("nothing comes")
		}
	}
}

// Messages of libzmq's PUB arrive unchanged, for all sizes of messages and of
// the buffer, with heartbeats in between.
func TestStreamOfAPublisher(t *testing.T) {
	for _, buffer := range []int{64, 1000, 64 << 10} {
		t.Run(fmt.Sprint(buffer), func(t *testing.T) {
			pub, endpoint := bindSocket(t, zmq.XPUB)
			opt := streamOptions("SUB")
			opt.Topic = "a"
			s, err := Connect(context.Background(), endpoint, opt)
			if err != nil {
				t.Fatal(err)
			}
			if sub, err := pub.RecvBytes(0); err != nil || string(sub) != "\x01a" {
				t.Fatalf("subscribed to %q, %v", sub, err)
			}
			l := newStreamReader(t, s, buffer)
			if !s.Heartbeats() {
				t.Error("libzmq answers heartbeats")
			}
			rng := rand.New(rand.NewPCG(1, uint64(buffer)))
			var sent [][]string
			for range 300 {
				m := []string{"a"}
				for range rng.IntN(4) {
					size := []int{0, 1, 255, 256, 5000, 200_000}[rng.IntN(6)]
					part := make([]byte, size)
					for i := range part {
						part[i] = byte(rng.Uint32())
					}
					m = append(m, string(part))
				}
				sent = append(sent, m)
			}
			done := make(chan error, 1)
			go func() {
				for i, m := range sent {
					if i%10 == 0 {
						pub.SendMessage("b", "of another topic")
					}
					if _, err := pub.SendMessage(m); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
			for i, want := range sent {
				got, err := l.next(t)
				if err != nil {
					t.Fatal(err)
				}
				if i%50 == 0 {
					if err := s.Ping(); err != nil {
						t.Fatal(err)
					}
				}
				if len(got) != len(want) {
					t.Fatalf("message %d has %d parts, want %d", i, len(got), len(want))
				}
				for k := range got {
					if string(got[k]) != want[k] {
						t.Fatalf("message %d, part %d differs", i, k)
					}
				}
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A question to libzmq's ROUTER, and its answers.
func TestStreamOfARouter(t *testing.T) {
	router, endpoint := bindSocket(t, zmq.ROUTER)
	s, err := Connect(context.Background(), endpoint, streamOptions("DEALER"))
	if err != nil {
		t.Fatal(err)
	}
	l := newStreamReader(t, s, 4096)
	if err := s.Send(nil, []byte("question")); err != nil {
		t.Fatal(err)
	}
	m, err := router.RecvMessageBytes(0)
	if err != nil || len(m) != 3 || len(m[1]) != 0 || string(m[2]) != "question" {
		t.Fatalf("%q, %v", m, err)
	}
	for i := range 1000 {
		router.SendMessage(m[0], "", fmt.Sprint(i))
	}
	for i := range 1000 {
		if got, err := l.next(t); err != nil || len(got) != 2 || string(got[1]) != fmt.Sprint(i) {
			t.Fatalf("answer %d: %q, %v", i, got, err)
		}
	}
	router.Close()
	if _, err := l.next(t); !errors.Is(err, io.EOF) || !s.Gone() {
		t.Errorf("after the end: %v, gone %v", err, s.Gone())
	}
}

// A publisher that connects to us.
func TestAcceptedStream(t *testing.T) {
	a, err := Accept("tcp://127.0.0.1:*", streamOptions("SUB"))
	if err != nil {
		t.Fatal(err)
	}
	came, ended := make(chan *Stream, 1), make(chan struct{})
	wrong := make(chan error, 8)
	go func() {
		defer close(ended)
		a.Run(context.Background(), 4, func(s *Stream) { came <- s }, func(err error) { wrong <- err })
	}()
	c, err := net.Dial("tcp", a.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	if err := <-wrong; !errors.Is(err, errNotZMTP) {
		t.Errorf("a client of HTTP: %v", err)
	}
	c.Close()
	pub, err := zmq.NewSocket(zmq.XPUB)
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	pub.SetLinger(0)
	pub.SetRcvtimeo(20 * time.Second)
	if err := pub.Connect("tcp://" + a.Addr().String()); err != nil {
		t.Fatal(err)
	}
	l := newStreamReader(t, <-came, 4096)
	if _, err := pub.RecvBytes(0); err != nil {
		t.Fatal(err)
	}
	pub.SendMessage("", "hello")
	if m, err := l.next(t); err != nil || len(m) != 2 || string(m[1]) != "hello" {
		t.Errorf("%q, %v", m, err)
	}
	a.Close()
	<-ended
}

// scriptedPeer is a peer that introduces itself as a PUB and then sends what a test wants.
func scriptedPeer(t *testing.T, script func(c net.Conn)) *streamReader {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		c.Write(ourGreeting[:])
		c.Write(readyOf("PUB"))
		io.ReadFull(c, make([]byte, greetingBytes+len(readyOf("SUB"))+3)) // its subscription to all
		script(c)
	}()
	opt := streamOptions("SUB")
	opt.MaxMessage = 1 << 20
	s, err := Connect(context.Background(), "tcp://"+ln.Addr().String(), opt)
	if err != nil {
		t.Fatal(err)
	}
	return newStreamReader(t, s, 4096)
}

func longFrame(flags byte, size uint64, body []byte) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size), body...)
}

// Invalid input ends the connection, and takes no memory.
func TestHostileStreams(t *testing.T) {
	for name, script := range map[string]func(c net.Conn){
		"a frame too large":        func(c net.Conn) { c.Write(longFrame(0, 1<<62, nil)) },
		"parts without an end":     func(c net.Conn) { c.Write(bytes.Repeat(encode(nil, nil, nil)[:2], 1000)) },
		"parts too large together": func(c net.Conn) { c.Write(bytes.Repeat(longFrame(flagMore, 900<<10, make([]byte, 900<<10)), 2)) },
		"commands without an end": func(c net.Conn) {
			c.Write([]byte{flagMore, 0})
			c.Write(bytes.Repeat(ping, 1000))
		},
		"reserved flags": func(c net.Conn) { c.Write([]byte{0xf0, 1, 1}) },
		"a huge heartbeat": func(c net.Conn) {
			c.Write(append([]byte{flagCommand, 60}, []byte("\x04PING"+strings.Repeat("x", 55))...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := scriptedPeer(t, func(c net.Conn) { script(c); c.Read(make([]byte, 1)) })
			m, err := l.next(t)
			if err == nil || errors.Is(err, io.EOF) {
				t.Errorf("%d parts, %v; want a fault", len(m), err)
			}
			if cap(l.partial) > 2<<20 {
				t.Errorf("%d bytes are held", cap(l.partial))
			}
		})
	}
}

// A heartbeat between the parts of a message is answered once, when the message is whole,
// and the message stays one.
func TestHeartbeatBetweenParts(t *testing.T) {
	answers := make(chan []byte, 1)
	l := scriptedPeer(t, func(c net.Conn) {
		whole := encode(nil, []byte("one"), []byte("two"))
		asked := append(append(append([]byte(nil), whole[:5]...), flagCommand, 8, 4, 'P', 'I', 'N', 'G', 0, 0, 'x'), whole[5:]...)
		for _, b := range asked { // a byte at a time
			c.Write([]byte{b})
			testwait.Pace(time.Millisecond)
		}
		answer := make([]byte, 64)
		n, _ := c.Read(answer)
		answers <- answer[:n]
	})
	if m, err := l.next(t); err != nil || len(m) != 2 || string(m[0])+string(m[1]) != "onetwo" {
		t.Errorf("%q, %v", m, err)
	}
	if got := string(<-answers); got != "\x04\x06\x04PONGx" {
		t.Errorf("answered %q", got)
	}
}

// A message returned by Next stays unchanged while more is read into another buffer.
func TestDetachedMessages(t *testing.T) {
	big := bytes.Repeat([]byte("b"), 300<<10)
	l := scriptedPeer(t, func(c net.Conn) {
		for i := range 20 {
			c.Write(encode(nil, []byte(fmt.Sprint("small ", i))))
			c.Write(longFrame(0, uint64(len(big)), big))
		}
		c.Read(make([]byte, 1))
	})
	var given []Message
	var want []string
	for i := range 40 {
		m, err := l.next(t)
		if err != nil {
			t.Fatal(err)
		}
		given = append(given, Message{m[0]})
		want = append(want, string(m[0]))
		if (i%2 == 0) != (string(m[0]) == fmt.Sprint("small ", i/2)) || i%2 == 1 && !bytes.Equal(m[0], big) {
			t.Fatalf("message %d is wrong", i)
		}
		l.Detach()
		l.buf = make([]byte, 4096)
	}
	for i := range given {
		if string(given[i][0]) != want[i] {
			t.Errorf("message %d was written over", i)
		}
	}
}

func TestEndpoints(t *testing.T) {
	for endpoint, ok := range map[string]bool{
		"tcp://h:1": true, "tcp://[::1]:1": true, "ipc:///tmp/x": true, "tcp://h": false, "tcp://h:": false, "tcp://:1": false, "udp://h:1": false,
		"tcp://h:x": false, "tcp://h:70000": false, "ipc://": false, "": false, "tcp://*:1": false, "tcp://h:0": false,
	} {
		if err := Check(endpoint, false); (err == nil) != ok {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
	if err := Check("tcp://*:0", true); err != nil {
		t.Error(err)
	}
}

// An engine on this machine may publish at a path.
func TestStreamOverIPC(t *testing.T) {
	dir, err := os.MkdirTemp("", "zmtp")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	pub, err := zmq.NewSocket(zmq.XPUB)
	if err != nil {
		t.Fatal(err)
	}
	defer pub.Close()
	pub.SetLinger(0)
	pub.SetRcvtimeo(20 * time.Second)
	if err := pub.Bind("ipc://" + dir + "/s"); err != nil {
		t.Fatal(err)
	}
	s, err := Connect(context.Background(), "ipc://"+dir+"/s", streamOptions("SUB"))
	if err != nil {
		t.Fatal(err)
	}
	l := newStreamReader(t, s, 4096)
	pub.RecvBytes(0)
	pub.SendMessage("x")
	if m, err := l.next(t); err != nil || string(m[0]) != "x" {
		t.Errorf("%q, %v", m, err)
	}
}

func TestNextPause(t *testing.T) {
	for _, c := range []struct {
		pause     time.Duration
		announced int
		want      time.Duration
	}{{minPause, 0, minPause}, {minPause, 3, minPause}, {minPause, 50, maxPause}, {maxPause, 200, maxPause}, {maxPause, 512, 20 * time.Millisecond}, {minPause, 1000, minPause}, {maxPause, 3, minPause}} {
		if got := nextPause(c.pause, c.announced); got != c.want {
			t.Errorf("%d announced in %v: %v, want %v", c.announced, c.pause, got, c.want)
		}
	}
}

// FuzzStream: bytes of any kind, in pieces of any size, never bring it down, nor more
// memory than what was sent.
func FuzzStream(f *testing.F) {
	f.Add(encode(nil, []byte("a"), []byte("b")), uint8(3))
	f.Add(append(append([]byte{flagMore, 1, 'x'}, ping...), 0, 1, 'y'), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, piece uint8) {
		fds := socketPair(t)
		s := &Stream{fd: fds[0], maxMessage: 1 << 10}
		defer s.Close()
		buf := make([]byte, 128)
		for len(b) > 0 {
			n := min(len(b), int(piece)+1)
			writeAll(fds[1], b[:n])
			b = b[n:]
			for {
				n, _, err := s.Fill(buf)
				if err != nil || n == 0 {
					break
				}
				for {
					m, ok, err := s.Next()
					if err != nil {
						return
					}
					if !ok {
						break
					}
					for _, part := range m {
						if len(part) > 1<<10 {
							t.Fatal("a part too large")
						}
					}
				}
				if cap(s.partial) > 16<<10 {
					t.Fatalf("%d bytes held", cap(s.partial))
				}
			}
		}
	})
}
