package migration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

func allowMigration(words ...string) func(*config.Config) {
	return func(c *config.Config) {
		c.Migration.Allow = words
		c.Timeouts.StreamIdle = 700 * time.Millisecond
	}
}

// choiceContent is one choice of a stream, as a client reads it.
type choiceContent struct {
	text   string
	roles  int
	finish []string
	scores map[string][]any // the lists of the logprobs objects, concatenated
	usage  string           // usage of the choice's last event, with continuous_usage_stats
}

// choiceContents returns the content of each choice of a stream, and the stream's last usage.
func choiceContents(t *testing.T, a *harness.Answer) (choices []choiceContent, usage string) {
	t.Helper()
	done := 0
	for _, event := range strings.Split(strings.TrimSuffix(string(a.Body), "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if data == "[DONE]" {
			done++
			continue
		}
		var v struct {
			Choices []struct {
				Index    int
				Text     string
				Delta    struct{ Role, Content string }
				Ends     string `json:"finish_reason"`
				Logprobs map[string][]any
			}
			Usage *struct {
				P int `json:"prompt_tokens"`
				T int `json:"total_tokens"`
				C int `json:"completion_tokens"`
			}
			Error any
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || !ok || v.Error != nil || done > 0 {
			t.Errorf("%v, behind [DONE]: %v: %s", err, done > 0, event)
			continue
		}
		for _, c := range v.Choices {
			for len(choices) <= c.Index {
				choices = append(choices, choiceContent{scores: map[string][]any{}})
			}
			s := &choices[c.Index]
			if s.text += c.Text + c.Delta.Content; c.Delta.Role != "" {
				if s.roles++; s.text != "" {
					t.Errorf("a role behind text: %s", data)
				}
			}
			if len(s.finish) > 0 {
				t.Errorf("choice %d goes on behind its end: %s", c.Index, data)
			}
			if c.Ends != "" {
				s.finish = append(s.finish, c.Ends)
			}
			for name, list := range c.Logprobs {
				s.scores[name] = append(s.scores[name], list...)
			}
			if v.Usage != nil {
				s.usage = fmt.Sprint(*v.Usage)
			}
		}
		if v.Usage != nil && len(v.Choices) == 0 {
			if usage != "" {
				t.Errorf("a second usage: %s", data)
			}
			usage = fmt.Sprint(*v.Usage)
		}
	}
	if done != 1 || a.Status != 200 {
		t.Errorf("status %d, %d times [DONE]: %s", a.Status, done, a.Body)
	}
	return choices, usage
}

// TestLogprobsMigrate: the log-probabilities after the splice point are those of an undisturbed
// stream: tokens, values, alternatives, bytes and text offsets.
func TestLogprobsMigrate(t *testing.T) {
	for _, pd := range []bool{false, true} {
		t.Run(fmt.Sprint("pd=", pd), func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, pd, 2, allowMigration("logprobs"))
			for _, k := range []struct{ path, body, list string }{
				{"/v1/chat/completions", `"messages":[{"role":"user","content":"go on and on"}],"max_tokens":40,"ignore_eos":true,"logprobs":true`, "content"},
				{"/v1/chat/completions", `"messages":[{"role":"user","content":"say it"}],"max_tokens":60,"min_tokens":20,"logprobs":true,"top_logprobs":3`, "content"},
				{"/v1/completions", `"prompt":"go on and on","max_tokens":40,"ignore_eos":true,"logprobs":0`, "text_offset"},
				{"/v1/completions", `"prompt":"say it","max_tokens":60,"min_tokens":20,"logprobs":3`, "text_offset"},
				{"/inference/v1/generate", `"token_ids":[900,901,902],"sampling_params":{"max_tokens":40,"ignore_eos":true,"logprobs":2}`, "content"},
			} {
				for _, kind := range []sim.FaultKind{sim.Reset, sim.Truncate, sim.StreamFail} {
					after := 1 + rand.IntN(12)
					body := `{"model":"sim","stream":true,"stream_options":{"include_usage":true},` + k.body + `}`
					want, usage := choiceContents(t, harness.Post(t, m.Reference.URL()+k.path, body))
					m.Fail("scored", sim.Fault{Kind: kind, After: after})
					was := m.Migrated("done")
					a := harness.Post(t, m.URL+k.path, body, "X-Request-Id", "scored")
					got, counted := choiceContents(t, a)
					if len(want) != 1 || len(want[0].scores[k.list]) < 20 {
						t.Fatalf("the undisturbed stream has no scores: %+v", want)
					}
					if !reflect.DeepEqual(got, want) || counted != usage || a.Header.Get("X-Sluice-Migration") != "ready" {
						t.Errorf("%s %s after %d: %q\ngot  %+v %s\nwant %+v %s", k.path, kind, after, a.Header.Get("X-Sluice-Migration"), got, counted, want, usage)
					}
					testwait.UntilWithin(t, 20*time.Second, "it is counted", func() bool { return m.Migrated("done") == was+1 })
					m.Clear()
				}
			}
			harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
		})
	}
}

