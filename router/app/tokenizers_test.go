package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/native/tokenizer"
	"sluice/router/config"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
	"sluice/router/worker"
)

// letters is a double of a loaded model: an id for each byte. It renders a template that is not its own
// as the template's source before the input.
type letters struct {
	closed   *int
	timeouts *[]time.Duration
}

func (letters) Encode(dst []uint32, text []byte, _ bool) ([]uint32, error) {
	for _, c := range text {
		dst = append(dst, uint32(c))
	}
	return dst, nil
}

func (l letters) Prompt(dst []uint32, template string, input []byte, addSpecial bool, rest func([]byte) []byte) ([]uint32, error) {
	return l.Encode(dst, rest(append([]byte(template), input...)), addSpecial)
}
func (l letters) SetTimeout(d time.Duration) {
	if l.timeouts != nil {
		*l.timeouts = append(*l.timeouts, d)
	}
}
func (l letters) Close() { *l.closed++ }

// converted is a double of a model that was loaded from another file than tokenizer.json.
type converted struct{ letters }

func (converted) Info() tokenizer.Info { return tokenizer.Info{Format: "tekken"} }
func (converted) Spec() []byte         { return []byte("{}") }

// doubleLibrary loads letters from any folder but those called "broken", and waits before it loads
// those called "slow".
type doubleLibrary struct {
	mu       sync.Mutex
	loads    []string
	closed   int
	timeouts []time.Duration // that were set
	release  chan struct{}   // of slow folders
}

func (d *doubleLibrary) load(dir string) (closingModel, []incremental.AddedToken, error) {
	if filepath.Base(dir) == "slow" {
		<-d.release
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.loads = append(d.loads, dir)
	if filepath.Base(dir) == "broken" {
		return nil, nil, errors.New("broken")
	}
	if filepath.Base(dir) == "tekken" {
		return converted{letters{&d.closed, &d.timeouts}}, nil, nil
	}
	return letters{&d.closed, &d.timeouts}, nil, nil
}

func (d *doubleLibrary) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.loads)
}

