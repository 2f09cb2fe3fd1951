package front

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/membudget"
)

// Extensions and trailers of a chunked body cannot exceed limits.max_body.
func TestFramingIsBounded(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		ext := strings.Repeat("a", 4000)
		const extension = "a chunk's extension must not be larger than 256 bytes"
		for name, c := range map[string]struct{ begin, again, says string }{
			"one extension":     {"5;", ext, extension},
			"one chunk first":   {"2\r\n{}\r\n1;", ext, extension},
			"in the last chunk": {"2\r\n{}\r\n0;", ext, extension},
			"in every chunk":    {"", "1;" + ext[:250] + "\r\n \r\n", "the framing of its chunks"},
			"trailers":          {"2\r\n{}\r\n0\r\n", "A: " + ext + "\r\n", "its trailers are larger than 16384 bytes"},
			"one trailer":       {"2\r\n{}\r\n0\r\nA: ", ext, "its trailers are larger than 16384 bytes"},
			"a trailer's name":  {"2\r\n{}\r\n0\r\n", ext, "its trailers are larger than 16384 bytes"},
		} {
			r := start(t, opt, echo)
			cl := dial(r)
			var sent int
			var wg sync.WaitGroup
			wg.Go(func() {
				n, err := io.WriteString(cl, chunkedHead+c.begin)
				for sent += n; err == nil && sent < 64<<20; sent += n {
					n, err = io.WriteString(cl, c.again)
				}
			})
			resp, body := cl.readResponse()
			reason := resp.Header.Get("X-Sluice-Reason")
			if resp.StatusCode != 400 || !resp.Close || reason != string(BadHTTP) || !strings.Contains(body, c.says) {
				t.Errorf("%s: %d %s", name, resp.StatusCode, body)
			}
			_ = cl.Close()
			if wg.Wait(); sent > 16<<20 {
				t.Errorf("%s: %d bytes were read", name, sent)
			}
			if r.calls.Load() != 0 {
				t.Errorf("%s: the handler was called", name)
			}
		}
	})
}

// Chunks of the smallest sizes, and extensions that some clients write, are accepted.
func TestSmallChunksAreRead(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		r := start(t, opt, echo)
		body := doc(100_000)
		for name, one := range map[string]string{"bytes": "1\r\n%\r\n", "with an extension": "1;a\r\n%\r\n"} {
			var b strings.Builder
			b.WriteString(chunkedHead)
			for i := range len(body) {
				b.WriteString(strings.Replace(one, "%", body[i:i+1], 1))
			}
			b.WriteString("0\r\n\r\n")
			c := dial(r)
			go func() { _, _ = io.WriteString(c, b.String()) }()
			if resp, got := c.readResponse(); resp.StatusCode != 200 || got != body {
				t.Errorf("%s: %d, %d bytes of %d", name, resp.StatusCode, len(got), len(body))
			}
		}
	})
}

// chunkBody is a chunked request whose body comes in chunks of size.
func chunkBody(body string, size int, fields ...string) string {
	var b strings.Builder
	b.WriteString(atHost)
	for _, f := range fields {
		b.WriteString(f + "\r\n")
	}
	b.WriteString("Transfer-Encoding: chunked\r\n\r\n")
	for len(body) > 0 {
		n := min(size, len(body))
		b.WriteString(chunk(body[:n]))
		body = body[n:]
	}
	return b.String() + "0\r\n\r\n"
}

