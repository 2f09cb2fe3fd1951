package access

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// storingEngine is an engine that stores responses like vLLM and SGLang: in its memory, for every
// client that knows the id. It has a route to delete a response only if deletes is set.
type storingEngine struct {
	*httptest.Server
	name           string
	deletes        bool
	redirectStatus atomic.Int32 // redirect requests about stored responses with this status; 0: do not

	mu             sync.Mutex
	stored         map[string]string // id -> status
	created        int
	storedRequests []string // method, target and cookies of requests about stored responses
}

func startStoringEngine(t *testing.T, name string, deletes bool) *storingEngine {
	t.Helper()
	k := &storingEngine{name: name, deletes: deletes, stored: map[string]string{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"org/sim","object":"model","max_model_len":4096}]}`)
	})
	mux.HandleFunc("POST /v1/responses", k.create)
	mux.HandleFunc("/v1/responses/{id}", k.retrieve)
	mux.HandleFunc("POST /v1/responses/{id}/cancel", k.retrieve)
	mux.HandleFunc("POST /v1/messages/count_tokens", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		harness.ReplyJSON(w, 200, fmt.Sprintf(`{"input_tokens":%d}`, len(body)))
	})
	k.Server = httptest.NewServer(mux)
	t.Cleanup(func() { k.CloseClientConnections(); k.Close() })
	return k
}

func (k *storingEngine) worker(id string) config.Worker {
	return config.Worker{ID: id, URL: k.URL, Role: worker.Aggregated, KVEvents: []string{"off"}}
}

// object returns the JSON of a response in the engines' format, padded by pad bytes.
func (k *storingEngine) object(id, status string, pad int) string {
	return fmt.Sprintf(`{"id":%q,"created_at":1,"model":"org/sim","object":"response","output":[],"status":%q,"engine":%q,"pad":%q,"usage":{"input_tokens":3,"output_tokens":1,"total_tokens":4}}`, id, status, k.name, strings.Repeat("x", pad))
}

func (k *storingEngine) create(w http.ResponseWriter, r *http.Request) {
	var b struct {
		Stream   bool    `json:"stream"`
		Pad      int     `json:"x_pad"`
		Previous *string `json:"previous_response_id"`
	}
	_ = json.NewDecoder(r.Body).Decode(&b)
	k.mu.Lock()
	defer k.mu.Unlock()
	if b.Previous != nil && k.stored[*b.Previous] == "" {
		harness.ReplyJSON(w, 404, `{"error":{"message":"Response with id not found.","type":"invalid_request_error","param":"response_id","code":404}}`)
		return
	}
	k.created++
	id := fmt.Sprintf("resp_%s%032d", k.name, k.created)
	k.stored[id] = "completed"
	if !b.Stream {
		harness.ReplyJSON(w, 200, k.object(id, "completed", b.Pad))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for i, kind := range []string{"response.created", "response.in_progress", "response.completed"} {
		fmt.Fprintf(w, "event: %s\ndata: {\"response\":%s,\"sequence_number\":%d,\"type\":%q}\n\n", kind, k.object(id, "in_progress", b.Pad), i, kind)
		w.(http.Flusher).Flush()
	}
}

func (k *storingEngine) retrieve(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.storedRequests = append(k.storedRequests, r.Method+" "+r.URL.RequestURI()+r.Header.Get("Cookie")+r.Header.Get("Authorization"))
	id := r.PathValue("id")
	if status := k.redirectStatus.Load(); status != 0 {
		w.Header().Set("Location", "http://10.0.0.1:8000/internal")
		w.Header().Set("Set-Cookie", "a=b")
		w.WriteHeader(int(status))
		return
	}
	switch {
	case k.stored[id] == "":
		harness.ReplyJSON(w, 404, `{"error":{"message":"Response with id not found.","type":"invalid_request_error","param":"response_id","code":404}}`)
	case r.Method == "DELETE" && !k.deletes:
		harness.ReplyJSON(w, 405, `{"detail":"Method Not Allowed"}`)
	case r.Method == "DELETE":
		delete(k.stored, id)
		harness.ReplyJSON(w, 200, fmt.Sprintf(`{"id":%q,"object":"response","deleted":true}`, id))
	case r.Method == "POST":
		k.stored[id] = "cancelled"
		harness.ReplyJSON(w, 200, k.object(id, "cancelled", 0))
	case r.URL.Query().Get("stream") == "true":
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		fmt.Fprintf(w, "event: response.completed\ndata: {\"response\":%s,\"sequence_number\":0,\"type\":\"response.completed\"}\n\n", k.object(id, "completed", 0))
	default:
		harness.ReplyJSON(w, 200, k.object(id, k.stored[id], 0))
	}
}

func (k *storingEngine) requests() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.storedRequests)
}

// idOf returns the id of the response in an answer or a stream.
func idOf(t *testing.T, a *harness.Answer) string {
	t.Helper()
	_, rest, ok := strings.Cut(string(a.Body), `"id":"`)
	id, _, ok2 := strings.Cut(rest, `"`)
	if a.Status != 200 || !ok || !ok2 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	return id
}

