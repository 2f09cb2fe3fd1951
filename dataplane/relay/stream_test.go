package relay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// Every capture goes through byte for byte, whole, by event and by byte, and
// the engine's connection is kept.
func TestBytesPassThrough(t *testing.T) {
	for _, c := range captures {
		for _, step := range []int{1 << 20, 100, 1} {
			t.Run(fmt.Sprintf("%s/%d", c.file, step), func(t *testing.T) {
				noLeaks(t)
				body := framed(t, c.file)
				res, dst, e := relayOnce(t, Options{Protocol: c.protocol}, func(nc *net.TCPConn) {
					send(nc, streamHead)
					for rest := body; rest != ""; rest = rest[min(step, len(rest)):] {
						send(nc, rest[:min(step, len(rest))])
					}
					waitClosed(nc)
				})
				if string(dst.got) != body {
					t.Errorf("got %q", dst.got)
				}
				if res.Cause != Completed || !res.Reusable || res.Events != c.want.Events || res.Finish != c.want.Finish ||
					res.Usage != c.want.Usage || res.SawErrorEvent || res.Unscanned != 0 {
					t.Errorf("%+v", res)
				}
				if res.FirstToken.IsZero() || res.FirstByte.After(res.FirstToken) || res.FirstToken.After(res.LastByte) {
					t.Errorf("times %v %v %v", res.FirstByte, res.FirstToken, res.LastByte)
				}
				if s := e.Stats(); s.Idle != 1 {
					t.Errorf("the engine's connection was not kept: %+v", s)
				}
			})
		}
	}
}

// Each event reaches the client before the engine sends the next, in one write.
func TestOneReadOneWrite(t *testing.T) {
	noLeaks(t)
	events := []string{"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n", "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", "data: [DONE]\n\n"}
	delivered := make(chan int, 10)
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead)
		for _, ev := range events {
			send(nc, chunksOf(ev))
			<-delivered
		}
		send(nc, sse.LastChunk)
		waitClosed(nc)
	})
	resp := open(t, e, nil)
	defer resp.Release()
	tokens := 0
	dst := &recordingConn{onWrite: func(s *recordingConn) { delivered <- s.writes }}
	dst.token = func() {
		if tokens++; dst.writes != 1 {
			t.Errorf("first token after %d writes", dst.writes)
		}
	}
	res := Stream(dst, resp, Options{})
	if res.Cause != Completed || dst.writes != 4 || tokens != 1 {
		t.Errorf("%+v, %d writes, %d first tokens", res, dst.writes, tokens)
	}
	if len(dst.deadlines) != 2 {
		t.Errorf("write deadline set %d times in a stream of milliseconds", len(dst.deadlines))
	}
}

func TestSizedAndToClose(t *testing.T) {
	sse := "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n"
	const doneEvent = "data: [DONE]\n\n"
	for name, c := range map[string]struct {
		head, body string
		cause      Cause
		reusable   bool
		added      bool
	}{
		"sized":             {fmt.Sprintf("Content-Type: text/event-stream\r\nContent-Length: %d\r\n", len(sse)), sse, Completed, true, false},
		"sized, empty":      {"Content-Length: 0\r\n", "", Completed, true, false},
		"sized, short":      {fmt.Sprintf("Content-Type: text/event-stream\r\nContent-Length: %d\r\n", len(sse)+1), sse, EngineClosed, false, false},
		"to close, done":    {"Content-Type: text/event-stream\r\n", sse + doneEvent, Completed, true, false},
		"to close, no done": {"Content-Type: text/event-stream\r\n", sse, EngineClosed, true, true},
		"to close, nothing": {"Content-Type: text/event-stream\r\n", "", EngineClosed, true, true},
		"to close, half":    {"Content-Type: text/event-stream\r\n", sse + "data: {", EngineClosed, true, true},
		"to close, JSON":    {"Content-Type: application/json\r\n", `{"a":1}`, Completed, true, false},
		"large":             {"Content-Length: 3000000\r\n", strings.Repeat("abc", 1000000), Completed, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) {
				send(nc, "HTTP/1.1 200 OK\r\n"+c.head+"\r\n"+c.body)
			})
			added, ok := strings.CutPrefix(string(dst.got), strings.TrimSuffix(c.body, "data: {"))
			if !ok || (added != "") != c.added || res.Cause != c.cause || res.Reusable != c.reusable {
				t.Errorf("%+v, added %.200q", res, added)
			}
			if dst.largest > largeRead {
				t.Errorf("a write of %d bytes", dst.largest)
			}
		})
	}
}