// modelDir writes a model's folder.
func modelDir(t *testing.T, name string, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if files == nil {
		files = map[string]string{"tokenizer.json": `{"truncation":{"max_length":5}}`}
	}
	for f, text := range files {
		if err := os.WriteFile(filepath.Join(dir, f), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.b.String(), s)
}

func newTestTokenizers(t *testing.T, open func() (modelLoader, error)) (*tokenizers, *tokenize.Tokenizer, *logBuffer) {
	t.Helper()
	to, log := tokenize.New(tokenize.Options{}), new(logBuffer)
	ts := newTokenizers(to, slog.New(slog.NewTextHandler(log, nil)))
	if open != nil {
		ts.open = open
	}
	t.Cleanup(ts.close)
	return ts, to, log
}

func (t *tokenizers) awaitModels(tb testing.TB, names ...string) {
	tb.Helper()
	testwait.Until(tb, "models "+strings.Join(names, ", "), func() bool {
		var have []string
		for _, s := range t.to.NativeStates() {
			if s.Failed == "" {
				have = append(have, s.Model)
			}
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		return !t.loading && slices.Equal(have, names)
	})
}

// TestTokenizersFollowSettings: configured models are loaded, one that fails is reported and left to
// the engines, and a reload loads only what is new and closes what is gone.
func TestTokenizersFollowSettings(t *testing.T) {
	d := new(doubleLibrary)
	ts, to, log := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	a, b, broken := modelDir(t, "a", nil), modelDir(t, "b", nil), modelDir(t, "broken", nil)
	harmony := modelDir(t, "harmony", map[string]string{"tokenizer.json": "{}", "config.json": `{"architectures":["GptOssForCausalLM"]}`})
	audio := modelDir(t, "audio", map[string]string{"tokenizer.json": "{}", "config.json": `{"architectures":["MoonshotKimiaForCausalLM"]}`})
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"a": {Tokenizer: a}, "broken": {Tokenizer: broken}, "harmony": {Tokenizer: harmony}, "audio": {Tokenizer: audio}, "none": {}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "a", "harmony")
	for _, s := range []string{"cannot load the tokenizer", "file=" + broken, "Kimi-Audio by its own code", "code for Harmony", "tokenizer loaded"} {
		if !log.has(s) {
			t.Errorf("the log does not say %q:\n%s", s, log.b.String())
		}
	}
	var doc jsonscan.Doc
	if err := doc.Scan([]byte(`{"model":"a","prompt":"xyz"}`), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	var p tokenize.Prompt
	if q := (tokenize.NativeQuery{Model: "a", Kind: tokenize.Completion, Doc: &doc}); !to.PromptInProcess(&p, &q) || !slices.Equal(p.Tokens, []uint32{'x', 'y', 'z'}) {
		t.Errorf("ids %v", p.Tokens)
	}
	ts.configure(tokenizerSettingsOf(cfg)) // the same: those that failed are tried again
	ts.awaitModels(t, "a", "harmony")
	loads := d.count()
	cfg.Models = map[string]config.Model{"a": {Tokenizer: a}, "b": {Tokenizer: b, ContentFormat: "openai"}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "a", "b")
	if n := d.count() - loads; n != 1 {
		t.Errorf("%d models loaded, want b alone", n)
	}
	cfg.Tokens.Native = "off"
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t)
	if d.closed != 5 { // audio's too, which was loaded twice and not used
		t.Errorf("%d models closed, want 5", d.closed)
	}
}

// TestReload: a reload loads what has changed in its folder, and what failed, and nothing else; it changes the
// timeout of the models that stay.
func TestReload(t *testing.T) {
	d := new(doubleLibrary)
	ts, to, _ := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	a, b, broken := modelDir(t, "a", nil), modelDir(t, "b", nil), modelDir(t, "broken", nil)
	given := filepath.Join(modelDir(t, "templates", map[string]string{"given.jinja": "x"}), "given.jinja")
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"a": {Tokenizer: a, ChatTemplate: given}, "b": {Tokenizer: b}, "broken": {Tokenizer: broken}}
	reload := func(want ...string) {
		t.Helper()
		d.mu.Lock()
		d.loads = nil
		d.mu.Unlock()
		ts.configure(tokenizerSettingsOf(cfg))
		ts.awaitModels(t, "a", "b")
		d.mu.Lock()
		defer d.mu.Unlock()
		if slices.Sort(want); !slices.Equal(d.loads, want) {
			t.Errorf("loaded %q, want %q", d.loads, want)
		}
	}
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	reload(a, b, broken)
	states := to.NativeStates()
	if len(states) != 3 || states[2].Model != "broken" || states[2].Failed != "broken" || states[2].Use() != "failed" {
		t.Errorf("states %+v, want a failed one", states)
	}
	reload(broken)
	write(filepath.Join(a, "tokenizer.json"), `{"truncation":{"max_length":6}}`) // as long as before
	reload(a, broken)
	write(filepath.Join(b, "chat_template.jinja"), "x")
	reload(b, broken)
	write(given, "y")
	reload(a, broken)
	if err := os.Mkdir(filepath.Join(b, "additional_chat_templates"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(b, "additional_chat_templates", "tool_use.jinja"), "x")
	reload(b, broken)
	write(filepath.Join(b, "README.md"), "x")
	reload(broken)
	cfg.Tokens.Timeout = 7 * time.Second
	reload(broken)
	if n := len(d.timeouts); n < 2 || d.timeouts[n-1] != 7*time.Second || d.timeouts[n-2] != 7*time.Second {
		t.Errorf("timeouts %v, want those of both models changed", d.timeouts)
	}
}

// TestModelsAreUsedAsTheyLoad: a model does not wait for the others, and is used until its successor is loaded.
func TestModelsAreUsedAsTheyLoad(t *testing.T) {
	d := &doubleLibrary{release: make(chan struct{})}
	ts, to, _ := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	cfg := config.Default()
	slow := modelDir(t, "slow", nil)
	cfg.Models = map[string]config.Model{"a": {Tokenizer: modelDir(t, "a", nil)}, "b": {Tokenizer: slow}}
	ts.configure(tokenizerSettingsOf(cfg))
	testwait.Until(t, "the first model", func() bool { s := to.NativeStates(); return len(s) == 1 && s[0].Model == "a" })
	d.release <- struct{}{}
	ts.awaitModels(t, "a", "b")
	cfg.Models = map[string]config.Model{"a": {Tokenizer: slow}}
	ts.configure(tokenizerSettingsOf(cfg))
	testwait.Until(t, "b is gone", func() bool { return len(to.NativeStates()) == 1 })
	if s := to.NativeStates(); len(s) != 1 || s[0].Model != "a" {
		t.Errorf("while its successor is loaded: %+v", s)
	}
	d.release <- struct{}{}
	ts.awaitModels(t, "a")
}

// TestStuckModel: a model whose folder does not answer is reported, holds up neither other models nor the end, and is
// used when it has been loaded after all.
func TestStuckModel(t *testing.T) {
	d := &doubleLibrary{release: make(chan struct{})}
	ts, to, log := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	ts.loadTimeout = 20 * time.Millisecond
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"a": {Tokenizer: modelDir(t, "slow", nil)}, "b": {Tokenizer: modelDir(t, "b", nil)}}
	ts.configure(tokenizerSettingsOf(cfg))
	testwait.Until(t, "the second model", func() bool {
		s := to.NativeStates()
		return len(s) == 2 && s[0].Model == "a" && s[0].Failed != "" && s[1].Failed == ""
	})
	if !log.has("still being loaded") {
		t.Error("the log does not mention it")
	}
	d.release <- struct{}{}
	ts.awaitModels(t, "a", "b")

	cfg.Models = map[string]config.Model{"c": {Tokenizer: modelDir(t, "slow", nil)}}
	ts.loadTimeout = time.Hour
	ts.configure(tokenizerSettingsOf(cfg))
	testwait.Until(t, "a and b are gone", func() bool { return len(to.NativeStates()) == 0 })
	begin := time.Now()
	ts.close()
	if d := time.Since(begin); d > 4*time.Second {
		t.Errorf("close took %v", d)
	}
	d.release <- struct{}{}
	testwait.Until(t, "all models are closed", func() bool {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		return d.closed == 3
	})
}

