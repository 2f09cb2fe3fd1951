package tokenize

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
)

// testEngine answers /tokenize over real HTTP: one id per eight bytes of the
// request's body, so that requests that differ have ids that differ.
type testEngine struct {
	*httptest.Server
	ep *upstream.Endpoint

	mu     sync.Mutex
	bodies []string
	status int           // 0: 200
	answer string        // "": ids
	block  chan struct{} // a request waits until it is closed, or the client leaves
}

func newEngine(t testing.TB) *testEngine {
	t.Helper()
	e := new(testEngine)
	e.Server = httptest.NewServer(http.HandlerFunc(e.serve))
	t.Cleanup(e.Close)
	ep, err := upstream.NewEndpoint(e.URL, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	e.ep = ep
	t.Cleanup(ep.Close)
	return e
}

func (e *testEngine) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Method != "POST" || r.URL.Path != "/tokenize" || r.Header.Get("Content-Type") != "application/json" {
		http.Error(w, "bad request", http.StatusTeapot)
		return
	}
	e.mu.Lock()
	e.bodies = append(e.bodies, string(body))
	status, answer, hold := e.status, e.answer, e.block
	e.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return
		}
	}
	if answer == "" {
		ids := idsOf(string(body))
		answer = fmt.Sprintf(`{"count":%d,"max_model_len":8192,"tokens":%s,"token_strs":null}`, len(ids), jsonscan.AppendTokenIDs(nil, ids))
	}
	if status != 0 {
		w.WriteHeader(status)
	}
	_, _ = io.WriteString(w, answer)
}

// idsOf is what testEngine makes of a request.
func idsOf(body string) (ids []uint32) {
	for i := 0; i+8 <= len(body); i += 8 {
		h := uint32(2166136261)
		for j := range 8 {
			h = (h ^ uint32(body[i+j])) * 16777619
		}
		ids = append(ids, h)
	}
	return ids
}

func (e *testEngine) set(status int, answer string, hold chan struct{}) {
	e.mu.Lock()
	e.status, e.answer, e.block = status, answer, hold
	e.mu.Unlock()
}

func (e *testEngine) requests() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.bodies...)
}

// patient gives an engine on a loaded machine all the time it may need.
var patient = Options{Timeout: 30 * time.Second}

func scanned(t testing.TB, body string) *jsonscan.Doc {
	t.Helper()
	d := new(jsonscan.Doc)
	if err := d.Scan([]byte(body), jsonscan.Limits{}); err != nil {
		t.Fatalf("%.100s: %v", body, err)
	}
	return d
}

// find runs one Prompt on a fresh Call.
func find(t testing.TB, tk *Tokenizer, kind Kind, body string, ep *upstream.Endpoint) *Prompt {
	t.Helper()
	p := new(Prompt)
	tk.Prompt(p, kind, scanned(t, body), ep, new(upstream.Call))
	return p
}

