package front

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/membudget"
)

// doc is a JSON body of n bytes.
func doc(n int) string {
	const frame = `{"prompt":""}`
	return `{"prompt":"` + strings.Repeat("x", n-len(frame)) + `"}`
}

func TestBodyLimit(t *testing.T) {
	const limit = 300 << 10
	r := start(t, Options{MaxBodyBytes: limit, BodyBudgetBytes: 4*limit + limit/4}, func(x Exchange) {
		x.ReplyJSON(200, fmt.Appendf(nil, "%d", len(x.Request().Doc.Body)))
	})
	chunked := func(body string) string {
		text := chunkedHead
		for len(body) > 0 {
			n := min(len(body), 10_000)
			text += chunk(body[:n])
			body = body[n:]
		}
		return text + "0\r\n\r\n"
	}
	for _, n := range []int{13, 4095, 4096, 4097, 8191, 8192, 8193, 65536, 65537, 200_000, limit - 1, limit} {
		for kind, raw := range map[string]string{"sized": chatPost(doc(n)), "chunked": chunked(doc(n))} {
			c := r.dial()
			_, _ = c.Write([]byte(raw))
			if resp, body := c.readResponse(); resp.StatusCode != 200 || body != fmt.Sprint(n) {
				t.Errorf("%s, %d bytes: %d %q", kind, n, resp.StatusCode, body)
			}
		}
	}
	before := r.calls.Load()
	for kind, raw := range map[string]string{"sized": chatPost(doc(limit + 1)), "chunked": chunked(doc(limit + 1))} {
		c := r.dial()
		_, _ = c.Write([]byte(raw))
		resp, body := c.readResponse()
		if resp.StatusCode != 413 || resp.Header.Get("X-Sluice-Reason") != string(BodyTooLarge) {
			t.Errorf("%s over the limit: %d %q", kind, resp.StatusCode, body)
		}
		contains(t, body, "larger than 307200 bytes")
	}
	// A Content-Length above the limit is refused before the body arrives.
	c := r.dial()
	c.send(atHost + "Content-Length: 99999999999\r\n\r\n{")
	if resp, _ := c.readResponse(); resp.StatusCode != 413 {
		t.Errorf("declared excess: %d", resp.StatusCode)
	}
	if r.calls.Load() != before {
		t.Error("the handler ran on a body over the limit")
	}
	if used := r.server.budget.Used(); used != 0 {
		t.Errorf("%d bytes of the budget are still held", used)
	}
}

func TestBodyBudget(t *testing.T) {
	const limit = 256 << 10
	free, held := make(chan struct{}), make(chan struct{}, 8)
	r := start(t, Options{MaxBodyBytes: limit, BodyBudgetBytes: 4*limit + limit/4}, func(x Exchange) {
		if len(x.Request().Doc.Body) > 100_000 {
			held <- struct{}{}
			<-free
		}
		x.ReplyJSON(200, []byte("{}")) // a long answer would count as well
	})
	var waiting []*client
	for range 4 {
		c := r.dial()
		c.send(chatPost(doc(limit)))
		<-held
		waiting = append(waiting, c)
	}
	c := r.dial()
	c.send(chatPost(doc(limit)))
	resp, body := c.readResponse()
	if resp.StatusCode != 503 || resp.Header.Get("X-Sluice-Reason") != string(BudgetExhausted) || resp.Header.Get("Retry-After") != "1" {
		t.Errorf("over the budget: %d %v %s", resp.StatusCode, resp.Header, body)
	}
	// A small request still fits.
	c = r.dial()
	c.send(chatPost(hello))
	if resp, _ := c.readResponse(); resp.StatusCode != 200 {
		t.Errorf("small request: %d", resp.StatusCode)
	}
	close(free)
	for _, c := range waiting {
		if resp, _ := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("held request: %d", resp.StatusCode)
		}
	}
	testwait.Until(t, "budget given back", func() bool { return r.server.budget.Used() == 0 })
}