// TestServerTemplate: a model is rendered with the template that its engines report, which replaces the
// folder's or is the only one; without a report it is the folder's. Only engines of models with a tokenizer
// are asked.
func TestServerTemplate(t *testing.T) {
	d := new(doubleLibrary)
	ts, to, log := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	reported := map[string]string{} // by worker
	var asked []string
	var mu sync.Mutex
	ts.template = func(w *worker.Worker) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, w.Spec.ID)
		if reported[w.Spec.ID] == "fails" {
			return "", errors.New("no answer")
		}
		return reported[w.Spec.ID], nil
	}
	ready := func(id, model, engine, template string) *worker.Worker {
		mu.Lock()
		reported[id] = template
		mu.Unlock()
		w := worker.New(worker.Spec{ID: id})
		w.SetInfo(&worker.Info{Base: model, Models: []string{model}, Engine: engine})
		ts.workerReady(w)
		return w
	}
	template := func() string {
		var p tokenize.Prompt
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(`{"messages":[{"role":"user","content":"x"}]}`), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		if !to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: &doc}) {
			return "none"
		}
		text, _, _ := strings.Cut(string(idBytes(p.Tokens)), "{")
		return text
	}
	cfg := config.Default()
	dir := modelDir(t, "m", map[string]string{"tokenizer.json": "{}", "chat_template.jinja": "folder"})
	cfg.Models = map[string]config.Model{"m": {Tokenizer: dir}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "m")
	for i, c := range []struct{ reported, want string }{{"", ""}, {"first", "first"}, {"fails", "first"}, {"second", "second"}, {"folder", ""}, {"third", "third"}, {"", ""}, {"last", "last"}} {
		ready("w"+strconv.Itoa(i), "m", "vllm", c.reported)
		ts.awaitModels(t, "m")
		if got := template(); got != c.want {
			t.Errorf("engine %d reports %q: rendered with %q, want %q", i, c.reported, got, c.want)
		}
	}
	ready("other", "other", "vllm", "x")
	ready("sglang", "m", "sglang", "x")
	ts.awaitModels(t, "m")
	if mu.Lock(); slices.Contains(asked, "other") || slices.Contains(asked, "sglang") || len(asked) != 8 || d.count() != 1 {
		t.Errorf("asked %q, loaded %d times", asked, d.count())
	}
	mu.Unlock()
	if !log.has("no answer") {
		t.Errorf("the log: %s", log.b.String())
	}
	// A reload asks an engine that is there, and none if the settings say the template.
	w := ready("late", "m", "vllm", "")
	ts.awaitModels(t, "m")
	mu.Lock()
	reported["late"] = "later"
	mu.Unlock()
	ts.servers = func(string) []*worker.Worker { return []*worker.Worker{w} }
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "m")
	if got := template(); got != "later" {
		t.Errorf("after a reload: rendered with %q", got)
	}
	cfg.Models = map[string]config.Model{"m": {Tokenizer: dir, ChatTemplate: filepath.Join(modelDir(t, "g", map[string]string{"g.jinja": "given"}), "g.jinja")}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "m")
	if got := template(); got != "given" {
		t.Errorf("with a template in the settings: rendered with %q", got)
	}
}