func TestEngineRequests(t *testing.T) {
	for _, tc := range []struct {
		name string
		kind Kind
		body string
		want string
	}{
		{"chat", Chat, `{"stream":true, "messages" : [ {"role":"user","content":"caf\u00e9 1e400 😀"} ],"model":"m","seed":12345678901234567890}`,
			`{"model":"m","messages":[ {"role":"user","content":"caf\u00e9 1e400 😀"} ]}`},
		{"chat with all that counts", Chat,
			`{"model":"m","tools":[{"type":"function"}],"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"add_generation_prompt":false,"continue_final_message":true,"chat_template":"{{x}}","chat_template_kwargs":{"a":1},"add_special_tokens":true,"temperature":1}`,
			`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"tools":[{"type":"function"}],"chat_template":"{{x}}","chat_template_kwargs":{"a":1},"add_generation_prompt":false,"continue_final_message":true,"add_special_tokens":true}`},
		{"chat, nulls left out", Chat, `{"model":"m","tools":null,"chat_template":null,"messages":[{}]}`, `{"model":"m","messages":[{}]}`},
		{"completion", Completion, `{"model":"m","prompt":"a\nb","max_tokens":5,"tools":[]}`, `{"model":"m","prompt":"a\nb"}`},
		{"completion without model", Completion, `{"prompt":"a","add_special_tokens":false}`, `{"prompt":"a","add_special_tokens":false}`},
		{"completion, several prompts", Completion, `{"model":"m","prompt":[ "first" ,"second"]}`, `{"model":"m","prompt":"first"}`},
		{"responses", Responses, `{"model":"m","input":"hi","instructions":"be kind"}`,
			`{"model":"m","messages":[{"role":"system","content":"be kind"},{"role":"user","content":"hi"}],"add_special_tokens":true}`},
		{"responses without instructions", Responses, `{"model":"m","input":"hi","instructions":null}`, `{"model":"m","messages":[{"role":"user","content":"hi"}],"add_special_tokens":true}`},
		{"responses with a member that they do not have", Responses, `{"model":"m","input":"hi","add_special_tokens":false,"chat_template_kwargs":{"a":1}}`,
			`{"model":"m","messages":[{"role":"user","content":"hi"}],"add_special_tokens":true,"chat_template_kwargs":{"a":1}}`},
		{"messages", Messages, `{"model":"m","system":"s","messages":[ {"role":"user","content":"hi"} ],"max_tokens":4}`,
			`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}`},
		{"messages with an empty system", Messages, `{"model":"m","system":"","messages":[{"role":"user","content":"hi"}]}`, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
		{"responses with empty instructions", Responses, `{"model":"m","input":"hi","instructions":""}`, `{"model":"m","messages":[{"role":"user","content":"hi"}],"add_special_tokens":true}`},
		{"messages without system", Messages, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			p := find(t, New(patient), tc.kind, tc.body, e.ep)
			if p.Source != FromEngine || p.Err != "" {
				t.Fatalf("source %v, err %q", p.Source, p.Err)
			}
			if got := e.requests(); len(got) != 1 || got[0] != tc.want {
				t.Fatalf("asked %q\nwant  [%q]", got, tc.want)
			}
			if want := idsOf(tc.want); fmt.Sprint(p.Tokens) != fmt.Sprint(want) || p.Count < len(want) {
				t.Errorf("tokens %v, count %d, want %v", p.Tokens, p.Count, want)
			}
		})
	}
}

// TestSGLangRequests: the /tokenize of SGLang 0.5.23 (TokenizeRequest, to_chat_completion_request) renders
// what its other APIs render if it gets the members that these take, and no others. "": none gives the
// same ids.
func TestSGLangRequests(t *testing.T) {
	const messages = `"messages":[{"role":"user","content":"hi"}]`
	for _, tc := range []struct {
		name string
		kind Kind
		body string
		want string
	}{
		{"members of a chat", Chat,
			`{"model":"m",` + messages + `,"tools":[{"type":"function"}],"tool_choice":"none","reasoning_effort":"low","thinking":{"type":"adaptive"},"reasoning":{"effort":"low"},"continue_final_message":true,"chat_template_kwargs":{"a":1},"temperature":1}`,
			`{"model":"m",` + messages + `,"tools":[{"type":"function"}],"tool_choice":"none","reasoning_effort":"low","reasoning":{"effort":"low"},"thinking":{"type":"adaptive"},"continue_final_message":true,"chat_template_kwargs":{"a":1}}`},
		{"members that only /tokenize has", Chat, `{"model":"m",` + messages + `,"add_generation_prompt":false,"add_special_tokens":true,"chat_template":"x"}`, `{"model":"m",` + messages + `}`},
		{"completion", Completion, `{"model":"m","prompt":"a","add_special_tokens":false,"reasoning_effort":"low"}`, `{"model":"m","prompt":"a"}`},
		{"responses", Responses, `{"model":"m","input":"hi","instructions":"s","chat_template_kwargs":{"a":1},"tool_choice":"auto","reasoning_effort":"low"}`,
			`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}],"chat_template_kwargs":{"a":1}}`},
		{"responses with reasoning", Responses, `{"model":"m","input":"hi","reasoning":{}}`, ``},
		{"messages", Messages, `{"model":"m","system":"s",` + messages + `,"max_tokens":4}`, `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}`},
		{"messages with thinking", Messages, `{"model":"m",` + messages + `,"thinking":{"type":"disabled"}}`, ``},
		{"messages with an effort", Messages, `{"model":"m",` + messages + `,"output_config":{"effort":"low"}}`, ``},
		{"a system message between others", Messages, `{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"system","content":"s"}]}`, ``},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			p := new(Prompt)
			New(patient).PromptOf(p, tc.kind, scanned(t, tc.body), SGLang, e.ep, nil)
			got := e.requests()
			switch {
			case tc.want == "" && (p.Source != FromText || p.Err == "" || len(got) > 0):
				t.Errorf("source %v, err %q, asked %q", p.Source, p.Err, got)
			case tc.want != "" && (p.Source != FromEngine || len(got) != 1 || got[0] != tc.want):
				t.Errorf("source %v, err %q, asked %q\nwant  [%q]", p.Source, p.Err, got, tc.want)
			}
		})
	}
}

