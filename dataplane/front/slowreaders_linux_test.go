package front

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/relay"
)

const unframedStreamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

// delivery is a way in which a stream's bytes reach the client.
type delivery struct {
	name    string
	opt     Options
	request string
	head    string              // the engine's
	frame   func(string) string // and its framing
}

// deliveries are all deliveries.
func deliveries(t *testing.T) []delivery {
	lent := httptest.NewUnstartedServer(nil)
	lent.StartTLS() // has a certificate
	t.Cleanup(lent.Close)
	secure := &tls.Config{Certificates: lent.TLS.Certificates, MinVersion: tls.VersionTLS12}
	same := func(s string) string { return s }
	coded := chatPost(streamDoc, "Accept-Encoding: gzip")
	old := strings.Replace(chatPost(streamDoc), "HTTP/1.1", "HTTP/1.0", 1)
	return []delivery{
		{"loop", Options{RelayMode: RelayLoop}, chatPost(streamDoc), streamHead, chunk},
		{"goroutine", Options{RelayMode: RelayGoroutine}, chatPost(streamDoc), streamHead, chunk},
		{"TLS", Options{TLS: secure}, chatPost(streamDoc), streamHead, chunk},
		{"gzip", Options{CompressStreams: true}, coded, streamHead, chunk},
		{"gzip over TLS", Options{CompressStreams: true, TLS: secure}, coded, streamHead, chunk},
		{"HTTP/1.0", Options{}, old, streamHead, chunk},
		{"unframed engine", Options{}, chatPost(streamDoc), unframedStreamHead, same},
		{"unframed engine, HTTP/1.0", Options{}, old, unframedStreamHead, same},
	}
}

// connect opens a connection with a small receive buffer. The size must be set before the kernel
// announces its window.
func (w *delivery) connect(r *testServer) *client {
	r.t.Helper()
	small := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 16<<10) })
	}}
	nc, err := small.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(testTimeout))
	c := newClient(r.t, nc)
	if w.opt.TLS != nil {
		c = dialTLS(c)
	}
	return c
}

// setReceiveBuffer sets a larger receive buffer for the client.
func (w *delivery) setReceiveBuffer(c *client) {
	nc := c.Conn
	if secure, ok := nc.(*tls.Conn); ok {
		nc = secure.NetConn()
	}
	_ = nc.(*net.TCPConn).SetReadBuffer(1 << 20)
}

// noise is an event of 32 KiB that hardly compresses.
func noise() string {
	data := make([]byte, 24<<10)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	return `data: {"x":"` + base64.StdEncoding.EncodeToString(data) + "\"}\n\n"
}

// flood is an engine that sends endlessly. sent counts its bytes.
func (w *delivery) flood(t *testing.T, sent *atomic.Int64) *engine {
	event := w.frame(noise())
	return startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, w.head)
		for {
			n, err := io.WriteString(nc, event)
			if sent.Add(int64(n)); err != nil {
				return false
			}
		}
	})
}

// trickle is an engine that sends small events endlessly, a thousand a second.
func (w *delivery) trickle(t *testing.T) *engine {
	var events []string // more than the window of a coding
	for range 4 {
		for all := noise(); len(all) > 1000; all = all[1000:] {
			events = append(events, w.frame(`data: {"x":"`+all[12:1000]+"\"}\n\n"))
		}
	}
	return startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := io.WriteString(nc, w.head)
		for i := 0; err == nil; i++ {
			testwait.Pace(time.Millisecond)
			_, err = io.WriteString(nc, events[i%len(events)])
		}
		return false
	})
}

// For a client that does not read, the kernel buffers at most what docs/relay.md states, and the
// router stops reading from the engine, in every delivery.
func TestStalledClientsUseBoundedMemory(t *testing.T) {
	for _, w := range deliveries(t) {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			var sent atomic.Int64
			r := start(t, w.opt, relayTo(w.flood(t, &sent), func() RelayHooks { return RelayHooks{} }))
			c := w.connect(r)
			c.send(w.request)
			held := func() (n int) {
				for _, of := range r.server.conns.snapshot() {
					_ = of.raw.Control(func(fd uintptr) { n = rawsocket.Unsent(int(fd)) })
				}
				return n
			}
			was, since := int64(0), time.Now()
			testwait.Until(t, "the end of reading", func() bool {
				if now := sent.Load(); now != was || was == 0 {
					was, since = now, time.Now()
				}
				return time.Since(since) > 300*time.Millisecond
			})
			t.Logf("the kernel holds %d KiB", held()>>10)
			if n := held(); n == 0 || n > 256<<10 {
				t.Errorf("the kernel holds %d bytes for the client, want at most 256 KiB", n)
			}
		})
	}
}

