package migration

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
)

// TestParseChoice checks that the next engine gets the remaining continuations of a choice, and
// that no other grammar is taken for a choice.
func TestParseChoice(t *testing.T) {
	const texts = `["yes","yes, but \u00fc","no","\"quoted\""]`
	for _, k := range []struct{ name, raw, delivered, want string }{
		{"guided_choice", texts, "", `"guided_choice":["yes","yes, but ü","no","\"quoted\""]`},
		{"guided_choice", texts, "yes", `"guided_choice":["",", but ü"]`},
		{"guided_choice", texts, "yes, but", `"guided_choice":[" ü"]`},
		{"guided_choice", texts, `"quo`, `"guided_choice":["ted\""]`},
		{"guided_choice", texts, "no", `"guided_choice":[""]`},
		{"guided_choice", texts, "nobody", "none"},
		{"guided_choice", texts, "\nyes", "none"},
		{"structured_outputs", `{"choice":` + texts + `}`, "n", `"structured_outputs":{"choice":["o"]}`},
		{"structured_outputs", `{"json":null,"regex":"","choice":["ab"]}`, "a", "no choice"},
		{"structured_outputs", `{"disable_fallback":true,"json":null,"choice":["ab"],"x":[1]}`, "a", `"structured_outputs":{"disable_fallback":true,"x":[1],"choice":["b"]}`},
		{"structured_outputs", `{"json":{},"choice":["ab"]}`, "a", `"structured_outputs":{"choice":["b"]}`},
		{"structured_outputs", `{"json":{"type":"object"},"choice":["ab"]}`, "a", "no choice"},
		{"structured_outputs", `{"regex":"a*"}`, "a", "no choice"},
		{"structured_outputs", `{"choice":[]}`, "", "no choice"},
		{"structured_outputs", `{"choice":null}`, "", "no choice"},
		{"structured_outputs", `{"choice":{"a":"b"}}`, "", "no choice"},
		{"structured_outputs", `[]`, "", "no choice"},
		{"guided_choice", `["a",1]`, "a", "no choice"},
		{"guided_choice", `"ab"`, "a", "no choice"},
		{"guided_regex", `["ab"]`, "a", "no choice"},
	} {
		o := parseChoice(k.name, []byte(k.raw))
		if o == nil {
			if k.want != "no choice" {
				t.Errorf("%s %s is not a choice", k.name, k.raw)
			}
			continue
		}
		got, ok := o.appendRemaining(nil, []byte(k.delivered))
		if !ok {
			got = []byte("none")
		}
		if string(got) != k.want {
			t.Errorf("%s %s behind %q: %s, want %s", k.name, k.raw, k.delivered, got, k.want)
		}
	}
}