func TestNoEngineRequest(t *testing.T) {
	image := `{"role":"user","content":[{"type":"text","text":"what is it?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("A", 8000) + `"}}]}`
	for _, tc := range []struct {
		name   string
		kind   Kind
		body   string
		source Source
		text   string
		count  int // 0: not looked at
		errHas string
	}{
		{"ids", Completion, `{"prompt":[1,2,3]}`, FromRequest, "", 3, ""},
		{"one list of ids", Completion, `{"prompt":[[1,2,3,4]]}`, FromRequest, "", 4, ""},
		{"two lists of ids", Completion, `{"prompt":[[1,2,3,4],[5, 6]]}`, FromRequest, "", 6, ""},
		{"generate", Generate, `{"token_ids":[7,8],"sampling_params":{}}`, FromRequest, "", 2, ""},
		{"bad ids", Generate, `{"token_ids":[7,-8]}`, FromText, "7,-8", 2, "cannot parse the"},
		{"mixed ids", Completion, `{"prompt":[1,"a"]}`, FromText, `1,"a"`, 0, "cannot parse the"},
		{"an image", Chat, `{"messages":[` + image + `]}`, FromText, image, 0, "images or other media"},
		{"responses with items", Responses, `{"input":[{"role":"user","content":"hi"}]}`, FromText, `{"role":"user","content":"hi"}`, 0, "only responses requests"},
		{"responses with tools", Responses, `{"input":"hi","tools":[{}]}`, FromText, "[{}]\x00hi", 0, "only responses requests"},
		{"responses that go on", Responses, `{"input":"hi","previous_response_id":"r"}`, FromText, "hi", 1, "only responses requests"},
		{"messages with blocks", Messages, `{"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"hi"}]}`, FromText, `[{"type":"text","text":"s"}]` + "\x00" + `{"role":"user","content":"hi"}`, 0, "only messages requests"},
		{"embeddings", Other, `{"input":"hi"}`, None, "", 0, ""},
		{"no prompt", Completion, `{"model":"m"}`, None, "", 0, ""},
		{"null prompt", Completion, `{"prompt":null}`, None, "", 0, ""},
		{"empty list", Completion, `{"prompt":[]}`, None, "", 0, ""},
		{"a prompt of something else", Completion, `{"prompt":[{}]}`, None, "", 0, ""},
		{"no messages", Chat, `{"messages":[]}`, None, "", 0, ""},
		{"too long", Chat, `{"messages":[{"content":"` + strings.Repeat("long ", 1<<19) + `"}]}`, FromText, `{"content":"` + strings.Repeat("long ", 1<<19) + `"}`, 0, "max_engine_bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			p := find(t, New(patient), tc.kind, tc.body, e.ep)
			if p.Source != tc.source || string(p.Text) != tc.text {
				t.Errorf("source %v, text %.80q, want %v, %.80q", p.Source, p.Text, tc.source, tc.text)
			}
			if tc.count != 0 && p.Count != tc.count {
				t.Errorf("count %d, want %d", p.Count, tc.count)
			}
			if !strings.Contains(p.Err, tc.errHas) || (tc.errHas == "") != (p.Err == "") {
				t.Errorf("err %q, want it to say %q", p.Err, tc.errHas)
			}
			if (p.Source == FromRequest) != (len(p.Tokens) > 0) {
				t.Errorf("%d tokens from %v", len(p.Tokens), p.Source)
			}
			if got := e.requests(); len(got) != 0 {
				t.Errorf("the engine was asked %.200q", got)
			}
		})
	}
}