// Bodies that are announced but not sent take little memory.
func TestStalledBodiesUseLittleMemory(t *testing.T) {
	r := start(t, Options{}, echo)
	for range 50 {
		c := r.dial()
		c.send(fmt.Sprintf("%sContent-Length: %d\r\n\r\n", atHost, 30<<20) + doc(9<<10))
	}
	testwait.Until(t, "bodies begun", func() bool { return r.server.budget.Used() > 0 })
	testwait.Settled(t, 50*time.Millisecond, "the memory of the bodies", r.server.budget.Used)
	if used := r.server.budget.Peak(); used > 50*int64(membudget.SizeOf(initialBodyBuf)) {
		t.Errorf("50 stalled bodies of 30 MiB take %d bytes", used)
	}
	t.Logf("reliability 2: 50 bodies of 30 MiB that stopped after 9 KiB held %d KiB", r.server.budget.Peak()>>10)
}

func TestSlowBodyTimesOut(t *testing.T) {
	t.Parallel()
	for name, raw := range map[string]string{
		"small sized": atHost + "Content-Length: 13\r\n\r\n{",
		"large sized": atHost + "Content-Length: 100000\r\n\r\n" + doc(10_000),
		"chunked":     chunkedHead + "d\r\n{",
	} {
		r := start(t, Options{BodyTimeout: 150 * time.Millisecond}, echo)
		c := r.dial()
		c.send(raw)
		resp, body := c.readResponse()
		if resp.StatusCode != 408 || resp.Header.Get("X-Sluice-Reason") != string(RequestTimeout) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, body)
		}
		c.expectClosed()
	}
}

func TestSlowHeadTimesOut(t *testing.T) {
	t.Parallel()
	r := start(t, Options{HeadTimeout: 500 * time.Millisecond}, echo)
	c := r.dial()
	began := time.Now()
	c.send(requestLine + "Host:")
	testwait.Pace(300 * time.Millisecond)
	c.send("x") // trickling does not prolong it
	if resp, body := c.readResponse(); resp.StatusCode != 408 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if took := time.Since(began); took < 400*time.Millisecond {
		t.Errorf("cut after %v", took)
	}
	c.expectClosed()

	// The same on a connection that has served before.
	c = r.dial()
	c.send(chatPost(hello))
	c.readResponse()
	c.send(requestLine + "Host:")
	if resp, body := c.readResponse(); resp.StatusCode != 408 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	c.expectClosed()

	silent := r.dial()
	silent.expectClosed()
}

// A body that trickles, but not too slowly, is read whole.
func TestSteadyBodyPasses(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	body := doc(3000)
	c.send(chatPost(body)[:len(chatPost(body))-len(body)])
	for i := 0; i < len(body); i += 500 {
		c.send(body[i : i+500])
		testwait.Pace(time.Millisecond)
	}
	if resp, got := c.readResponse(); resp.StatusCode != 200 || got != body {
		t.Errorf("%d, %d bytes", resp.StatusCode, len(got))
	}
}

func TestForbiddenFields(t *testing.T) {
	values := []string{`{"remote_host":"10.0.0.1"}`, `"x"`, `1`, `[]`, `false`}
	refuse := start(t, Options{}, echo)
	strip := start(t, Options{StripForbidden: true}, echo)
	for name, onlyRouter := range fieldrules.EngineFields() {
		if !onlyRouter {
			continue
		}
		for _, v := range values {
			body := `{"model":"m","` + name + `":` + v + `,"z":1}`
			c := refuse.dial()
			c.send(chatPost(body))
			resp, text := c.readResponse()
			if resp.StatusCode != 400 {
				t.Errorf("%s: %d", body, resp.StatusCode)
			}
			// A value of the wrong type may be refused as such.
			contains(t, text, `"param":"`+name+`"`)
		}
		v := `{}`
		switch name {
		case "bootstrap_host":
			v = `"h"`
		case "bootstrap_port", "bootstrap_room":
			v = `7`
		}
		body := `{"model":"m", "` + name + `":` + v + `,"z":12345678901234567890}`
		c := refuse.dial()
		c.send(chatPost(body))
		resp, text := c.readResponse()
		if resp.Header.Get("X-Sluice-Reason") != string(ForbiddenField) {
			t.Errorf("%s: %v %s", body, resp.Header, text)
		}
		c = strip.dial()
		c.send(chatPost(body))
		resp, text = c.readResponse()
		if resp.StatusCode != 200 || strings.Contains(text, name) {
			t.Errorf("stripped %s: %d %s", body, resp.StatusCode, text)
		}
		contains(t, text, `"model":"m"`, `"z":12345678901234567890`)

		null := `{"` + name + `":null,"model":"m"}`
		c = refuse.dial()
		c.send(chatPost(null))
		if resp, text := c.readResponse(); resp.StatusCode != 200 || text != null {
			t.Errorf("%s: %d %s", null, resp.StatusCode, text)
		}
	}
	if n := strip.server.budget.Used(); n != 0 {
		t.Errorf("%d bytes of the budget are still held", n)
	}
}

