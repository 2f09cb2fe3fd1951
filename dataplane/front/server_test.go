package front

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/upstream"
)

func TestRequestIDs(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) { x.ReplyJSON(200, []byte(`"`+x.Request().RequestID+`"`)) })
	c := r.dial()
	seen := map[string]bool{}
	for id, taken := range map[string]bool{
		"abc-1": true, "a/b+c=d;~": true, strings.Repeat("x", 128): true,
		strings.Repeat("x", 129): false, "a b": false, `a"b`: false, `a\b`: false, "é": false, "": false, "a'b": false,
	} {
		c.send(chatPost(hello, "x-request-id: "+id))
		resp, body := c.readResponse()
		got := resp.Header.Get("X-Request-Id")
		if resp.StatusCode != 200 || body != `"`+got+`"` {
			t.Errorf("%q: %d, header %q, handler saw %s", id, resp.StatusCode, got, body)
		}
		if (got == id) != taken {
			t.Errorf("%q became %q", id, got)
		}
		if !taken {
			if !fieldrules.ValidRequestID([]byte(got)) || seen[got] {
				t.Errorf("%q: made id %q is invalid or not new", id, got)
			}
			seen[got] = true
		}
	}
	for _, raw := range []string{
		"GET /nothing HTTP/1.1\r\nHost: a\r\nX-Request-Id: me\r\n\r\n",
		"GET /livez HTTP/1.1\r\nHost: a\r\nX-Request-Id: me\r\n\r\n",
		"DELETE " + chat + " HTTP/1.1\r\nHost: a\r\nX-Request-Id: me\r\n\r\n",
		chatPost("nonsense", "X-Request-Id: me"),
	} {
		c.send(raw)
		if resp, _ := c.readResponse(); resp.Header.Get("X-Request-Id") != "me" {
			t.Errorf("%q: X-Request-Id %q", raw, resp.Header.Get("X-Request-Id"))
		}
	}
}

func TestErrorShapes(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) {
		x.SetHeader("X-Sluice-Worker", "a\r\nX-Evil: 1")
		x.Error(UnknownModel, "model", "no \"such\" model \x01\xff", 1500*time.Millisecond)
	})
	for _, e := range Endpoints {
		c := r.dial()
		c.send(post(e.Path, hello))
		resp, body := c.readResponse()
		if resp.StatusCode != 404 || resp.Header.Get("Retry-After") != "2" ||
			resp.Header.Get("X-Sluice-Reason") != "unknown_model" || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %v", e.Path, resp.StatusCode, resp.Header)
		}
		if resp.Header.Get("X-Evil") != "" {
			t.Error("a header value broke out of its line")
		}
		var got struct {
			Type      string
			RequestID string `json:"request_id"`
			Error     struct {
				Message, Type string
				Param, Code   *string
			}
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatalf("%s: %v in %s", e.Path, err, body)
		}
		if got.Error.Message != "no \"such\" model \x01\ufffd" {
			t.Errorf("message %q", got.Error.Message)
		}
		if strings.HasPrefix(e.Path, "/v1/messages") {
			if got.Type != "error" || got.Error.Type != "not_found_error" || got.RequestID != resp.Header.Get("X-Request-Id") {
				t.Errorf("%s: %s", e.Path, body)
			}
			continue
		}
		if got.Error.Type != "invalid_request_error" || got.Error.Param == nil || *got.Error.Param != "model" ||
			got.Error.Code == nil || *got.Error.Code != "model_not_found" {
			t.Errorf("%s: %s", e.Path, body)
		}
	}
}

func TestEveryReasonHasARow(t *testing.T) {
	for reason, row := range reasonTable {
		if row.status < 400 || row.status > 599 || row.typ == "" || reason.Status() != row.status {
			t.Errorf("%s: %+v", reason, row)
		}
	}
	if Reason("made up").Status() != 500 {
		t.Error("an unknown reason is not a 500")
	}
}

