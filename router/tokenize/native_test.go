package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
)

// byteModel is a double of native/tokenizer.Model that is a tokenizer all the same: an id for each
// byte, and one for each added token. Its template is ChatML.
type byteModel struct {
	skew   bool // the generation prompt differs from the engine's
	fail   bool
	refuse bool          // the template raises an exception
	clock  func() string // what the template prints of the time; nil: nothing
}

const (
	startID, endID = 1000, 1001
	byteTokenizer  = `{"added_tokens":[{"id":1000,"content":"<|im_start|>","special":true},{"id":1001,"content":"<|im_end|>","special":true}],
		"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[999]}}}}`
)

func (m *byteModel) Encode(dst []uint32, text []byte, addSpecial bool) ([]uint32, error) {
	if addSpecial {
		dst = append(dst, 999)
	}
	for s := string(text); s != ""; {
		switch {
		case strings.HasPrefix(s, "<|im_start|>"):
			dst, s = append(dst, startID), s[len("<|im_start|>"):]
		case strings.HasPrefix(s, "<|im_end|>"):
			dst, s = append(dst, endID), s[len("<|im_end|>"):]
		default:
			dst, s = append(dst, uint32(s[0])), s[1:]
		}
	}
	return dst, nil
}

func (m *byteModel) Prompt(dst []uint32, _ string, input []byte, addSpecial bool, rest func([]byte) []byte) ([]uint32, error) {
	text, err := m.render(input)
	if err != nil {
		return dst, err
	}
	if part := rest(text); part != nil {
		return m.Encode(dst, part, addSpecial)
	}
	return dst, nil
}

// refusal is the error of a template that raises an exception.
type refusal struct{ error }

func (refusal) Refused() bool { return true }

func (m *byteModel) render(input []byte) (dst []byte, err error) {
	if m.refuse {
		return dst, &refusal{errors.New("no")}
	}
	var in struct {
		Messages []struct{ Role, Content string }
	}
	if err := json.Unmarshal(input, &in); err != nil || m.fail {
		return dst, errors.New("cannot render")
	}
	for _, msg := range in.Messages {
		dst = fmt.Appendf(dst, "<|im_start|>%s\n%s<|im_end|>\n", msg.Role, msg.Content)
	}
	if m.clock != nil {
		dst = append(dst, m.clock()...)
	}
	dst = append(dst, "<|im_start|>assistant\n"...)
	if m.skew {
		dst = append(dst, "<think>"...)
	}
	return dst, nil
}

// renderEngine is an engine with vLLM's render endpoints, whose own model is a byteModel.
type renderEngine struct {
	*httptest.Server
	ep *upstream.Endpoint

	mu       sync.Mutex
	paths    []string
	noRender int           // the status of its render endpoints, 0: they answer
	clock    func() string // of its template
	down     bool
	skew     bool
}

func newRenderEngine(t *testing.T) *renderEngine {
	t.Helper()
	e := new(renderEngine)
	e.Server = httptest.NewServer(e)
	t.Cleanup(e.Close)
	var err error
	if e.ep, err = upstream.NewEndpoint(e.URL, upstream.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.ep.Close)
	return e
}

func (e *renderEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.mu.Lock()
	e.paths = append(e.paths, r.URL.Path)
	noRender, down, m := e.noRender, e.down, byteModel{skew: e.skew, clock: e.clock}
	e.mu.Unlock()
	api, render := strings.CutSuffix(r.URL.Path, "/render")
	kind := map[string]chatinput.API{"/v1/chat/completions": chatinput.Chat, "/v1/completions": chatinput.Completions, "/v1/responses": chatinput.Responses, "/v1/messages": chatinput.Messages}[api]
	switch {
	case down:
		http.Error(w, "down", 500)
		return
	case render && noRender != 0:
		http.Error(w, "no", noRender)
		return
	case !render && strings.Contains(string(body), `"prompt"`):
		kind = chatinput.Completions
	}
	var in chatinput.Input
	in.Read(kind, body, new(chatinput.Settings))
	text := in.Text
	if kind != chatinput.Completions {
		text, _ = m.render(in.Chat)
	}
	ids, _ := m.Encode(nil, text, in.AddSpecial)
	answer := map[string]any{"token_ids": ids}
	if !render {
		answer = map[string]any{"tokens": ids}
	}
	if render && kind == chatinput.Completions {
		_ = json.NewEncoder(w).Encode([]any{answer})
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func (e *renderEngine) set(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
}

func (e *renderEngine) asked() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.paths)
}