// TestModelNameIsBounded: the name of a model is kept in records and logs, so a long one is refused, and not repeated.
func TestModelNameIsBounded(t *testing.T) {
	r := start(t, Options{}, echo)
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/embeddings"} {
		for n, status := range map[int]int{maxModelName: 200, maxModelName + 1: 400, 1 << 20: 400} {
			name := strings.Repeat("m", n)
			c := r.dial()
			c.send(post(path, `{"model":"`+name+`","messages":[],"prompt":"x","input":"x"}`))
			resp, text := c.readResponse()
			if resp.StatusCode != status {
				t.Errorf("%s: a name of %d bytes: status %d; want %d", path, n, resp.StatusCode, status)
			}
			if status == 400 && (resp.Header.Get("X-Sluice-Reason") != string(BadField) || len(text) > 300 || !strings.Contains(text, strconv.Itoa(n)+" bytes")) {
				t.Errorf("%s: a name of %d bytes: reason %s, %.300s", path, n, resp.Header.Get("X-Sluice-Reason"), text)
			}
		}
	}
}

func TestBadJSON(t *testing.T) {
	r := start(t, Options{MaxDepth: 8}, echo)
	for body, reason := range map[string]Reason{
		``: BadJSON, `{`: BadJSON, `[]`: BadJSON, `{"a":1}x`: BadJSON, `nonsense`: BadJSON, "{\"a\":\"\xff\"}": "",
		`{"model":1}`: BadField, `{"stream":"yes"}`: BadField, `{"model":"a","model":"b"}`: BadField,
		`{"a":` + strings.Repeat("[", 9) + strings.Repeat("]", 9) + `}`: "",
	} {
		c := r.dial()
		c.send(chatPost(body))
		resp, text := c.readResponse()
		if resp.StatusCode != 400 {
			t.Errorf("%q: %d", body, resp.StatusCode)
		}
		if got := resp.Header.Get("X-Sluice-Reason"); reason != "" && got != string(reason) {
			t.Errorf("%q: reason %s, want %s: %s", body, got, reason, text)
		}
		contains(t, text, "want")
		// The connection serves another request.
		c.send(chatPost(hello))
		if resp, _ := c.readResponse(); resp.StatusCode != 200 {
			t.Errorf("after %q: %d", body, resp.StatusCode)
		}
	}
}

// A head may arrive in pieces of any size, even if it is larger than the read-ahead.
func TestHeadInPieces(t *testing.T) {
	r := start(t, Options{}, echo)
	for _, pad := range []int{0, 3000, 4050, 4096, 9000} {
		raw := chatPost(hello, "X-Pad: "+strings.Repeat("p", pad))
		for _, cut := range []int{1, 17, 100, 4095, 4096, 4097, len(raw) - len(hello) - 2, len(raw) - len(hello), len(raw) - 1} {
			if cut >= len(raw) {
				continue
			}
			c := r.dial()
			c.send(raw[:cut])
			testwait.Pace(time.Millisecond)
			c.send(raw[cut:])
			if resp, body := c.readResponse(); resp.StatusCode != 200 || body != hello {
				t.Errorf("pad %d, cut at %d: %d %q", pad, cut, resp.StatusCode, body)
			}
			_ = c.Close()
		}
	}
}

// A client that has sent nothing has no buffer; one that sends its head slowly has a small one.
func TestTricklingHeadsUseLittleMemory(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	c.send("P")
	r.dial()
	testwait.Until(t, "both connected", func() bool {
		r.server.conns.mu.Lock()
		defer r.server.conns.mu.Unlock()
		for _, c := range r.server.conns.conns {
			if c.active.Load() {
				t.Error("half a head of a new connection is not closed to make room")
			}
		}
		return len(r.server.conns.conns) == 2
	})
	c.send(chatPost(hello)[1:])
	if resp, _ := c.readResponse(); resp.StatusCode != 200 {
		t.Errorf("%d", resp.StatusCode)
	}
}
