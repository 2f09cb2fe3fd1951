package sim

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
	"sluice/bench/testwait"
)

// TestRequestForms: bodies by length or chunked, pipelined, kept alive, and what
// the engine remembers of them.
func TestRequestForms(t *testing.T) {
	e := fastOptions(t, Options{})
	body := `{"prompt":[300],  "max_tokens":1,"unknown":{"big":12345678901234567890,"esc":"\u00e9\/"}}`
	chunked := fmt.Sprintf("POST /v1/completions?x=1 HTTP/1.1\r\nContent-Type: application/json; charset=utf-8\r\nTransfer-Encoding: chunked\r\nX-Mixed-Case: Kept\r\n\r\n%x;ext=1\r\n%s\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n",
		10, body[:10], len(body)-10, body[10:])
	got := rawExchange(t, e.Addr(), chunked+request("/v1/completions", body)+request("/v1/completions", body, "Connection: close"))
	if n := strings.Count(got, "HTTP/1.1 200 OK\r\n"); n != 3 {
		t.Fatalf("%d answers, want 3: %s", n, got)
	}
	list := e.Requests()
	if len(list) != 3 {
		t.Fatalf("%d requests remembered, want 3", len(list))
	}
	for i, r := range list {
		if string(r.Body) != body || r.Method != "POST" || r.Path != "/v1/completions" || r.Rank != 0 || r.Arrived.IsZero() {
			t.Errorf("request %d: %+v", i, r)
		}
	}
	if r := list[0]; r.Query != "x=1" || r.Header("x-mixed-case") != "Kept" || r.Headers[2] != (httpconn.Header{Name: "X-Mixed-Case", Value: "Kept"}) {
		t.Errorf("headers: %+v", r)
	}
	e.ForgetRequests()
	if len(e.Requests()) != 0 {
		t.Error("requests are not forgotten")
	}
}

func TestExpectContinue(t *testing.T) {
	e := fastOptions(t, Options{})
	c := dial(t, e.Addr())
	body := `{"prompt":[300],"max_tokens":1}`
	fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", len(body))
	br := bufio.NewReader(c)
	if line, err := br.ReadString('\n'); line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatalf("%q %v", line, err)
	}
	br.ReadString('\n')
	io.WriteString(c, body)
	if line, err := br.ReadString('\n'); line != "HTTP/1.1 200 OK\r\n" {
		t.Fatalf("%q %v", line, err)
	}
}

func TestBadRequests(t *testing.T) {
	e := fastOptions(t, Options{BodyLimit: 1000})
	for send, want := range map[string]string{
		"GARBAGE\r\n\r\n":              "400",
		"GET /health HTTP/2.0\r\n\r\n": "400",
		"GET /health HTTP/1.1\r\nBad Header: x\r\nno colon\r\n\r\n":                  "400",
		"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n":          "400",
		"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n":                              "400",
		"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n":                            "413",
		"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n":                         "501",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n": "400",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n":                "400",
		"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n":               "413",
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("y", httpconn.MaxHead) + "\r\n\r\n": "431",
		"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n":                          "200",
		"HEAD /v1/models HTTP/1.1\r\n\r\nGET /health HTTP/1.0\r\n\r\n":               "200",
		"DELETE /v1/completions HTTP/1.0\r\n\r\n":                                    "405",
		"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}":               "400", // no content type
	} {
		// The unread rest of a refused request may turn the close into a reset.
		c := dial(t, e.Addr())
		io.WriteString(c, send)
		b, _ := io.ReadAll(c)
		if !strings.HasPrefix(string(b), "HTTP/1.1 "+want) {
			t.Errorf("%.60q: %.100q, want %s", send, b, want)
		}
		if strings.HasPrefix(send, "HEAD") && strings.Contains(string(b), "{") {
			t.Errorf("HEAD has a body: %q", b)
		}
	}
}

