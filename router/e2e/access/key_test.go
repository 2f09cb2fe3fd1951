package access

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestKeysAreRequired requests all routes, with keys in the form of each client library.
func TestKeysAreRequired(t *testing.T) {
	e := harness.StartSim(t, nil)
	key := apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "team-a", SHA256: apikey.HashOf(key).String(), Models: []string{"sim"}}), harness.SimWorker(e, worker.Aggregated, "e"))
	for _, c := range []struct {
		name, path, body string
		headers          []string
		status           int
		says, reason     string
	}{
		{"none", "/v1/completions", harness.KeyBody, nil, 401, `"code":"invalid_api_key"`, "missing_api_key"},
		{"wrong", "/v1/completions", harness.KeyBody, []string{"Authorization", "Bearer " + apikey.New()}, 401, `"code":"invalid_api_key"`, "unknown_api_key"},
		{"another scheme", "/v1/completions", harness.KeyBody, []string{"Authorization", "Basic " + key}, 401, "", "missing_api_key"},
		{"OpenAI's", "/v1/completions", harness.KeyBody, []string{"Authorization", "Bearer " + key}, 200, "", ""},
		{"scheme in small letters", "/v1/completions", harness.KeyBody, []string{"Authorization", "bearer  " + key}, 200, "", ""},
		{"Anthropic's", "/v1/messages", `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}`, []string{"X-Api-Key", key}, 200, "", ""},
		{"Anthropic's, none", "/v1/messages", `{}`, nil, 401, `"type":"authentication_error"`, "missing_api_key"},
		{"another model", "/v1/completions", strings.Replace(harness.KeyBody, "sim", "other", 1), []string{"Authorization", "Bearer " + key}, 403, `"param":"model"`, "key_model"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := harness.Post(t, r.URL+c.path, c.body, c.headers...)
			if a.Status != c.status || !strings.Contains(string(a.Body), c.says) || a.Header.Get("X-Sluice-Reason") != c.reason {
				t.Errorf("%d %q %s; want %d %q %s", a.Status, a.Header.Get("X-Sluice-Reason"), a.Body, c.status, c.reason, c.says)
			}
			if a.Status == 401 && a.Header.Get("WWW-Authenticate") != "Bearer" {
				t.Error("a 401 does not say what is asked for")
			}
		})
	}
	for path, want := range map[string]int{"/v1/models": 401, "/health": 200, "/readyz": 200, "/metrics": 200} {
		resp, err := http.Get(r.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("GET %s without a key: %d, want %d", path, resp.StatusCode, want)
		}
		if path == "/metrics" && !strings.Contains(string(body), `sluice_api_key_requests_total{key="team-a",outcome="admitted"} 4`) {
			t.Error("the metrics do not count the key's requests")
		}
	}
	if strings.Contains(r.Logs.String(), key) {
		t.Error("the log tells the key")
	}
}

// TestKeysAreNotForwarded: an engine receives the router's own key, never a client's.
func TestKeysAreNotForwarded(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen = append(seen, fmt.Sprint(r.Header["Authorization"], r.Header["X-Api-Key"]))
		mu.Unlock()
		harness.ReplyJSON(w, 200, `{"choices":[{"text":"hi"}]}`)
	})
	key := apikey.New()
	keys := harness.WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String()})
	for name, c := range map[string]struct {
		mod     func(*config.Config)
		headers []string
		want    string
	}{
		"keys":                  {keys, []string{"Authorization", "Bearer " + key, "X-Api-Key", key}, "[] []"},
		"keys and an engine's":  {func(c *config.Config) { keys(c); c.EngineKey = "engine-key" }, []string{"Authorization", "Bearer " + key}, "[Bearer engine-key] []"},
		"an engine's alone":     {func(c *config.Config) { c.EngineKey = "engine-key" }, []string{"Authorization", "Bearer whatever"}, "[Bearer engine-key] []"},
		"none: the client's is": {nil, []string{"Authorization", "Bearer the-client's"}, "[Bearer the-client's] []"},
	} {
		t.Run(name, func(t *testing.T) {
			r := harness.StartRouter(t, c.mod, e.Worker(worker.Aggregated, "e"))
			mu.Lock()
			seen = nil
			mu.Unlock()
			if a := harness.Post(t, r.URL+"/v1/completions", harness.KeyBody, c.headers...); a.Status != 200 {
				t.Fatalf("%d %s", a.Status, a.Body)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, got := range seen {
				if got != c.want {
					t.Errorf("the engine saw %s, want %s", got, c.want)
				}
			}
			if strings.Contains(r.Logs.String(), "engine-key") || strings.Contains(fmt.Sprintf("%+v %#v", r.Config, *r.Config), "engine-key") {
				t.Error("the engine's key is exposed")
			}
		})
	}
}

