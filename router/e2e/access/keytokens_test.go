package access

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// longBody returns a request with a prompt of 3,000 bytes, which the router counts as 750 tokens.
func longBody(more string) string {
	return fmt.Sprintf(`{"model":"sim","prompt":%q%s}`, strings.Repeat("word ", 600), more)
}

// TestUnreportedTokensAreCharged: a key's limit also counts responses without usage, or with only half
// of it, clients that leave before a response, and prefill-only requests.
func TestUnreportedTokensAreCharged(t *testing.T) {
	t.Parallel()
	const prompt = 750
	answer := ""
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		if answer == "" {
			<-r.Context().Done()
			return
		}
		harness.ReplyJSON(w, 200, answer)
	})
	auth, mod := harness.TokenKey(1 << 30)
	r := harness.StartRouter(t, mod, e.Worker(worker.Aggregated, "e"))
	spent := func() uint64 { return r.Keyring.Keys()[0].Counts().Tokens }
	for _, c := range []struct {
		name, answer string
		want         uint64
		headers      []string
	}{
		{"all reported", `{"choices":[{"text":"hello"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`, 5, nil},
		{"no usage", `{"choices":[{"text":"hello"}]}`, prompt + 2, nil},
		{"chat's shape", `{"id":"0123456789","choices":[{"message":{"content":"12345678","tool_calls":[{"function":{"name":"f","arguments":"{}{}"}}]},"logprobs":{"content":[{"token":"x","top_logprobs":[]}]}}]}`, prompt + 3, nil},
		{"ids", `{"choices":[{"token_ids":[1,2,3]}]}`, prompt + 3, nil},
		{"null prompt_tokens", `{"choices":[{"text":"hello"}],"usage":{"prompt_tokens":null,"completion_tokens":7}}`, prompt + 7, nil},
		{"no completion_tokens", `{"choices":[{"text":"hello"}],"usage":{"prompt_tokens":9}}`, 9 + 2, nil},
		{"warmed", `{"choices":[{"text":"h"}]}`, prompt + 1, []string{"X-Sluice-Prefill-Only", "true"}},
	} {
		answer = c.answer
		before := spent()
		if a := harness.Post(t, r.URL+"/v1/completions", longBody(""), append(c.headers, auth...)...); a.Status != 200 {
			t.Fatalf("%s: %d %s", c.name, a.Status, a.Body)
		}
		if got := spent() - before; got != c.want {
			t.Errorf("%s: %d tokens booked, want %d", c.name, got, c.want)
		}
	}
	answer = ""
	for _, more := range []string{"", `,"stream":true`} {
		before := spent()
		ctx, leave := context.WithTimeout(t.Context(), 200*time.Millisecond)
		req, _ := http.NewRequestWithContext(ctx, "POST", r.URL+"/v1/completions", strings.NewReader(longBody(more)))
		req.Header.Set(auth[0], auth[1])
		if resp, err := http.DefaultClient.Do(req); err == nil {
			t.Errorf("an answer: %s", resp.Status)
			resp.Body.Close()
		}
		leave()
		testwait.UntilWithin(t, 5*time.Second, "a client that left pays for its prompt", func() bool { return spent()-before == prompt })
	}
	answer = `{"choices":[{"text":"hello"}]}`
	if a := harness.Post(t, r.URL+"/v1/embeddings", `{"model":"sim","input":"`+strings.Repeat("word ", 600)+`"}`, auth...); a.Status != 200 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	if got := r.Keyring.Keys()[0].Counts().Tokens; got < prompt {
		t.Errorf("embeddings without usage: %d", got)
	}
}