// withModel returns a Tokenizer with a byteModel called "m", and where mismatches are reported.
func withModel(t *testing.T, model NativeModel) (*Tokenizer, *InProcess, chan Mismatch) {
	t.Helper()
	reports := make(chan Mismatch, 10)
	tk := New(Options{})
	tk.ReportMismatches(func(m Mismatch) { reports <- m })
	rules, err := incremental.NewRules([]byte(byteTokenizer), nil)
	if err != nil {
		t.Fatal(err)
	}
	n, err := tk.NewInProcess("m", model, rules, chatinput.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	tk.SetNatives(map[string]*InProcess{"m": n})
	return tk, n, reports
}

func hello(i int) string {
	return fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"hello %d"}]}`, i)
}

// ask returns the prompt of a request, and whether it was tokenized in this process.
func ask(t *testing.T, tk *Tokenizer, kind Kind, body string, e *renderEngine, incarnation uint32) (Prompt, bool) {
	t.Helper()
	var p Prompt
	q := NativeQuery{Model: "m", Kind: kind, Doc: scanned(t, body), Incarnation: incarnation}
	if e != nil {
		q.Endpoint = e.ep
	}
	ok := tk.PromptInProcess(&p, &q)
	return p, ok
}

func awaitChecks(t *testing.T, tk *Tokenizer, n uint64) {
	t.Helper()
	testwait.Until(t, "a comparison with the engine", func() bool { s := tk.Stats(); return s.Checks+s.ChecksFailed >= n })
}

// TestInProcess: every API's prompts have the ids of the engine, which is asked once for each kind
// of request, and again when it has restarted.
func TestInProcess(t *testing.T) {
	e := newRenderEngine(t)
	tk, n, reports := withModel(t, new(byteModel))
	bodies := map[Kind]string{
		Chat:       hello(1),
		Completion: `{"model":"m","prompt":"once upon"}`,
		Responses:  `{"model":"m","input":"hello","instructions":"be kind"}`,
		Messages:   `{"model":"m","max_tokens":5,"system":"be kind","messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}]}`,
	}
	checks := uint64(0)
	for kind, body := range bodies {
		for range 3 {
			p, ok := ask(t, tk, kind, body, e, 7)
			if !ok || p.Source != FromNative || p.Count != len(p.Tokens) {
				t.Fatalf("%v: %v from %v, %d ids, count %d", kind, ok, p.Source, len(p.Tokens), p.Count)
			}
			if want, err := tk.engineIDs(kind, []byte(body), e.ep, false); err != nil || !slices.Equal(p.Tokens, want) {
				t.Errorf("%v: ids %v, the engine's %v (%v)", kind, p.Tokens, want, err)
			}
			awaitChecks(t, tk, checks+1)
		}
		checks++
	}
	if s := tk.Stats(); s.Checks != 4 || s.Mismatches != 0 || s.FromNative != 12 {
		t.Errorf("stats %+v, want 12 prompts and 4 comparisons", s)
	}
	if p, _ := ask(t, tk, Chat, hello(2), e, 7); !p.Verified {
		t.Error("ids are not verified after comparisons without difference")
	}
	_, _ = ask(t, tk, Chat, hello(3), e, 8)
	awaitChecks(t, tk, 5)
	if len(reports) != 0 || n.mismatch != nil {
		t.Error("a mismatch was reported")
	}
}