// A connection serves chunked requests and others in turn, however their bytes are split. A
// chunked body that is refused for its content is discarded like one with Content-Length.
func TestChunkedKeepsItsConnection(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		r := start(t, opt, echo)
		c := dial(r)
		served := 0
		answered := func(raw string, status int, want string) {
			t.Helper()
			resp, got := c.readResponse()
			if served++; resp.StatusCode != status || resp.Close || status == 200 && got != want {
				t.Fatalf("request %d, %.80q: %d %v, %d bytes %.80q", served, raw, resp.StatusCode, resp.Header, len(got), got)
			}
		}
		for _, size := range []int{1, 7, 100, 4 << 10, 16 << 10, 1 << 20} {
			for _, n := range []int{13, 1000, initialBodyBuf - 1, initialBodyBuf, initialBodyBuf + 1, 20_000, 300_000} {
				if n/size > 100_000 {
					continue
				}
				body := doc(n)
				raw := chunkBody(body, size)
				go func() { _, _ = io.WriteString(c, raw) }()
				answered(raw, 200, body)
			}
			c.send(chatPost(hello))
			answered(chatPost(hello), 200, hello)
		}
		raw := chunkBody(hello, 5)
		for cut := range len(raw) {
			c.send(raw[:cut])
			testwait.Pace(100 * time.Microsecond)
			c.send(raw[cut:])
			answered(raw, 200, hello)
		}
		for _, k := range []struct {
			raw    string
			status int
		}{
			{chunkBody(hello, 5, "Content-Type: text/plain"), 415},
			{chunkBody(hello, 5, "Content-Encoding: br"), 415},
			{chunkBody(hello, 5, "Content-Encoding: gzip"), 400},
			{chunkBody("{", 5), 400},
			{chunkBody("", 5), 400},
			{strings.Replace(chunkBody(hello, 5), chat, "/nothing", 1), 404},
			{strings.Replace(chunkBody(hello, 5), "POST", "PUT", 1), 405},
		} {
			c.send(k.raw)
			answered(k.raw, k.status, "")
		}
		c.send(strings.Replace(chunkBody(hello, 5), "POST "+chat, "GET /livez", 1))
		answered("a page", 200, "ok\n")
		var coded bytes.Buffer
		coder := gzip.NewWriter(&coded)
		_, _ = io.WriteString(coder, hello)
		_ = coder.Close()
		c.send(chunkBody(coded.String(), 5, "Content-Encoding: gzip"))
		answered("gzip", 200, hello)
		head, rest, _ := strings.Cut(chunkBody(hello, 5, "Expect: 100-continue"), "\r\n\r\n")
		c.send(head + "\r\n\r\n")
		if resp, err := http.ReadResponse(c.br, nil); err != nil || resp.StatusCode != 100 {
			t.Fatal(resp, err)
		}
		c.send(rest)
		answered("an expectation", 200, hello)
		c.expectServes()
	})
}

// gatheredConn sends what is written to it at once, before the next read. A TLS client otherwise makes a
// write for each record, and the server may have read the first one long before the last one is sent.
type gatheredConn struct {
	net.Conn
	unsent []byte
}

func (c *gatheredConn) Write(p []byte) (int, error) {
	c.unsent = append(c.unsent, p...)
	return len(p), nil
}

func (c *gatheredConn) Read(p []byte) (int, error) {
	if unsent := c.unsent; len(unsent) > 0 {
		c.unsent = nil
		if _, err := c.Conn.Write(unsent); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(p)
}

// A chunked body that exceeds the limit by little is discarded after its refusal, like one with
// Content-Length. The server waits only briefly for its rest, which therefore comes with its beginning.
func TestChunkedOverTheLimitIsDiscarded(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, _ func(*testServer) *client) {
		opt.MaxBodyBytes, opt.drainTime = 50_000, testTimeout
		r := start(t, opt, echo)
		c := r.dial()
		c = newClient(t, &gatheredConn{Conn: c.Conn})
		if opt.TLS != nil {
			c = dialTLS(c)
		}
		for _, raw := range []string{chunkBody(doc(60_000), 60_000), chunkBody(doc(60_000), 20_000), chatPost(doc(60_000))} {
			c.send(raw)
			if resp, body := c.readResponse(); resp.StatusCode != 413 || resp.Close {
				t.Fatalf("%.150q: %d %v %s", raw, resp.StatusCode, resp.Header, body)
			}
		}
		c.expectServes()
	})
}

