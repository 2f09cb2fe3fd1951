package front

import (
	"io"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// A refusal that does not depend on the body is sent before the body arrives, because a client may
// wait for the response before it sends more. The client still gets the refusal if it sends the
// body afterwards.
func TestRefusalDoesNotWaitForTheBody(t *testing.T) {
	const most = 500 * time.Millisecond
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		opt.MaxBodyBytes = 1000
		r := start(t, opt, echo)
		for _, k := range []struct {
			name, raw string
			status    int
		}{
			{"wrong type", atHost + "Content-Type: text/plain\r\nContent-Length: 900\r\n\r\n{", 415},
			{"wrong type, chunked", atHost + "Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n384\r\n{", 415},
			{"too large", atHost + "Content-Length: 90000\r\n\r\n{", 413},
			{"too large, chunked", chunkedHead + "10000\r\n" + strings.Repeat(" ", 2000), 413},
			{"unknown path", "POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{", 404},
		} {
			var took time.Duration
			for range 5 { // one attempt without a delay of the machine
				c := dial(r)
				c.t = t
				c.send(k.raw)
				began := time.Now()
				resp, body := c.readResponse()
				took = time.Since(began)
				if resp.StatusCode != k.status || !resp.Close {
					t.Fatalf("%s: %d, close %v: %s", k.name, resp.StatusCode, resp.Close, body)
				}
				c.send(strings.Repeat(" ", 500)) // the connection is not reset yet
				if rest, err := io.ReadAll(c.br); err != nil || len(rest) > 0 {
					t.Errorf("%s: behind the answer: %v, %q", k.name, err, rest)
				}
				_ = c.Close()
				if took < most {
					break
				}
			}
			if took > most {
				t.Errorf("%s: the answer took %v", k.name, took)
			}
		}
	})
}

// A body that is being sent during a refusal does not end the connection.
func TestRefusedBodyOnItsWayKeepsTheConnection(t *testing.T) {
	r := start(t, Options{}, echo)
	kept := false
	for range 20 { // one of them arrives in time
		c := r.dial()
		c.send(atHost + "Content-Type: text/plain\r\nContent-Length: 9\r\n\r\n{")
		testwait.Pace(time.Millisecond)
		c.send("\"a\": 12}")
		resp, body := c.readResponse()
		if resp.StatusCode != 415 {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		if resp.Close {
			continue
		}
		kept = true
		c.send(chatPost(hello))
		if resp, body := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("the next one: %d %s", resp.StatusCode, body)
		}
		break
	}
	if !kept {
		t.Error("never kept")
	}
}
