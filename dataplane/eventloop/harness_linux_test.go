package eventloop

import (
	"bytes"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testTimeout is for what must happen; tests never wait that long when it does.
const testTimeout = 20 * time.Second

func begin(t testing.TB, threads int) *Loops {
	t.Helper()
	s, err := Start(Options{Loops: threads, Tick: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// pair is a TCP connection: near is the loop's end, with its descriptor.
func pair(t testing.TB) (near int, far *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	other, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { near, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	t.Cleanup(func() { _ = unix.Close(near); _ = other.Close() })
	return near, other.(*net.TCPConn)
}

// echo is a Handler that passes on what comes; a byte '$' is the end, '!' a panic.
type echo struct {
	mu       sync.Mutex
	received int
	repeat   atomic.Int32 // passed on so many times; 0: once
	ends     chan End
}

func (e *echo) Process(p []byte, _ time.Time) (out []byte, done bool) {
	e.mu.Lock()
	e.received += len(p)
	e.mu.Unlock()
	for i, b := range p {
		switch b {
		case '$':
			return p[:i+1], true
		case '!':
			panic("a Handler's")
		}
	}
	if n := e.repeat.Load(); n > 1 {
		return bytes.Repeat(p, int(n)), false
	}
	return p, false
}

func (e *echo) Ended(end End) { e.ends <- end }

func (e *echo) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.received
}

// stream is a Task in progress with both of its far ends.
type stream struct {
	t      testing.TB
	task   *Task
	h      *echo
	engine *net.TCPConn
	client *net.TCPConn
}

func open(t testing.TB, s *Loops, change func(*Task)) *stream {
	t.Helper()
	st := prepare(t)
	if change != nil {
		change(st.task)
	}
	s.Attach(st.task)
	return st
}

// prepare is open without a loop.
func prepare(t testing.TB) *stream {
	t.Helper()
	st := &stream{t: t, h: &echo{ends: make(chan End, 1)}}
	st.task = &Task{Handler: st.h, WriteTimeout: time.Minute}
	st.task.In, st.engine = pair(t)
	st.task.Out, st.client = pair(t)
	return st
}

func (st *stream) send(text string) {
	st.t.Helper()
	if _, err := io.WriteString(st.engine, text); err != nil {
		st.t.Fatal(err)
	}
}

func (st *stream) expectReceived(text string) {
	st.t.Helper()
	got := make([]byte, len(text))
	_ = st.client.SetReadDeadline(time.Now().Add(testTimeout))
	if n, err := io.ReadFull(st.client, got); err != nil || string(got) != text {
		st.t.Fatalf("the client got %q (%v), want %q", got[:n], err, text)
	}
}

func (st *stream) expectEnd(why Reason) End {
	st.t.Helper()
	select {
	case e := <-st.h.ends:
		if e.Reason != why {
			st.t.Fatalf("left by %d (%v), want %d", e.Reason, e.Err, why)
		}
		return e
	case <-time.After(testTimeout):
		st.t.Fatal("not left")
	}
	return End{}
}

func (st *stream) expectOpen() {
	st.t.Helper()
	select {
	case e := <-st.h.ends:
		st.t.Fatalf("left by %d (%v)", e.Reason, e.Err)
	default:
	}
}