func TestRoutes(t *testing.T) {
	r := start(t, Options{}, echo)
	for _, k := range []struct {
		line, fields string
		status       int
		parts        []string
	}{
		{"GET /v1/models", "", 200, []string{`"object":"list"`}},
		{"GET /livez", "", 200, []string{"ok"}},
		{"GET /readyz", "", 503, []string{"waiting_for"}},
		{"GET /health", "", 200, []string{"ok"}},
		{"GET /version", "", 200, []string{"test"}},
		{"GET /metrics", "", 200, []string{"sluice_test 1"}},
		{"GET /metrics?x=1", "", 200, nil},
		{"GET http://a/livez", "", 200, nil},
		{"GET http://a", "", 404, nil},
		{"POST /livez", "Content-Length: 0\r\n", 405, []string{"use GET"}},
		{"GET " + chat, "", 405, []string{"use POST"}},
		{"OPTIONS *", "", 404, nil},
		{"POST /v1/chat", "Content-Length: 0\r\n", 404, []string{"unknown path", "/v1/chat/completions", "/metrics"}},
		{"GET /v1//models", "", 404, nil},
		{"GET /v1/%6dodels", "", 404, nil},
		{"GET /x/../livez", "", 404, nil},
		{"GET /livez/", "", 404, nil},
		{"POST " + chat, "Content-Type: text/plain\r\nContent-Length: 13\r\n\r\n" + hello, 415, []string{"application/json"}},
	} {
		c := r.dial()
		raw := k.line + " HTTP/1.1\r\nHost: a\r\n" + k.fields
		if !strings.Contains(k.fields, "\r\n\r\n") {
			raw += "\r\n"
		}
		c.send(raw)
		resp, body := c.readResponse()
		if resp.StatusCode != k.status {
			t.Errorf("%s: %d, want %d: %s", k.line, resp.StatusCode, k.status, body)
		}
		contains(t, body, k.parts...)
		if allow := resp.Header.Get("Allow"); (k.status == 405) != (allow != "") {
			t.Errorf("%s: Allow %q", k.line, allow)
		}
		if resp.Header.Get("Server") != "" {
			t.Errorf("%s: Server %q", k.line, resp.Header.Get("Server"))
		}
	}
	c := r.dial()
	c.send("HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
	resp, err := http.ReadResponse(c.br, &http.Request{Method: "HEAD"})
	if err != nil || resp.StatusCode != 200 || resp.ContentLength != int64(len("sluice_test 1\n")) {
		t.Errorf("HEAD: %v %v", resp, err)
	}
	c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
	if _, body := c.readResponse(); body != "ok\n" {
		t.Errorf("after HEAD: %q", body)
	}
	if r.calls.Load() != 0 {
		t.Error("the handler ran")
	}
}

func TestHeadTooLarge(t *testing.T) {
	r := start(t, Options{}, echo)
	for _, fields := range []string{
		"X-A: " + strings.Repeat("a", 17<<10) + "\r\n",
		strings.Repeat("X-Header: 1234567890\r\n", 1000),
	} {
		c := r.dial()
		_, _ = c.Write([]byte(helloPost(fields)))
		resp, body := c.readResponse()
		if resp.StatusCode != 431 || resp.Header.Get("X-Sluice-Reason") != string(HeadTooLarge) {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		c.expectClosed()
	}
	c := r.dial()
	c.send(helloPost("X-A: " + strings.Repeat("a", 15<<10) + "\r\n"))
	if resp, _ := c.readResponse(); resp.StatusCode != 200 {
		t.Errorf("head of 15 KiB: %d", resp.StatusCode)
	}
}

func TestExpectContinue(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	raw := helloPost("Expect: 100-continue\r\n")
	c.send(strings.TrimSuffix(raw, hello))
	line, err := c.br.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("%q %v", line, err)
	}
	_, _ = c.br.ReadString('\n')
	c.send(hello)
	if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

// A client that expects "100 Continue" gets refusals that do not depend on the body before it sends
// the body. Nothing is counted twice.
func TestExpectIsRefused(t *testing.T) {
	r := start(t, Options{MaxBodyBytes: 1 << 20, Authenticator: goodKey{}, WithholdClientKeys: true}, echo)
	refused := []struct{ head, reason string }{
		{"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer good\r\nContent-Length: 9999999", "body_too_large"},
		{"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9", "missing_api_key"},
		{"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer good\r\nContent-Type: text/plain\r\nContent-Length: 9", "wrong_content_type"},
		{"POST /v1/nothing HTTP/1.1\r\nContent-Length: 9", "unknown_route"},
		{"POST /livez HTTP/1.1\r\nContent-Length: 9", "wrong_method"},
		{"POST /livez HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 9", "bad_http"},
	}
	for _, want := range refused {
		c := r.dial()
		c.send(want.head + "\r\nHost: a\r\nExpect: 100-Continue\r\n\r\n")
		if resp, body := c.readResponse(); resp.Header.Get("X-Sluice-Reason") != want.reason || !resp.Close {
			t.Errorf("%s: %d %v %s, want %s", want.head, resp.StatusCode, resp.Header, body, want.reason)
		}
		c.expectClosed()
	}
	r.observed.mu.Lock()
	defer r.observed.mu.Unlock()
	for _, want := range refused {
		if n := r.observed.refused[Reason(want.reason)]; n != 1 {
			t.Errorf("%s: %d refusals seen", want.reason, n)
		}
	}
}

type goodKey struct{}

func (goodKey) Authenticate(key []byte, _ bool) (Principal, *Rejection) {
	if string(key) == "good" {
		return goodKey{}, nil
	}
	return nil, &Rejection{Reason: MissingKey}
}
func (goodKey) Name() string                           { return "good" }
func (goodKey) Allows(string) bool                     { return true }
func (goodKey) Reserve(int) *Rejection                 { return nil }
func (goodKey) Commit(int, int)                        {}
func (goodKey) Adjust(int, int)                        {}
func (goodKey) CheckLimits() *Rejection                { return nil }
func (goodKey) VisitLimitHeaders(func(string, string)) {}

// An HTTP/1.0 client gets no "100 Continue", which it would read as the final response.
func TestExpectOfHTTP10IsIgnored(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	c.send(strings.Replace(helloPost("Expect: 100-continue\r\n"), "HTTP/1.1", "HTTP/1.0", 1))
	if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

func TestPanicInHandler(t *testing.T) {
	r := start(t, Options{}, func(x Exchange) {
		switch string(x.Request().Doc.Body) {
		case `{"model":"late"}`:
			x.ReplyJSON(200, []byte("{}"))
			panic("late")
		case `{"model":"none"}`:
			return
		case `{"model":"twice"}`:
			x.ReplyJSON(200, []byte(`1`))
			x.ReplyJSON(200, []byte(`2`))
		default:
			panic("early")
		}
	})
	for body, status := range map[string]int{hello: 500, `{"model":"late"}`: 500, `{"model":"none"}`: 500, `{"model":"twice"}`: 200} {
		c := r.dial()
		c.send(chatPost(body, "X-Request-Id: p1"))
		resp, text := c.readResponse()
		if resp.StatusCode != status || resp.Header.Get("X-Request-Id") != "p1" {
			t.Errorf("%s: %d %v %s", body, resp.StatusCode, resp.Header, text)
		}
		if status == 500 && resp.Header.Get("X-Sluice-Reason") != string(Internal) {
			t.Errorf("%s: %v", body, resp.Header)
		}
	}
	r.observed.mu.Lock()
	defer r.observed.mu.Unlock()
	if r.observed.panics != 2 {
		t.Errorf("%d panics seen, want 2", r.observed.panics)
	}
}

func TestForwardFields(t *testing.T) {
	var mu sync.Mutex // the socket's own order is not seen by the race detector
	var got []upstream.Field
	r := start(t, Options{}, func(x Exchange) {
		mu.Lock()
		defer mu.Unlock()
		got = nil
		for _, f := range x.ForwardFields(nil) {
			got = append(got, upstream.Field{Name: strings.Clone(f.Name), Value: strings.Clone(f.Value)})
		}
		if string(x.Header("AUTHORIZATION")) != "Bearer k" || x.Header("X-Absent") != nil {
			t.Error("Header does not find, or finds too much")
		}
		echo(x)
	})
	c := r.dial()
	c.send(helloPost("aUTHorization:  Bearer k \r\nX-data-parallel-rank: 3\r\nx-sluice-worker: w\r\nX-Request-ID: q\r\nx-override-bootstrap-host: 10.9.9.9\r\n" +
		"Connection: keep-alive, X-Hop\r\nX-HOP: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nTrailer: X-A\r\nProxy-Authorization: p\r\n" +
		"Proxy-Connection: x\r\nUpgrade: h2c\r\nAccept-Encoding: gzip\r\nContent-Encoding: identity\r\ntraceparent: 00-1\r\nX-Session-ID: s\r\n"))
	c.readResponse()
	mu.Lock()
	defer mu.Unlock()
	want := []upstream.Field{{Name: "aUTHorization", Value: "Bearer k"}, {Name: "traceparent", Value: "00-1"},
		{Name: "X-Session-ID", Value: "s"}, {Name: "Content-Type", Value: "application/json"}}
	if len(got) != len(want) {
		t.Fatalf("forwarded %q", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("field %d: %q, want %q", i, got[i], want[i])
		}
	}
}

func TestConnectionLimits(t *testing.T) {
	for _, opt := range []Options{{MaxConns: 2}, {MaxConnsPerIP: 2}} {
		r := start(t, opt, echo)
		ask := func(c *client) int {
			c.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
			resp, _ := c.readResponse()
			return resp.StatusCode
		}
		a, b := r.dial(), r.dial()
		if ask(a) != 200 || ask(b) != 200 {
			t.Fatal("within the limit")
		}
		last := ""
		for range 2 {
			over := r.dial()
			over.send("GET /livez HTTP/1.1\r\nHost: a\r\n\r\n") // most have sent it when they are accepted
			resp, body := over.readResponse()
			if _, err := over.br.ReadByte(); err != io.EOF {
				t.Errorf("behind the answer: %v, and not the connection's end: it was reset with the answer in flight", err)
			}
			id := resp.Header.Get("X-Request-Id")
			if resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != string(TooManyConnections) || !fieldrules.ValidRequestID([]byte(id)) || id == last {
				t.Errorf("over the limit: %d %s of %q, behind %q", resp.StatusCode, body, id, last)
			}
			last = id
		}
		_ = a.Close()
		testwait.Until(t, "a place is free", func() bool { return r.server.conns.len() == 1 })
		if ask(r.dial()) != 200 {
			t.Error("after a place became free")
		}
	}
}

func TestReplyPassesTheEnginesAnswer(t *testing.T) {
	const answer = `{"id":1, "error" : "no"}`
	e := startEngine(t, func(w net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(w, "HTTP/1.1 418 odd\r\nContent-type: application/problem+json\r\nx-weird: a,  b\r\nX-Weird: c\r\n"+
			"x-request-id: engine\r\nX-Sluice-Worker: liar\r\nConnection: keep-alive, x-hop\r\nx-hop: 1\r\nContent-Length: 24\r\n\r\n"+answer)
		return true
	})
	r := start(t, Options{}, func(x Exchange) {
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, new(upstream.Call))
		if err != nil {
			x.Error(UpstreamFailed, "", err.Error(), 0)
			return
		}
		body, err := resp.ReadAll(nil, 1<<20)
		if err != nil {
			t.Error(err)
		}
		x.SetHeader("X-Sluice-Worker", "w0")
		x.SetHeader("X-Sluice-Worker", "w1")
		x.Reply(resp, body)
		resp.Release()
	})
	c := r.dial()
	c.send(chatPost(hello, "X-Request-Id: mine"))
	head := ""
	br := bufio.NewReader(c)
	for {
		line, err := br.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if line == "\r\n" {
			break
		}
		head += line
	}
	body := make([]byte, len(answer))
	if _, err := io.ReadFull(br, body); err != nil || string(body) != answer {
		t.Errorf("%q %v", body, err)
	}
	contains(t, head, "HTTP/1.1 418 ", "Content-type: application/problem+json\r\n", "x-weird: a,  b\r\nX-Weird: c\r\n",
		"X-Request-Id: mine\r\n", "X-Sluice-Worker: w1\r\n", "Content-Length: 24\r\n")
	for _, no := range []string{"engine", "liar", "x-hop", "w0"} {
		if strings.Contains(head, no) {
			t.Errorf("%q in %q", no, head)
		}
	}
}

func TestImpossibleOptions(t *testing.T) {
	h := handlerFunc(echo)
	for _, opt := range []Options{
		{}, {Handler: h, MaxBodyBytes: -1}, {Handler: h, MaxHeadBytes: 10}, {Handler: h, IdleTimeout: -1},
		{Handler: h, BodyBudgetBytes: 1 << 20}, {Handler: h, MaxConns: -1},
	} {
		if _, err := New(opt); err == nil || !strings.HasPrefix(err.Error(), "front: cannot") {
			t.Errorf("%+v: %v", opt, err)
		}
	}
}