// Small chunks are read from the connection many at a time.
func TestSmallChunksUseFewReads(t *testing.T) {
	s := pathServer(t)
	ours, theirs := socketPair(t)
	defer theirs.Close()
	body := doc(10_000)
	raw, stays := chunkBody(body, 1), 0
	if _, err := io.WriteString(theirs, raw); err != nil {
		t.Fatal(err)
	}
	if err := theirs.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c := s.admit(ours, remoteIP(ours))
	c.acquireState()
	inner := c.io.step
	c.io.step = func(fd uintptr) bool { stays++; return inner(fd) }
	s.serveConn(c)
	if got, _ := io.ReadAll(theirs); !strings.HasSuffix(string(got), body) {
		t.Errorf("%.300q", got)
	}
	if most := 5 + len(raw)/(readAheadSize-len(chunkedHead)); stays > most {
		t.Errorf("%d bytes in chunks of one took %d calls, want %d at most", len(raw), stays, most)
	}
}

// A chunked request gets a stream, and the connection then serves another request.
func TestChunkedKeepsItsConnectionAfterStream(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		withBothRelayModes(t, func(t *testing.T, by RelayMode) {
			e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
				_, err := io.WriteString(nc, streamHead+chunk(helloStream)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
				return err == nil
			})
			opt := opt
			opt.RelayMode = by
			r := start(t, opt, relayTo(e, func() RelayHooks { return RelayHooks{} }))
			c := dial(r)
			for range 3 {
				c.send(chunkBody(hello, 4))
				if resp, got := c.readResponse(); resp.StatusCode != 200 || resp.Close || got != helloStream+"data: [DONE]\n\n" {
					t.Fatalf("%d %v %q", resp.StatusCode, resp.Header, got)
				}
			}
			c.send(chunkBody(hello, 4) + chatPost(probeBody, "X-Request-Id: second"))
			if resp, got := c.readResponse(); resp.StatusCode != 200 || got != helloStream+"data: [DONE]\n\n" {
				t.Fatalf("%d %v %q", resp.StatusCode, resp.Header, got)
			}
			c.expectPipelinedRefusal("")
		})
	})
}

// A chunk that exceeds the limit is refused as soon as its size has arrived. A size alone costs
// no memory.
func TestChunkedIsRefusedBeforeBody(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		opt.MaxBodyBytes = 4 << 20
		r := start(t, opt, echo)
		for _, raw := range []string{"400001\r\n", "fffffffffffffff\r\n", "5\r\nhello\r\n3ffffc\r\n"} {
			c := dial(r)
			c.send(chunkedHead + raw)
			resp, body := c.readResponse()
			if resp.StatusCode != 413 || !resp.Close || resp.Header.Get("X-Sluice-Reason") != string(BodyTooLarge) {
				t.Errorf("%q: %d %v %s", raw, resp.StatusCode, resp.Header, body)
			}
			contains(t, body, "larger than 4194304 bytes")
			c.expectClosed()
		}
		for range 20 {
			dial(r).send(chunkedHead + "400000\r\n" + doc(9<<10))
		}
		testwait.Until(t, "bodies begun", func() bool { return r.server.budget.Used() >= 20*initialBodyBuf })
		testwait.Settled(t, 20*time.Millisecond, "the memory of the bodies", r.server.budget.Used)
		if used := r.server.budget.Peak(); used > 21*int64(membudget.SizeOf(initialBodyBuf)) {
			t.Errorf("20 stalled bodies of 4 MiB take %d bytes", used)
		}
		if r.calls.Load() != 0 {
			t.Error("the handler was called")
		}
	})
}