// TestDisconnect: a client that leaves is noticed, streaming or not, running or
// waiting, and its blocks are free again.
func TestDisconnect(t *testing.T) {
	e := fastOptions(t, Options{Speed: 1, MaxSeqs: 2, Cost: cost.Model{Step: 5 * time.Millisecond}})
	long := `{"prompt":[300,301],"max_tokens":100000,"ignore_eos":true,"stream":%v}`
	var conns []net.Conn
	for i := range 4 { // two run, two wait
		c := dial(t, e.Addr())
		io.WriteString(c, request("/v1/completions", fmt.Sprintf(long, i%2 == 0)))
		conns = append(conns, c)
		testwait.Until(t, "request taken", func() bool { s := e.Stats().Sum(); return s.Running+s.Waiting == i+1 })
	}
	for i, c := range []int{3, 0, 2, 1} {
		conns[c].Close()
		testwait.Until(t, "abort", func() bool { return e.Stats().Sum().Aborted == i+1 })
	}
	if s := e.Stats().Sum(); s.Running+s.Waiting != 0 || s.BlocksFree != s.BlocksTotal {
		t.Errorf("left over: %+v", s)
	}
}

func TestAbortByID(t *testing.T) {
	e := fastOptions(t, Options{Speed: 1, Cost: cost.Model{Step: 2 * time.Millisecond}})
	_, br := openStream(t, e.Addr(), "/v1/completions", `{"prompt":[300],"max_tokens":100000,"ignore_eos":true,"stream":true}`, 2, "X-Request-Id: gone", "Connection: close")
	if a := post(t, e, "/inference/v1/abort_requests", `{"request_ids":["cmpl-gone","other"]}`); a.status != 200 {
		t.Fatalf("abort: %d", a.status)
	}
	rest, err := io.ReadAll(br)
	if err != nil || !strings.Contains(string(rest), `"finish_reason":"abort"`) || !strings.Contains(string(rest), "[DONE]") {
		t.Errorf("%v %q", err, lastBytes(string(rest), 300))
	}
	if s := e.Stats().Sum(); s.BlocksFree != s.BlocksTotal {
		t.Errorf("blocks are held: %+v", s)
	}
}

// TestSlowReader: a client that does not read holds up nobody and is cut when
// its bound is reached.
func TestSlowReader(t *testing.T) {
	e := fastOptions(t, Options{StreamBuffer: 1 << 16})
	c := dial(t, e.Addr())
	c.(*net.TCPConn).SetReadBuffer(4096)
	io.WriteString(c, request("/v1/completions", `{"prompt":[300],"max_tokens":120000,"ignore_eos":true,"stream":true}`))
	testwait.Until(t, "slow reader cut", func() bool { return e.Stats().SlowReaders == 1 })
	if a := post(t, e, "/v1/completions", `{"prompt":[300],"max_tokens":50,"ignore_eos":true}`); a.status != 200 {
		t.Errorf("another client: %d", a.status)
	}
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the slow reader got %v, want a reset", err)
	}
	testwait.Until(t, "freed", func() bool { s := e.Stats().Sum(); return s.BlocksFree == s.BlocksTotal && s.Running == 0 })
}

// TestPausedReader: within the bound nothing is lost.
func TestPausedReader(t *testing.T) {
	e := fastOptions(t, Options{})
	c := dial(t, e.Addr())
	c.(*net.TCPConn).SetReadBuffer(1 << 16)
	io.WriteString(c, request("/v1/completions", `{"prompt":[300],"max_tokens":40000,"ignore_eos":true,"stream":true}`, "Connection: close"))
	testwait.Until(t, "all generated", func() bool { return e.Stats().Sum().GeneratedTokens == 40000 })
	b, err := io.ReadAll(c)
	if n := strings.Count(string(b), "data: "); err != nil || n != 40001 {
		t.Errorf("%d events, %v; want 40001", n, err)
	}
}