func idBytes(ids []uint32) (text []byte) {
	for _, id := range ids {
		text = append(text, byte(id))
	}
	return text
}

// TestChatsRenderedByCode: of a model whose chats vLLM renders by code, only completions are tokenized here.
func TestChatsRenderedByCode(t *testing.T) {
	d := new(doubleLibrary)
	ts, to, _ := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	cfg := config.Default()
	cfg.Models = map[string]config.Model{
		"gpt-oss": {Tokenizer: modelDir(t, "harmony", map[string]string{"tokenizer.json": "{}", "config.json": `{"architectures":["GptOssForCausalLM"]}`})},
		"mistral": {Tokenizer: modelDir(t, "tekken", map[string]string{"tekken.json": "{}"})},
	}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "gpt-oss", "mistral")
	for _, model := range []string{"gpt-oss", "mistral"} {
		for kind, body := range map[tokenize.Kind]string{tokenize.Completion: `{"prompt":"xyz"}`, tokenize.Chat: `{"messages":[{"role":"user","content":"x"}]}`} {
			var doc jsonscan.Doc
			if err := doc.Scan([]byte(body), jsonscan.Limits{}); err != nil {
				t.Fatal(err)
			}
			var p tokenize.Prompt
			q := tokenize.NativeQuery{Model: model, Kind: kind, Doc: &doc}
			if got := to.PromptInProcess(&p, &q); got != (kind == tokenize.Completion) {
				t.Errorf("%s: %s is tokenized here: %v", model, body, got)
			}
		}
	}
}

// TestMismatchOutlivesTemplate: an engine that joins with another template does not make a model be used whose ids
// differ from those of an engine that is still there; a reload does.
func TestMismatchOutlivesTemplate(t *testing.T) {
	d := new(doubleLibrary)
	ts, to, _ := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"token_ids":[1]}`)) }))
	defer engine.Close()
	ep, err := upstream.NewEndpoint(engine.URL, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"m": {Tokenizer: modelDir(t, "m", map[string]string{"tokenizer.json": "{}", "chat_template.jinja": "folder"})}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "m")
	var doc jsonscan.Doc
	if err := doc.Scan([]byte(`{"messages":[{"role":"user","content":"x"}]}`), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	ask := func() bool {
		var p tokenize.Prompt
		return to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: &doc, Endpoint: ep, Incarnation: 1})
	}
	state := func() string { return to.NativeStates()[0].Use() }
	_ = ask()
	testwait.Until(t, "a mismatch", func() bool { return state() == "mismatch" })
	ts.template = func(*worker.Worker) (string, error) { return "joined", nil }
	w := worker.New(worker.Spec{ID: "w"})
	w.SetInfo(&worker.Info{Base: "m", Models: []string{"m"}, Engine: "vllm"})
	ts.workerReady(w)
	ts.awaitModels(t, "m")
	if ts.loaded["m"].template != "joined" {
		t.Fatal("the template of the engine was not taken over")
	}
	if ask() || state() != "mismatch" {
		t.Error("used although the engine that differed is there")
	}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "m")
	if !ask() {
		t.Error("not used after a reload")
	}
}

// TestProcessorTemplates: chats are left to the engines where a processor's template is not the tokenizer's, unless
// the settings say the template.
func TestProcessorTemplates(t *testing.T) {
	for i, c := range []struct {
		files map[string]string
		given bool
		chats bool
	}{
		{map[string]string{"chat_template.jinja": "a"}, false, true},
		{map[string]string{"chat_template.jinja": "a", "chat_template.json": `{"chat_template":"a"}`}, false, true},
		{map[string]string{"chat_template.jinja": "a", "processor_config.json": `{"processor_class":"P"}`}, false, true},
		{map[string]string{"chat_template.jinja": "a", "chat_template.json": `{"chat_template":"b"}`}, false, false},
		{map[string]string{"chat_template.jinja": "a", "chat_template.json": `{"chat_template":"b"}`}, true, true},
		{map[string]string{"chat_template.jinja": "a", "processor_config.json": `{"chat_template":"b"}`}, false, false},
		{map[string]string{"chat_template.json": `{"chat_template":"b"}`}, false, false},
		{map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"default","template":"a"},{"name":"tool_use","template":"c"}]}`, "chat_template.json": `{"chat_template":"a"}`}, false, false},
	} {
		ts, to, log := newTestTokenizers(t, func() (modelLoader, error) { return new(doubleLibrary), nil })
		c.files["tokenizer.json"] = "{}"
		m := config.Model{Tokenizer: modelDir(t, "m", c.files)}
		if c.given {
			m.ChatTemplate = filepath.Join(modelDir(t, "g", map[string]string{"g.jinja": "given"}), "g.jinja")
		}
		cfg := config.Default()
		cfg.Models = map[string]config.Model{"m": m}
		ts.configure(tokenizerSettingsOf(cfg))
		ts.awaitModels(t, "m")
		for kind, body := range map[tokenize.Kind]string{tokenize.Completion: `{"prompt":"x"}`, tokenize.Chat: `{"messages":[{"role":"user","content":"x"}]}`} {
			if got := tryPrompt(to, "m", kind, body) > 0; got != (kind == tokenize.Completion || c.chats) {
				t.Errorf("folder %d: %s is tokenized here: %v", i, body, got)
			}
		}
		if log.has("template of a processor") == c.chats {
			t.Errorf("folder %d: the log: %s", i, log.b.String())
		}
	}
}

