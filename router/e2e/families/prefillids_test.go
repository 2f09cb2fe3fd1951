package families

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
	"sluice/router/worker"
)

// simTokenizer renders and encodes as the simulated engines do. skew adds text to every prompt.
type simTokenizer struct{ skew string }

func (m simTokenizer) Encode(dst []uint32, text []byte, _ bool) ([]uint32, error) {
	return append(dst, sim.Tokenize(m.skew+string(text))...), nil
}

func (m simTokenizer) Prompt(dst []uint32, _ string, input []byte, addSpecial bool, rest func([]byte) []byte) ([]uint32, error) {
	var in struct {
		Messages []struct{ Role, Content string }
	}
	if err := json.Unmarshal(input, &in); err != nil {
		return dst, err
	}
	var text []byte
	for _, msg := range in.Messages {
		text = fmt.Appendf(text, "<|im_start|>%s\n%s<|im_end|>\n", msg.Role, msg.Content)
	}
	part := rest(append(text, "<|im_start|>assistant\n"...))
	if part == nil {
		return dst, nil
	}
	return m.Encode(dst, part, addSpecial)
}

// driftingTokenizer becomes another tokenizer than the engines' at some time.
type driftingTokenizer struct{ hasDrifted atomic.Bool }

func (m *driftingTokenizer) now() simTokenizer {
	if m.hasDrifted.Load() {
		return simTokenizer{skew: "more words "}
	}
	return simTokenizer{}
}

func (m *driftingTokenizer) Encode(dst []uint32, text []byte, addSpecial bool) ([]uint32, error) {
	return m.now().Encode(dst, text, addSpecial)
}

func (m *driftingTokenizer) Prompt(dst []uint32, template string, input []byte, addSpecial bool, rest func([]byte) []byte) ([]uint32, error) {
	return m.now().Prompt(dst, template, input, addSpecial, rest)
}

// TestReportedCountsStartComparison: an answer whose engine has counted other tokens than the router has the next
// prompt compared, which no sample would be.
func TestReportedCountsStartComparison(t *testing.T) {
	t.Parallel()
	for name, member := range map[string]string{"whole": "", "stream": `"stream":true,"stream_options":{"include_usage":true},`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, m := harness.StartSim(t, nil), new(driftingTokenizer)
			r := harness.StartRouter(t, func(c *config.Config) { c.Tokens.VerifyRatio = 0 }, harness.SimWorker(e, worker.Aggregated, "a"))
			tokenizeNatively(t, r, m)
			n := 0
			send := func() {
				t.Helper()
				n++
				if a := harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(harness.ChatOf(harness.PromptWords(100, n)), "{", "{"+member, 1)); a.Status != 200 {
					t.Fatalf("status %d: %s", a.Status, a.Body)
				}
			}
			counter := func(name string) float64 { return r.Metric("sluice_tokenizer_" + name + "_total") }
			send()
			testwait.Until(t, "the first prompt is compared", func() bool { return counter("checks") == 1 })
			send()
			if c, d := counter("checks"), counter("count_differences"); c != 1 || d != 0 {
				t.Fatalf("%v comparisons and %v differences of counts after two equal prompts; want 1 and 0", c, d)
			}
			m.hasDrifted.Store(true)
			send()
			testwait.Until(t, "the count differs", func() bool { return counter("count_differences") == 1 })
			if n := counter("mismatches"); n != 0 {
				t.Fatalf("%v mismatches before another prompt", n)
			}
			send()
			testwait.Until(t, "the next prompt is compared", func() bool { return counter("mismatches") == 1 })
			harness.WantIdle(t, r, 20*time.Second, e)
		})
	}
}