// TestKeysHaveLimits: a key's limits count the tokens of responses that are streamed, not streamed, or
// abandoned by the client.
func TestKeysHaveLimits(t *testing.T) {
	e := harness.StartSim(t, nil)
	key := apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String(), RequestsPerMinute: 10, TokensPerMinute: 100_000}), harness.SimWorker(e, worker.Aggregated, "e"))
	auth := []string{"Authorization", "Bearer " + key}
	spent := func() uint64 { return r.Keyring.Keys()[0].Counts().Tokens }
	a := harness.Post(t, r.URL+"/v1/completions", harness.KeyBody, auth...)
	if a.Status != 200 || a.Header.Get("x-ratelimit-limit-requests") != "10" || a.Header.Get("x-ratelimit-remaining-requests") != "9" || a.Header.Get("x-ratelimit-limit-tokens") != "100000" {
		t.Fatalf("%d %v", a.Status, a.Header)
	}
	whole := spent()
	if whole < 5 || whole > 50 {
		t.Errorf("%d tokens for a short prompt and 4 of output", whole)
	}
	stream := strings.Replace(harness.KeyBody, "{", `{"stream":true,`, 1)
	if a = harness.Post(t, r.URL+"/v1/completions", stream, auth...); a.Status != 200 || a.Header.Get("x-ratelimit-remaining-requests") == "" {
		t.Fatalf("%d %v", a.Status, a.Header)
	}
	testwait.UntilWithin(t, 5*time.Second, "a stream's tokens are counted as a whole answer's", func() bool {
		got := spent() - whole
		return got >= whole && got <= whole+2 // without usage the router counts events; a last event has no token
	})
	for i := range 20 {
		if a = harness.Post(t, r.URL+"/v1/completions", harness.KeyBody, auth...); a.Status != 200 {
			if i < 7 {
				t.Errorf("refused after %d of 10", i+2)
			}
			break
		}
	}
	if a.Status != 429 || a.Header.Get("Retry-After") == "" || a.Header.Get("X-Sluice-Reason") != "key_limit" || a.Header.Get("x-ratelimit-remaining-requests") != "0" || !strings.Contains(string(a.Body), "rate_limit_exceeded") {
		t.Errorf("%d %v %s", a.Status, a.Header, a.Body)
	}
}

// TestKeysAreReloaded edits the keys in the file of a running router.
func TestKeysAreReloaded(t *testing.T) {
	e := harness.StartSim(t, nil)
	first, second := apikey.New(), apikey.New()
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	write := func(key string) {
		text := fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: \"off\"}\ndiscovery: {file_poll_interval: 20ms}\nworkers: [{id: e, url: %q}]\napi_keys: [{name: a, sha256: %s}]\n", e.URL(), apikey.HashOf(key))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(first)
	r := harness.LaunchConfigured(t, path)
	status := func(key string) int {
		a, err := harness.TryPost(context.Background(), r.URL+"/v1/completions", harness.KeyBody, "Authorization", "Bearer "+key)
		if err != nil {
			return 0
		}
		return a.Status
	}
	testwait.UntilWithin(t, 10*time.Second, "the first key is good", func() bool { return status(first) == 200 })
	if got := status(second); got != 401 {
		t.Errorf("a key to come: %d", got)
	}
	write(second)
	testwait.UntilWithin(t, 10*time.Second, "the second key is good", func() bool { return status(second) == 200 })
	if got := status(first); got != 401 {
		t.Errorf("the key that was taken out: %d", got)
	}
}

