package tokenize

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// The second turn's text must begin with the first turn's, or text mode finds
// nothing again.
func TestNextTurnExtendsText(t *testing.T) {
	tk := New(Options{Mode: ModeText})
	turn := `{"role":"user","content":"a [b]"}`
	next := turn + `,{"role":"assistant","content":"c"},{"role":"user","content":"d"}`
	for _, tc := range []struct {
		name string
		kind Kind
		form string
	}{
		{"chat", Chat, `{"model":"m","messages":[%s]}`},
		{"chat, spaced", Chat, `{"messages":[ %s ] , "stream":true}`},
		{"chat, tools last", Chat, `{"messages":[%s],"tools":[{"a":1}],"chat_template_kwargs":{}}`},
		{"chat, tools first", Chat, `{"tools":[{"a":1}],"messages":[%s]}`},
		{"messages", Messages, `{"messages":[%s],"system":"s","tools":[]}`},
		{"responses", Responses, `{"input":[%s],"instructions":"i"}`},
	} {
		first := find(t, tk, tc.kind, fmt.Sprintf(tc.form, turn), nil)
		second := find(t, tk, tc.kind, fmt.Sprintf(tc.form, next), nil)
		if first.Source != FromText || len(first.Text) == 0 || !bytes.HasPrefix(second.Text, first.Text) || len(second.Text) <= len(first.Text) {
			t.Errorf("%s:\nfirst  %q\nsecond %q", tc.name, first.Text, second.Text)
		}
	}
	a := find(t, tk, Completion, `{"prompt":"once upon"}`, nil)
	b := find(t, tk, Completion, `{"prompt":"once upon a time"}`, nil)
	if !bytes.HasPrefix(b.Text, a.Text) || string(a.Text) != "once upon" {
		t.Errorf("completion: %q, %q", a.Text, b.Text)
	}
}

// Text before the messages in the rendered prompt comes before them in
// the text, wherever the client put it.
func TestToolsComeFirst(t *testing.T) {
	tk := New(Options{Mode: ModeText})
	p := find(t, tk, Chat, `{"messages":[{"m":1}],"tools":[1],"chat_template":"t","chat_template_kwargs":{"k":2}}`, nil)
	if got, want := string(p.Text), "\"t\"\x00{\"k\":2}\x00[1]\x00{\"m\":1}"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
}

func TestJoinedTextIsBounded(t *testing.T) {
	tk := New(Options{Mode: ModeText})
	for _, n := range []int{maxJoined - 10, maxJoined - 5, maxJoined - 4, maxJoined - 3, maxJoined, maxJoined + 1000} {
		body := `{"tools":[1],"messages":["` + strings.Repeat("x", n) + `"]}`
		p := find(t, tk, Chat, body, nil)
		want := min(len("[1]")+1+n+2, maxJoined)
		if len(p.Text) != want || !bytes.HasPrefix(p.Text, []byte("[1]\x00\"xxx")) {
			t.Errorf("%d bytes of messages: %d of text, want %d", n, len(p.Text), want)
		}
	}
	// Without anything before it the text is the body's own, however long.
	doc := scanned(t, `{"messages":["`+strings.Repeat("x", 2*maxJoined)+`"]}`)
	var p Prompt
	tk.Prompt(&p, Chat, doc, nil, nil)
	if len(p.Text) != 2*maxJoined+2 || &p.Text[0] != &doc.Body[len(`{"messages":[`)] {
		t.Error("the text was copied or cut")
	}
}

func TestContents(t *testing.T) {
	for _, tc := range []struct {
		messages string
		media    int
		parts    bool
	}{
		{`[]`, 0, false},
		{`[{"role":"user","content":"hi"}]`, 0, false},
		{`[{"role":"user","content":"see [1] and image_url"}]`, 0, false},
		{`[{"role":"assistant","content":null,"tool_calls":[{"type":"function"}]}]`, 0, false},
		{`[{"content":[{"type":"text","text":"a"},{"text":"b"},"c",{"type":"refusal","refusal":"no"}]}]`, 0, true},
		{`[{"content":[{"type":"image_url","image_url":{"url":"u"}}]},{"content":[{"type":"input_audio"},{"type":"text","text":"a"}]}]`, 2, true},
		{`[{"content":[{"typ\u0065":"video_url"}]}]`, 1, true},
		{`[{"c\u006fntent":[{"type":"image"}]}]`, 1, true},
		{`[{"content":[{"type":"something new","text":"a"}]}]`, 1, true},
		{`[{"content":[{"image_url":"u"}]}]`, 1, true},
		{`[{"content":[{"type":null},1]}]`, 2, true},
		{`["x",[1],{"content":[]}]`, 0, true},
	} {
		c := readContents([]byte(tc.messages))
		if c.media != tc.media || c.hasParts != tc.parts {
			t.Errorf("%s: media %d, parts %v", tc.messages, c.media, c.hasParts)
		}
	}
}

func TestEstimates(t *testing.T) {
	tk := New(Options{Mode: ModeText})
	words := strings.Repeat("word", 1000)
	for _, tc := range []struct {
		kind   Kind
		body   string
		lo, hi int
	}{
		{Completion, `{"prompt":"` + words + `"}`, 1000, 1000},
		{Completion, `{"prompt":["` + words + `","` + words + `"]}`, 2000, 2002},
		{Completion, `{"prompt":[1,2,3]}`, 3, 3},
		{Completion, `{"prompt":[[1,2,3],[],[4],"abcd"]}`, 6, 6},
		{Chat, `{"messages":[{"role":"user","content":"` + words + `"}]}`, 1000, 1020},
		{Chat, `{"tools":["` + words + `"],"messages":[{"role":"user","content":"` + words + `"}]}`, 2000, 2030},
		{Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"` + strings.Repeat(words, 100) + `"}}]}]}`, mediaTokens, mediaTokens + 20},
		{Messages, `{"system":"` + words + `","messages":[{"role":"user","content":"` + words + `"}]}`, 2000, 2030},
		{Responses, `{"input":"` + words + `","instructions":"` + words + `"}`, 2000, 2030},
	} {
		if p := find(t, tk, tc.kind, tc.body, nil); p.Count < tc.lo || p.Count > tc.hi {
			t.Errorf("%.60s…: count %d, want %d to %d", tc.body, p.Count, tc.lo, tc.hi)
		}
	}
}

func TestSourceNames(t *testing.T) {
	for s, want := range map[Source]string{None: "none", FromRequest: "request", FromCache: "cache", FromEngine: "engine", FromText: "text", FromNative: "native", 99: "unknown"} {
		if s.String() != want {
			t.Errorf("Source(%d) is %q, want %q", s, s, want)
		}
	}
}