// tokenizeNatively makes the router tokenize the simulated model's prompts itself.
func tokenizeNatively(t *testing.T, r *harness.Router, m tokenize.NativeModel) {
	t.Helper()
	native, err := r.Tokenizer.NewInProcess("sim", m, nil, chatinput.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	r.Tokenizer.SetNatives(map[string]*tokenize.InProcess{"sim": native})
}

// byIDs returns the configuration of mod with prefill by ids.
func byIDs(mod func(*config.Config)) func(*config.Config) {
	return func(c *config.Config) {
		c.PD.PrefillByIDs = "verified"
		if mod != nil {
			mod(c)
		}
	}
}

// carriesIDs reports whether a leg's prompt is token ids.
func carriesIDs(r sim.Record) bool {
	return strings.Contains(string(r.Body), `"prompt_token_ids":[`) || strings.Contains(string(r.Body), `"prompt":[`)
}

// legs returns the legs that the engine received, without the router's comparisons of ids.
func legs(e *sim.Engine) []sim.Record {
	return slices.DeleteFunc(harness.GenerateRequests(e), func(r sim.Record) bool { return strings.HasSuffix(r.Path, "/render") })
}

// TestPrefillByIDsFamilies sends chats to every family with prefill by ids on. Where the family can carry
// ids, each prefill engine gets them once it has confirmed those of a prompt before. All answers are those
// of an engine alone, and decode computes nothing.
func TestPrefillByIDsFamilies(t *testing.T) {
	t.Parallel()
	ids := []string{"nixl", "nixl-push", "mooncake", "orchestrated", "storage"}
	for i := range harness.MatrixFamilies {
		fam := harness.MatrixFamilies[i]
		t.Run(fam.Name+fam.Variant, func(t *testing.T) {
			t.Parallel()
			row := fam.Prepared(t)
			row.Prepare = nil
			row.Config = byIDs(row.Config)
			f := harness.StartMatrixFleet(t, row)
			tokenizeNatively(t, f.Router, simTokenizer{})
			n := 0
			send := func() {
				s := harness.Shapes[n%len(harness.Shapes)]
				n++
				if cell := f.CheckAnswers(t, "chat", s.Extra); cell == "wrong" || strings.HasPrefix(cell, "refused") {
					t.Fatalf("request %d: %s", n, cell)
				}
			}
			if !slices.Contains(ids, fam.Name) {
				for range 4 {
					send()
				}
				if v := f.Router.Metric(`sluice_prefill_prompts_total{form="ids"}`); v != 0 {
					t.Errorf("%v prefill legs are counted as ids; want none in this family", v)
				}
				return
			}
			got := map[*sim.Engine]bool{}
			testwait.Until(t, "both prefill engines get ids", func() bool {
				send()
				for _, e := range f.Prefills {
					for _, l := range legs(e) {
						got[e] = got[e] || carriesIDs(l)
					}
				}
				return len(got) == 2 && got[f.Prefills[0]] && got[f.Prefills[1]] || t.Failed()
			})
			sent := f.Router.Metric(`sluice_prefill_prompts_total{form="ids"}`)
			for range 2 {
				send()
			}
			if v := f.Router.Metric(`sluice_prefill_prompts_total{form="ids"}`); v != sent+2 {
				t.Errorf("%v more prefill legs are counted as ids after 2 requests; want 2", v-sent)
			}
		})
	}
}

// idsPair is a router with prefill by ids over one prefill and one decode engine, and an engine whose
// answers it compares with.
type idsPair struct {
	t                          *testing.T
	router                     *harness.Router
	prefill, decode, reference *sim.Engine
	sent                       int
}

func startIDsPair(t *testing.T, family string, m simTokenizer) *idsPair {
	p := &idsPair{t: t, reference: harness.StartSim(t, nil)}
	start := func(role worker.Role) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role, o.PD = role.String(), family })
	}
	p.prefill, p.decode = start(worker.Prefill), start(worker.Decode)
	pw := harness.SimWorker(p.prefill, worker.Prefill, "p")
	if family == "mooncake" {
		harness.WithBootstrap(&pw, p.prefill)
	}
	p.router = harness.StartRouter(t, byIDs(func(c *config.Config) { c.PD.Family = family }), pw, harness.SimWorker(p.decode, worker.Decode, "d"))
	tokenizeNatively(t, p.router, m)
	return p
}