const respond = `{"model":"org/sim","input":"hello"%s}`

// TestStoredResponses creates responses on two engines: streamed, not streamed, and too long for the
// router's buffer. A request for each reaches only the engine that stored it, and only from the
// client that created it. In the past GET returned 404 and a follow-up went to any engine.
func TestStoredResponses(t *testing.T) {
	t.Parallel()
	mine, others := apikey.New(), apikey.New()
	engines := map[string]*storingEngine{"a": startStoringEngine(t, "a", false), "b": startStoringEngine(t, "b", true)}
	for name, keys := range map[string]bool{"keys": true, "no keys": false} {
		t.Run(name, func(t *testing.T) {
			mod, auth, other := func(*config.Config) {}, []string{"Cookie", "s=1"}, []string(nil)
			if keys {
				mod = harness.WithKeys(config.APIKey{Name: "mine", SHA256: apikey.HashOf(mine).String()}, config.APIKey{Name: "theirs", SHA256: apikey.HashOf(others).String()})
				auth, other = append(auth, "Authorization", "Bearer "+mine), []string{"Authorization", "Bearer " + others}
			}
			r := harness.StartRouter(t, mod, engines["a"].worker("a"), engines["b"].worker("b"))
			used := map[string]bool{}
			for i := range 24 {
				more := []string{"", `,"stream":true`, `,"x_pad":2000000`, `,"x_pad":2000000,"stream":true`}[i%4]
				made := harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, more), auth...)
				id, by := idOf(t, made), made.Header.Get("X-Sluice-Worker")
				used[by] = true
				url := r.URL + "/v1/responses/" + id
				want := fmt.Sprintf(`"engine":%q`, by)
				for _, query := range []string{"", "?stream=true", "?stream=false&starting_after=1"} {
					a := harness.Get(t, url+query, auth...)
					if a.Status != 200 || !strings.Contains(string(a.Body), want) || a.Header.Get("X-Sluice-Worker") != by {
						t.Fatalf("%q: GET %s%s: %d %.300s; want one of engine %s", more, id, query, a.Status, a.Body, by)
					}
				}
				next := harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, `,"previous_response_id":"`+id+`"`), auth...)
				if next.Status != 200 || next.Header.Get("X-Sluice-Worker") != by {
					t.Fatalf("the next turn: %d %s on %s, want %s", next.Status, next.Body, next.Header.Get("X-Sluice-Worker"), by)
				}
				if a := harness.DoWithoutBody(t, "POST", url+"/cancel", auth...); a.Status != 200 || !strings.Contains(string(a.Body), `"cancelled"`) {
					t.Errorf("cancel: %d %s", a.Status, a.Body)
				}
				if keys {
					before := engines[by].requests()
					for _, a := range []*harness.Answer{harness.Get(t, url, other...), harness.DoWithoutBody(t, "POST", url+"/cancel", other...), harness.DoWithoutBody(t, "DELETE", url, other...),
						harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, `,"previous_response_id":"`+id+`"`), other...)} {
						harness.WantReason(t, a, 404, "unknown_response")
					}
					if engines[by].requests() != before {
						t.Error("an engine was asked for another client's response")
					}
					own := idOf(t, harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, ""), other...))
					before = engines["a"].requests() + engines["b"].requests()
					for member, reason := range map[string]string{
						`"previous_response\u005fid":"` + id + `"`:                                      "unknown_response",
						`"previous_response_id":"` + own + `","previous_response_id":"` + id + `"`:      "bad_field",
						`"previous_response_id":"` + own + `","previous_response\u005fid":"` + id + `"`: "bad_field",
						`"previous_response_id":null,"previous_response_id":"` + id + `"`:               "bad_field",
						`"previous_response_id":5,"previous_response_id":"` + id + `"`:                  "bad_field",
						`"previous_response_id":["` + id + `"]`:                                         "bad_field",
					} {
						if a := harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, ","+member), other...); a.Status < 400 || a.Header.Get("X-Sluice-Reason") != reason {
							t.Errorf("%s: %d %s, want %s", member, a.Status, a.Body, reason)
						}
					}
					if engines["a"].requests()+engines["b"].requests() != before {
						t.Error("an engine was asked to go on from another client's response")
					}
					harness.WantReason(t, harness.Get(t, url), 401, "missing_api_key")
				}
				del := harness.DoWithoutBody(t, "DELETE", url, auth...)
				if want := map[string]int{"a": 405, "b": 200}[by]; del.Status != want {
					t.Errorf("DELETE: %d %s, want %d", del.Status, del.Body, want)
				}
				if after := harness.Get(t, url, auth...); by == "b" && after.Status != 404 || by == "a" && after.Status != 200 {
					t.Errorf("GET behind DELETE on %s: %d", by, after.Status)
				}
			}
			if len(used) != 2 {
				t.Errorf("only %v were used", used)
			}
			unknown := harness.Get(t, r.URL+"/v1/responses/resp_unknown", auth...)
			harness.WantReason(t, unknown, 404, "unknown_response")
			if msg, _, param := unknown.ErrorOf(t); param != "response_id" || !strings.Contains(msg, "resp_unknown") {
				t.Errorf("%s", unknown.Body)
			}
			for _, path := range []string{"/v1/responses/", "/v1/responses/a/b", "/v1/responses/a%2fb", "/v1/responses/../models", "/v1/responses/a/cancel/x", "/v1/responses/" + strings.Repeat("a", 129)} {
				harness.WantReason(t, rawGet(t, r.Addr(), path, auth...), 404, "unknown_route")
			}
			harness.WantReason(t, harness.DoWithoutBody(t, "PUT", r.URL+"/v1/responses/resp_1", auth...), 405, "wrong_method")
			harness.WantReason(t, harness.DoWithoutBody(t, "GET", r.URL+"/v1/responses/resp_1/cancel", auth...), 405, "wrong_method")
			for n, e := range engines {
				e.mu.Lock()
				if all := strings.Join(e.storedRequests, "\n"); strings.Contains(all, "s=1") || strings.Contains(all, mine) {
					t.Errorf("engine %s saw a cookie or a key", n)
				}
				e.mu.Unlock()
			}
		})
	}
}