// TestTokensAreReserved: concurrent requests cannot all use the quota that remains for one of them,
// and a failed request returns its reservation.
func TestTokensAreReserved(t *testing.T) {
	block := make(chan struct{})
	status := 200
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		<-block
		if strings.Contains(r.URL.Path, "chat") {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
			w.(http.Flusher).Flush()
			io.WriteString(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n")
			return
		}
		harness.ReplyJSON(w, status, `{"choices":[{"text":"h"}],"usage":{"prompt_tokens":750,"completion_tokens":1}}`)
	})
	auth, mod := harness.TokenKey(2000) // enough for two requests of 750 tokens, not for a third
	r := harness.StartRouter(t, mod, e.Worker(worker.Aggregated, "e"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := map[int]int{}
	for range 20 {
		wg.Go(func() {
			a := harness.Post(t, r.URL+"/v1/completions", longBody(""), auth...)
			mu.Lock()
			defer mu.Unlock()
			if got[a.Status]++; a.Status == 429 {
				if a.Header.Get("Retry-After") == "" || a.Header.Get("X-Sluice-Reason") != "key_limit" || a.Header.Get("x-ratelimit-remaining-tokens") == "2000" || !strings.Contains(string(a.Body), "750 tokens of this prompt") {
					t.Errorf("%v %s", a.Header, a.Body)
				}
				if got[429] == 18 {
					close(block)
				}
			}
		})
	}
	if wg.Wait(); got[200] != 2 || got[429] != 18 {
		t.Fatalf("%v; want 2 of 20 let in", got)
	}

	auth, mod = harness.TokenKey(800)
	r = harness.StartRouter(t, mod, e.Worker(worker.Aggregated, "e"))
	left := func() string {
		return harness.Post(t, r.URL+"/v1/completions", `{}`, auth...).Header.Get("x-ratelimit-remaining-tokens")
	}
	status = 400
	for i := range 3 { // each reserves nearly the whole quota
		if a := harness.Post(t, r.URL+"/v1/completions", longBody(""), auth...); a.Status != 400 {
			t.Fatalf("request %d, which the engine refuses: %d %s", i+1, a.Status, a.Body)
		}
	}
	if got := left(); got != "800" {
		t.Errorf("%s tokens are left behind requests that an engine has refused, want 800", got)
	}
	chat := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("word ", 600) + `"}]}`
	if a := harness.Post(t, r.URL+"/v1/chat/completions", chat, auth...); a.Status != 200 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	testwait.UntilWithin(t, 5*time.Second, "a stream gives back what it did not use", func() bool {
		n, _ := strconv.Atoi(left())
		return n >= 780
	})
	if c := r.Keyring.Keys()[0].Counts(); c.Tokens != 11 {
		t.Errorf("%d tokens are booked, want the stream's 11", c.Tokens)
	}
	status = 200
	if a := harness.Post(t, r.URL+"/v1/completions", `{"model":"none","prompt":"x"}`, auth...); a.Status != 404 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
}

// TestBackgroundResponsesAreCharged: a background response is acknowledged before it is computed. The
// router charges its key for the maximum output; in the past it charged only the prompt.
func TestBackgroundResponsesAreCharged(t *testing.T) {
	status, answer := 200, ""
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if strings.Contains(string(b), `"stream":true`) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"status\":\"queued\"}}\n\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		harness.ReplyJSON(w, status, answer)
	})
	auth, mod := harness.TokenKey(1 << 30)
	r := harness.StartRouter(t, mod, e.Worker(worker.Aggregated, "e"))
	spent := func() int { return int(r.Keyring.Keys()[0].Counts().Tokens) }
	body := func(more string) string {
		return fmt.Sprintf(`{"model":"sim","input":%q,"background":true%s}`, strings.Repeat("word ", 600), more)
	}
	const queued = `{"id":"resp_1","object":"response","status":"queued","usage":null}`
	for _, c := range []struct {
		name, more, answer string
		status, atLeast    int
		below              int
	}{
		{"queued, with a limit", `,"max_output_tokens":5000`, queued, 200, 5750, 6000},
		{"queued, without one", ``, queued, 200, 4096 + 750, 5100},
		{"done at once", `,"max_output_tokens":5000`, `{"id":"resp_1","status":"completed","usage":{"input_tokens":700,"output_tokens":9}}`, 200, 709, 710},
		{"refused", `,"max_output_tokens":5000`, `{"error":{"message":"no"}}`, 400, 0, 1},
	} {
		status, answer = c.status, c.answer
		before := spent()
		if a := harness.Post(t, r.URL+"/v1/responses", body(c.more), auth...); a.Status != c.status {
			t.Fatalf("%s: %d %s", c.name, a.Status, a.Body)
		}
		if got := spent() - before; got < c.atLeast || got >= c.below {
			t.Errorf("%s: %d tokens are charged, want %d to %d", c.name, got, c.atLeast, c.below)
		}
	}
	before := spent()
	ctx, leave := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer leave()
	req, _ := http.NewRequestWithContext(ctx, "POST", r.URL+"/v1/responses", strings.NewReader(body(`,"max_output_tokens":5000,"stream":true`)))
	req.Header.Set(auth[0], auth[1])
	if resp, err := http.DefaultClient.Do(req); err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	testwait.UntilWithin(t, 5*time.Second, "a client that leaves the stream of a background response pays for it", func() bool { return spent()-before >= 5750 })
}