// TestMismatch: a model whose ids differ is reported with the position and is left to the engine
// until that engine has restarted.
func TestMismatch(t *testing.T) {
	e, other := newRenderEngine(t), newRenderEngine(t)
	e.skew = true
	tk, _, reports := withModel(t, new(byteModel))
	if _, ok := ask(t, tk, Chat, hello(1), e, 1); !ok {
		t.Fatal("the first prompt was not tokenized")
	}
	m := <-reports
	rendered, _ := new(byteModel).render([]byte(`{"messages":[{"role":"user","content":"hello 1"}]}`))
	ids, _ := new(byteModel).Encode(nil, rendered, false)
	if m.Model != "m" || m.URL != e.ep.URL() || m.API != "/v1/chat/completions" || m.Position != len(ids) || m.Native != len(ids) || m.Engine != len(ids)+len("<think>") {
		t.Errorf("reported %+v", m)
	}
	if strings.Contains(fmt.Sprintf("%+v %s", m, m.String()), "hello") {
		t.Error("the report contains the prompt")
	}
	for _, q := range []struct {
		e           *renderEngine
		incarnation uint32
	}{{e, 1}, {other, 1}, {nil, 0}} {
		if _, ok := ask(t, tk, Chat, hello(2), q.e, q.incarnation); ok {
			t.Error("the model is used in spite of the mismatch")
		}
	}
	if s := tk.NativeStates(); len(s) != 1 || s[0].Mismatch == nil || s[0].Verified {
		t.Errorf("states %+v", s)
	}
	e.mu.Lock()
	e.skew = false
	e.mu.Unlock()
	if p, ok := ask(t, tk, Chat, hello(2), e, 2); !ok || p.Verified {
		t.Errorf("after the engine's restart: used %v, verified %v", ok, p.Verified)
	}
	awaitChecks(t, tk, 2)
	if p, ok := ask(t, tk, Chat, hello(3), e, 2); !ok || !p.Verified {
		t.Errorf("after an equal prompt: used %v, verified %v", ok, p.Verified)
	}
}

// TestEngineLeft: a model whose ids differed is tried again when the engine that differed is gone or another
// process, whichever engine is asked next, and not for any other engine. A comparison that the engine
// did not outlive says nothing.
func TestEngineLeft(t *testing.T) {
	e, other := newRenderEngine(t), newRenderEngine(t)
	e.skew = true
	tk, n, reports := withModel(t, new(byteModel))
	_, _ = ask(t, tk, Chat, hello(1), e, 1)
	<-reports
	tk.EngineLeft(other.ep.URL())
	if _, ok := ask(t, tk, Chat, hello(2), other, 1); ok {
		t.Error("used although the engine that differed is there")
	}
	tk.EngineLeft(e.ep.URL())
	if p, ok := ask(t, tk, Chat, hello(2), other, 1); !ok || p.Verified {
		t.Errorf("after the engine has left: used %v, verified %v", ok, p.Verified)
	}
	awaitChecks(t, tk, 2)
	testwait.Until(t, "verified", func() bool {
		return tk.IsVerified(tk.nativeModels()["m"], &NativeQuery{Model: "m", Kind: Chat, Endpoint: other.ep, Incarnation: 1})
	})
	tk.EngineLeft(other.ep.URL())
	if tk.IsVerified(tk.nativeModels()["m"], &NativeQuery{Model: "m", Kind: Chat, Endpoint: other.ep, Incarnation: 1}) {
		t.Error("a process at the URL of one that has left is verified")
	}
	e.mu.Lock() // holds the engine's answer
	_, ok := ask(t, tk, Chat, hello(3), e, 1)
	tk.EngineLeft(e.ep.URL())
	e.mu.Unlock()
	awaitChecks(t, tk, 3)
	if n.mu.Lock(); !ok || n.mismatch != nil || len(reports) > 0 || tk.Stats().ChecksFailed != 1 {
		t.Errorf("used %v, %d reports, stats %+v: the ids of an engine that has left count", ok, len(reports), tk.Stats())
	}
	n.mu.Unlock()
}

// TestRetry: a reload tries a model again, once.
func TestRetry(t *testing.T) {
	e := newRenderEngine(t)
	e.skew = true
	tk, n, reports := withModel(t, new(byteModel))
	for i := range 2 {
		if _, ok := ask(t, tk, Chat, hello(i), e, 1); !ok {
			t.Error("not used")
		}
		<-reports
		if _, ok := ask(t, tk, Chat, hello(i), e, 1); ok {
			t.Error("used in spite of the mismatch")
		}
		n.Retry()
	}
}