// Bytes behind the last chunk are not the client's, nor the next request's.
func TestBytesAfterTheEnd(t *testing.T) {
	body := framed(t, "vllm_chat.http")
	res, dst, e := relayOnce(t, Options{}, func(nc *net.TCPConn) {
		send(nc, streamHead+body+"HTTP/1.1 200 OK\r\n")
		waitClosed(nc)
	})
	if string(dst.got) != body || res.Cause != Completed || !res.Reusable {
		t.Errorf("%+v %q", res, dst.got)
	}
	if s := e.Stats(); s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

func TestClientGone(t *testing.T) {
	noLeaks(t)
	router, client := tcpPair(t)
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead)
		for {
			if _, err := io.WriteString(nc, chunksOf("data: {}\n\n")); err != nil {
				return
			}
		}
	})
	resp := open(t, e, nil)
	go func() {
		buf := make([]byte, 1000)
		_, _ = io.ReadFull(client, buf)
		client.Close()
	}()
	res := Stream(tcpConn{TCPConn: router}, resp, Options{})
	resp.Release()
	if res.Cause != ClientGone || res.Err == nil || res.Reusable || res.Bytes < 1000 {
		t.Errorf("%+v", res)
	}
}

// A client that takes nothing is let go at WriteTimeout, and the engine with it.
func TestClientStalled(t *testing.T) {
	noLeaks(t)
	router, _ := tcpPair(t)
	_ = router.SetWriteBuffer(8 << 10)
	gone := make(chan struct{})
	e := engine(t, func(nc *net.TCPConn) {
		defer close(gone)
		send(nc, streamHead)
		for {
			if _, err := io.WriteString(nc, chunksOf("data: "+strings.Repeat("x", 10000)+"\n\n")); err != nil {
				return
			}
		}
	})
	resp := open(t, e, nil)
	start := time.Now()
	res := Stream(tcpConn{TCPConn: router}, resp, Options{WriteTimeout: 200 * time.Millisecond})
	resp.Release()
	<-gone
	if res.Cause != ClientStalled || res.Reusable || !errors.Is(res.Err, os.ErrDeadlineExceeded) || time.Since(start) < 100*time.Millisecond {
		t.Errorf("%+v", res)
	}
}

// The engine is not read faster than the client takes.
func TestBackPressure(t *testing.T) {
	noLeaks(t)
	router, client := tcpPair(t)
	const total = 32 << 20 // several times what the kernel keeps for two connections
	var sent atomic.Int64
	stopped := make(chan struct{})
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", total))
		piece := make([]byte, 16<<10)
		for sent.Load() < total {
			_ = nc.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			n, err := nc.Write(piece)
			sent.Add(int64(n))
			if err != nil { // nothing moves any more
				close(stopped)
				_ = nc.SetWriteDeadline(time.Time{})
				if _, err := nc.Write(piece[n:]); err != nil {
					return
				}
				sent.Add(int64(len(piece) - n))
				break
			}
		}
		for sent.Load() < total {
			n, err := nc.Write(piece)
			if err != nil {
				return
			}
			sent.Add(int64(n))
		}
		waitClosed(nc)
	})
	resp := open(t, e, nil)
	done := make(chan Result, 1)
	go func() {
		done <- Stream(tcpConn{TCPConn: router}, resp, Options{})
		router.Close() // a failure must not leave the client waiting
	}()
	<-stopped
	if n := sent.Load(); n > total/2 {
		t.Errorf("%d bytes taken from the engine while the client took none", n)
	}
	if n, err := io.Copy(io.Discard, io.LimitReader(client, total)); n != total || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	res := <-done
	resp.Release()
	if res.Cause != Completed || res.Bytes != total {
		t.Errorf("%+v", res)
	}
}

