package chatinput

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// vllmCase is a line of testdata/vllm.jsonl; see scripts/tokens/oracle.py.
type vllmCase struct {
	API       string          `json:"api"`
	Body      string          `json:"body"`
	Parts     bool            `json:"parts"`
	Developer bool            `json:"developer"`
	Defaults  json.RawMessage `json:"defaults"`
	Exact     *bool           `json:"exact"`
	Want      *struct {
		Input      json.RawMessage `json:"input"`
		AddSpecial bool            `json:"add_special_tokens"`
	} `json:"want"`
}

var apis = map[string]API{"chat": Chat, "completions": Completions, "responses": Responses, "messages": Messages}

// TestAsVLLM compares every body that Read accepts with what vLLM's own code made of it, in the
// order of the members. Read may refuse a body, but few of those that the server accepts.
func TestAsVLLM(t *testing.T) {
	file := "testdata/vllm.jsonl"
	if f := os.Getenv("SLUICE_CHATINPUT_CASES"); f != "" {
		file = f // a longer output of oracle.py
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	var in Input
	valid, accepted := map[string]int{}, map[string]int{}
	reasons := map[string]int{}
	for n := 1; lines.Scan(); n++ {
		var c vllmCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		s := Settings{Parts: c.Parts, Developer: c.Developer, Defaults: c.Defaults}
		reason := in.Read(apis[c.API], []byte(c.Body), &s)
		if c.Want != nil {
			valid[c.API]++
		}
		if reason != "" {
			if c.Want != nil {
				reasons[c.API+": "+reason]++
			}
			continue
		}
		if c.Want == nil {
			if c.Exact != nil && !*c.Exact {
				t.Errorf("line %d: %s is accepted; its messages do not determine the prompt", n, c.Body)
			}
			continue // the server refuses it, so that there is no prompt
		}
		accepted[c.API]++
		got := in.Chat
		if c.API == "completions" {
			got, _ = json.Marshal(map[string]string{"text": string(in.Text)})
		}
		if g, w := spell(t, got), spell(t, c.Want.Input); g != w || in.AddSpecial != c.Want.AddSpecial {
			t.Errorf("line %d: %s %s\ngot  %s special %v\nwant %s special %v", n, c.API, c.Body, g, in.AddSpecial, w, c.Want.AddSpecial)
		}
	}
	t.Logf("accepted %v of %v", accepted, valid)
	for api, n := range valid {
		if accepted[api] < n*6/10 {
			t.Errorf("%s: %d of %d bodies that the server accepts are accepted", api, accepted[api], n)
		}
	}
	keys := make([]string, 0, len(reasons))
	for r := range reasons {
		keys = append(keys, r)
	}
	slices.Sort(keys)
	for _, r := range keys {
		t.Logf("%4d %s", reasons[r], r)
	}
}

// TestReadKeepsBodies: Read writes to no body, neither its own nor an earlier one, whatever an Input
// has read before; and an Input that is used again gives what a new one gives.
func TestReadKeepsBodies(t *testing.T) {
	f, err := os.ReadFile("testdata/vllm.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var cases []vllmCase
	for line := range bytes.Lines(f) {
		var c vllmCase
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var in Input
		var bodies [6][]byte
		var from [6]*vllmCase
		for i := range bodies {
			c := &cases[r.IntN(len(cases))]
			bodies[i], from[i] = []byte(c.Body), c
			s := Settings{Parts: c.Parts, Developer: c.Developer, Defaults: c.Defaults}
			var fresh Input
			want := fresh.Read(apis[c.API], []byte(c.Body), &s)
			if got := in.Read(apis[c.API], bodies[i], &s); got != want || got == "" && (!bytes.Equal(in.Chat, fresh.Chat) || !bytes.Equal(in.Text, fresh.Text)) {
				t.Fatalf("%s gives %q, %s%s; a new Input gives %q, %s%s", c.Body, got, in.Chat, in.Text, want, fresh.Chat, fresh.Text)
			}
			for j := range i + 1 {
				if string(bodies[j]) != from[j].Body {
					t.Fatalf("reading %s has changed the body %s to %s", c.Body, from[j].Body, bodies[j])
				}
			}
		}
	}
}

// spell writes a JSON text in one way, with its members in their order; of members with one name the
// last counts, and chat_template_kwargs are sorted, since templates see them as variables.
func spell(t *testing.T, raw []byte) string {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var write func(b *strings.Builder, sorted bool)
	write = func(b *strings.Builder, sorted bool) {
		token, err := d.Token()
		if err != nil {
			t.Fatalf("%v in %s", err, raw)
		}
		switch v := token.(type) {
		case json.Delim:
			var members []string
			for d.More() {
				var m strings.Builder
				if v == '{' {
					name, _ := d.Token()
					m.WriteString(name.(string) + ":")
				}
				write(&m, strings.HasPrefix(m.String(), "chat_template_kwargs:"))
				members = append(members, m.String())
			}
			end, _ := d.Token()
			if sorted {
				slices.Sort(members)
			}
			b.WriteString(v.String() + strings.Join(members, ",") + end.(json.Delim).String())
		default:
			text, _ := json.Marshal(v)
			b.Write(text)
		}
	}
	var b strings.Builder
	write(&b, false)
	return b.String()
}

// TestRefused: what is not modelled is refused with a reason, and never becomes part of a prompt.
func TestRefused(t *testing.T) {
	for body, api := range map[string]API{
		`{"messages":[{"role":"user","content":"a \ud800 b"}]}`:                                                                                     Chat,
		`{"messages":[{"role":"user","content":"a \udc00\ud800 b"}]}`:                                                                               Chat,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}`:                                              Chat,
		`{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ messages }}"}`:                                                             Chat,
		`{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"messages":[]}}`:                                                       Chat,
		`{"messages":[{"role":"user","content":"x"}],"truncate_prompt_tokens":5}`:                                                                   Chat,
		`{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}`:                                                                Chat,
		`{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":\"\\ud800\"}"}}]}]}`: Chat,
		`{"prompt":["a","b"]}`:                                                         Completions,
		`{"prompt":"a","suffix":"b"}`:                                                  Completions,
		`{"input":"a","previous_response_id":"x"}`:                                     Responses,
		`{"input":"a","truncation":"auto"}`:                                            Responses,
		`{"messages":[{"role":"user","content":"x"}],"thinking":{"type":"disabled"}}`:  Messages,
		`{"messages":[{"role":"system","content":"x"},{"role":"user","content":"x"}]}`: Messages,
	} {
		var in Input
		if reason := in.Read(api, []byte(body), new(Settings)); reason == "" {
			t.Errorf("%s is accepted: %s%s", body, in.Chat, in.Text)
		}
	}
}