// TestKeyModelsApplyToAdapters: a key's models also restrict adapters, which SGLang reads from other
// members than model.
func TestKeyModelsApplyToAdapters(t *testing.T) {
	var mu sync.Mutex
	seen := 0
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen++
		mu.Unlock()
		harness.ReplyJSON(w, 200, `{"choices":[{"text":"hi"}]}`)
	})
	few, all := apikey.New(), apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "few", SHA256: apikey.HashOf(few).String(), Models: []string{"sim", "mine"}},
		config.APIKey{Name: "all", SHA256: apikey.HashOf(all).String()}), e.Worker(worker.Aggregated, "e"))
	for _, c := range []struct {
		member string
		status int // with the key that may use only some models
		says   string
	}{
		{`"x":1`, 200, ""},
		{`"lora_path":null`, 200, ""},
		{`"lora_path":"mine"`, 200, ""},
		{`"lora_path":["mine",null,"mine"]`, 200, ""},
		{`"lora_path":"theirs"`, 403, `\"few\" may not use adapter \"theirs\"`},
		{`"lora_path":"\u0074heirs"`, 403, `\"theirs\"`},
		{`"lora_p\u0061th":"theirs"`, 403, `"param":"lora_path"`},
		{`"lora_path":"mine","lora_path":"theirs"`, 400, "only once"},
		{`"lora_path":["mine","theirs"]`, 403, `"code":"model_not_found"`},
		{`"lora_path":""`, 403, ""},
		{`"lora_path":[["theirs"]]`, 400, `must be a string, an array of strings and nulls, or null`},
		{`"lora_path":{"a":"theirs"}`, 400, ""},
		{`"lora_id":"theirs"`, 403, `"param":"lora_id"`},
	} {
		for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/embeddings"} {
			body := `{"model":"sim","prompt":"hello","messages":[{"role":"user","content":"a"}],"input":"a",` + c.member + `}`
			mu.Lock()
			before := seen
			mu.Unlock()
			a := harness.Post(t, r.URL+path, body, "Authorization", "Bearer "+few)
			mu.Lock()
			reached := seen > before
			mu.Unlock()
			if a.Status != c.status || !strings.Contains(string(a.Body), c.says) || reached != (c.status == 200) {
				t.Errorf("%s %s: %d %s (an engine was asked: %v); want %d %s", path, c.member, a.Status, a.Body, reached, c.status, c.says)
			}
			if a := harness.Post(t, r.URL+path, body, "Authorization", "Bearer "+all); a.Status != 200 && c.status != 400 {
				t.Errorf("%s %s: %d %s with a key for all models", path, c.member, a.Status, a.Body)
			}
		}
	}
}

// TestKeyModelsFilterModelList: model lists, errors that list the known models, and the pages about
// the router's state contain only models that the key may use.
func TestKeyModelsFilterModelList(t *testing.T) {
	e := harness.StartSim(t, nil)
	few, all := apikey.New(), apikey.New()
	at := harness.SimWorker(e, worker.Aggregated, "e")
	at.Models = []string{"hidden", "mine/a", "sim"}
	r := harness.StartRouter(t, harness.WithKeys(config.APIKey{Name: "few", SHA256: apikey.HashOf(few).String(), Models: []string{"sim", "mine/a", "absent"}},
		config.APIKey{Name: "all", SHA256: apikey.HashOf(all).String()}), at)
	ids := func(body []byte) (ids []string) {
		var list struct {
			Object string
			Data   []struct{ ID string }
		}
		if err := json.Unmarshal(body, &list); err != nil || list.Object != "list" {
			t.Errorf("%s is not a list of models: %v", body, err)
		}
		for _, m := range list.Data {
			ids = append(ids, m.ID)
		}
		return ids
	}
	for key, want := range map[string][]string{few: {"mine/a", "sim"}, all: {"hidden", "mine/a", "sim"}} {
		a := harness.Get(t, r.URL+"/v1/models", "Authorization", "Bearer "+key)
		if got := ids(a.Body); a.Status != 200 || !slices.Equal(got, want) {
			t.Errorf("the list of models is %d %v, want 200 %v", a.Status, got, want)
		}
	}
	absent := strings.Replace(harness.KeyBody, "sim", "absent", 1)
	for _, c := range []struct {
		name string
		a    *harness.Answer
		want int
	}{
		{"an own model", harness.Get(t, r.URL+"/v1/models/mine%2Fa", "Authorization", "Bearer "+few), 200},
		{"another's model", harness.Get(t, r.URL+"/v1/models/hid%64en", "Authorization", "Bearer "+few), 404},
		{"an own model without a worker", harness.Post(t, r.URL+"/v1/completions", absent, "Authorization", "Bearer "+few), 404},
		{"the health page", harness.Get(t, r.URL+"/health", "Authorization", "Bearer "+few), 200},
	} {
		listed := strings.ReplaceAll(string(c.a.Body), `the model \"hidden\" does not`, "")
		if c.a.Status != c.want || strings.Contains(listed, "hidden") {
			t.Errorf("%s: %d %s; want %d and no other key's model", c.name, c.a.Status, c.a.Body, c.want)
		}
	}
	if a := harness.Get(t, r.URL+"/v1/models/hidden", "Authorization", "Bearer "+all); a.Status != 200 {
		t.Errorf("with a key for every model: %d %s", a.Status, a.Body)
	}
}