// TestNativeScratchIsBounded: no buffer that a long request was read into is kept.
func TestNativeScratchIsBounded(t *testing.T) {
	long := strings.Repeat("x", maxNativeScratch+1)
	arguments, err := json.Marshal(`{"a":"` + long + `"}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		api  chatinput.API
		body string
	}{
		{chatinput.Completions, `{"prompt":"` + long + `"}`},
		{chatinput.Messages, `{"max_tokens":1,"messages":[{"role":"user","content":"` + long + `"}]}`},
		{chatinput.Responses, `{"input":"` + long + `"}`},
		{chatinput.Chat, `{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":` + string(arguments) + `}}]}]}`},
	} {
		w := new(nativeWork)
		w.input.Read(c.api, []byte(c.body), new(chatinput.Settings))
		if c.api != chatinput.Completions {
			w.input.Chat = nil // leaves the buffers in between
		}
		if w.put(); nativeWorks.Get() == w {
			t.Errorf("a work with %d bytes is kept after %.60s", w.input.Memory(), c.body)
		}
	}
}

// TestIsVerified: equal ids verify one kind of request with one process of one engine, until any engine's
// ids differ.
func TestIsVerified(t *testing.T) {
	e, other := newRenderEngine(t), newRenderEngine(t)
	tk, _, reports := withModel(t, new(byteModel))
	verified := func(e *renderEngine, kind Kind, incarnation uint32) bool {
		return tk.IsVerified(tk.nativeModels()["m"], &NativeQuery{Model: "m", Kind: kind, Endpoint: e.ep, Incarnation: incarnation})
	}
	if verified(e, Chat, 1) || tk.IsVerified(tk.nativeModels()["m"], &NativeQuery{Model: "m", Kind: Chat}) {
		t.Error("verified before any comparison")
	}
	_, _ = ask(t, tk, Chat, hello(1), e, 1)
	awaitChecks(t, tk, 1)
	testwait.Until(t, "verified", func() bool { return verified(e, Chat, 1) })
	if verified(e, Completion, 1) || verified(e, Chat, 2) || verified(other, Chat, 1) {
		t.Error("another API, process or engine is verified by one comparison")
	}
	if n := new(InProcess); tk.IsVerified(n, &NativeQuery{Model: "m", Kind: Chat, Endpoint: e.ep, Incarnation: 1}) {
		t.Error("ids of another model are verified, as those of an adapter whose tokenizer a reload has removed")
	}
	e.mu.Lock()
	e.down = true
	e.mu.Unlock()
	_, _ = ask(t, tk, Messages, `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}`, e, 1)
	awaitChecks(t, tk, 2)
	if verified(e, Messages, 1) || !verified(e, Chat, 1) {
		t.Error("a comparison that failed verifies, or refutes others")
	}
	other.mu.Lock()
	other.skew = true
	other.mu.Unlock()
	_, _ = ask(t, tk, Chat, hello(2), other, 1)
	<-reports
	if verified(e, Chat, 1) || verified(other, Chat, 1) {
		t.Error("verified although an engine's ids differ")
	}
}

// TestSampling: one prompt in a hundred is compared.
func TestSampling(t *testing.T) {
	e := newRenderEngine(t)
	tk, _, _ := withModel(t, new(byteModel))
	for i := range 301 {
		if i%100 == 1 {
			awaitChecks(t, tk, uint64(i/100+1)) // only one comparison runs at a time
		}
		_, _ = ask(t, tk, Chat, hello(i), e, 1)
	}
	awaitChecks(t, tk, 4)
	if asked := e.asked(); len(asked) != 4 || asked[0] != "/v1/chat/completions/render" {
		t.Errorf("the engine was asked %q, want the first and three of 300", asked)
	}
}

// TestSuspect: after a report that does not fit, the next prompt of its kind is compared, once a minute.
func TestSuspect(t *testing.T) {
	e := newRenderEngine(t)
	tk, n, _ := withModel(t, new(byteModel))
	_, _ = ask(t, tk, Completion, `{"model":"m","prompt":"once upon"}`, e, 1)
	awaitChecks(t, tk, 1)
	_, _ = ask(t, tk, Chat, hello(1), e, 1)
	awaitChecks(t, tk, 2)
	tk.Suspect(n, Chat)
	_, _ = ask(t, tk, Completion, `{"model":"m","prompt":"a time"}`, e, 1)
	if n.checking != "" {
		t.Error("a prompt of another kind is compared")
	}
	_, _ = ask(t, tk, Chat, hello(2), e, 1)
	awaitChecks(t, tk, 3)
	tk.Suspect(n, Chat)
	_, _ = ask(t, tk, Chat, hello(3), e, 1)
	if s := tk.Stats(); n.checking != "" || s.Checks != 3 || s.Suspicions != 2 {
		t.Errorf("stats %+v, comparing with %q; want 3 comparisons, and none for the second report within a minute", s, n.checking)
	}
}

// TestWithoutRender: an engine without render endpoints, or with some that the router may not use, is asked for
// /tokenize, by what Prompt would send.
func TestWithoutRender(t *testing.T) {
	for _, status := range []int{401, 403, 404, 405, 501} {
		e := newRenderEngine(t)
		e.noRender = status
		tk, _, reports := withModel(t, new(byteModel))
		for i := range 3 {
			_, _ = ask(t, tk, Chat, hello(i), e, 1)
			awaitChecks(t, tk, 1)
		}
		if asked := e.asked(); !slices.Equal(asked, []string{"/v1/chat/completions/render", "/tokenize"}) {
			t.Errorf("status %d: asked %q", status, asked)
		}
		if s := tk.Stats(); s.Checks != 1 || len(reports) != 0 {
			t.Errorf("status %d: stats %+v, %d mismatches", status, s, len(reports))
		}
	}
	e := newRenderEngine(t)
	tk, _, _ := withModel(t, new(byteModel))
	_, _ = ask(t, tk, Chat, hello(1), e, 1)
	awaitChecks(t, tk, 1)
	e.mu.Lock()
	e.down = true
	e.mu.Unlock()
	_, _ = ask(t, tk, Completion, `{"model":"m","prompt":"x"}`, e, 1)
	awaitChecks(t, tk, 2)
	if p, ok := ask(t, tk, Chat, hello(2), e, 1); !ok || !p.Verified || tk.Stats().ChecksFailed != 1 {
		t.Errorf("an engine that fails says nothing: used %v, stats %+v", ok, tk.Stats())
	}
}

// TestFailingComparisons: an engine that gives no ids is asked again after a delay, which doubles, and not for each
// prompt; other engines and APIs, and another process at its URL, are asked at once.
func TestFailingComparisons(t *testing.T) {
	e, other := newRenderEngine(t), newRenderEngine(t)
	tk, n, _ := withModel(t, new(byteModel))
	c := &clock{t: time.Unix(1e9, 0)}
	tk.backoffs.now = c.now
	tk.Reload(Options{VerifyRatio: -1})
	asked := func(e *renderEngine, want int) {
		t.Helper()
		for i := range 10 {
			_, _ = ask(t, tk, Chat, hello(i), e, 1)
			testwait.Until(t, "the end of a comparison", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.checking == "" })
		}
		if got := len(e.asked()); got != want {
			t.Fatalf("the engine was asked %d times, want %d", got, want)
		}
	}
	e.set(func() { e.down = true })
	asked(e, 1)
	asked(other, 1)
	refusing := newRenderEngine(t)
	refusing.set(func() { refusing.noRender = 422 })
	asked(refusing, 10) // that says something about a prompt: the engine works
	times := 1
	for _, delay := range []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second} {
		c.advance(delay - 1)
		asked(e, times)
		c.advance(1)
		times++
		asked(e, times)
	}
	_, _ = ask(t, tk, Completion, `{"model":"m","prompt":"x"}`, e, 1)
	testwait.Until(t, "another API's comparison", func() bool { return len(e.asked()) == times+1 })
	testwait.Until(t, "its end", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.checking == "" })
	tk.EngineLeft(e.URL)
	asked(e, times+2) // the delay is short again
	c.advance(500 * time.Millisecond)
	e.set(func() { e.down = false })
	asked(e, times+3)
}