// TestContinuations checks, for each request, the resume request or the reason why there is none.
func TestContinuations(t *testing.T) {
	all := config.Migration{Allow: config.MigrationAllow, Structured: "unconstrained"}
	exact := config.Migration{Structured: "exact"}
	none := config.Migration{Structured: "error"}
	chat := `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}],"max_tokens":20,`
	prompt := `{"model":"m","stream":true,"prompt":"hi","max_tokens":20,`
	var out strings.Builder
	for _, k := range []struct {
		policy    *config.Migration
		kind      front.Kind
		body      string
		delivered string
		conts     int
	}{
		{&none, front.Chat, chat + `"temperature":0,"min_tokens":5}`, "", 1},
		{&none, front.Chat, chat + `"logprobs":true}`, "", 1},
		{&none, front.Chat, chat + `"logprobs":false,"top_logprobs":3}`, "", 1},
		{&all, front.Chat, chat + `"logprobs":true}`, "", 1},
		{&all, front.Chat, chat + `"top_logprobs":3,"logprobs":true,"logprob_token_ids":[5]}`, "", 1},
		{&all, front.Chat, chat + `"top_logprobs":-1,"logprobs":true}`, "", 1},
		{&all, front.Chat, chat + `"logprobs":true,"return_tokens_as_token_ids":true}`, "", 1},
		{&all, front.Chat, chat + `"logprobs":true,"prompt_logprobs":0}`, "", 1},
		{&all, front.Completions, prompt + `"logprobs":0}`, "", 1},
		{&all, front.Completions, prompt + `"logprobs":2,"return_tokens_as_token_ids":true}`, "", 1},
		{&none, front.Completions, prompt + `"logprobs":0}`, "", 1},
		{&all, front.Generate, `{"token_ids":[1],"sampling_params":{"max_tokens":20,"logprobs":2}}`, "", 1},
		{&all, front.NativeGenerate, `{"input_ids":[1],"return_logprob":true,"sampling_params":{"max_new_tokens":20}}`, "", 1},
		{&all, front.ResponsesAPI, `{"model":"m","input":"hi","top_logprobs":2}`, "", 1},
		{&none, front.Chat, chat + `"n":2}`, "", 2},
		{&all, front.Chat, chat + `"n":2}`, "", 2},
		{&all, front.Chat, chat + `"n":2,"logprobs":true}`, "", 1},
		{&all, front.Completions, prompt + `"n":3,"min_tokens":6}`, "", 3},
		{&all, front.Completions, prompt + `"n":33}`, "", 1},
		{&all, front.Completions, prompt + `"n":2,"best_of":2}`, "", 1},
		{&all, front.Completions, prompt + `"n":2,"use_beam_search":true}`, "", 1},
		{&all, front.Generate, `{"token_ids":[1],"sampling_params":{"max_tokens":20,"n":2}}`, "", 1},
		{&none, front.Chat, chat + `"guided_choice":["yes","no"]}`, "y", 1},
		{&exact, front.Chat, chat + `"guided_choice":["yes","no"],"guided_decoding_backend":"xgrammar"}`, "y", 1},
		{&exact, front.Completions, prompt + `"structured_outputs":{"choice":["yes","no"]}}`, "no", 1},
		{&exact, front.Chat, chat + `"guided_choice":["yes"],"response_format":{"type":"text"}}`, "", 1},
		{&exact, front.Chat, chat + `"guided_choice":["yes"],"response_format":{"type":"json_object"}}`, "", 1},
		{&exact, front.Chat, chat + `"guided_regex":"a*"}`, "", 1},
		{&exact, front.Generate, `{"token_ids":[1],"sampling_params":{"max_tokens":20,"structured_outputs":{"choice":["a"]}}}`, "", 1},
		{&all, front.Generate, `{"token_ids":[1],"sampling_params":{"max_tokens":20,"structured_outputs":{"choice":["a"]}}}`, "", 1},
		{&all, front.Chat, chat + `"guided_regex":"a*","guided_whitespace_pattern":" "}`, "", 1},
		{&all, front.Chat, chat + `"response_format":{"type":"json_schema","json_schema":{"schema":{}}}}`, "", 1},
		{&all, front.Chat, chat + `"n":2,"response_format":{"type":"json_object"}}`, "", 2},
		{&all, front.Messages, `{"model":"m","messages":[],"max_tokens":20,"output_config":{"format":{"type":"json_schema","schema":{}}}}`, "", 1},
		{&all, front.Messages, `{"model":"m","messages":[],"max_tokens":20,"output_config":{"effort":"low","format":{"type":"json_schema"}}}`, "", 1},
		{&exact, front.ResponsesAPI, `{"model":"m","input":"hi","text":{"format":{"type":"json_schema","schema":{}}}}`, "", 1},
		{&all, front.ResponsesAPI, `{"model":"m","input":"hi","text":{"format":{"type":"json_schema","schema":{}}}}`, "", 1},
		{&all, front.Chat, chat + `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required"}`, "", 1},
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(k.body), jsonscan.Limits{}); err != nil {
			t.Fatalf("%s: %v", k.body, err)
		}
		fmt.Fprintf(&out, "allow %v, structured %s\n%s\n", k.policy.Allow, k.policy.Structured, k.body)
		a, reason := newTemplate(&doc, k.kind, k.policy, false)
		if reason != "" {
			fmt.Fprintf(&out, "-> %s\n\n", reason)
			continue
		}
		var conts []Continuation
		for i := range k.conts {
			conts = append(conts, Continuation{Tokens: []uint32{1, 2, 10 + uint32(i)}, PromptLen: 2})
		}
		member, ok := a.appendRemainingGrammar(nil, []byte(k.delivered))
		if !ok {
			t.Errorf("%s: nothing is left behind %q", k.body, k.delivered)
		}
		body := a.complete(k.kind, conts, a.minTokens, 19, member)
		if err := doc.Scan(body, jsonscan.Limits{}); err != nil {
			t.Errorf("%s: %v", body, err)
		}
		fmt.Fprintf(&out, "-> %s %s", a.endpoint(k.kind), body)
		if a.logprobs {
			fmt.Fprintf(&out, "  [log-probabilities, %d alternatives]", a.topLogprobs)
		}
		if a.unconstrained {
			out.WriteString("  [unconstrained]")
		}
		out.WriteString("\n\n")
	}
	golden(t, "testdata/continuations.txt", out.String())
}

var rewrite = flag.Bool("rewrite", false, "rewrite testdata")

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs; run with -rewrite and review the diff. Got:\n%s", path, got)
	}
}
