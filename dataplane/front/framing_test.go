package front

import (
	"bytes"
	"crypto/tls"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// syncLog is a log that can be read while it is written.
type syncLog struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

func (l *syncLog) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.String()
}

// A body that does not arrive after "100 Continue" is reported like any other incomplete body.
func TestContinuedBodyErrorNamesRequest(t *testing.T) {
	var log syncLog
	r := start(t, Options{Authenticator: goodKey{}, BodyIdleTimeout: 200 * time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil))}, echo)
	for _, length := range []string{"Content-Length: 13", "Transfer-Encoding: chunked"} {
		c := r.dial()
		c.send(atHost + "Authorization: Bearer good\r\nX-Request-Id: mine\r\nExpect: 100-continue\r\n" + length + "\r\n\r\n")
		resp, body := c.readResponse()
		if resp.StatusCode == 100 {
			resp, body = c.readResponse()
		}
		if resp.StatusCode != 408 || !strings.Contains(body, "the request body did not arrive in time") || resp.Header.Get("X-Request-Id") != "mine" {
			t.Errorf("%s: %d %v %s", length, resp.StatusCode, resp.Header, body)
		}
		c.expectClosed()
	}
	for _, want := range []string{"endpoint=" + chat, "request=mine", "client=127.0.0.1", "key="} {
		if strings.Count(log.text(), want) != 2 {
			t.Errorf("not twice %s in %s", want, log.text())
		}
	}
}

// A client that speaks TLS to a plain HTTP port is disconnected at once, at the beginning of a
// connection or later, and the log names the cause.
func TestTLSOnPlaintextPort(t *testing.T) {
	var log syncLog
	r := start(t, Options{HeadTimeout: testTimeout, Log: slog.New(slog.NewTextHandler(&log, nil))}, echo)
	began := time.Now()
	if tls.Client(r.dial().Conn, &tls.Config{InsecureSkipVerify: true}).Handshake() == nil {
		t.Error("TLS was taken")
	}
	for _, hello := range []string{"\x16", "\x16\x03\x01\x02\x00\x01\r\n\r\n"} {
		c := r.dial()
		c.expectServes()
		c.send(hello)
		c.expectClosed()
	}
	if took := time.Since(began); took > testTimeout/2 {
		t.Errorf("let go after %v", took)
	}
	if n := r.observed.refusals(BadTLS); n != 3 {
		t.Errorf("%d are counted", n)
	}
	if text := log.text(); strings.Count(text, "this port plain HTTP") != 1 || !strings.Contains(text, "client=127.0.0.1") || strings.Contains(text, "request_timeout") {
		t.Errorf("%s", text)
	}
}

// Failed handshakes are logged with the error of crypto/tls, at a limited rate.
func TestFailedHandshakesAreLogged(t *testing.T) {
	var log syncLog
	opt := Options{TLS: testTLS(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	r := start(t, opt, echo)
	_ = r.dial().Close() // a port probe
	for range 5 {
		old := tls.Client(r.dial().Conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11})
		if old.Handshake() == nil {
			t.Error("TLS 1.1 was taken")
		}
	}
	testwait.Until(t, "all are counted", func() bool { return r.observed.refusals(BadTLS) >= 5 })
	if text := log.text(); strings.Count(text, "TLS handshake failed") != 1 || !strings.Contains(text, "level=INFO") || !strings.Contains(text, "unsupported versions") || !strings.Contains(text, "client=127.0.0.1") {
		t.Errorf("%s", text)
	}
}