// TestTimeInTemplate: what a template prints of the time differs between router and engine when it changes in
// between, and that does not count as a mismatch. An engine with another time is one. A prompt that is another one each
// time cannot be compared, and is not compared again for each request.
func TestTimeInTemplate(t *testing.T) {
	var day atomic.Int64
	clock := func() string { return fmt.Sprint("day ", day.Load()) }
	chat := func(i int) string { return fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%d"}]}`, i) }
	t.Run("midnight", func(t *testing.T) {
		e := newRenderEngine(t)
		e.clock = func() string { day.Add(1); return clock() }
		tk, _, reports := withModel(t, &byteModel{clock: clock})
		for i, body := range []string{chat(1), `{"model":"m","truncate_prompt_tokens":15,"messages":[{"role":"user","content":"x"}]}`} {
			if _, ok := ask(t, tk, Chat, body, e, uint32(i)); !ok {
				t.Fatal("not tokenized")
			}
			awaitChecks(t, tk, uint64(i+1))
		}
		if s := tk.Stats(); s.Checks != 1 || s.ChecksFailed != 1 || len(reports) != 0 {
			t.Errorf("stats %+v, %d mismatches; want one equal, and the cut one without result", s, len(reports))
		}
	})
	t.Run("another time zone", func(t *testing.T) {
		e := newRenderEngine(t)
		e.clock = func() string { return "yesterday" }
		tk, _, reports := withModel(t, &byteModel{clock: clock})
		_, _ = ask(t, tk, Chat, chat(1), e, 1)
		awaitChecks(t, tk, 1)
		<-reports
	})
	t.Run("always another", func(t *testing.T) {
		e := newRenderEngine(t)
		e.clock = func() string { day.Add(1); return clock() }
		tk, _, reports := withModel(t, &byteModel{clock: e.clock})
		for i := range 5 {
			_, _ = ask(t, tk, Chat, chat(i), e, 1)
			awaitChecks(t, tk, 1)
		}
		if s := tk.Stats(); s.Checks != 0 || s.ChecksFailed != 1 || len(reports) != 0 || len(e.asked()) != maxRenders {
			t.Errorf("stats %+v, %d mismatches, asked %d times", s, len(reports), len(e.asked()))
		}
	})
}

// TestFollow: a model with another template is not used either until the engine that differed has left.
func TestFollow(t *testing.T) {
	e, other := newRenderEngine(t), newRenderEngine(t)
	e.skew = true
	tk, old, reports := withModel(t, new(byteModel))
	_, _ = ask(t, tk, Chat, hello(1), e, 1)
	<-reports
	n, err := tk.NewInProcess("m", new(byteModel), nil, chatinput.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	n.Follow(old)
	tk.SetNatives(map[string]*InProcess{"m": n})
	if _, ok := ask(t, tk, Chat, hello(2), other, 1); ok {
		t.Error("a new template makes the model be used although the engine that differed is there")
	}
	tk.EngineLeft(e.ep.URL())
	if _, ok := ask(t, tk, Chat, hello(2), other, 1); !ok {
		t.Error("not used after the engine has left")
	}
}

// TestNotInProcess: prompts that the library cannot or may not tokenize are left to Prompt, and so
// is everything without a library.
func TestNotInProcess(t *testing.T) {
	model := new(byteModel)
	tk, _, _ := withModel(t, model)
	image := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}`
	if _, ok := ask(t, tk, Chat, image, nil, 0); ok || tk.Stats().Unmodelled != 1 {
		t.Error("an image was tokenized")
	}
	if _, ok := ask(t, tk, Other, `{"input":"x"}`, nil, 0); ok {
		t.Error("an embedding was tokenized")
	}
	for size, want := range map[int]bool{maxNativeText: true, maxNativeText + 1: false} {
		if _, ok := ask(t, tk, Completion, `{"model":"m","prompt":"`+strings.Repeat("a", size)+`"}`, nil, 0); ok != want {
			t.Errorf("a prompt of %d bytes: tokenized %v, want %v", size, ok, want)
		}
	}
	model.fail = true
	if _, ok := ask(t, tk, Chat, hello(1), nil, 0); ok || tk.Stats().NativeFailed != 1 {
		t.Error("a failed rendering was used")
	}
	model.fail = false
	var p Prompt
	if q := (NativeQuery{Model: "other", Kind: Chat, Doc: scanned(t, hello(1))}); tk.PromptInProcess(&p, &q) {
		t.Error("another model's prompt was tokenized")
	}
	if q := (NativeQuery{Model: "alias", Base: "m", Kind: Chat, Doc: scanned(t, hello(1))}); !tk.PromptInProcess(&p, &q) {
		t.Error("the base model's tokenizer was not used")
	}
	for _, mode := range []string{ModeText, ModeIDs} {
		tk.Reload(Options{Mode: mode})
		if _, ok := ask(t, tk, Chat, hello(1), nil, 0); ok {
			t.Errorf("mode %s: tokenized", mode)
		}
	}
	if _, ok := ask(t, New(Options{}), Chat, hello(1), nil, 0); ok {
		t.Error("tokenized without a model")
	}
}

// TestRefusedByEngines: no engine is asked for the ids of a request that it refuses.
func TestRefusedByEngines(t *testing.T) {
	e := newRenderEngine(t)
	model := new(byteModel)
	tk, _, _ := withModel(t, model)
	ask1 := func(kind Kind, body string) {
		t.Helper()
		if p, ok := ask(t, tk, kind, body, e, 1); !ok || p.Source != FromText || len(p.Tokens) > 0 || p.Count == 0 {
			t.Errorf("%s: used %v, source %v, %d ids, count %d; want the text", body, ok, p.Source, len(p.Tokens), p.Count)
		}
	}
	ask1(Chat, `{"model":"m","messages":[{"role":"user","content":"hello"}],"tools":[]}`)
	ask1(Messages, `{"model":"m","messages":[{"role":"tool","content":"hello"}]}`)
	model.refuse = true
	ask1(Chat, hello(1))
	if s := tk.Stats(); s.FromText != 3 || s.Unmodelled != 0 || s.NativeFailed != 0 || len(e.asked()) > 0 {
		t.Errorf("stats %+v, asked %q", s, e.asked())
	}
}

// TestSeveralPrompts: of a completion with several prompts the ids are those of the first, and the
// others are estimated.
func TestSeveralPrompts(t *testing.T) {
	tk, _, _ := withModel(t, new(byteModel))
	p, ok := ask(t, tk, Completion, `{"model":"m","prompt":["once upon","a time there was"]}`, nil, 0)
	want, _ := new(byteModel).Encode(nil, []byte("once upon"), true)
	if !ok || !slices.Equal(p.Tokens, want) || p.Count != len(want)+tokensOf(len(`"a time there was"`)) {
		t.Errorf("used %v, ids %v, count %d", ok, p.Tokens, p.Count)
	}
	if p, ok = ask(t, tk, Completion, `{"model":"m","prompt":["once upon"]}`, nil, 0); !ok || p.Count != len(want) {
		t.Errorf("one prompt: used %v, count %d", ok, p.Count)
	}
}

// contexts are the contexts of a request's engines.
type contexts [2]int

func (c contexts) Contexts() (shortest, longest int) { return c[0], c[1] }

// TestTruncation: a prompt is cut as vLLM 0.32 cuts it (TokenizeParams); without ids, where what it keeps is
// not known, no engine is asked.
func TestTruncation(t *testing.T) {
	tk, n, _ := withModel(t, new(byteModel))
	n.longest = 10 // characters of a token
	completion := func(members string) string { return `{"model":"m","prompt":"abcdef",` + members + `}` }
	for _, c := range []struct {
		kind   Kind
		body   string
		engine contexts
		want   []uint32 // nil: not known
	}{
		{Completion, completion(`"truncate_prompt_tokens":10`), contexts{}, []uint32{999, 'a', 'b', 'c', 'd', 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":7`), contexts{}, []uint32{999, 'a', 'b', 'c', 'd', 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":3`), contexts{}, []uint32{999, 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":3,"add_special_tokens":false`), contexts{}, []uint32{'d', 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":3,"truncation_side":"left"`), contexts{20, 20}, []uint32{'d', 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":3,"truncation_side":"right"`), contexts{20, 20}, []uint32{999, 'a', 'b'}},
		{Completion, completion(`"truncate_prompt_tokens":3,"truncation_side":"right"`), contexts{}, nil},
		{Completion, `{"model":"m","prompt":"` + strings.Repeat("x", 201) + `","truncate_prompt_tokens":3,"truncation_side":"left"}`, contexts{20, 20}, nil},
		{Completion, completion(`"truncate_prompt_tokens":-1`), contexts{5, 5}, []uint32{999, 'd', 'e', 'f'}}, // 16 tokens of output are asked for
		{Completion, completion(`"truncate_prompt_tokens":-1,"max_tokens":0`), contexts{5, 5}, []uint32{999, 'c', 'd', 'e', 'f'}},
		{Completion, completion(`"truncate_prompt_tokens":-1`), contexts{}, nil},
		{Completion, completion(`"truncate_prompt_tokens":-1`), contexts{5, 9}, nil},
		{Completion, completion(`"truncate_prompt_tokens":-1`), contexts{8, 20}, []uint32{999, 'a', 'b', 'c', 'd', 'e', 'f'}},
		{Responses, `{"model":"m","input":"x","truncation":"auto"}`, contexts{5, 5}, []uint32{999, 'a', 'n', 't', '\n'}},
	} {
		var p Prompt
		q := NativeQuery{Model: "m", Kind: c.kind, Doc: scanned(t, c.body), Contexts: c.engine}
		ok := tk.PromptInProcess(&p, &q)
		if c.want == nil {
			if !ok || p.Source != FromText {
				t.Errorf("%s with contexts %v: used %v, source %v, ids %v", c.body, c.engine, ok, p.Source, p.Tokens)
			}
			continue
		}
		if !ok || !slices.Equal(p.Tokens, c.want) || p.Count != len(c.want) {
			t.Errorf("%s with contexts %v: used %v, ids %v, count %d, want %v", c.body, c.engine, ok, p.Tokens, p.Count, c.want)
		}
		if all := blockhash.Seqs(nil, p.BlockSalt, p.Tokens, incremental.BlockSize); len(p.Blocks) > 0 && !slices.Equal(p.Blocks, all) {
			t.Errorf("%s: the blocks are not those of the ids", c.body)
		}
	}
}