// rawGet sends a GET request for a path without normalising it.
func rawGet(t *testing.T, addr, path string, headers ...string) *harness.Answer {
	t.Helper()
	req, err := http.NewRequest("GET", "http://"+addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.URL.Opaque = path
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return &harness.Answer{Status: resp.StatusCode, Header: resp.Header, Body: b}
}

// TestStoredResponseOfLostWorker: if the worker is not ready, a follow-up is refused with Retry-After.
// If the worker does not answer, a GET returns an error that says so.
func TestStoredResponseOfLostWorker(t *testing.T) {
	engines := map[string]*storingEngine{"a": startStoringEngine(t, "a", false), "b": startStoringEngine(t, "b", false)}
	r := harness.StartRouter(t, nil, engines["a"].worker("a"), engines["b"].worker("b"))
	made := harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, ""))
	id, by := idOf(t, made), made.Header.Get("X-Sluice-Worker")
	engines[by].CloseClientConnections()
	engines[by].Close()
	testwait.UntilWithin(t, 10*time.Second, "the worker is out", func() bool { return r.State(by) == worker.Unhealthy })
	if a := harness.Get(t, r.URL+"/v1/responses/"+id); a.Status != 502 || !strings.Contains(string(a.Body), by) {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	a := harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, `,"previous_response_id":"`+id+`"`))
	if a.Status != 503 || a.Header.Get("Retry-After") == "" || !strings.Contains(string(a.Body), "which stored response") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
}