// send sends a new prompt with further members and returns the prefill leg that was answered last. The
// answer must be the reference engine's.
func (p *idsPair) send(path, extra string) sim.Record {
	p.t.Helper()
	p.sent++
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":8%s}`, p.sent, harness.Prompt, extra)
	switch path {
	case "/v1/completions":
		body = fmt.Sprintf(`{"model":"sim","prompt":"%d %s","max_tokens":8%s}`, p.sent, harness.Prompt, extra)
	case "/v1/responses":
		body = fmt.Sprintf(`{"model":"sim","input":"%d %s","max_output_tokens":8%s}`, p.sent, harness.Prompt, extra)
	}
	a, want := harness.Post(p.t, p.router.URL+path, body), harness.Post(p.t, p.reference.URL()+path, body)
	if a.Status != 200 || contentOf(a) != contentOf(want) {
		p.t.Fatalf("%s: status %d %s; want %s", path, a.Status, a.Body, want.Body)
	}
	all := legs(p.prefill)
	return all[len(all)-1]
}

// contentOf returns the generated content of an answer of any API.
func contentOf(a *harness.Answer) string {
	var v struct {
		Choices []struct {
			Text    string
			Message struct{ Content string }
		}
		Content json.RawMessage
		Output  []struct{ Content json.RawMessage }
	}
	_ = json.Unmarshal(a.Body, &v)
	s := string(v.Content)
	for _, o := range v.Output {
		s += string(o.Content)
	}
	for _, c := range v.Choices {
		s += c.Text + c.Message.Content
	}
	return s
}

func (p *idsPair) form(form string) float64 {
	return p.router.Metric(`sluice_prefill_prompts_total{form="` + form + `"}`)
}

// untilIDs sends requests until the prefill leg carries ids.
func (p *idsPair) untilIDs(path string) {
	p.t.Helper()
	testwait.Until(p.t, "the prefill leg carries ids", func() bool { return carriesIDs(p.send(path, "")) || p.t.Failed() })
}

// TestPrefillByIDsAPIs: in each API the legs keep everything but the prompt, and prompts with media go as text.
func TestPrefillByIDsAPIs(t *testing.T) {
	t.Parallel()
	p := startIDsPair(t, "nixl", simTokenizer{})
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} {
		p.untilIDs(path)
		limit := `"max_tokens":1`
		if path == "/v1/responses" {
			limit = `"max_output_tokens":1`
		}
		const members = `,"cache_salt":"s-1","priority":3,"temperature":0.5,"top_p":0.9`
		l := p.send(path, members)
		if body := string(l.Body); !carriesIDs(l) || l.Path != path || !strings.Contains(body, members[1:]) || !strings.Contains(body, `"model":"sim"`) || !strings.Contains(body, limit) {
			t.Errorf("%s: prefill leg to %s is %s; want ids, the members %s and one token", path, l.Path, body, members)
		}
		all := legs(p.decode)
		if l := all[len(all)-1]; !carriesIDs(l) {
			t.Errorf("%s: the decode leg has no ids: %s", path, l.Body)
		}
	}
	if s := p.decode.Stats().Sum(); s.LocalCompute != 0 {
		t.Errorf("decode computed %d prompt tokens; want none", s.LocalCompute)
	}
	image := `{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}],"max_tokens":3}`
	texts := p.form("text")
	if a := harness.Post(t, p.router.URL+"/v1/chat/completions", image); a.Status != 200 {
		t.Fatalf("an image: %d %s", a.Status, a.Body)
	}
	if all := legs(p.prefill); strings.Contains(string(all[len(all)-1].Body), "prompt_token_ids") || p.form("text") != texts+1 {
		t.Errorf("an image: prefill leg %s, %v counted as text; want text, %v", all[len(all)-1].Body, p.form("text"), texts+1)
	}
}