// TestMultipleChoicesMigrate: each of several choices resumes after its own output and ends where
// it would have ended. Choices that had ended are not resumed.
func TestMultipleChoicesMigrate(t *testing.T) {
	for _, k := range []struct {
		name, engine, path, body string
		most                     int
	}{
		{"chat", "", "/v1/chat/completions", `"n":3,"messages":[{"role":"user","content":"go on and on"}],"max_tokens":30,"ignore_eos":true`, 30},
		{"chat, each to its end", "", "/v1/chat/completions", `"n":4,"messages":[{"role":"user","content":"say it"}],"max_tokens":70`, 70},
		{"chat, usage all along", "", "/v1/chat/completions", `"n":2,"messages":[{"role":"user","content":"say it"}],"max_tokens":70,"min_tokens":3,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, 70},
		{"completions", "", "/v1/completions", `"n":2,"prompt":"go on and on","max_tokens":25,"logprobs":1`, 25},
		{"completions, no limit given", "", "/v1/completions", `"n":3,"prompt":"go on","ignore_eos":true`, 16},
		{"sglang", "sglang", "/v1/completions", `"n":3,"prompt":"go on and on","max_tokens":25`, 25},
	} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, &harness.EndpointCase{Engine: k.engine}, 2, allowMigration("multiple_choices", "logprobs"))
			body := `{"model":"sim","stream":true,` + k.body + `}`
			if !strings.Contains(body, "stream_options") {
				body = strings.TrimSuffix(body, "}") + `,"stream_options":{"include_usage":true}}`
			}
			whole, usage := choiceContents(t, harness.Post(t, m.Reference.URL()+k.path, body))
			prompt := 0
			fmt.Sscanf(usage, "{%d", &prompt)
			if len(whole) < 2 || prompt == 0 {
				t.Fatalf("the undisturbed stream cannot be read: %+v %s", whole, usage)
			}
			shortest := k.most
			for _, v := range whole {
				shortest = min(shortest, len(sim.Tokenize(v.text)))
			}
			for i, kind := range []sim.FaultKind{sim.Reset, sim.StreamFail, sim.Truncate, sim.Reset, sim.StreamFail} {
				after := 2 + rand.IntN(40)
				switch {
				case kind == sim.Reset:
					after = 2 + rand.IntN(12)
				case i == 4: // one choice has ended
					after = len(whole)*(shortest+1) + 3
				}
				m.Fail("many", sim.Fault{Kind: kind, After: after})
				a := harness.Post(t, m.URL+k.path, body, "X-Request-Id", "many")
				got, counted := choiceContents(t, a)
				splice := m.SpliceRounds(t)
				what := fmt.Sprintf("%s after %d, %d rounds", kind, after, len(splice))
				t.Log(what)
				if i == 4 && strings.Contains(k.name, "to its end") && (len(splice) == 0 || len(splice[0]) >= len(whole)) {
					t.Errorf("%s: no choice had ended by then", what)
				}
				if len(splice) == 0 && kind == sim.Reset { // all choices had ended before the fault
					if !reflect.DeepEqual(got, whole) {
						t.Errorf("%s: got %+v, want %+v", what, got, whole)
					}
					m.Clear()
					continue
				}
				output := 0
				var first [][]uint32
				if len(splice) > 0 {
					first = splice[0]
				}
				for i := range whole {
					want := whole[i].text
					// The resumed prompt identifies the choice whose text it continues; a choice
					// without output is identified by its position.
					for j, ids := range first {
						received := sim.Detokenize(ids[prompt:])
						if strings.HasPrefix(whole[i].text, received) && (received != "" || i == j && len(first) == len(whole)) {
							want = received + m.Continuation(t, ids, k.most-(len(ids)-prompt), body)
						}
					}
					if i >= len(got) || got[i].text != want || len(got[i].finish) != 1 || got[i].roles != whole[i].roles {
						t.Errorf("%s: choice %d is\n%+v, want\n%q\n%s", what, i, got, want, a.Body)
						continue
					}
					n := len(sim.Tokenize(got[i].text))
					if got[i].finish[0] == "stop" {
						n++
					} else if n != k.most {
						t.Errorf("%s: choice %d ends for its length with %d tokens of %d", what, i, n, k.most)
					}
					if list := got[i].scores["text_offset"]; strings.Contains(body, "logprobs") && !slices.Equal(list, offsetsOf(got[i].scores["tokens"])) {
						t.Errorf("%s: choice %d: text_offset %v of %q", what, i, list, got[i].scores["tokens"])
					}
					if whole[i].usage != "" && got[i].usage != fmt.Sprintf("{%d %d %d}", prompt, prompt+n, n) {
						t.Errorf("%s: choice %d counts %s of %d and %d", what, i, got[i].usage, prompt, n)
					}
					output += n
				}
				if counted != fmt.Sprintf("{%d %d %d}", prompt, prompt+output, output) {
					t.Errorf("%s: usage %s, want %d of the prompt and %d", what, counted, prompt, output)
				}
				if len(splice) > 0 {
					testwait.UntilWithin(t, 20*time.Second, "it is counted", func() bool { return m.Migrated("done") > 0 })
				}
				m.Clear()
			}
			if m.Migrated("done") == 0 {
				t.Error("no stream moved: the test shows nothing")
			}
			harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
		})
	}
}

// TestMultipleChoicesAreReserved: the router reserves, on the worker that resumes several choices,
// all tokens that it computes: the prompt once, and the output of each choice.
func TestMultipleChoicesAreReserved(t *testing.T) {
	m := startEndpointFleet(t, &harness.EndpointCase{}, 2, allowMigration("multiple_choices"))
	m.Fail("booked", sim.Fault{Kind: sim.StreamFail, After: 20})
	body := `{"model":"sim","stream":true,"n":3,"prompt":"go on and on","max_tokens":30,"ignore_eos":true}`
	if a := harness.Post(t, m.URL+"/v1/completions", body, "X-Request-Id", "booked"); a.Status != 200 {
		t.Fatalf("%d %s", a.Status, a.Body)
	}
	rounds, made := m.SpliceRounds(t), m.Outcome(t, "booked").Decisions
	if len(rounds) == 0 || len(rounds[0]) != 3 || len(made) != 1+len(rounds) {
		t.Fatalf("%d rounds, %d decisions", len(rounds), len(made))
	}
	prompt, received := made[0].PromptTokens, 0
	for _, ids := range rounds[0] {
		received += len(ids) - prompt
	}
	if received < 12 || made[1].PromptTokens != prompt+received {
		t.Errorf("booked %d tokens for a prompt of %d and %d delivered", made[1].PromptTokens, prompt, received)
	}
}

// offsetsOf returns the text offsets of consecutive tokens.
func offsetsOf(tokens []any) (offsets []any) {
	at := 0
	for _, token := range tokens {
		offsets = append(offsets, float64(at))
		at += len([]rune(token.(string)))
	}
	return offsets
}

// TestMultipleChoicesLoseARound: a stream ends with an error if one of the requests that resume its
// choices fails, because output is missing.
func TestMultipleChoicesLoseARound(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, allowMigration("multiple_choices"))
	body := `{"model":"sim","stream":true,"n":2,"prompt":"go on and on","max_tokens":30,"ignore_eos":true}`
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Slow, ID: "lost-2"})
		e.Fault(sim.Fault{Kind: sim.Status, Status: 400, ID: "lost-3"})
		e.Fault(sim.Fault{Kind: sim.Reset, After: 7, ID: "lost"}) // one choice has one more token
	}
	a := harness.Post(t, m.URL+"/v1/completions", body, "X-Request-Id", "lost")
	s := harness.ReadStreamContent(a)
	if s.Err != "no engine continues the unfinished choices" || s.Done != 1 || len(s.Finish) != 1 || len(s.Broken) > 0 {
		t.Errorf("%+v\n%s", s, a.Body)
	}
	testwait.UntilWithin(t, 20*time.Second, "it is counted", func() bool { return m.Migrated("done") == 1 && m.Migrated("failed") == 1 })
	harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
}

// TestMultipleChoicesDrain: the choices of a request leave a draining worker together, as one
// migration, and complete on another worker.
func TestMultipleChoicesDrain(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 2, func(c *config.Config) { allowMigration("multiple_choices")(c); c.Migration.DrainDelay = 0 })
	body := `{"model":"sim","stream":true,"n":3,"messages":[{"role":"user","content":"go on and on"}],"max_tokens":60,"ignore_eos":true,"stream_options":{"include_usage":true}}`
	for _, e := range m.Engines {
		e.Fault(sim.Fault{Kind: sim.Slow, Delay: 8 * time.Millisecond})
	}
	got := make(chan *harness.Answer, 1)
	go func() { got <- harness.Post(t, m.URL+"/v1/chat/completions", body) }()
	on := ""
	testwait.UntilWithin(t, 20*time.Second, "the stream is in progress", func() bool {
		for i, e := range m.Engines {
			if s := e.Stats().Sum(); s.Running > 0 && s.GeneratedTokens > 6 {
				on = fmt.Sprint("d", i)
			}
		}
		return on != ""
	})
	m.Fleet.Drain(on, true)
	choices, usage := choiceContents(t, <-got)
	if len(choices) != 3 || !strings.HasSuffix(usage, " 180}") || m.Migrated("drained") != 1 || len(m.SpliceRounds(t)) == 0 {
		t.Errorf("%d voices, usage %s, drained %v, rounds %d", len(choices), usage, m.Migrated("drained"), len(m.SpliceRounds(t)))
	}
	for i, v := range choices {
		if n := len(sim.Tokenize(v.text)); n != 60 || fmt.Sprint(v.finish) != "[length]" || v.roles != 1 {
			t.Errorf("choice %d: %d tokens, %+v", i, n, v)
		}
	}
	harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
}

// TestGrammarsMigrate: streams with structured output migrate as migration.structured allows.
func TestGrammarsMigrate(t *testing.T) {
	const texts = `["no","yes","yes, but late","yes, and there is a long way to go before we can say it","yes, and there is \"more\" ü"]`
	chat := `"messages":[{"role":"user","content":"go on"}],"max_tokens":40,`
	for _, k := range []struct{ structured, path, body, header, asked string }{
		{"exact", "/v1/chat/completions", chat + `"guided_choice":` + texts, "ready", `"guided_choice":["`},
		{"exact", "/v1/chat/completions", chat + `"structured_outputs":{"disable_any_whitespace":true,"choice":` + texts + `,"json":null}`, "ready", `"structured_outputs":{"disable_any_whitespace":true,"choice":["`},
		{"exact", "/v1/completions", `"prompt":"go on","max_tokens":40,"structured_outputs":{"choice":` + texts + `}`, "ready", `"choice":["`},
		{"unconstrained", "/v1/completions", `"prompt":"go on","max_tokens":40,"guided_choice":["a","b, and there is so much more to it that it takes some time"]`, "ready", `"guided_choice":["`},
		{"unconstrained", "/v1/chat/completions", chat + `"ignore_eos":true,"response_format":{"type":"json_object"}`, "ready; unconstrained", ``},
		{"unconstrained", "/v1/chat/completions", chat + `"ignore_eos":true,"n":2,"guided_choice":["abcdef","ghij"]`, "no; multiple_choices", ``},
		{"unconstrained", "/v1/responses", `"input":"go on","max_output_tokens":40,"text":{"format":{"type":"json_schema","schema":{}}}`, "ready; unconstrained", ``},
		{"unconstrained", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true,"max_tokens":20,"structured_outputs":{"regex":"a"}}`, "ready; unconstrained", ``},
		{"exact", "/v1/chat/completions", chat + `"response_format":{"type":"json_object"}`, "no; structured", ``},
		{"exact", "/v1/chat/completions", chat + `"structured_outputs":{"regex":"a*"}`, "no; structured", ``},
		{"exact", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"max_tokens":20,"structured_outputs":{"choice":["a"]}}`, "no; structured", ``},
		{"error", "/v1/chat/completions", chat + `"guided_choice":` + texts, "no; structured", ``},
	} {
		t.Run(k.structured+" "+k.header+" "+k.path, func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, false, 2, func(c *config.Config) { c.Migration.Structured = k.structured })
			body := `{"model":"sim","stream":true,` + k.body + `}`
			want := harness.Post(t, m.Reference.URL()+k.path, body)
			text := func(a *harness.Answer) string {
				h := readOpenAIStream(a)
				if k.path == "/v1/responses" {
					h = readResponsesStream(a)
				}
				return fmt.Sprint(h.Text, h.Ids)
			}
			prefix := text(want)
			for after := 1; after < 12; after += 1 + rand.IntN(4) {
				if k.path == "/v1/responses" && after < 5 {
					continue
				}
				m.Fail("held", sim.Fault{Kind: sim.Reset, After: after})
				a := harness.Post(t, m.URL+k.path, body, "X-Request-Id", "held")
				if h := a.Header.Get("X-Sluice-Migration"); h != k.header {
					t.Errorf("header %q, want %q", h, k.header)
				}
				if strings.HasPrefix(k.header, "no") {
					if !bytes.Contains(a.Body, []byte(`"error":{`)) {
						t.Errorf("no error: %s", a.Body)
					}
					return
				}
				if text(a) != prefix || bytes.Contains(a.Body, []byte(`"error":{`)) || prefix == "[]" {
					t.Errorf("after %d: %q, want %q\n%s", after, text(a), prefix, a.Body)
				}
				for _, e := range m.Engines {
					for _, r := range harness.GenerateRequests(e) {
						if r.Header("X-Request-Id") == "held" {
							continue
						}
						if k.asked == "" && (bytes.Contains(r.Body, []byte("format")) || bytes.Contains(r.Body, []byte("structured"))) || !bytes.Contains(r.Body, []byte(k.asked)) {
							t.Errorf("after %d another engine was asked %s", after, r.Body)
						}
					}
				}
				m.Clear()
			}
			if m.Migrated("done") == 0 {
				t.Error("no stream moved: the test shows nothing")
			}
		})
	}
}