// A chunked body has the time limits of one with Content-Length: each read may take
// BodyIdleTimeout, a slow body ends at BodyTimeout, and a body that is fast enough may take
// longer.
func TestChunkedBodyTimeouts(t *testing.T) {
	t.Parallel()
	const step = 20 * time.Millisecond
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		opt.BodyIdleTimeout, opt.BodyTimeout = 20*step, 100*step
		r := start(t, opt, echo)
		stalls := watchStalls(t, opt.BodyIdleTimeout/4)
		// on runs test in parallel with the others, because they mostly wait. A test fails only in a time
		// in which this process ran: a client that is held up is not as fast as the one that is meant.
		var tests sync.WaitGroup
		on := func(name string, test func(c *client, errorf func(format string, args ...any))) {
			tests.Go(func() {
				for try := 1; ; try++ {
					c, began := dial(r), time.Now()
					if over, ok := c.Conn.(*tls.Conn); ok {
						if err := over.Handshake(); err != nil {
							t.Errorf("%s: %v", name, err)
							return
						}
					}
					var failures []string
					test(c, func(format string, args ...any) { failures = append(failures, fmt.Sprintf(name+": "+format, args...)) })
					if len(failures) > 0 && try < 10 && stalls.since(began) {
						_ = c.Close()
						continue
					}
					for _, f := range failures {
						t.Error(f)
					}
					return
				}
			})
		}
		on("steady", func(c *client, errorf func(format string, args ...any)) {
			for i, raw := 0, chunkBody(hello, 1); i < len(raw); {
				n := min(len(raw)-i, 1+i/3)
				c.send(raw[i : i+n])
				testwait.Pace(2 * step)
				i += n
			}
			if resp, got := c.readResponse(); resp.StatusCode != 200 || got != hello {
				errorf("%d %s", resp.StatusCode, got)
			}
		})
		// 1200 KiB may take 4.7 s more, a second for a quarter of a MiB.
		on("long", func(c *client, errorf func(format string, args ...any)) {
			body, began := doc(1200<<10), time.Now()
			raw := chunkBody(body, 10_000)
			for i := 0; i < len(raw); i += 16 << 10 {
				c.send(raw[i:min(len(raw), i+16<<10)])
				testwait.Pace(50 * time.Millisecond)
			}
			if resp, got := c.readResponse(); resp.StatusCode != 200 || got != body {
				errorf("%d, %d bytes of %d", resp.StatusCode, len(got), len(body))
			}
			if took := time.Since(began); took < opt.BodyTimeout {
				errorf("all came within %v", took)
			}
		})
		for name, raw := range map[string]string{
			"a size": "5", "an extension": "5;a", "a line end": "5\r", "data": "5\r\nhel", "behind data": "5\r\nhello",
			"a trailer": "5\r\nhello\r\n0\r\nX-", "the end": "5\r\nhello\r\n0\r\n",
		} {
			on("stopped in "+name, func(c *client, errorf func(format string, args ...any)) {
				began := time.Now()
				c.send(chunkedHead + raw)
				resp, body := c.readResponse()
				took := time.Since(began)
				if resp.StatusCode != 408 || !resp.Close || took < opt.BodyIdleTimeout || took > opt.BodyTimeout {
					errorf("%d %s after %v", resp.StatusCode, body, took)
				}
				contains(t, body, "the request body did not arrive in time")
				c.expectClosed()
			})
		}
		for name, piece := range map[string][2]string{
			"an extension": {"1;", "a"}, "chunks": {"", "1\r\n \r\n"}, "trailers": {"0\r\n", "A: b\r\n"},
		} {
			on("a trickle of "+name, func(c *client, errorf func(format string, args ...any)) {
				began := time.Now()
				c.send(chunkedHead + piece[0])
				over := make(chan struct{})
				var wg sync.WaitGroup
				wg.Go(func() {
					for {
						select {
						case <-over:
							return
						case <-time.After(step):
							_, _ = io.WriteString(c, piece[1])
						}
					}
				})
				resp, body := c.readResponse()
				close(over)
				wg.Wait()
				if took := time.Since(began); resp.StatusCode != 408 || took < opt.BodyTimeout {
					errorf("%d %s after %v", resp.StatusCode, body, took)
				}
			})
		}
		tests.Wait()
	})
}

// stallWatch notices when this process does not run for a while.
type stallWatch struct {
	tick  time.Duration
	last  atomic.Int64 // Unix time, in ns, of the end of the last stall
	ticks atomic.Int64 // the rounds that have looked for one
}