// TestStoredResponseIsNotRedirected: the router forwards no redirect from an engine for a request
// about a stored response, whatever the method.
func TestStoredResponseIsNotRedirected(t *testing.T) {
	e := startStoringEngine(t, "a", true)
	r := harness.StartRouter(t, nil, e.worker("a"))
	id := idOf(t, harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, "")))
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	for _, status := range []int{301, 304, 307, 399} {
		e.redirectStatus.Store(int32(status))
		for _, try := range []struct{ method, path string }{{"GET", id}, {"GET", id + "?stream=true"}, {"DELETE", id}, {"POST", id + "/cancel"}} {
			req, err := http.NewRequest(try.method, r.URL+"/v1/responses/"+try.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 502 || resp.Header.Get("X-Sluice-Reason") != "upstream_invalid_response" || resp.Header.Get("Location") != "" || resp.Header.Get("Set-Cookie") != "" || strings.Contains(string(body), "10.0.0.1") {
				t.Errorf("%s %s, redirected by %d: %d %v %s", try.method, try.path, status, resp.StatusCode, resp.Header, body)
			}
		}
	}
	e.redirectStatus.Store(0)
	if a := harness.Get(t, r.URL+"/v1/responses/"+id); a.Status != 200 {
		t.Errorf("behind it: %d %s", a.Status, a.Body)
	}
}

// TestOnlyEngineIsQueried: if only one engine can have stored a response, the router queries it even
// after its own restart, as long as clients need no key.
func TestOnlyEngineIsQueried(t *testing.T) {
	e := startStoringEngine(t, "a", false)
	first := harness.StartRouter(t, nil, e.worker("a"))
	id := idOf(t, harness.Post(t, first.URL+"/v1/responses", fmt.Sprintf(respond, "")))
	second := harness.StartRouter(t, nil, e.worker("a"))
	if a := harness.Get(t, second.URL+"/v1/responses/"+id); a.Status != 200 {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	if a := harness.Get(t, second.URL+"/v1/responses/resp_other"); a.Status != 404 || a.Header.Get("X-Sluice-Reason") != "" {
		t.Errorf("%d %s; want the engine's own 404", a.Status, a.Body)
	}
}

// TestUnstoredResponsesAreNotRemembered: if a client declines storage, neither the engine nor the
// router's table has an entry for the response.
func TestUnstoredResponsesAreNotRemembered(t *testing.T) {
	key := apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String()}), startStoringEngine(t, "a", false).worker("a"))
	auth := []string{"Authorization", "Bearer " + key}
	for _, more := range []string{"", `,"stream":true`, `,"x_pad":2000000`} {
		for store, want := range map[string]int{"": 200, `,"store":true`: 200, `,"store":false`: 404} {
			id := idOf(t, harness.Post(t, r.URL+"/v1/responses", fmt.Sprintf(respond, more+store), auth...))
			if a := harness.Get(t, r.URL+"/v1/responses/"+id, auth...); a.Status != want {
				t.Errorf("%s%s: %d, want %d", more, store, a.Status, want)
			}
		}
	}
}