// TestRootOfEngine: the folder that an engine reports is used only in mode auto, only from vLLM, and
// only if it can be read here.
func TestRootOfEngine(t *testing.T) {
	d := new(doubleLibrary)
	ts, _, _ := newTestTokenizers(t, func() (modelLoader, error) { return d, nil })
	dir := modelDir(t, "m", nil)
	ready := func(base, engine, root string) {
		w := new(worker.Worker)
		w.SetInfo(&worker.Info{Base: base, Engine: engine, Root: root})
		ts.workerReady(w)
	}
	ready("early", "vllm", dir)
	cfg := config.Default()
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t)
	cfg.Tokens.Native = "auto"
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "early")
	ready("hub", "vllm", "org/name")
	ready("elsewhere", "vllm", "/no/such/folder")
	ready("sglang", "sglang", dir)
	ready("late", "vllm", dir)
	ts.awaitModels(t, "early", "late")
}

// TestWithoutLibrary: without the library the configuration is valid, the log says once for each
// model why, and prompts are not tokenized here.
func TestWithoutLibrary(t *testing.T) {
	ts, to, log := newTestTokenizers(t, func() (modelLoader, error) {
		return nil, &tokenizer.LoadError{} // a failed Open would keep TestRealLibrary from loading it
	})
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"a": {Tokenizer: modelDir(t, "a", nil)}}
	ts.configure(tokenizerSettingsOf(cfg))
	testwait.Until(t, "the log", func() bool { return log.has("no tokenizer library") })
	ts.awaitModels(t)
	var doc jsonscan.Doc
	if err := doc.Scan([]byte(`{"model":"a","prompt":"xyz"}`), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	var p tokenize.Prompt
	if q := (tokenize.NativeQuery{Model: "a", Kind: tokenize.Completion, Doc: &doc}); to.PromptInProcess(&p, &q) {
		t.Error("tokenized without a library")
	}
	if to.Prompt(&p, tokenize.Completion, &doc, nil, nil); p.Source != tokenize.FromText {
		t.Errorf("source %v, want text as before", p.Source)
	}
}