// TestNeverMigratable: some requests never migrate, even if the configuration allows everything.
func TestNeverMigratable(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 2, func(c *config.Config) {
		c.Migration.Allow, c.Migration.Structured = config.MigrationAllow, "unconstrained"
	})
	chat := `"messages":[{"role":"user","content":"go on"}],`
	for _, k := range []struct{ why, path, body string }{
		{"prompt_logprobs", "/v1/chat/completions", chat + `"logprobs":true,"prompt_logprobs":0`},
		{"logprobs", "/v1/chat/completions", chat + `"logprobs":true,"return_tokens_as_token_ids":true`},
		{"logprobs", "/v1/responses", `"input":"go on","include":["message.output_text.logprobs"]`},
		{"multiple_choices", "/v1/chat/completions", chat + `"n":100`},
		{"multiple_choices", "/v1/completions", `"prompt":"a","n":2,"best_of":3`},
		{"multiple_choices", "/inference/v1/generate", `"token_ids":[900,901],"sampling_params":{"ignore_eos":true,"max_tokens":20,"n":2}`},
		{"batch_prompt", "/v1/completions", `"prompt":["a b c","d"],"n":2`},
		{"multiple_choices", "/v1/completions", `"prompt":"a b c","n":2,"use_beam_search":true`},
		{"echo", "/v1/completions", `"prompt":"a b c","echo":true,"logprobs":1`},
		{"tools", "/v1/chat/completions", chat + `"tool_choice":"required","tools":[{"type":"function","function":{"name":"f"}}]`},
		{"reasoning", "/v1/messages", chat + `"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}}`},
	} {
		a := harness.Post(t, m.URL+k.path, `{"model":"sim","stream":true,"max_tokens":30,"ignore_eos":true,`+k.body+`}`)
		if h := a.Header.Get("X-Sluice-Migration"); a.Status != 200 || h != "no; "+k.why {
			t.Errorf("%s: status %d, header %q: %s", k.body, a.Status, h, a.Body[:min(300, len(a.Body))])
		}
	}
}

