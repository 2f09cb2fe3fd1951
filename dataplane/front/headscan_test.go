package front

import (
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/http1"
)

// TestBareLineEndAtOnce sends heads with bare LFs and with bare CRs, in one write and piece by piece,
// and leaves the connection open. The response is 400 long before the head timeout, on the
// fast path, on fasthttp's (TLS, and behind a request that only fasthttp serves), and on a
// connection that has served a request before.
func TestBareLineEndAtOnce(t *testing.T) {
	const headTime = 60 * time.Second // longer than the test waits
	heads := map[string]string{
		"request line":         "POST " + chat + " HTTP/1.1\n",
		"two lines":            "POST " + chat + " HTTP/1.1\nHost: a\n",
		"whole head":           "GET /livez HTTP/1.1\nHost: a\n\n",
		"header line":          requestLine + "Host: a\n",
		"second header line":   atHost + "Accept: a\nX: ",
		"last line":            atHost + "Content-Length: 2\r\n\n",
		"behind an empty line": "\r\n\nGET /livez HTTP/1.1\n",
		"unknown method":       "BREW /pot HTTP/1.1\n",

		"CR, request line":         "POST " + chat + " HTTP/1.1\rHost",
		"CR, two lines":            "POST " + chat + " HTTP/1.1\rHost: a\r",
		"CR, whole head":           "GET /livez HTTP/1.1\rHost: a\r\r",
		"CR, header line":          requestLine + "Host: a\rX",
		"CR, last line":            atHost + "Content-Length: 2\r\n\r{}",
		"CR before CRLF":           atHost + "Accept: a\r\r\n",
		"CR, behind an empty line": "\r\nGET /livez HTTP/1.1\rHost",
		"CR, unknown method":       "BREW /pot HTTP/1.1\r\r",
	}
	for _, secure := range []bool{false, true} {
		opt := Options{HeadTimeout: headTime}
		if secure {
			opt.TLS = testTLS()
		}
		r := start(t, opt, echo)
		dial := func() *client {
			if secure {
				return dialTLS(r.dial())
			}
			return r.dial()
		}
		firsts := map[string]string{
			"first":                  "",
			"behind a plain request": "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
			"behind a HEAD":          "GET /livez?a HTTP/1.1\r\nHost: a\r\n\r\n", // fasthttp's
		}
		c := dial()
		c.send("\r\r\r\r\r\r\r\r") // no request has begun, so there is no response
		c.expectClosed()
		for name, head := range heads {
			for when, first := range firsts {
				for _, pieces := range []int{len(head), 7} {
					c := dial()
					if first != "" {
						c.send(first)
						if resp, _ := c.readResponse(); resp.StatusCode != 200 {
							t.Fatalf("first request: %d", resp.StatusCode)
						}
					}
					for rest := head; rest != ""; {
						n := min(pieces, len(rest))
						if len(rest)-n < len(headEnd) {
							n = len(rest) // the kernel reports no fewer bytes, see setWakeThreshold
						}
						_, _ = c.Write([]byte(rest[:n])) // it may have been answered already
						if rest = rest[n:]; rest != "" {
							testwait.Pace(time.Millisecond) // mostly a segment of its own
						}
					}
					resp, body := c.readResponse()
					if resp.StatusCode != 400 || !strings.Contains(body, http1.BareEndMessage) || !resp.Close {
						t.Errorf("TLS %v, %s, %s: %d %s", secure, name, when, resp.StatusCode, body)
					}
					c.expectClosed()
				}
			}
		}
	}
}