// TestRealLibrary loads a real tokenizer through the router's own loader.
func TestRealLibrary(t *testing.T) {
	if _, err := tokenizer.Open(""); err != nil {
		t.Skipf("no tokenizer library; make builds it where cargo is installed: %v", err)
	}
	ts, to, log := newTestTokenizers(t, nil)
	cfg := config.Default()
	cfg.Models = map[string]config.Model{"tiny": {Tokenizer: "../../native/tokenizer/testdata/tiny"}}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "tiny")
	if log.has("encoded each time") || log.has("cannot") {
		t.Errorf("the log: %s", log.b.String())
	}
	var doc jsonscan.Doc
	if err := doc.Scan([]byte(`{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	var chat tokenize.Prompt
	if q := (tokenize.NativeQuery{Model: "tiny", Kind: tokenize.Chat, Doc: &doc}); !to.PromptInProcess(&chat, &q) {
		t.Fatal("not tokenized")
	}
	text := `<|begin|>user: hi<|end|>\nassistant:`
	if err := doc.Scan([]byte(`{"model":"tiny","add_special_tokens":false,"prompt":"`+text+`"}`), jsonscan.Limits{}); err != nil {
		t.Fatal(err)
	}
	var rendered tokenize.Prompt
	if q := (tokenize.NativeQuery{Model: "tiny", Kind: tokenize.Completion, Doc: &doc}); !to.PromptInProcess(&rendered, &q) {
		t.Fatal("not tokenized")
	}
	if !slices.Equal(chat.Tokens, rendered.Tokens) || len(chat.Tokens) == 0 {
		t.Errorf("the chat has the ids %v, its text %v", chat.Tokens, rendered.Tokens)
	}
}

// TestTemplateSettings: chats are rendered with the template, the content format and the variables that
// the servers were started with, and with the template that they select for requests with tools.
func TestTemplateSettings(t *testing.T) {
	if _, err := tokenizer.Open(""); err != nil {
		t.Skipf("no tokenizer library; make builds it where cargo is installed: %v", err)
	}
	vocabulary, err := os.ReadFile("../../native/tokenizer/testdata/tiny/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	folder := func(files map[string]string) string {
		files["tokenizer.json"] = string(vocabulary)
		return modelDir(t, "m", files)
	}
	const parts = `{% for m in messages %}{% for c in m.content %}{{ m.role }}={{ c.text }} {% endfor %}{% endfor %}{{ x }}`
	const text = `{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{{ x }}`
	both := func(toolUse string) map[string]string {
		list, err := json.Marshal(map[string]any{"chat_template": []map[string]string{{"name": "default", "template": text}, {"name": "tool_use", "template": toolUse}}})
		if err != nil {
			t.Fatal(err)
		}
		return map[string]string{"tokenizer_config.json": string(list)}
	}
	given := filepath.Join(modelDir(t, "templates", map[string]string{"given.jinja": parts + `!`, "broken.jinja": `{% if %}`}), "given.jinja")
	ts, to, log := newTestTokenizers(t, nil)
	cfg := config.Default()
	cfg.Models = map[string]config.Model{
		"broken-given":    {Tokenizer: folder(both(parts)), ChatTemplate: filepath.Join(filepath.Dir(given), "broken.jinja")},
		"broken-tool-use": {Tokenizer: folder(both("{% if %}"))},
		"excludes-tools":  {Tokenizer: folder(both(parts)), ExcludeTools: true},
		"given":           {Tokenizer: folder(both(parts)), ChatTemplate: given, ChatTemplateKwargs: ` {"x":"k"} `},
		"missing":         {Tokenizer: folder(both(parts)), ChatTemplate: given + "x"},
		"openai":          {Tokenizer: folder(both(parts)), ContentFormat: "openai"},
		"plain":           {Tokenizer: folder(map[string]string{"chat_template.jinja": text})},
		"tool-use":        {Tokenizer: folder(both(parts)), ChatTemplateKwargs: `{"x":1}`, TrustRequestChatTemplate: true},
	}
	ts.configure(tokenizerSettingsOf(cfg))
	ts.awaitModels(t, "broken-given", "broken-tool-use", "excludes-tools", "given", "openai", "plain", "tool-use")
	const messages = `"messages":[{"role":"developer","content":"d"},{"role":"user","content":"u"}]`
	const tools = `,"tools":[{"type":"function","function":{"name":"f"}}]`
	for _, c := range []struct{ model, more, want string }{ // "": the engine tokenizes it
		{"plain", ``, "system:d user:u "},
		{"plain", tools, "system:d user:u "},
		{"plain", `,"chat_template_kwargs":{"x":2}`, "system:d user:u 2"},
		{"tool-use", ``, "system:d user:u 1"},
		{"tool-use", tools, "system=d user=u 1"},
		{"tool-use", tools + `,"chat_template_kwargs":{"x":2}`, "system=d user=u 2"},
		{"tool-use", `,"chat_template":"x"`, ""},
		{"tool-use", tools + `,"tool_choice":"none"`, "system=d user=u 1"},
		{"excludes-tools", tools, "system=d user=u "},
		{"excludes-tools", tools + `,"tool_choice":"none"`, "system:d user:u "},
		{"broken-tool-use", ``, "system:d user:u "},
		{"broken-tool-use", tools, ""},
		{"openai", ``, "system:[{'type': 'text', 'text': 'd'}] user:[{'type': 'text', 'text': 'u'}] "},
		{"given", ``, "system=d user=u k!"},
		{"given", tools, "system=d user=u k!"},
		{"broken-given", ``, ""},
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(`{`+messages+c.more+`}`), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		var p tokenize.Prompt
		got := ""
		if q := (tokenize.NativeQuery{Model: c.model, Kind: tokenize.Chat, Doc: &doc}); to.PromptInProcess(&p, &q) {
			for _, id := range p.Tokens { // 0 to 255 are the bytes
				got += string([]byte{byte(id)})
			}
		}
		if got != c.want {
			t.Errorf("%s: %s: %q, want %q", c.model, c.more, got, c.want)
		}
	}
	for _, s := range []string{`"cannot render a chat template: the engines tokenize the prompts that select it" model=broken-tool-use detail=tool_use`, `model=broken-given detail=default error="syntax error`, "cannot use the tokenizer: the engines tokenize the model's prompts\" model=missing"} {
		if !log.has(s) {
			t.Errorf("the log does not say %q:\n%s", s, log.b.String())
		}
	}
	if strings.Count(log.b.String(), "cannot render a chat") != 2 {
		t.Errorf("the log: %s", log.b.String())
	}
}

// TestTemplatesAreTried: the results are those of vLLM 0.32 for the same templates
// (AnthropicServingMessages._detect_merge_inline_system and _probe_disabled_thinking_effort).
func TestTemplatesAreTried(t *testing.T) {
	l, err := tokenizer.Open("")
	if err != nil {
		t.Skipf("no tokenizer library; make builds it where cargo is installed: %v", err)
	}
	m, _, err := (nativeLibrary{l}).load("../../native/tokenizer/testdata/tiny")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const show = `{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}`
	for template, want := range map[string]bool{
		show:                                   false,
		`{{ bos_token }}` + show:               false,
		`{{ bos_token + 'x' }}` + show:         true,
		`{{ 'x' + bos_token }}` + show:         true,
		`{{ bos_token ~ 'x' }}` + show:         false,
		`{% generation %}x{% endgeneration %}`: true,
		`{# {% generation %} #}` + show:        false,
		`{{ strftime_now('%Y') }}` + show:      true,
		`{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}` + show:                       false,
		`{% if tools is not none %}{% for t in tools %}{{ t }}{% endfor %}{{ tools | length }}{% endif %}`: false,
		`{% if tools is none %}{{ raise_exception('x') }}{% endif %}` + show:                               false,
		`{% if tools is not defined %}{{ raise_exception('x') }}{% endif %}` + show:                        true,
		`{{ documents.title }}` + show: true,
		`{% macro no(x) %}{{ raise_exception(x) }}{% endmacro %}{% if messages | length > 4 %}{{ no('x') }}{% endif %}` + show:                                                                                           false,
		`{% macro no(x) %}{{ raise_exception(x) }}{% endmacro %}{% if messages | length > 3 %}{{ no('x') }}{% endif %}` + show:                                                                                           true,
		`{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}`:                                                                         true,
		`{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                            false,
		`{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('x') }}{% endif %}{% endfor %}`: false,
		`{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('x') }}{% endif %}{% endfor %}`:                                                                                  true,
	} {
		var s chatinput.Settings
		if tryTemplates(&s, map[string]string{"default": template}, m); s.MergeSystem != want {
			t.Errorf("%s: merges system messages %v, want %v", template, s.MergeSystem, want)
		}
	}
	for template, want := range map[string]string{
		show: "low",
		show + `{% if not enable_thinking | default(true) %}<think></think>{% endif %}`: "none",
		show + `{{ reasoning_effort }}`: "none",
		show + `{% if reasoning_effort not in ['low', 'high'] %}{{ raise_exception('x') }}{% endif %}`: "low",
		show + `{% if reasoning_effort in ['low', 'high'] %}{{ reasoning_effort }}{% endif %}`:         "low",
	} {
		render := func(input []byte) ([]byte, error) { return renderer(m)(template, input) }
		if got := chatinput.FindDisabledEffort(new(chatinput.Settings), render); got != want {
			t.Errorf("%s: thinking is disabled by %q, want %q", template, got, want)
		}
	}
}