// TestPrefillByIDsRefused: an engine that refuses ids with a 4xx gets the same prompt as text in the same
// request, and text only until it restarts. A request that it refuses in either form says nothing about
// ids.
func TestPrefillByIDsRefused(t *testing.T) {
	t.Parallel()
	const path = "/v1/chat/completions"
	for _, family := range []string{"nixl", "nixl-push", "mooncake"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			p := startIDsPair(t, family, simTokenizer{})
			p.untilIDs(path)

			p.prefill.Fault(sim.Fault{Kind: sim.Status, Status: 400, Leg: "prefill", N: 2})
			if a := harness.Post(t, p.router.URL+path, harness.Chat("")); a.Status != 400 || !strings.Contains(string(a.Body), "injected fault") {
				t.Fatalf("a request that the engine refuses in both forms: %d %s; want the engine's 400", a.Status, a.Body)
			}
			p.prefill.ClearFaults()
			if l := p.send(path, ""); !carriesIDs(l) || p.router.Fallbacks("prompt_ids_refused") != 0 {
				t.Fatalf("after a bad request: leg %s, %v refusals; want ids and none", l.Body, p.router.Fallbacks("prompt_ids_refused"))
			}

			p.prefill.Fault(sim.Fault{Kind: sim.Status, Status: 400, Leg: "prefill", Body: `"prompt_token_ids":[`})
			if l := p.send(path, ""); carriesIDs(l) {
				t.Errorf("the leg after a refusal carries ids: %s", l.Body)
			}
			testwait.Until(t, "the refusal is counted", func() bool { return p.router.Fallbacks("prompt_ids_refused") == 1 })
			p.prefill.ClearFaults()
			if l := p.send(path, ""); carriesIDs(l) || p.form("refused") < 2 {
				t.Errorf("a later request: leg %s, %v counted as refused; want text, 2", l.Body, p.form("refused"))
			}
			if n := strings.Count(p.router.Logs.String(), "the engine refuses prompts as token ids"); n != 1 {
				t.Errorf("the log says it %d times; want once", n)
			}

			if err := p.prefill.Restart(); err != nil {
				t.Fatal(err)
			}
			testwait.Until(t, "ids again after a restart", func() bool {
				a := harness.Post(t, p.router.URL+path, harness.Chat(""))
				all := legs(p.prefill)
				return a.Status == 200 && len(all) > 0 && carriesIDs(all[len(all)-1])
			})
		})
	}
}

// TestPrefillByIDsNeedsComparison: no ids are sent before the engine has confirmed those of a prompt.
func TestPrefillByIDsNeedsComparison(t *testing.T) {
	t.Parallel()
	p := startIDsPair(t, "nixl", simTokenizer{})
	compare := make(chan struct{})
	p.prefill.Fault(sim.Fault{Kind: sim.Stall, Path: "/tokenize", Until: compare})
	for range 3 {
		if l := p.send("/v1/chat/completions", ""); carriesIDs(l) {
			t.Fatalf("ids are sent before the comparison has ended: %s", l.Body)
		}
	}
	if v := p.form("unverified"); v != 3 {
		t.Errorf("%v prefill legs are counted as unverified; want 3", v)
	}
	close(compare)
	p.untilIDs("/v1/chat/completions")
}

// TestPrefillByIDsNeedsEqualIDs: ids that differ from the engine's are never sent.
func TestPrefillByIDsNeedsEqualIDs(t *testing.T) {
	t.Parallel()
	p := startIDsPair(t, "nixl", simTokenizer{skew: "x"})
	for range 3 {
		if l := p.send("/v1/chat/completions", ""); carriesIDs(l) {
			t.Fatalf("wrong ids are sent: %s", l.Body)
		}
	}
	testwait.Until(t, "the difference is found", func() bool { return p.router.Tokenizer.Stats().Mismatches > 0 })
	if l := p.send("/v1/chat/completions", ""); carriesIDs(l) || p.form("ids") != 0 {
		t.Errorf("after the difference: leg %s, %v counted as ids; want text, 0", l.Body, p.form("ids"))
	}
}