// TestMigrationAllowIsReloaded: a reload applies the settings that allow migrations.
func TestMigrationAllowIsReloaded(t *testing.T) {
	g := harness.StartReloadRouter(t, "", harness.StartSim(t, nil).URL(), harness.StartSim(t, nil).URL())
	for _, k := range []struct {
		migration string
		headers   [3]string // of logprobs, of n, of a grammar
	}{
		{"", [3]string{"no; logprobs", "no; multiple_choices", "no; structured"}},
		{"migration: {allow: [logprobs], structured: unconstrained}\n", [3]string{"ready", "no; multiple_choices", "ready; unconstrained"}},
		{"migration: {allow: [multiple_choices], structured: exact}\n", [3]string{"no; logprobs", "ready", "no; structured"}},
		{"", [3]string{"no; logprobs", "no; multiple_choices", "no; structured"}},
	} {
		if status, _, message := g.ReloadWith(k.migration); status != 200 {
			t.Fatal(status, message)
		}
		for i, asks := range []string{`,"logprobs":true`, `,"n":2`, `,"response_format":{"type":"json_object"}`} {
			a := harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`+asks))
			if h := a.Header.Get("X-Sluice-Migration"); a.Status != 200 || h != k.headers[i] {
				t.Errorf("%q, %s: status %d, header %q, want %q", k.migration, asks, a.Status, h, k.headers[i])
			}
		}
	}
	if status, _, message := g.ReloadWith("migration: {allow: [n]}\n"); status == 200 || !strings.Contains(message, "multiple_choices") {
		t.Errorf("%d %s", status, message)
	}
}

// TestMigrationKeepsConfiguration: a stream migrates by the configuration that its request read, although
// a reload has switched migration off since.
func TestMigrationKeepsConfiguration(t *testing.T) {
	engines := []*sim.Engine{harness.StartSim(t, nil), harness.StartSim(t, nil)}
	g := harness.StartReloadRouter(t, "", engines[0].URL(), engines[1].URL())
	body := `{"model":"sim","stream":true,"max_tokens":60,"messages":[{"role":"user","content":"Count to a hundred."}]}`
	want := harness.Post(t, harness.StartSim(t, nil).URL()+"/v1/chat/completions", body)
	for _, e := range engines {
		e.Fault(sim.Fault{Kind: sim.Slow, Delay: 8 * time.Millisecond})
	}
	got := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(context.Background(), g.URL+"/v1/chat/completions", body)
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	var engine *sim.Engine
	testwait.UntilWithin(t, 10*time.Second, "the stream is in progress", func() bool {
		for _, e := range engines {
			if s := e.Stats().Sum(); s.Running > 0 && s.GeneratedTokens > 5 {
				engine = e
			}
		}
		return engine != nil
	})
	if status, _, message := g.ReloadWith("migration: {max: 0}\n"); status != 200 {
		t.Fatal(status, message)
	}
	engine.Close()
	select {
	case a := <-got:
		if a != nil {
			harness.WantSameContent(t, a, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the stream did not end")
	}
	if a := harness.Post(t, g.URL+"/v1/chat/completions", body); a.Header.Get("X-Sluice-Migration") != "" {
		t.Errorf("a request after the reload: header %q", a.Header.Get("X-Sluice-Migration"))
	}
}
