package chatinput

import (
	"bufio"
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/jsonscan"
)

// vllmCase is a line of testdata/vllm.jsonl; see scripts/tokens/oracle.py.
type vllmCase struct {
	API       string          `json:"api"`
	Body      string          `json:"body"`
	Parts     bool            `json:"parts"`
	Developer bool            `json:"developer"`
	Merge     bool            `json:"merge"`
	Disabled  string          `json:"disabled"`
	Defaults  json.RawMessage `json:"defaults"`
	Exact     *bool           `json:"exact"`
	Fixed     bool            `json:"fixed"`
	Want      *struct {
		Input      json.RawMessage `json:"input"`
		AddSpecial bool            `json:"add_special_tokens"`
		Prompts    int             `json:"prompts"` // of a completion
		Keep       int             `json:"keep"`
		Side       string          `json:"side"`
		Output     bool            `json:"output"`
	} `json:"want"`
}

func (c *vllmCase) settings() *Settings {
	template := Template{Parts: c.Parts, Developer: c.Developer}
	return &Settings{Plain: template, WithTools: template, MergeSystem: c.Merge, DisabledEffort: c.Disabled, Defaults: c.Defaults}
}

var sides = map[string]Side{"": Default, "left": Left, "right": Right}

var apis = map[string]API{"chat": Chat, "completions": Completions, "responses": Responses, "messages": Messages}