func TestCancelMidStream(t *testing.T) {
	noLeaks(t)
	gone := make(chan struct{})
	const sent = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead+chunksOf(sent))
		waitClosed(nc)
		close(gone)
	})
	var call upstream.Call
	resp := open(t, e, &call)
	dst := &recordingConn{onWrite: func(*recordingConn) { go call.Cancel() }}
	res := Stream(dst, resp, Options{})
	resp.Release()
	<-gone
	// A client that is still connected gets an error event; one that left does not.
	want := chunksOf(sent) + chunksOf(string(failures[Cancelled].AppendEvent(nil, sse.OpenAI, 1))) + sse.LastChunk
	if res.Cause != Cancelled || !errors.Is(res.Err, upstream.ErrCancelled) || !res.Reusable || string(dst.got) != want {
		t.Errorf("%+v %q", res, dst.got)
	}
}

func TestEngineStalled(t *testing.T) {
	for name, c := range map[string]struct {
		sent     string
		reusable bool
	}{
		"between events": {chunksOf("data: {}\n\n"), true},
		"in an event":    {chunksOf("data: {}\n"), true},
		"in a chunk":     {"ff\r\ndata: {}\n\n", true},
		"in a long one":  {"fffff\r\ndata: {}\n\n", false},
		"at once":        {"", true},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			res, dst, e := relayOnce(t, Options{IdleTimeout: 50 * time.Millisecond}, func(nc *net.TCPConn) {
				send(nc, streamHead+c.sent)
				waitClosed(nc)
			})
			if res.Cause != EngineStalled || res.Reusable != c.reusable || !errors.Is(res.Err, upstream.ErrTimeout) {
				t.Errorf("%+v", res)
			}
			added, _ := strings.CutPrefix(string(dst.got), c.sent)
			if c.reusable != strings.Contains(added, `"code":504}}`) || c.reusable != strings.HasSuffix(added, sse.LastChunk) {
				t.Errorf("added %q", added)
			}
			if s := e.Stats(); s.Open != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A leg whose time is over is not called silent, were it speaking to the last.
func TestLegDeadline(t *testing.T) {
	noLeaks(t)
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead)
		for err := error(nil); err == nil; testwait.Pace(5 * time.Millisecond) {
			_, err = io.WriteString(nc, chunksOf("data: {}\n\n"))
		}
	})
	resp := open(t, e, nil)
	resp.SetDeadline(time.Now().Add(60 * time.Millisecond))
	dst := &recordingConn{}
	res := Stream(dst, resp, Options{IdleTimeout: time.Minute})
	resp.Release()
	if res.Cause != Deadline || !errors.Is(res.Err, upstream.ErrTimeout) || !strings.Contains(string(dst.got), failures[Deadline].Message) {
		t.Errorf("%+v %q", res, dst.got)
	}
}

// The time a slow client takes is not the engine's silence.
func TestSlowClientIsNoEngineStall(t *testing.T) {
	noLeaks(t)
	body := framed(t, "vllm_chat.http")
	const idle = 400 * time.Millisecond
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, streamHead)
		for rest := body; rest != ""; rest = rest[min(600, len(rest)):] {
			send(nc, rest[:min(600, len(rest))])
		}
		waitClosed(nc)
	})
	resp := open(t, e, nil)
	dst := &recordingConn{}
	dst.onWrite = func(s *recordingConn) {
		if s.writes == 1 {
			testwait.Pace(idle + 50*time.Millisecond) // the client's slowness itself
		}
	}
	res := Stream(dst, resp, Options{IdleTimeout: idle})
	resp.Release()
	if res.Cause != Completed || string(dst.got) != body {
		t.Errorf("%+v", res)
	}
}

func TestReadBufferFollowsRate(t *testing.T) {
	noLeaks(t)
	delivered := make(chan struct{}, 1000)
	e := engine(t, func(nc *net.TCPConn) {
		send(nc, "HTTP/1.1 200 OK\r\nContent-Length: 1048676\r\n\r\n"+strings.Repeat("x", 1<<20))
		testwait.Until(t, "all delivered", func() bool {
			n := len(delivered)
			return n > 0
		})
		for range 100 {
			send(nc, "y")
			<-delivered
		}
		waitClosed(nc)
	})
	resp := open(t, e, nil)
	dst := &recordingConn{}
	dst.onWrite = func(s *recordingConn) {
		if n := s.len(); n >= 1<<20 {
			delivered <- struct{}{}
		}
	}
	res := Stream(dst, resp, Options{Protocol: sse.Opaque})
	resp.Release()
	if res.Cause != Completed || dst.largest <= smallRead || dst.largest > largeRead {
		t.Errorf("%+v, largest write %d", res, dst.largest)
	}
}
