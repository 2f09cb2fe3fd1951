package front

import (
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
)

// Each refusal is logged, without any input of the client.
func TestRefusalsAreLogged(t *testing.T) {
	const secret = "sk-secret-0123456789"
	var log logBuffer
	r := start(t, Options{Authenticator: goodKey{}, Log: log.logger()}, echo)
	sent := []struct{ raw, reason string }{
		{chatPost(hello, "Authorization: Bearer "+secret), "missing_api_key"},
		{chatPost(hello), "missing_api_key"},
		{chatPost(`{"`+secret+`":`+secret+`}`, "Authorization: Bearer good"), "bad_json"},
		{strings.Replace(chatPost(hello, "Authorization: Bearer good"), "application/json", secret, 1), "wrong_content_type"},
		{"POST /" + secret + " HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "unknown_route"},
		{"POST /v1/messages HTTP/1.1\r\nHost: a\r\nHost: " + secret + "\r\n\r\n", "bad_http"},
		{chatPost(hello, "Authorization: Bearer good") + "GET /" + secret + " HTTP/1.1\r\nHost: a\r\n\r\n", "pipelined"},
		{secret + "\r\n\r\n", "bad_http"},
	}
	for _, s := range sent {
		c := r.dial()
		c.send(s.raw)
		if s.reason == "pipelined" {
			c.readResponse()
		}
		resp, _ := c.readResponse()
		testwait.Until(t, "the line of "+s.reason, func() bool { return strings.Contains(log.String(), "reason="+s.reason+" ") })
		if id := resp.Header.Get("X-Request-Id"); id == "" || !strings.Contains(log.String(), "request="+id) {
			t.Errorf("%s: no line of request %q", s.reason, id)
		}
		_ = c.Close()
	}
	if text := log.String(); strings.Contains(text, secret) || !strings.Contains(text, "status=401") || !strings.Contains(text, "client=127.0.0.1") || !strings.Contains(text, "key=good") {
		t.Errorf("%s", text)
	}
}

// Of many refusals only some are logged, and the next line has the number of the others.
func TestRefusalLinesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logBuffer
		s := &Server{initial: Options{Log: log.logger()}}
		for range 1000 {
			s.reportRefused(Refusal{Endpoint: chat, Reason: BadJSON, RequestID: "a"})
		}
		time.Sleep(time.Second)
		for range 5 {
			s.reportRefused(Refusal{Endpoint: chat, Reason: BadJSON, RequestID: "b"})
		}
		s.reportRefused(Refusal{Endpoint: chat, Reason: ClientGone, RequestID: "c"}) // a client that has disconnected is logged too
		text := log.String()
		if n := strings.Count(text, "request=a"); n != maxRefusalLines {
			t.Errorf("%d lines in a second, want %d", n, maxRefusalLines)
		}
		if n := strings.Count(text, "request=b"); n != 5 || !strings.Contains(text, "reason=client_gone status=499 request=c") {
			t.Errorf("%d lines in the next second: %s", n, text)
		}
		left := 0
		for _, m := range regexp.MustCompile(`suppressed=(\d+)`).FindAllStringSubmatch(text, -1) {
			n, _ := strconv.Atoi(m[1])
			left += n
		}
		if left != 1000-maxRefusalLines {
			t.Errorf("%d were counted as left out, want %d", left, 1000-maxRefusalLines)
		}
	})
}

// A non-streaming response that the client does not read is reported like the end of a stream.
func TestStalledResponseIsCounted(t *testing.T) {
	for _, k := range []struct {
		limit time.Duration
		leave bool
		cause relay.Cause
	}{{200 * time.Millisecond, false, relay.ClientStalled}, {time.Minute, true, relay.ClientGone}} {
		r := start(t, Options{WriteTimeout: k.limit}, func(x Exchange) { x.ReplyJSON(200, make([]byte, 32<<20)) })
		c := r.dial()
		_ = c.Conn.(*net.TCPConn).SetReadBuffer(16 << 10)
		c.send(chatPost(hello))
		if k.leave {
			if _, err := io.ReadFull(c.br, make([]byte, 1<<10)); err != nil {
				t.Fatal(err)
			}
			_ = c.Conn.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
		testwait.Until(t, "the end of the connection", func() bool { return r.calls.Load() == 1 && r.server.conns.len() == 0 })
		r.observed.mu.Lock()
		if want := chat + " " + k.cause.String(); len(r.observed.incomplete) != 1 || r.observed.incomplete[0] != want {
			t.Errorf("%q, want %q", r.observed.incomplete, want)
		}
		r.observed.mu.Unlock()
	}
}

// exhaustedKey is an Authenticator whose only key has exceeded its limit.
type exhaustedKey struct{ goodKey }

func (exhaustedKey) Authenticate(_ []byte, counts bool) (Principal, *Rejection) {
	if counts {
		return exhaustedKey{}, exhaustedKey{}.CheckLimits()
	}
	return exhaustedKey{}, nil
}

func (exhaustedKey) CheckLimits() *Rejection {
	return &Rejection{Reason: KeyLimitReached, Message: "the limit is reached", RetryAfter: time.Second}
}

// A client that expects "100 Continue" gets the refusal for an exceeded limit instead.
func TestExpectOverTheLimit(t *testing.T) {
	r := start(t, Options{Authenticator: exhaustedKey{}}, echo)
	c := r.dial()
	c.send(strings.TrimSuffix(chatPost(hello, "Expect: 100-continue", "Authorization: Bearer good"), hello))
	resp, body := c.readResponse()
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "1" || !resp.Close {
		t.Errorf("%d %v %s", resp.StatusCode, resp.Header, body)
	}
	c.expectClosed()
	r.observed.mu.Lock()
	defer r.observed.mu.Unlock()
	if n := r.observed.refused[KeyLimitReached]; n != 1 || r.calls.Load() != 0 {
		t.Errorf("refused %d times, the handler ran %d times", n, r.calls.Load())
	}
}
