package scheduling

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/jsonscan"
	"sluice/native/tokenizer"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/tokenize/chatinput"
	"sluice/router/worker"
)

// refusal is a request that vLLM 0.32 with a context of 128 tokens has refused, and its answer
// (scripts/tokens/context_length.py).
type refusal struct {
	Name, Path string
	Body       json.RawMessage
	Answer     string
	Native     bool // only a model whose ids are native and verified tells its length
}

func refusals(t *testing.T) (all []refusal) {
	t.Helper()
	text, err := os.ReadFile("testdata/context_length_vllm032.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &all); err != nil || len(all) == 0 {
		t.Fatalf("%d refusals: %v", len(all), err)
	}
	return all
}

// shortEngine is a vLLM engine with a context of 128 tokens that counts the requests that reach it.
// With a model, it answers the router's comparisons with that model's ids.
func shortEngine(t *testing.T, model *tokenizer.Model) (url string, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case r.URL.Path == "/health":
		case r.URL.Path == "/version":
			io.WriteString(w, `{"version":"0.32.1"}`)
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model","owned_by":"vllm","root":"sim","parent":null,"max_model_len":128}]}`)
		case strings.HasSuffix(r.URL.Path, "/render") && model != nil:
			var in chatinput.Input
			in.Read(chatinput.Chat, body, new(chatinput.Settings))
			text, _ := model.Render(nil, "", in.Chat)
			ids, _ := model.Encode(nil, text, false)
			fmt.Fprintf(w, `{"token_ids":%s}`, jsonscan.AppendTokenIDs(nil, ids))
		case strings.HasPrefix(r.URL.Path, "/v1/") && !strings.HasSuffix(r.URL.Path, "/render"):
			asked.Add(1)
			io.WriteString(w, `{"id":"x","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, asked
}

// TestContextLengthIsCheckedEarly: requests beyond the context length get vLLM's own answer, and no
// engine is asked; those within it reach the engine.
func TestContextLengthIsCheckedEarly(t *testing.T) {
	t.Parallel()
	url, asked := shortEngine(t, nil)
	r := harness.StartRouter(t, nil, config.Worker{ID: "e0", URL: url, Role: worker.Aggregated, KVEvents: []string{"off"}})
	for _, c := range refusals(t) {
		a := harness.Post(t, r.URL+c.Path, string(c.Body))
		if c.Native {
			if a.Status != 200 {
				t.Errorf("%s: status %d without native ids: %s", c.Name, a.Status, a.Body)
			}
			continue
		}
		if a.Status != 400 || string(a.Body) != c.Answer || a.Header.Get("X-Sluice-Reason") != "context_length" {
			t.Errorf("%s: status %d, reason %q\ngot  %s\nvLLM %s", c.Name, a.Status, a.Header.Get("X-Sluice-Reason"), a.Body, c.Answer)
		}
	}
	before := asked.Load()
	for _, body := range []string{`{"model":"sim","prompt":[1,2,3],"max_tokens":128}`, `{"model":"sim","prompt":[` + strings.Repeat("1,", 127) + `1]}`, `{"model":"sim","prompt":[` + strings.Repeat("1,", 128) + `1],"truncate_prompt_tokens":5}`} {
		if a := harness.Post(t, r.URL+"/v1/completions", body); a.Status != 200 {
			t.Errorf("status %d for %.60s: %s", a.Status, body, a.Body)
		}
	}
	if n := asked.Load() - before; n != 3 {
		t.Errorf("the engine was asked %d times, want 3", n)
	}
	if n := r.Metric(`sluice_requests_refused_total{endpoint="/v1/completions",reason="context_length"}`); n == 0 {
		t.Error("the refusals are not counted")
	}
}

// TestNativeLengthIsCheckedEarly: the prompt's own length counts once native ids have been compared.
func TestNativeLengthIsCheckedEarly(t *testing.T) {
	t.Parallel()
	library, err := tokenizer.Open("")
	if err != nil {
		if library, err = tokenizer.Open(filepath.Join("..", "..", "..", "bin", tokenizer.Name)); err != nil {
			t.Skipf("%v; make builds the library where cargo is installed", err)
		}
	}
	dir, err := filepath.Abs("../../../native/tokenizer/testdata/tiny")
	if err != nil {
		t.Fatal(err)
	}
	model, err := library.Load(dir, tokenizer.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	url, asked := shortEngine(t, model)
	r := harness.StartRouter(t, func(c *config.Config) { c.Models = map[string]config.Model{"sim": {Tokenizer: dir}} },
		config.Worker{ID: "e0", URL: url, Role: worker.Aggregated, KVEvents: []string{"off"}})
	testwait.Until(t, "the tokenizer is loaded", func() bool { return r.Metric(`sluice_tokenizer_native_models{state="used"}`) == 1 })
	native := 0
	for _, c := range refusals(t) {
		if !c.Native {
			continue
		}
		native++
		if a := harness.Post(t, r.URL+c.Path, `{"model":"sim","messages":[{"role":"user","content":"short"}]}`); a.Status != 200 {
			t.Fatalf("status %d: %s", a.Status, a.Body)
		}
		testwait.Until(t, "the ids are compared", func() bool { return r.Metric("sluice_tokenizer_checks_total") > 0 })
		before := asked.Load()
		a := harness.Post(t, r.URL+c.Path, string(c.Body))
		if a.Status != 400 || string(a.Body) != c.Answer || asked.Load() != before {
			t.Errorf("%s: status %d, %d requests to the engine\ngot  %s\nvLLM %s", c.Name, a.Status, asked.Load()-before, a.Body, c.Answer)
		}
	}
	if native == 0 {
		t.Error("no refusal tells the length of a text")
	}
}
