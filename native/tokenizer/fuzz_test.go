package tokenizer

import (
	"errors"
	"slices"
	"testing"
	"unicode/utf8"
)

// FuzzRender: whatever the template and the request, the library gives a text in UTF-8 or an
// *Error that is not a panic of its own.
func FuzzRender(f *testing.F) {
	const chat = `{"messages":[{"role":"user","content":"hi","tool_calls":[{"function":{"name":"f","arguments":{"a":[1,2.5,null,true]}}}]}],"tools":[{"x":"é"}],"add_generation_prompt":true}`
	for _, template := range []string{
		"", "{{ messages | tojson(indent=2) }}", "{% for m in messages recursive %}{{ loop.index0 }}{{ m['items'] }}{{ m.items }}{% endfor %}",
		"{% generation %}{{ messages[0].content | upper | indent(4, true) }}{% endgeneration %}", "{{ strftime_now('%d %b %Y') }}{{ raise_exception('x') }}",
		"{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{{ f('x') }}{% set ns = namespace(i=0) %}{% set ns.i = ns.i + 1 %}", "{{ 'a' * 1000 }}{{ messages[::-1][0].content.split('i')[0].strip() }}",
	} {
		f.Add(template, chat)
	}
	f.Add("{{ messages }}", `{"messages":[{"a":1e400,"b":"\ud83d\ude00","b":-0.0}],"continue_final_message":"a"}`)
	m := load1(f, "testdata/tiny")
	f.Fuzz(func(t *testing.T, template, input string) {
		text, err := m.Render([]byte("x"), template, []byte(input))
		var e *Error
		switch {
		case err == nil && !utf8.Valid(text):
			t.Errorf("the text is not UTF-8: %q", text)
		case err != nil && (!errors.As(err, &e) || e.Code == CodePanic || e.Code == CodeArgument || e.Code > CodePanic && e.Code != CodeRefused):
			t.Errorf("Render = %#v", err)
		case string(text[:1]) != "x":
			t.Errorf("Render has changed dst: %q", text)
		}
	})
}

// FuzzEncode: an encoding of UTF-8 succeeds, and a text cut before an added token has the ids of
// its parts; of other bytes it fails.
func FuzzEncode(f *testing.F) {
	for _, text := range []string{"", "hello", "é漢字🙂", "a<|end|>b", "<|end", "\xff", "\x00\n\r\t ", "<|begin|><|end|>"} {
		f.Add(text, true)
	}
	m := load1(f, "testdata/tiny")
	f.Fuzz(func(t *testing.T, text string, special bool) {
		ids, err := m.Encode(nil, []byte(text), special)
		if !utf8.ValidString(text) {
			var e *Error
			if !errors.As(err, &e) || e.Code != CodeInput {
				t.Fatalf("Encode of malformed UTF-8 = %v, %v", ids, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		whole, err := m.Encode(ids, []byte(text+"<|end|>"+text), false)
		if err != nil {
			t.Fatal(err)
		}
		part, err := m.Encode(nil, []byte(text), false)
		if err != nil {
			t.Fatal(err)
		}
		if want := slices.Concat(ids, part, []uint32{257}, part); !slices.Equal(whole, want) {
			t.Errorf("the ids are %v, want %v", whole, want)
		}
	})
}