// TestAsVLLM compares every body that Read accepts with what vLLM's own code made of it, in the
// order of the members. Read may accept a body that the server refuses; it says that the server refuses
// one only if it does, and leaves few random ones to the engine.
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
		reason := in.Read(apis[c.API], []byte(c.Body), c.settings())
		if c.Want != nil && !c.Fixed {
			valid[c.API]++
		}
		if reason != "" {
			if c.Want != nil {
				reasons[c.API+": "+reason]++
			}
			if c.Want != nil && in.Refused {
				t.Errorf("line %d: %s %s: %s; the server takes it", n, c.API, c.Body, reason)
			}
			continue
		}
		if c.Want == nil {
			if c.Exact != nil && !*c.Exact {
				t.Errorf("line %d: %s is accepted; its messages do not determine the prompt", n, c.Body)
			}
			continue // the server refuses it, so that there is no prompt
		}
		if !c.Fixed {
			accepted[c.API]++
		}
		got := in.Chat
		if c.API == "completions" {
			got, _ = json.Marshal(map[string]string{"text": string(in.Text)})
		}
		if g, w := spell(t, got), spell(t, c.Want.Input); g != w || in.AddSpecial != c.Want.AddSpecial {
			t.Errorf("line %d: %s %s\ngot  %s special %v\nwant %s special %v", n, c.API, c.Body, g, in.AddSpecial, w, c.Want.AddSpecial)
		}
		if want := (Truncation{Keep: c.Want.Keep, Output: c.Want.Output, Side: sides[c.Want.Side]}); in.Truncation != want {
			t.Errorf("line %d: %s %s: %+v, want %+v", n, c.API, c.Body, in.Truncation, want)
		}
		if c.API == "completions" && in.Prompts != c.Want.Prompts {
			t.Errorf("line %d: %s: %d prompts, want %d", n, c.Body, in.Prompts, c.Want.Prompts)
		}
	}
	t.Logf("accepted %v of %v", accepted, valid)
	for api, n := range valid {
		if accepted[api] < n*9/10 {
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

// TestTemplateOfTools: contents and roles are as the template takes them that the server chooses by the
// presence of tools (HfRenderer.render_messages and transformers' get_chat_template).
func TestTemplateOfTools(t *testing.T) {
	const messages = `"messages":[{"role":"developer","content":"d"},{"role":"user","content":"u"}]`
	const plain = `{"messages":[{"role":"system","content":"d"},{"role":"user","content":"u"}]`
	const withTools = `{"messages":[{"role":"developer","content":[{"type":"text","text":"d"}],"tools":null},{"role":"user","content":[{"type":"text","text":"u"}]}]`
	const tool = `{"type":"function","function":{"name":"f"}}`
	for _, c := range []struct {
		api        API
		body, want string
	}{
		{Chat, `{` + messages + `}`, plain},
		{Chat, `{` + messages + `,"tools":null}`, plain},
		{Chat, `{` + messages + `,"tools":[` + tool + `],"tool_choice":"none"}`, plain},
		{Chat, `{` + messages + `,"tools":[` + tool + `]}`, withTools},
		{Chat, `{` + messages + `,"chat_template_kwargs":{"tools":[]}}`, withTools},
		{Chat, `{` + messages + `,"chat_template_kwargs":{"tools":"auto"}}`, plain},
		{Responses, `{"instructions":"i","input":"u","tools":[]}`, `{"messages":[{"role":"system","content":"i"},{"role":"user","content":"u"}]`},
		{Responses, `{"instructions":"i","input":"u","tools":[{"type":"web_search"}]}`, `{"messages":[{"role":"system","content":[{"type":"text","text":"i"}]},{"role":"user","content":[{"type":"text","text":"u"}]}]`},
		{Messages, `{"messages":[{"role":"user","content":"u"}]}`, `{"messages":[{"role":"user","content":"u"}]`},
		{Messages, `{"messages":[{"role":"user","content":"u"}],"tools":[{"name":"f","input_schema":{}}]}`, `{"messages":[{"role":"user","content":[{"type":"text","text":"u"}]}]`},
	} {
		var in Input
		s := Settings{WithTools: Template{Parts: true, Developer: true}, NoToolsIfNone: true}
		if reason := in.Read(c.api, []byte(c.body), &s); reason != "" || !strings.HasPrefix(string(in.Chat), c.want+",") {
			t.Errorf("%s: %q %s\nwant %s", c.body, reason, in.Chat, c.want)
		}
	}
}

// TestArguments: the arguments of a tool call are what json.loads of Python reads, or an empty object.
func TestArguments(t *testing.T) {
	for text, want := range map[string]string{
		`{"a":1}`:                  `{"a":1}`,
		" \t\n\r{\"a\":1}\r\n\t ":  `{"a":1}`,
		"\u00a0{\"a\":1}":          `{}`,
		"{\"a\":1}\u3000":          `{}`,
		"\v{\"a\":1}":              `{}`,
		"{\"a\":1}\f":              `{}`,
		"\u0085{\"a\":1}":          `{}`,
		"\ufeff{\"a\":1}":          `{}`,
		"{\"a\":\u00a01}":          `{}`,
		"{\"a\":\"\u00a0\u3000\"}": "{\"a\":\"\u00a0\u3000\"}",
		"\u00a0{\"a\":NaN}":        `{}`,
		`{"a":NaN}`:                `{"a":NaN}`,
		"\u00a0":                   `{}`,
		"":                         `{}`,
		`[1]`:                      `{}`,
	} {
		call := `{"id":"c","type":"function","function":{"name":"f","arguments":` + string(jsonscan.AppendQuoted(nil, []byte(text))) + `}}`
		var in Input
		reason := in.Read(Chat, []byte(`{"messages":[{"role":"assistant","content":"","tool_calls":[`+call+`]}]}`), new(Settings))
		if got := `"function":{"arguments":` + want + `,"name":"f"}`; reason != "" || !strings.Contains(string(in.Chat), got) {
			t.Errorf("%q: %q %s, want %s", text, reason, in.Chat, got)
		}
	}
}

// TestTemplateOfRequest: a request's template is refused, or left to the engine if its server takes it.
func TestTemplateOfRequest(t *testing.T) {
	for _, body := range []string{`{"messages":[],"chat_template":"x"}`, `{"messages":[],"chat_template_kwargs":{"chat_template":"x"}}`} {
		for _, trust := range []bool{false, true} {
			var in Input
			if reason := in.Read(Chat, []byte(body), &Settings{TrustTemplate: trust}); reason == "" || in.Refused == trust {
				t.Errorf("%s, trusted %v: %q, refused %v", body, trust, reason, in.Refused)
			}
		}
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
			s := c.settings()
			var fresh Input
			want := fresh.Read(apis[c.API], []byte(c.Body), s)
			if got := in.Read(apis[c.API], bodies[i], s); got != want || in.Refused != fresh.Refused || in.Truncation != fresh.Truncation || got == "" && (!bytes.Equal(in.Chat, fresh.Chat) || !bytes.Equal(in.Text, fresh.Text)) {
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
// last counts, in the place of the first, as in Python and in the library. chat_template_kwargs are
// sorted, since templates see them as variables.
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
			at := map[string]int{}
			for d.More() {
				var m strings.Builder
				name := ""
				if v == '{' {
					token, _ := d.Token()
					name = token.(string)
					m.WriteString(name + ":")
				}
				write(&m, name == "chat_template_kwargs")
				if i, ok := at[name]; ok && v == '{' {
					members[i] = m.String()
					continue
				}
				at[name] = len(members)
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

// TestNotModelled: what is not modelled has a reason, and never becomes part of a prompt. refused says
// that the server refuses the body.
func TestNotModelled(t *testing.T) {
	for _, c := range []struct {
		api     API
		refused bool
		body    string
	}{
		{Chat, false, `{"messages":[{"role":"user","content":"a \ud800 b"}]}`},
		{Chat, false, `{"messages":[{"role":"user","content":"a \udc00\ud800 b"}]}`},
		{Chat, false, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}`},
		{Chat, false, `{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"messages":[]}}`},
		{Chat, false, `{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":\"\\ud800\"}"}}]}]}`},
		{Completions, false, `{"prompt":"a","prompt_embeds":"b"}`},
		{Responses, false, `{"input":"a","previous_response_id":"x"}`},
		{Responses, false, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"data:,"}]}]}`},
		{Messages, false, `{"messages":[{"role":"user","content":"x"}],"thinking":{"type":"disabled"}}`}, // without DisabledEffort
		{Messages, false, `{"messages":[{"role":"user","content":"x"},{"role":"system","content":[{"type":"tool_removal","tool":{"type":"tool_reference","name":"f"}}]}]}`},
		{Messages, false, `{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"","name":"f","input":{}}]}]}`},
		{Chat, true, `{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ messages }}"}`},
		{Chat, true, `{"messages":[{"role":"user","content":"x"}],"truncate_prompt_tokens":"x"}`},
		{Chat, true, `{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}`},
		{Chat, true, `{"messages":[{"role":"user","content":"x"}],"tools":[]}`},
		{Chat, true, `{"messages":[{"content":"x"}]}`},
		{Chat, true, `{"messages":[]}`},
		{Completions, true, `{"prompt":""}`},
		{Completions, true, `{"prompt":"a","suffix":"b"}`},
		{Responses, true, `{"input":"a","truncation":"left"}`},
		{Responses, true, `{"input":[{"type":"item_reference","id":"x"}]}`},
		{Messages, true, `{"messages":[{"role":"user","content":[]}]}`}, // a message without content is dropped
		{Messages, true, `{"messages":[{"role":"tool","content":"x"}]}`},
	} {
		var in Input
		if reason := in.Read(c.api, []byte(c.body), new(Settings)); reason == "" || in.Refused != c.refused {
			t.Errorf("%s: reason %q, refused %v, want %v: %s%s", c.body, reason, in.Refused, c.refused, in.Chat, in.Text)
		}
	}
}

