package front

import (
	"bytes"
	"crypto/tls"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// Extensions and trailers of a chunked body are no way around limits.max_body.
func TestFramingIsBounded(t *testing.T) {
	ext := strings.Repeat("a", 4000)
	for name, c := range map[string]struct{ begin, again string }{
		"one extension":   {"5;", ext},
		"in every chunk":  {"", "1;" + ext + "\r\n \r\n"},
		"a trailer":       {"2\r\n{}\r\n0\r\n", "A: " + ext + "\r\n"},
		"one chunk first": {"2\r\n{}\r\n1;", ext},
	} {
		r := start(t, Options{}, echo)
		cl := r.dial()
		var sent int
		var wg sync.WaitGroup
		wg.Go(func() {
			n, err := io.WriteString(cl, chunkedHead+c.begin)
			for sent += n; err == nil && sent < 64<<20; sent += n {
				n, err = io.WriteString(cl, c.again)
			}
		})
		resp, body := cl.answer()
		if resp.StatusCode != 400 || resp.Header.Get("X-Sluice-Reason") != string(BadHTTP) || name != "a trailer" && !strings.Contains(body, "the framing of its chunks") {
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
}

// The least of chunks, and extensions as some clients write them, are read.
func TestSmallChunksAreRead(t *testing.T) {
	r := start(t, Options{}, echo)
	body := doc(100_000)
	for name, one := range map[string]string{"bytes": "1\r\n%\r\n", "with an extension": "1;a\r\n%\r\n"} {
		var b strings.Builder
		b.WriteString(chunkedHead)
		for i := range len(body) {
			b.WriteString(strings.Replace(one, "%", body[i:i+1], 1))
		}
		b.WriteString("0\r\n\r\n")
		c := r.dial()
		go func() { _, _ = io.WriteString(c, b.String()) }()
		if resp, got := c.answer(); resp.StatusCode != 200 || got != body {
			t.Errorf("%s: %d, %d bytes of %d", name, resp.StatusCode, len(got), len(body))
		}
	}
}

// logged is a log that can be read while it is written.
type logged struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.String()
}

// A body that does not come behind the leave to send it is told of as any other.
func TestAwaitedBodyIsNamed(t *testing.T) {
	var log logged
	r := start(t, Options{Gate: goodKey{}, BodyIdleTimeout: 200 * time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil))}, echo)
	for _, length := range []string{"Content-Length: 13", "Transfer-Encoding: chunked"} {
		c := r.dial()
		c.send(atHost + "Authorization: Bearer good\r\nX-Request-Id: mine\r\nExpect: 100-continue\r\n" + length + "\r\n\r\n")
		resp, body := c.answer()
		if resp.StatusCode == 100 {
			resp, body = c.answer()
		}
		if resp.StatusCode != 408 || !strings.Contains(body, "the request body did not come in time") || resp.Header.Get("X-Request-Id") != "mine" {
			t.Errorf("%s: %d %v %s", length, resp.StatusCode, resp.Header, body)
		}
		c.closed()
	}
	for _, want := range []string{"endpoint=" + chat, "request_id=mine", "client=127.0.0.1", "key="} {
		if strings.Count(log.text(), want) != 2 {
			t.Errorf("not twice %s in %s", want, log.text())
		}
	}
}

// Handshakes that fail are told of, seldom, in the words of crypto/tls.
func TestFailedHandshakesAreLogged(t *testing.T) {
	var log logged
	opt := Options{TLS: testTLS(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	r := start(t, opt, echo)
	_ = r.dial().Close() // a look whether the port is open
	for range 5 {
		old := tls.Client(r.dial().Conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11})
		if old.Handshake() == nil {
			t.Error("TLS 1.1 was taken")
		}
	}
	until(t, "all are counted", func() bool { return r.seen.refusals(BadTLS) >= 5 })
	if text := log.text(); strings.Count(text, "TLS handshake failed") != 1 || !strings.Contains(text, "level=INFO") || !strings.Contains(text, "unsupported versions") || !strings.Contains(text, "client=127.0.0.1") {
		t.Errorf("%s", text)
	}
}