// TestBackgroundChargeIsAdjusted: a client that reads a background response after its end is charged
// what the engine has computed, once, instead of the maximum.
func TestBackgroundChargeIsAdjusted(t *testing.T) {
	var answer atomic.Pointer[string]
	set := func(s string) { answer.Store(&s) }
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model","max_model_len":40960}]}`)
	})
	mux.HandleFunc("/v1/responses", func(w http.ResponseWriter, r *http.Request) {
		harness.ReplyJSON(w, 200, `{"id":"resp_1","object":"response","status":"queued","usage":null}`)
	})
	mux.HandleFunc("/v1/responses/", func(w http.ResponseWriter, r *http.Request) { harness.ReplyJSON(w, 200, *answer.Load()) })
	e := httptest.NewServer(mux)
	t.Cleanup(e.Close)
	const limit = 100_000
	auth, mod := harness.TokenKey(limit)
	r := harness.StartRouter(t, mod, config.Worker{ID: "e", URL: e.URL, Role: worker.Aggregated, KVEvents: []string{"off"}})
	key := r.Keyring.Keys()[0]
	for _, c := range []struct {
		name, path, answer string
		spent              int // -1: the maximum
	}{
		{"completed", "/v1/responses/resp_1", `{"id":"resp_1","status":"completed","usage":{"input_tokens":700,"output_tokens":9}}`, 709},
		{"cancelled", "/v1/responses/resp_1/cancel", `{"id":"resp_1","status":"cancelled","usage":{"input_tokens":700,"output_tokens":0}}`, 700},
		{"more than the maximum", "/v1/responses/resp_1", `{"id":"resp_1","status":"incomplete","usage":{"input_tokens":700,"output_tokens":6000}}`, 6700},
		{"still running", "/v1/responses/resp_1", `{"id":"resp_1","status":"in_progress","usage":{"input_tokens":700,"output_tokens":9}}`, -1},
		{"no usage", "/v1/responses/resp_1", `{"id":"resp_1","status":"failed","usage":null}`, -1},
	} {
		before := int(key.Counts().Tokens)
		spent := func() int { return int(key.Counts().Tokens) - before }
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(`{"model":"sim","input":%q,"background":true,"max_output_tokens":5000}`, strings.Repeat("word ", 600)), auth...), 200)
		reserved := spent()
		if reserved < 5750 {
			t.Fatalf("%s: %d tokens are charged at first", c.name, reserved)
		}
		want := c.spent
		if want < 0 {
			want = reserved
		}
		set(c.answer)
		method := "GET"
		if strings.HasSuffix(c.path, "/cancel") {
			method = "POST"
		}
		for range 3 { // only the first one counts
			harness.WantStatus(t, harness.DoWithoutBody(t, method, r.URL+c.path, auth...), 200)
			if got := spent(); got != want {
				t.Errorf("%s: %d tokens are charged, want %d", c.name, got, want)
			}
		}
	}
	// The limit follows the total: what was returned may be used.
	left := limit - int(key.Counts().Tokens)
	ok := func(n int) bool {
		d := key.Reserve(n)
		if d == nil {
			key.Commit(n, 0)
		}
		return d == nil
	}
	if !ok(left-1000) || ok(left+10_000) {
		t.Errorf("with %d tokens left: %d are granted %v, %d are granted %v", left, left-1000, ok(left-1000), left+10_000, ok(left+10_000))
	}
}
