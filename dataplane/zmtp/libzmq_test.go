//go:build cgo

package zmtp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
)

// peer is a socket of libzmq that is connected to p.
func peer(t testing.TB, kind zmq.Type, endpoint string, set ...func(*zmq.Socket) error) *zmq.Socket {
	t.Helper()
	s, err := zmq.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	err = errors.Join(s.SetLinger(0), s.SetSndtimeo(30*time.Second))
	for _, f := range set {
		err = errors.Join(err, f(s))
	}
	if err = errors.Join(err, s.Connect(endpoint)); err != nil {
		t.Fatal(err)
	}
	return s
}

func send(t testing.TB, s *zmq.Socket, parts ...any) {
	t.Helper()
	if _, err := s.SendMessage(parts...); err != nil {
		t.Fatal(err)
	}
}

// Many messages of several sockets: none is lost, each socket's are in order.
func TestPushSockets(t *testing.T) {
	const sockets, each = 4, 25_000
	var next [sockets]atomic.Int64
	var wrong atomic.Int64
	p := listen(t, Options{Message: func(m []byte) {
		who, n, _ := strings.Cut(strings.TrimRight(string(m), "."), " ")
		i, _ := strconv.Atoi(who)
		if at, err := strconv.ParseInt(n, 10, 64); err != nil || next[i].Add(1) != at+1 {
			wrong.Add(1)
		}
	}})
	var all sync.WaitGroup
	for i := range sockets {
		s := peer(t, zmq.PUSH, p.Endpoint())
		all.Go(func() {
			for n := range each {
				if _, err := s.Send(fmt.Sprintf("%d %d%s", i, n, strings.Repeat(".", n%700)), 0); err != nil { // of both lengths of frames
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	testwait.Until(t, "all have come", func() bool {
		sum := int64(0)
		for i := range next {
			sum += next[i].Load()
		}
		return sum+wrong.Load() == sockets*each
	})
	if s := p.Stats(); wrong.Load() != 0 || s.PeerErrors+s.AtCapacity+s.NotAllowed+s.Multipart != 0 || s.Conns != sockets {
		t.Errorf("%d out of order; %+v", wrong.Load(), s)
	}
}

func TestPartsOfLibzmq(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	s := peer(t, zmq.PUSH, p.Endpoint())
	send(t, s, "one")
	send(t, s, "a", "b", strings.Repeat("c", 300))
	send(t, s, "")
	send(t, s, "two")
	testwait.Until(t, "all have come", func() bool { return got.String() == "one,,two" })
	if s := p.Stats(); s.Multipart != 1 || s.PeerErrors != 0 {
		t.Errorf("%+v", s)
	}
}

// Heartbeats of libzmq are answered: it would give the connection up else.
func TestHeartbeatsOfLibzmq(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	var pongs atomic.Int64
	relay := newFlakyProxy(t, p, func(b []byte) { pongs.Add(int64(bytes.Count(b, []byte("\x04PONG")))) })
	s := peer(t, zmq.PUSH, relay.endpoint, func(s *zmq.Socket) error {
		return errors.Join(s.SetHeartbeatIvl(20*time.Millisecond), s.SetHeartbeatTimeout(20*time.Second), s.SetHeartbeatTtl(20*time.Second))
	})
	send(t, s, "before")
	testwait.Until(t, "ten heartbeats are answered", func() bool { return pongs.Load() >= 10 })
	send(t, s, "after")
	testwait.Until(t, "both messages", func() bool { return got.String() == "before,after" })
	if n := relay.conns.Load(); n != 1 || p.Stats().PeerErrors != 0 {
		t.Errorf("%d connections, %+v", n, p.Stats())
	}
}

// A connection that breaks is made again by the peer, and messages come as before.
func TestReconnectOfLibzmq(t *testing.T) {
	var got messageRecorder
	p := listen(t, Options{Message: got.take})
	relay := newFlakyProxy(t, p, func([]byte) {})
	s := peer(t, zmq.PUSH, relay.endpoint)
	for i := range 3 {
		mark := fmt.Sprintf("<%d>", i)
		// Messages sent while the connection broke may be lost with it, so they are sent again.
		testwait.Until(t, "a message over connection "+mark, func() bool {
			send(t, s, mark)
			testwait.Pace(5 * time.Millisecond)
			return strings.Contains(got.String(), mark) && relay.conns.Load() > int64(i)
		})
		relay.closeAll()
	}
}

// Peers that do not belong here are recognised, and lose their connections.
func TestOtherSocketsOfLibzmq(t *testing.T) {
	for _, kind := range []zmq.Type{zmq.PUB, zmq.DEALER, zmq.PULL} {
		p := listen(t, Options{})
		peer(t, kind, p.Endpoint())
		testwait.Until(t, kind.String()+" is refused", func() bool { return p.Stats().PeerErrors > 0 })
	}
}

// flakyProxy stands between a peer and a Pull.
type flakyProxy struct {
	endpoint string
	conns    atomic.Int64
	mu       sync.Mutex
	open     []net.Conn
}

// newFlakyProxy begins one; back is shown what goes back to the peer.
func newFlakyProxy(t *testing.T, p *Pull, back func([]byte)) *flakyProxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &flakyProxy{endpoint: "tcp://" + l.Addr().String()}
	t.Cleanup(func() { l.Close(); r.closeAll() })
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", strings.TrimPrefix(p.Endpoint(), "tcp://"))
			if err != nil {
				a.Close()
				continue
			}
			r.mu.Lock()
			r.open = append(r.open, a, b)
			r.mu.Unlock()
			r.conns.Add(1)
			go func() { io.Copy(b, a); b.Close() }()
			go func() { io.Copy(io.MultiWriter(a, testLogWriter(back)), b); a.Close() }()
		}
	}()
	return r
}

func (r *flakyProxy) closeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.open {
		c.Close()
	}
	r.open = nil
}

type testLogWriter func([]byte)

func (f testLogWriter) Write(b []byte) (int, error) { f(b); return len(b), nil }