// TestCodeRendered: of a model without a template only completions are read.
func TestCodeRendered(t *testing.T) {
	s := &Settings{CodeRendered: true}
	var in Input
	for api, body := range map[API]string{Chat: `{"messages":[{"role":"user","content":"x"}]}`, Messages: `{"messages":[{"role":"user","content":"x"}]}`, Responses: `{"input":"x"}`} {
		if reason := in.Read(api, []byte(body), s); reason == "" {
			t.Errorf("%s is accepted", body)
		}
	}
	if reason := in.Read(Completions, []byte(`{"prompt":"x"}`), s); reason != "" || string(in.Text) != "x" {
		t.Errorf("a completion gives %q, %q", in.Text, reason)
	}
}

// TestSurrogates: pairs, and backslashes that only look like escapes, are text.
func TestSurrogates(t *testing.T) {
	for body, lone := range map[string]bool{`"\ud83e\udd8a"`: false, `"\\ud800"`: false, `"\\\ud800"`: true, `"\u00e9"`: false, `"\uD83Ex"`: true, `"\ud83e\u0041"`: true, `"\uDD8A"`: true} {
		if got := loneSurrogate([]byte(body)); got != lone {
			t.Errorf("%s: %v, want %v", body, got, lone)
		}
	}
}

func BenchmarkRead(b *testing.B) {
	var body bytes.Buffer
	body.WriteString(`{"messages":[{"role":"system","content":"s"}`)
	for body.Len() < 300<<10 {
		body.WriteString(`,{"role":"user","content":"` + strings.Repeat("a line of code\\n", 30) + `"},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\": \"` + strings.Repeat("word ", 100) + `\"}"}}]},{"role":"tool","tool_call_id":"c","content":"` + strings.Repeat("a result\\n", 100) + `"}`)
	}
	body.WriteString(`]}`)
	var in Input
	s := new(Settings)
	b.SetBytes(int64(body.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if reason := in.Read(Chat, body.Bytes(), s); reason != "" {
			b.Fatal(reason)
		}
	}
}
