package discovery

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// register sends an announcement to a router's registration listener. path is the id as it is in the URL.
func register(t *testing.T, r *harness.Router, path, body string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequest("PUT", "http://"+r.Registration.Addr()+"/v1/workers/"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+harness.RegisterToken)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}

// wantPlain checks that a text has no character that a terminal or a page interprets: only lines of printable
// characters, without direction marks.
func wantPlain(t *testing.T, what, text string) {
	t.Helper()
	for n, line := range strings.Split(text, "\n") {
		at := strings.IndexFunc(line, func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) && r != '\t' })
		if at >= 0 {
			t.Errorf("%s, line %d: %q", what, n+1, line[max(at-100, 0):min(at+100, len(line))])
			return
		}
	}
}

// escapes is what a hostile worker puts where text is expected: a terminal's escape sequences in C0 and C1,
// a direction mark, a line of the log, and markup.
const escapes = "\x1b[2J\x1b]0;owned\a\u009b31m\u202egnp\r\nlevel=ERROR msg=forged<img src=x onerror=alert(1)>"

// TestHostileRegistration: a worker that registers, and the engine behind it, cannot put control characters,
// forged lines or text without a bound into logs, metrics, the admin API and explain records.
func TestHostileRegistration(t *testing.T) {
	t.Parallel()
	const quoted = `\u001b[2J\u001b]0;owned\u0007\u009b31m\u202egnp\r\nlevel=ERROR msg=forged<img src=x onerror=alert(1)>`
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		switch path := q.URL.Path; {
		case strings.HasSuffix(path, "/health"):
		case strings.HasSuffix(path, "/v1/models"):
			fmt.Fprintf(w, `{"data":[{"id":"good"},{"id":"bad%s"},{"id":"<img src=x onerror=alert(1)>"}]}`, quoted)
		case strings.HasSuffix(path, "/version"):
			fmt.Fprintf(w, `{"version":"9%s"}`, quoted)
		case q.Method != "POST":
			http.NotFound(w, q)
		case strings.Contains(string(body), "raw"):
			if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
				io.WriteString(c, "HTTP/1.1 2"+escapes+" OK\r\nX-A"+escapes+": b\r\n\r\n")
				c.Close()
			}
		case strings.Contains(string(body), "refuse"):
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprintf(w, `{"error":{"message":"%s","type":"%s","code":"%s"}}`, quoted, quoted, quoted)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"error\":{\"message\":\"%s\",\"type\":\"%s\"}}\n\n", quoted, quoted)
		}
	}))
	t.Cleanup(engine.Close)
	r := harness.LaunchRouter(t, func(c *config.Config) { withRegister(c); c.Tokens.Mode = "text" })

	body := fmt.Sprintf(`{"version":1,"url":%q}`, engine.URL)
	for what, id := range map[string]string{
		"escape": "a%1B%5B2J", "C1": "a%C2%9B31m", "direction": "a%E2%80%AEb", "line": "a%0Alevel=ERROR", "NUL": "a%00b", "no UTF-8": "a%FFb", "quote": "a%22b",
		"markup": "%3Cscript%3Ealert(1)%3C%2Fscript%3E", "space": "a%20b", "flag": "--yes", "long": strings.Repeat("x", 10<<10),
	} {
		if status, text := register(t, r, id, body); status != 400 || len(text) > 1000 {
			t.Errorf("an id with %s: %d %.300s", what, status, text)
		} else {
			wantPlain(t, "the answer to an id with "+what, text)
		}
	}
	for what, bad := range map[string]string{
		"models": fmt.Sprintf(`{"version":1,"url":%q,"models":["%s"]}`, engine.URL, quoted), "labels": fmt.Sprintf(`{"version":1,"url":%q,"labels":["%s"]}`, engine.URL, quoted),
		"engine": fmt.Sprintf(`{"version":1,"url":%q,"engine":"%s"}`, engine.URL, quoted), "role": fmt.Sprintf(`{"version":1,"url":%q,"role":"%s"}`, engine.URL, quoted),
		"kv_events": fmt.Sprintf(`{"version":1,"url":%q,"kv_events":["tcp://127.0.0.1:%s"]}`, engine.URL, quoted), "unknown": fmt.Sprintf(`{"version":1,"url":%q,"%s":1}`, engine.URL, quoted),
		"health_path": fmt.Sprintf(`{"version":1,"url":%q,"health_path":"/%s"}`, engine.URL, quoted), "long url": fmt.Sprintf(`{"version":1,"url":"%s/%s"}`, engine.URL, strings.Repeat("x", 10<<10)),
	} {
		if status, text := register(t, r, "bad", bad); status != 400 || len(text) > 1000 {
			t.Errorf("%s: %d %.300s", what, status, text)
		} else {
			wantPlain(t, "the answer to a bad announcement, "+what, text)
		}
	}
	// What is accepted: every character of an id, and a path that needs escapes.
	id := "A-z.0_9:@" + strings.Repeat("y", 119)
	if status, text := register(t, r, id, fmt.Sprintf(`{"version":1,"url":"%s/%%1b[2J<b>","models":["<img src=x onerror=alert(1)>","good"],"labels":["<b>\"'&"]}`, engine.URL)); status != 201 {
		t.Fatalf("%d %s", status, text)
	}
	testwait.UntilWithin(t, 10*time.Second, "the worker is ready", func() bool { return r.State(id) == worker.Ready })
	for i, prompt := range []string{"raw", "refuse", "stream"} {
		request := fmt.Sprintf(`{"model":"good","stream":true,"messages":[{"role":"user","content":%q}]}`, prompt)
		a := harness.Post(t, r.URL+"/v1/chat/completions", request, "X-Request-Id", fmt.Sprint("hostile-", i))
		if a.Status == 200 && prompt != "stream" {
			t.Errorf("%s: %d %s", prompt, a.Status, a.Body)
		}
	}
	for i := range 3 {
		record := r.Outcome(t, fmt.Sprint("hostile-", i))
		for _, note := range record.Notes {
			wantPlain(t, "a note of an explain record", note.Text)
		}
		wantPlain(t, "a reason of an explain record", record.Outcome.Reason)
	}
	for _, path := range []string{"status?parts=workers,models,requests,keys,transfers,queues&detail=" + id, "workers", "health", "discovery", "requests", "explain/hostile-0", "explain/hostile-1", "explain/hostile-2"} {
		a := harness.Get(t, "http://"+r.Admin.Addr()+"/admin/v1/"+path, "Authorization", "Bearer "+r.Config.Admin.Token)
		wantPlain(t, "/admin/v1/"+path, string(a.Body))
	}
	for _, path := range []string{"/metrics", "/health", "/readyz", "/v1/models"} {
		wantPlain(t, path, string(harness.Get(t, r.URL+path).Body))
	}
	for line := range strings.Lines(r.Logs.String()) {
		if strings.HasPrefix(line, "level=") || len(line) > 8<<10 {
			t.Errorf("a forged or a long line in the log: %.300q", line)
		}
	}
	wantPlain(t, "the log", r.Logs.String())
}