// TestNumbersOfPython: a tool call's arguments are what Python's reader makes of them.
func TestNumbersOfPython(t *testing.T) {
	for arguments, want := range map[string]string{
		`{"a": NaN}`: `{"a": NaN}`, `[Infinity]`: `{}`, `{"a":-Infinity,"b":"NaN"}`: `{"a":-Infinity,"b":"NaN"}`, `{"a":"\"NaN"}`: `{"a":"\"NaN"}`,
		`{"a":-NaN}`: `{}`, `{"a":NaN1}`: `{}`, `{"a":1NaN}`: `{}`, `{"a":nan}`: `{}`, `{"a":"x\\",NaN:1}`: `{}`,
	} {
		var in Input
		if in.parseArguments(jsonscan.AppendQuoted(nil, arguments)); string(in.args) != want || in.reason != "" {
			t.Errorf("%s becomes %s (%s), want %s", arguments, in.args, in.reason, want)
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

// TestManySystemMessages: merging the system messages of a request takes memory and time in proportion to
// their size.
func TestManySystemMessages(t *testing.T) {
	const messages, size = 5000, 200
	one := `{"role":"system","content":"` + strings.Repeat("x", size) + `"},`
	body := `{"messages":[` + strings.Repeat(one, messages) + `{"role":"user","content":"hello"}]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var in Input
	if reason := in.Read(Messages, []byte(body), &Settings{MergeSystem: true}); reason != "" {
		t.Fatal(reason)
	}
	runtime.ReadMemStats(&after)
	if n := strings.Count(string(in.Chat), strings.Repeat("x", size)); n != messages {
		t.Errorf("%d messages are in the chat, want %d", n, messages)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 32*uint64(len(body)) {
		t.Errorf("%d bytes were allocated for a request of %d", used, len(body))
	}
}