func TestModes(t *testing.T) {
	e := newEngine(t)
	chat, ids := `{"messages":[{"content":"x"}]}`, `{"prompt":[1]}`
	for _, tc := range []struct {
		mode      string
		chat, ids Source
	}{{ModeAuto, FromEngine, FromRequest}, {ModeEngine, FromEngine, FromRequest}, {ModeText, FromText, FromRequest}, {ModeIDs, None, FromRequest}} {
		tk := New(Options{Mode: tc.mode, Timeout: patient.Timeout})
		if p := find(t, tk, Chat, chat, e.ep); p.Source != tc.chat || p.Count == 0 {
			t.Errorf("mode %s: chat from %v, count %d", tc.mode, p.Source, p.Count)
		}
		if p := find(t, tk, Completion, ids, e.ep); p.Source != tc.ids {
			t.Errorf("mode %s: ids from %v", tc.mode, p.Source)
		}
	}
	if p := find(t, New(Options{Mode: ModeEngine}), Chat, chat, nil); p.Source != None {
		t.Errorf("mode engine without an engine gives %v", p.Source)
	}
}

func TestAnswersOfEngines(t *testing.T) {
	body := `{"messages":[{"content":"x"}]}`
	for _, tc := range []struct {
		name, answer string
		status       int
		errHas       string
		rests        bool
	}{
		{"not there", `{"detail":"Not Found"}`, 404, "has no /tokenize (status 404)", true},
		{"not implemented", ``, 501, "has no /tokenize (status 501)", true},
		{"a prompt it refuses", `{"error":{"message":"bad template"}}`, 400, "rejects this prompt (status 400)", false},
		{"broken", `oops`, 500, "it returned an error (status 500)", true},
		{"busy", ``, 503, "it returned an error (status 503)", true},
		{"html", `<html>`, 200, "contains no token ids", true},
		{"no tokens", `{"count":1}`, 200, "contains no token ids", true},
		{"tokens of another kind", `{"tokens":["a"]}`, 200, "contains no token ids", true},
		{"endless", strings.Repeat(" ", 1<<20), 200, "exceeds the limit", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			answer := tc.answer
			if answer == "" {
				answer = " "
			}
			e.set(tc.status, answer, nil)
			tk := New(patient)
			p := find(t, tk, Chat, body, e.ep)
			if p.Source != FromText || string(p.Text) != `{"content":"x"}` || len(p.Tokens) != 0 || !strings.Contains(p.Err, tc.errHas) {
				t.Errorf("source %v, text %q, err %q", p.Source, p.Text, p.Err)
			}
			if tk.Available(e.ep) == tc.rests {
				t.Errorf("Asks is %v", !tc.rests)
			}
			e.set(0, "", nil)
			want := FromEngine
			if tc.rests {
				want = FromText
			}
			if p = find(t, tk, Chat, body, e.ep); p.Source != want || tc.rests && !strings.Contains(p.Err, tc.errHas) {
				t.Errorf("the next one: source %v, err %q", p.Source, p.Err)
			}
		})
	}
}

func TestPromptIsReused(t *testing.T) {
	e := newEngine(t)
	tk := New(patient)
	p := new(Prompt)
	tk.Prompt(p, Completion, scanned(t, `{"prompt":[1,2,3]}`), e.ep, nil)
	tk.Prompt(p, Completion, scanned(t, `{"prompt":"eight or more bytes"}`), e.ep, nil)
	got := fmt.Sprint(p.Tokens)
	if p.Source != FromEngine || got != fmt.Sprint(idsOf(`{"prompt":"eight or more bytes"}`)) {
		t.Fatal(p.Source, got)
	}
	clear(p.Tokens) // the caller's own: what the cache holds must not change
	tk.Prompt(p, Completion, scanned(t, `{"prompt":"eight or more bytes"}`), nil, nil)
	if p.Source != FromCache || fmt.Sprint(p.Tokens) != got {
		t.Fatal(p.Source, p.Tokens)
	}
	tk.Prompt(p, Chat, scanned(t, `{"messages":[{}],"tools":[1]}`), nil, nil)
	if p.Source != FromText || len(p.Tokens) != 0 || string(p.Text) != "[1]\x00{}" {
		t.Fatalf("%v %v %q", p.Source, p.Tokens, p.Text)
	}
	tk.Prompt(p, Other, scanned(t, `{}`), nil, nil)
	if p.Source != None || p.Text != nil || p.Count != 0 || p.Err != "" {
		t.Fatalf("%+v", p)
	}
}
