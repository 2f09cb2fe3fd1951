package relay

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/eventloop"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// long bounds what must happen; tests never wait that long unless they fail.
const long = 20 * time.Second

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

// engine is a server that runs script on every connection once the request's
// head has come.
func engine(t testing.TB, script func(nc *net.TCPConn)) *upstream.Endpoint {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer nc.Close()
				var seen []byte
				buf := make([]byte, 4096)
				for !bytes.Contains(seen, []byte("\r\n\r\n")) {
					n, err := nc.Read(buf)
					if err != nil {
						return
					}
					seen = append(seen, buf[:n]...)
				}
				script(nc.(*net.TCPConn))
			}()
		}
	}()
	e, err := upstream.NewEndpoint("http://"+ln.Addr().String(), upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close(); ln.Close(); wg.Wait() })
	return e
}

func send(nc net.Conn, s string) { _, _ = io.WriteString(nc, s) }

// waitClosed waits until the router has closed the connection.
func waitClosed(nc net.Conn) { _, _ = io.Copy(io.Discard, nc) }

func open(t testing.TB, e *upstream.Endpoint, call *upstream.Call) *upstream.Response {
	t.Helper()
	resp, err := e.Do(&upstream.Request{Method: "GET", Path: "/", Deadline: time.Now().Add(long)}, call)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// noHooks implements the methods of a ClientConn that tests rarely need.
type noHooks struct{}

func (noHooks) DetectsStalls() bool                     { return false }
func (noHooks) Reframes() bool                          { return false }
func (noHooks) ClientGone() bool                        { return false }
func (noHooks) FirstToken()                             {}
func (noHooks) ResponseID(string)                       {}
func (noHooks) Done(Usage, bool)                        {}
func (noHooks) BeforeEnd()                              {}
func (noHooks) LoopOutput() (int, eventloop.Sink, bool) { return 0, nil, false }
func (noHooks) Resume(func() (Result, bool))            { panic("a stream without loops was resumed") }

// tcpConn is a client behind a real connection.
type tcpConn struct {
	noHooks
	*net.TCPConn
}

// recordingConn is a client that takes everything.
type recordingConn struct {
	noHooks
	mu        sync.Mutex
	got       []byte
	writes    int
	largest   int
	deadlines []time.Time
	onWrite   func(s *recordingConn) // called after each write, unlocked
	token     func()                 // called at the first token
}

func (s *recordingConn) FirstToken() {
	if s.token != nil {
		s.token()
	}
}

func (s *recordingConn) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.got = append(s.got, p...)
	s.writes++
	s.largest = max(s.largest, len(p))
	s.mu.Unlock()
	if s.onWrite != nil {
		s.onWrite(s)
	}
	return len(p), nil
}

func (s *recordingConn) SetWriteDeadline(t time.Time) error {
	s.deadlines = append(s.deadlines, t)
	return nil
}

func (s *recordingConn) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got)
}

// relayOnce streams one response of an engine that runs script.
func relayOnce(t testing.TB, opt Options, script func(nc *net.TCPConn)) (Result, *recordingConn, *upstream.Endpoint) {
	t.Helper()
	e := engine(t, script)
	resp := open(t, e, nil)
	dst := new(recordingConn)
	res := Stream(dst, resp, opt)
	resp.Release()
	if res.Bytes != int64(len(dst.got)) {
		t.Errorf("Bytes %d, written %d", res.Bytes, len(dst.got))
	}
	if (res.Cause == Completed) != (res.Err == nil) {
		t.Errorf("cause %v with error %v", res.Cause, res.Err)
	}
	if n := len(dst.deadlines); n > 0 && !dst.deadlines[n-1].IsZero() {
		t.Error("the client's connection keeps a write deadline")
	}
	return res, dst, e
}

// framed is a capture's body with the chunk framing it came in, or with one
// chunk an event.
func framed(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, body, ok := strings.Cut(string(b), "\r\n\r\n"); ok && strings.HasSuffix(name, ".http") {
		return body
	}
	return chunksOf(strings.SplitAfter(string(b), "\n\n")...) + sse.LastChunk
}

func chunksOf(payloads ...string) string {
	var out strings.Builder
	for _, p := range payloads {
		if p != "" {
			fmt.Fprintf(&out, "%x\r\n%s\r\n", len(p), p)
		}
	}
	return out.String()
}

// noLeaks fails t when goroutines outlive it. Call it first.
func noLeaks(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		testwait.Until(t, "no goroutine left", func() bool { return runtime.NumGoroutine() <= before })
	})
}

// tcpPair is a real connection: the router's side and the client's.
func tcpPair(t testing.TB) (router, client *net.TCPConn) {
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
	r, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); r.Close() })
	return r.(*net.TCPConn), c.(*net.TCPConn)
}