// TestAnthropicPaths: count_tokens reaches an engine. Errors under /v1/messages, and errors for
// clients that send the anthropic-version header, have Anthropic's format.
func TestAnthropicPaths(t *testing.T) {
	e := startStoringEngine(t, "a", false)
	r := harness.StartRouter(t, nil, e.worker("a"))
	body := `{"model":"org/sim","messages":[{"role":"user","content":"hi"}]}`
	if a := harness.Post(t, r.URL+"/v1/messages/count_tokens", body); a.Status != 200 || string(a.Body) != fmt.Sprintf(`{"input_tokens":%d}`, len(body)) {
		t.Errorf("count_tokens: %d %s", a.Status, a.Body)
	}
	for _, c := range []struct {
		method, path string
		headers      []string
		status       int
		typ          string // "" for OpenAI's format
	}{
		{"POST", "/v1/messages/batches", nil, 404, "not_found_error"},
		{"GET", "/v1/messages/batches/b_1", nil, 404, "not_found_error"},
		{"GET", "/v1/messages", nil, 405, "invalid_request_error"},
		{"GET", "/v1/messages/count_tokens", nil, 405, "invalid_request_error"},
		{"POST", "/v1/complete", []string{"Anthropic-Version", "2023-06-01"}, 404, "not_found_error"},
		{"GET", "/v1/models/none", []string{"Anthropic-Version", "2023-06-01"}, 404, "not_found_error"},
		{"POST", "/v1/complete", nil, 404, ""},
		{"POST", "/v1/messagesx", nil, 404, ""},
	} {
		a := harness.DoWithoutBody(t, c.method, r.URL+c.path, c.headers...)
		var v struct {
			Type  string `json:"type"`
			Error struct {
				Type, Message string
			} `json:"error"`
			ID string `json:"request_id"`
		}
		if err := json.Unmarshal(a.Body, &v); err != nil || a.Status != c.status || v.Error.Message == "" {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.Status, a.Body)
			continue
		}
		if anthropic := v.Type == "error" && v.ID == a.Header.Get("X-Request-Id") && v.Error.Type == c.typ; anthropic != (c.typ != "") {
			t.Errorf("%s %s: %s", c.method, c.path, a.Body)
		}
	}
}

// TestOneModel: GET /v1/models/{id} returns the entry of GET /v1/models, even if the id contains a
// slash.
func TestOneModel(t *testing.T) {
	e := startStoringEngine(t, "a", false)
	key := apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String()}), e.worker("a"))
	auth := []string{"Authorization", "Bearer " + key}
	var list struct{ Data []json.RawMessage }
	if err := json.Unmarshal(harness.Get(t, r.URL+"/v1/models", auth...).Body, &list); err != nil || len(list.Data) != 1 {
		t.Fatal(err, list)
	}
	for _, id := range []string{"org/sim", "org%2Fsim", "org%2fs%69m"} {
		if a := rawGet(t, r.Addr(), "/v1/models/"+id, auth...); a.Status != 200 || string(a.Body) != string(list.Data[0]) {
			t.Errorf("%s: %d %s", id, a.Status, a.Body)
		}
	}
	for _, id := range []string{"org", "org/sim/", "none", "%zz"} {
		a := rawGet(t, r.Addr(), "/v1/models/"+id, auth...)
		harness.WantReason(t, a, 404, "unknown_model")
		if !strings.Contains(string(a.Body), "org/sim") {
			t.Errorf("%s", a.Body)
		}
	}
	harness.WantReason(t, harness.Get(t, r.URL+"/v1/models/org/sim"), 401, "missing_api_key")
	harness.WantReason(t, harness.DoWithoutBody(t, "DELETE", r.URL+"/v1/models/org/sim", auth...), 405, "wrong_method")
}
