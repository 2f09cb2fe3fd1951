package front

import (
	"crypto/tls"
	"net/http/httptest"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// testTLS is a server's TLS configuration with httptest's certificate.
func testTLS() *tls.Config {
	lent := httptest.NewUnstartedServer(nil)
	lent.StartTLS()
	defer lent.Close()
	return &tls.Config{Certificates: lent.TLS.Certificates, MinVersion: tls.VersionTLS12}
}

const announcedLength = atHost + "Content-Length: 30000000\r\n\r\n"

// A body that stalls is refused long before the time that its size allows.
func TestStalledBodyTimesOut(t *testing.T) {
	t.Parallel()
	opt := Options{BodyTimeout: time.Hour, BodyIdleTimeout: 300 * time.Millisecond}
	bodies := map[string]string{
		"sized":                   atHost + "Content-Length: 13\r\n\r\n{",
		"without a byte":          announcedLength,
		"large":                   announcedLength + doc(100_000),
		"chunked":                 chunkedHead + "d\r\n{",
		"chunked, without a byte": chunkedHead,
		"chunked, large":          chunkedHead + "1000000\r\n" + doc(100_000),
		"after leave":             atHost + "Expect: 100-continue\r\nContent-Length: 13\r\n\r\n",
	}
	secure := opt
	secure.TLS = testTLS()
	plain, overTheTLS := start(t, opt, echo), start(t, secure, echo)
	for name, raw := range bodies {
		for _, r := range []*testServer{plain, overTheTLS} {
			c := r.dial()
			if r == overTheTLS {
				c = dialTLS(c)
			}
			c.send(raw)
			if resp, body := c.readResponse(); resp.StatusCode != 408 || resp.Header.Get("X-Sluice-Reason") != string(RequestTimeout) {
				t.Errorf("%s: %d %s", name, resp.StatusCode, body)
			}
			c.expectClosed()
		}
	}
}

// A slow body is read beyond BodyIdleTimeout and beyond the head timeout, which is the first
// deadline that the socket gets.
func TestTricklingBodyIsRead(t *testing.T) {
	t.Parallel()
	opt := Options{HeadTimeout: 1500 * time.Millisecond, BodyTimeout: time.Hour, BodyIdleTimeout: 2 * time.Second}
	secure := opt
	secure.TLS = testTLS()
	plain, overTheTLS := start(t, opt, echo), start(t, secure, echo)
	var all []*client
	for _, r := range []*testServer{plain, overTheTLS} {
		for _, raw := range []string{atHost + "Content-Length: 13\r\n\r\n", chunkedHead + "d\r\n"} {
			c := r.dial()
			if r == overTheTLS {
				c = dialTLS(c)
			}
			c.send(raw + "{")
			all = append(all, c)
		}
	}
	for _, piece := range []string{`"`, "mo", "d", "e", `l`, `":`, `"x`, `"}`} {
		testwait.Pace(350 * time.Millisecond)
		for i, c := range all {
			if c.send(piece); piece == `"}` && i%2 == 1 {
				c.send("\r\n0\r\n\r\n")
			}
		}
	}
	for i, c := range all {
		if resp, body := c.readResponse(); resp.StatusCode != 200 || body != `{"model":"x"}` {
			t.Errorf("%d: %d %s", i, resp.StatusCode, body)
		}
	}
}