// TestPromptsBeyondTokenize: /tokenize, which cuts nothing and does not know all members, is not asked for
// prompts whose ids it would give wrongly.
func TestPromptsBeyondTokenize(t *testing.T) {
	e := newRenderEngine(t)
	e.noRender = 404
	tk, _, reports := withModel(t, new(byteModel))
	for i, c := range []struct {
		kind Kind
		body string
	}{
		{Completion, `{"model":"m","prompt":"abcdef","truncate_prompt_tokens":3}`},
		{Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"reasoning_effort":"low"}`},
		{Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"}`},
		{Messages, `{"model":"m","messages":[{"role":"user","content":"x"},{"role":"system","content":"y"}]}`},
	} {
		if p, ok := ask(t, tk, c.kind, c.body, e, uint32(i)); !ok || p.Source != FromNative {
			t.Errorf("%s: used %v, source %v", c.body, ok, p.Source)
		}
		awaitChecks(t, tk, uint64(i+1))
	}
	if s := tk.Stats(); s.ChecksFailed != 4 || len(reports) > 0 || slices.Contains(e.asked(), "/tokenize") {
		t.Errorf("stats %+v, asked %q", s, e.asked())
	}
}

// TestCacheIsShared: the next turn encodes only what is new, within the one bound of both caches.
func TestCacheIsShared(t *testing.T) {
	tk, _, _ := withModel(t, new(byteModel))
	turn := `{"role":"user","content":"` + strings.Repeat("long text ", 200) + `"},{"role":"assistant","content":"` + strings.Repeat("answer ", 200) + `"}`
	body := func(n int) string {
		return `{"model":"m","messages":[` + strings.Repeat(turn+",", n) + `{"role":"user","content":"hi"}]}`
	}
	_, _ = ask(t, tk, Chat, body(10), nil, 0)
	before := tk.Stats()
	p, _ := ask(t, tk, Chat, body(11), nil, 0)
	s := tk.Stats()
	if fresh := s.NativeEncoded - before.NativeEncoded; fresh > uint64(len(turn))+2048 || s.NativeCached == 0 || len(p.Tokens) < 30_000 {
		t.Errorf("%d bytes encoded for a turn of %d, %d ids cached", fresh, len(turn), s.NativeCached)
	}
	tk.Reload(Options{CacheBytes: 8 << 10})
	if s := tk.Stats(); s.CacheBytes > 8<<10 {
		t.Errorf("%d bytes cached, want at most 8 KiB", s.CacheBytes)
	}
}