// A client that stops reading is cut after WriteTimeout as stalled, in every delivery.
func TestStalledClientsAreDisconnected(t *testing.T) {
	limit, most := 2*time.Second, testTimeout/2 // a busy machine may be later
	if os.Getenv("SLUICE_SOAK") != "" {
		limit, most = 30*time.Second, 32*time.Second
	}
	cut := func(w delivery, e *engine) func(t *testing.T) {
		return func(t *testing.T) {
			t.Parallel()
			ends := make(chan relay.Result, 1)
			w.opt.WriteTimeout = limit
			r := start(t, w.opt, relayTo(e, endHook(ends)))
			c := w.connect(r)
			began := time.Now()
			c.send(w.request)
			res := wantEndIn(t, ends, relay.ClientStalled, limit+testTimeout)
			took := time.Since(began)
			t.Logf("cut after %v", took)
			if took < limit || took > most {
				t.Errorf("cut after %v, want %v", took, limit)
			}
			if !errors.Is(res.Err, os.ErrDeadlineExceeded) || res.Reusable {
				t.Errorf("%+v", res)
			}
		}
	}
	for _, w := range deliveries(t) {
		t.Run(w.name, cut(w, w.flood(t, new(atomic.Int64))))
		t.Run(w.name+", small events", cut(w, w.trickle(t)))
	}
}

// A client that reads about 20 KB a second is not cut, although its socket accepts no new bytes for
// longer than WriteTimeout. It gets the stream without lost or repeated bytes.
func TestSlowClientsGetAll(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("several times the timeout long")
	}
	const limit = 3 * time.Second // a client's kernel announces a window only when it is large
	var all sync.WaitGroup        // all run at once, whatever -parallel is
	for _, w := range deliveries(t) {
		run := func(t *testing.T) {
			text, body := "", ""
			for range 12 {
				event := noise()
				text += event
				body += w.frame(event)
			}
			text += "data: [DONE]\n\n"
			body += w.frame("data: [DONE]\n\n")
			if w.head == streamHead {
				body += lastChunk
			}
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, w.head+body)
				return false
			})
			ends := make(chan relay.Result, 1)
			w.opt.WriteTimeout = limit
			r := start(t, w.opt, relayTo(e, endHook(ends)))
			c := w.connect(r)
			c.send(strings.Replace(w.request, "\r\n", "\r\nConnection: close\r\n", 1))
			got, piece := []byte(nil), make([]byte, 4<<10)
			for began := time.Now(); time.Since(began) < 4*limit; testwait.Pace(200 * time.Millisecond) {
				if _, err := io.ReadFull(c, piece); err != nil {
					t.Fatalf("cut after %v: %v", time.Since(began), err)
				}
				got = append(got, piece...)
			}
			w.setReceiveBuffer(c)
			rest, err := io.ReadAll(c)
			if err != nil {
				t.Fatal(err)
			}
			wantEnd(t, ends, relay.Completed)
			resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(append(got, rest...))), nil)
			if err != nil {
				t.Fatal(err)
			}
			var plain io.Reader = resp.Body
			if resp.Header.Get("Content-Encoding") == "gzip" {
				if plain, err = gzip.NewReader(resp.Body); err != nil {
					t.Fatal(err)
				}
			}
			if answer, err := io.ReadAll(plain); err != nil || string(answer) != text {
				t.Errorf("%d bytes (%v), want %d", len(answer), err, len(text))
			}
		}
		all.Go(func() { t.Run(w.name, run) })
	}
	all.Wait()
}

// Comments get the same framing and compression as a stream's events.
func TestCommentsInEveryDelivery(t *testing.T) {
	for _, w := range deliveries(t) {
		t.Run(w.name, func(t *testing.T) {
			first := make(chan struct{})
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, _ = io.WriteString(nc, w.head)
				select {
				case <-first:
				case <-time.After(2 * time.Second): // no comments come
				}
				_, _ = io.WriteString(nc, w.frame(helloStream)+w.frame("data: [DONE]\n\n"))
				if w.head == streamHead {
					_, _ = io.WriteString(nc, lastChunk)
				}
				return false
			})
			ends := make(chan relay.Result, 1)
			w.opt.KeepAlive = 2 * time.Millisecond
			r := start(t, w.opt, relayTo(e, endHook(ends)))
			c := w.connect(r)
			c.send(w.request)
			resp := c.head()
			if resp.Header.Get("Content-Encoding") == "gzip" {
				plain, err := gzip.NewReader(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body = io.NopCloser(plain)
			}
			c.comments(resp, 4)
			close(first)
			if got := c.rest(resp); got != helloStream+"data: [DONE]\n\n" {
				t.Errorf("body %q", got)
			}
			wantEnd(t, ends, relay.Completed)
		})
	}
}