// watchStalls notices, until the end of the test, stalls that take at least limit.
func watchStalls(t *testing.T, limit time.Duration) *stallWatch {
	w, stop, done := &stallWatch{tick: limit / 8}, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for before := time.Now(); ; {
			select {
			case <-stop:
				return
			case <-time.After(w.tick):
			}
			now := time.Now()
			if now.Sub(before) >= limit {
				w.last.Store(now.UnixNano())
			}
			before = now
			w.ticks.Add(1)
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	return w
}

// since reports whether there was a stall since at. It waits until one that ends now is seen.
func (w *stallWatch) since(at time.Time) bool {
	seen := w.ticks.Load()
	testwait.Poll(testTimeout, func() bool { return w.ticks.Load() >= seen+2 })
	return w.last.Load() >= at.UnixNano()
}

// Invalid framing ends the connection, and no request inside or behind the body is served.
func TestChunkedSmugglesNothing(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		r := start(t, opt, echo)
		const te = "Transfer-Encoding: chunked\r\n"
		cl := fmt.Sprintf("Content-Length: %d\r\n", len(inner))
		for name, raw := range map[string]string{
			"CL.TE":                         atHost + cl + te + "\r\n0\r\n\r\n" + inner,
			"TE.CL":                         atHost + te + "Content-Length: 4\r\n\r\n" + chunk(inner) + "0\r\n\r\n",
			"TE with white space":           atHost + cl + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + inner,
			"TE in another word":            atHost + cl + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + inner,
			"TE behind a tab":               atHost + cl + "Transfer-Encoding:\vchunked\r\n\r\n0\r\n\r\n" + inner,
			"TE on a line of its own":       atHost + cl + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + inner,
			"TE behind a bare LF":           atHost + "X: y\n" + te + cl + "\r\n0\r\n\r\n" + inner,
			"TE twice":                      atHost + te + "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n" + inner,
			"TE in a list":                  atHost + "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + inner,
			"a size of 2^64 and 5":          chunkedHead + "10000000000000005\r\nhello\r\n0\r\n\r\n" + inner,
			"a size of 2^32 and 5":          chunkedHead + "100000005\r\nhello\r\n0\r\n\r\n" + inner,
			"0x5":                           chunkedHead + "0x5\r\nhello\r\n0\r\n\r\n" + inner,
			"+5":                            chunkedHead + "+5\r\nhello\r\n0\r\n\r\n" + inner,
			"5 with a space":                chunkedHead + "5 \r\nhello\r\n0\r\n\r\n" + inner,
			"bare LF":                       chunkedHead + "5\nhello\n0\n\n" + inner,
			"bare LF behind the last chunk": chunkedHead + "5\r\nhello\r\n0\r\n\n" + inner,
			"no CRLF behind data":           chunkedHead + "5\r\nhello0\r\n\r\n" + inner,
			"two bytes in CRLF's place":     chunkedHead + "5\r\nhelloXX0\r\n\r\n" + inner,
			"LF in an extension":            chunkedHead + "5;\nhello\r\n0\r\n\r\n" + inner,
			"a request as an extension":     chunkedHead + "5;" + strings.ReplaceAll(inner, "\r\n", "\n") + "\r\nhello\r\n",
			"a giant extension":             chunkedHead + "5;" + strings.Repeat("a", 1<<20) + "\r\nhello\r\n" + inner,
			"trailers without end":          chunkedHead + "0\r\n" + strings.Repeat("X-A: b\r\n", 1<<17) + "\r\n" + inner,
			"a request as trailers":         chunkedHead + "0\r\n" + inner,
		} {
			c := dial(r)
			wrote := make(chan struct{})
			go func() {
				_, _ = io.WriteString(c, raw)
				close(wrote)
			}()
			resp, body := c.readResponse()
			want := 400
			if name == "a size of 2^32 and 5" {
				want = 413
			}
			if resp.StatusCode != want || !resp.Close {
				t.Errorf("%s: %d %v %s", name, resp.StatusCode, resp.Header, body)
			}
			c.expectClosed()
			_ = c.Close()
			<-wrote
		}
		if n := r.calls.Load(); n != 0 {
			t.Errorf("the handler ran %d times", n)
		}
		// With valid framing everything inside is data, to the last byte.
		for _, size := range []int{1, 10, 1000} {
			c := dial(r)
			c.send(chunkBody(inner, size) + "\r\n")
			if resp, _ := c.readResponse(); resp.StatusCode != 400 || resp.Header.Get("X-Sluice-Reason") != string(BadJSON) {
				t.Errorf("a request as data: %d %v", resp.StatusCode, resp.Header)
			}
			c.expectServes()
		}
		if n := r.calls.Load(); n != 0 {
			t.Errorf("the handler ran %d times", n)
		}
	})
}