// TestStatePagesWithoutAKey: without a valid key the pages about the router's state name no worker,
// model, address or file.
func TestStatePagesWithoutAKey(t *testing.T) {
	secret := func(text string) string {
		for _, word := range []string{"secret-worker", "127.0.0.1", "refused", "sim", "/", "libnixl", "kv_tier"} {
			text = strings.ReplaceAll(text, "/admin/v1/health", "")
			if strings.Contains(text, word) {
				return word
			}
		}
		return ""
	}
	key := apikey.New()
	for name, mod := range map[string]func(*config.Config){
		"keys":    harness.WithKeys(config.APIKey{Name: "a", SHA256: apikey.HashOf(key).String()}),
		"no keys": nil,
	} {
		for _, up := range []bool{true, false} {
			e := harness.StartSim(t, nil)
			if !up {
				e.Crash()
			}
			r := harness.LaunchRouter(t, mod, harness.SimWorker(e, worker.Aggregated, "secret-worker"))
			want := map[bool]int{true: 200, false: 503}[up]
			testwait.UntilWithin(t, 10*time.Second, "the worker was looked at", func() bool {
				_, page := r.Pages.Health(true)
				return harness.Get(t, r.URL+"/readyz").Status == want && (up || strings.Contains(string(page), "refused"))
			})
			for _, path := range []string{"/health", "/readyz"} {
				a := harness.Get(t, r.URL+path)
				if word := secret(string(a.Body)); a.Status != want || word != "" {
					t.Errorf("%s, up %v, %s: %d %s tells %q", name, up, path, a.Status, a.Body, word)
				}
				if mod == nil {
					continue
				}
				if wrong := harness.Get(t, r.URL+path, "Authorization", "Bearer "+apikey.New()); string(wrong.Body) != string(a.Body) {
					t.Errorf("%s with a wrong key: %s", path, wrong.Body)
				}
				full := harness.Get(t, r.URL+path, "Authorization", "Bearer "+key)
				if full.Status != want || path == "/health" && !strings.Contains(string(full.Body), "secret-worker") || !up && !strings.Contains(string(full.Body), "refused") {
					t.Errorf("%s with a key: %d %s", path, full.Status, full.Body)
				}
			}
			// The metrics name workers and keys, for everybody who reaches the port (docs/metrics.md).
			// They show no key, address or file.
			for _, header := range [][]string{nil, {"Authorization", "Bearer " + apikey.New()}, {"Authorization", "Bearer " + key}} {
				page := harness.Get(t, r.URL+"/metrics", header...)
				if text := string(page.Body); page.Status != 200 || !strings.Contains(text, "secret-worker") {
					t.Errorf("%s, up %v, /metrics: %d %.100s", name, up, page.Status, text)
				}
				for _, word := range []string{key, apikey.HashOf(key).String(), e.Addr(), "127.0.0.1", "://", "connection refused", "libnixl", ".so"} {
					if strings.Contains(string(page.Body), word) {
						t.Errorf("%s, up %v, /metrics tells %q", name, up, word)
					}
				}
			}
			a := harness.Get(t, "http://"+r.Admin.Addr()+"/admin/v1/health", "Authorization", "Bearer test-token-0123456789")
			if a.Status != want || !strings.Contains(string(a.Body), "secret-worker") {
				t.Errorf("/admin/v1/health: %d %s", a.Status, a.Body)
			}
		}
	}
}

// TestLargeCounts: the router forwards an integer that an engine may refuse. It refuses an integer
// that no engine can represent, and names the range.
func TestLargeCounts(t *testing.T) {
	e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body)
	})
	r := harness.StartRouter(t, nil, e.Worker(worker.Aggregated, "e"))
	for number, status := range map[string]int{"1e18": 200, "1000000000000000000": 200, "9223372036854775807": 200, "1e19": 400, "9223372036854775808": 400, "1.5": 400} {
		body := `{"model":"sim","prompt":"hello","max_tokens":` + number + `}`
		a := harness.Post(t, r.URL+"/v1/completions", body)
		if a.Status != status {
			t.Errorf("max_tokens %s: %d %s, want %d", number, a.Status, a.Body, status)
		}
		if status == 200 && string(a.Body) != body {
			t.Errorf("the engine got %s, want %s", a.Body, body)
		}
		if status == 200 {
			continue
		}
		if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, "max_tokens") || !strings.Contains(msg, number) || !strings.Contains(msg, "9223372036854775807") {
			t.Errorf("max_tokens %s: %s", number, msg)
		}
	}
}
