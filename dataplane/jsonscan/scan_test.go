package jsonscan

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func scan(t *testing.T, body string) *Doc {
	t.Helper()
	d := new(Doc)
	if err := d.Scan([]byte(body), Limits{}); err != nil {
		t.Fatalf("Scan(%.80q): %v", body, err)
	}
	return d
}

func TestScanFindsMembers(t *testing.T) {
	body := " {\"model\" : \"m\\u00e9\\ud83d\\ude00\", \"stream\":true,\n\"n\":2,\"max_tokens\":null,\"messages\":[{\"role\":\"user\",\"content\":\"a\\\"b\"}]," +
		`"x":{"model":"inner","stream":"no"},"sampling_params":{"max_tokens":16.0,"a":1,"n":3},"seed":12345678901234567890,"stream_options":{}} ` + "\r\n"
	d := scan(t, body)
	if got := string(d.String(KeyModel)); got != "mé😀" {
		t.Errorf("model %q", got)
	}
	if !d.Bool(KeyStream) || d.Bool(KeyReturnTokenIDs) {
		t.Error("booleans read wrong")
	}
	if n, ok := d.Int(KeyN); n != 2 || !ok {
		t.Error("n", n, ok)
	}
	if _, ok := d.Int(KeyMaxTokens); ok || d.Has(KeyMaxTokens) || d.Values[KeyMaxTokens].Kind != Null {
		t.Error("a null count must be there, and count as not had")
	}
	if n, ok := d.Int(KeySamplingMaxTokens); n != 16 || !ok {
		t.Error("sampling_params.max_tokens", n, ok)
	}
	if n, ok := d.Int(KeySamplingN); n != 3 || !ok {
		t.Error("sampling_params.n", n, ok)
	}
	if got := string(d.Raw(KeyMessages)); got != `[{"role":"user","content":"a\"b"}]` {
		t.Errorf("messages %s", got)
	}
	if got := string(d.Raw(KeySamplingParams)); got != `{"max_tokens":16.0,"a":1,"n":3}` {
		t.Errorf("sampling_params %s", got)
	}
	if d.Raw(KeyPrompt) != nil || d.Has(KeyPrompt) {
		t.Error("an absent member has bytes")
	}
	if d.Members != 9 || body[d.Open] != '{' || body[d.Close] != '}' || d.Close != strings.LastIndexByte(body, '}') {
		t.Error("outer object", d.Members, d.Open, d.Close)
	}
	if v := d.Values[KeyStream]; body[v.KeyStart:v.Start] != `"stream":` {
		t.Error("key offset of stream")
	}
}

func TestScanResets(t *testing.T) {
	d := scan(t, `{"model":"a","stream":true,"sampling_params":{"n":1}}`)
	if err := d.Scan([]byte(`{"n":1}`), Limits{}); err != nil {
		t.Fatal(err)
	}
	if d.Has(KeyModel) || d.Has(KeyStream) || d.Has(KeySamplingN) || d.Members != 1 {
		t.Fatal("old members are still there")
	}
	if err := d.Scan([]byte(`{"n":1,"model":"x"`), Limits{}); err == nil || d.Has(KeyN) || d.Body != nil {
		t.Fatal("a failed scan must leave the doc empty")
	}
}

func TestEscapedKeysAreKnown(t *testing.T) {
	d := scan(t, `{"mod\u0065l":"a","\u0073\u0074\u0072\u0065\u0061\u006d":true,"sampling\u005fparams":{"\u006e":4}}`)
	if string(d.Raw(KeyModel)) != `"a"` || !d.Bool(KeyStream) {
		t.Error("escaped top-level keys were not recognised")
	}
	if n, _ := d.Int(KeySamplingN); n != 4 {
		t.Error("escaped nested key was not recognised")
	}
	long := ""
	for _, c := range "continue_final_message" {
		long += fmt.Sprintf(`\u%04X`, c)
	}
	if d = scan(t, `{"`+long+`":true}`); !d.Bool(KeyContinueFinalMessage) {
		t.Error("a wholly escaped long key was not recognised")
	}
}

// Every known key must be found under its own name and refused the second time,
// also where one of the two is written with an escape.
func TestEveryKnownKey(t *testing.T) {
	for k := Key(0); k < NumKeys; k++ {
		name := k.Name()
		if name == "" || members[k].want == "" || members[k].allowed == 0 {
			t.Fatalf("key %d has no rule", k)
		}
		leaf, open, end := name, `{`, `}`
		if k.nested() {
			_, leaf, _ = strings.Cut(name, ".")
			open, end = `{"sampling_params":{`, `}}`
		}
		if len(leaf) > maxNameLen {
			t.Errorf("maxNameLen is below %q", leaf)
		}
		val := sampleValue(k)
		d := scan(t, open+`"a":0,"`+leaf+`":`+val+end)
		if got := string(d.Raw(k)); got != val {
			t.Errorf("%s: raw %q", name, got)
		}
		for _, second := range []string{leaf, fmt.Sprintf(`\u%04x`, leaf[0]) + leaf[1:]} {
			err := new(Doc).Scan([]byte(open+`"`+leaf+`":`+val+`,"`+second+`":`+val+end), Limits{})
			var se *SyntaxError
			if !errors.As(err, &se) || se.Field != name || !strings.Contains(se.Got, "second") {
				t.Errorf("%s twice (%s): %v", name, second, err)
			}
		}
	}
}

func sampleValue(k Key) string {
	switch a := members[k].allowed; {
	case a == anyKind:
		return `{"a":[1]}`
	case a&str != 0:
		return `"s"`
	case a&boolean != 0:
		return `true`
	case a&number != 0:
		return `7`
	case a&array != 0:
		return `[1]`
	}
	return `{}`
}

func TestScanErrors(t *testing.T) {
	deep := strings.Repeat(`[`, 64)
	for _, tc := range []struct{ body, want string }{
		{"", `body at byte 0: got an empty body; want a JSON object`},
		{"  \n", `body at byte 3: got an empty body; want a JSON object`},
		{"[1]", `body at byte 0: got "["; want a JSON object`},
		{"\xef\xbb\xbf{}", `body at byte 0: got "\ufeff"; want a JSON object`},
		{`{"a":1} x`, `body at byte 8: got "x"; want nothing after the object`},
		{`{"a":1}{}`, `body at byte 7: got "{"; want nothing after the object`},
		{`{"a":1`, `body at byte 6: got the end of the body; want "," or "}"`},
		{`{"a"`, `body at byte 4: got the end of the body; want ":" after a member's name`},
		{`{"a":`, `body at byte 5: got the end of the body; want a value`},
		{`{"a":1,}`, `body at byte 7: got "}"; want a member's name in quotes`},
		{`{,}`, `body at byte 1: got ","; want a member's name in quotes`},
		{`{a:1}`, `body at byte 1: got "a"; want a member's name in quotes`},
		{`{"a":[1,]}`, `body at byte 8: got "]"; want a value`},
		{`{"a":[1 2]}`, `body at byte 8: got "2"; want "," or "]"`},
		{`{"a":[01]}`, `body at byte 7: got "1"; want no digit after a leading zero`},
		{`{"a":[1,01,2]}`, `body at byte 9: got "1"; want no digit after a leading zero`},
		{`{"a":[1,2,03,4,5,6,7,8,9]}`, `body at byte 11: got "3"; want no digit after a leading zero`},
		{`{"a":[12345678,123456789,1x,2,3,4,5]}`, `body at byte 26: got "x"; want "," or "]"`},
		{`{"a":-}`, `body at byte 6: got "}"; want a digit`},
		{`{"a":1.}`, `body at byte 7: got "}"; want a digit after the point`},
		{`{"a":1e+}`, `body at byte 8: got "}"; want a digit in the exponent`},
		{`{"a":NaN}`, `body at byte 5: got "NaN"; want a value`},
		{`{"a":nul}`, `body at byte 5: got "nul"; want a value`},
		{`{"a":truee}`, `body at byte 9: got "e"; want "," or "}"`},
		{`{"a":"x`, `body at byte 7: got the end of the body; want a closing quote`},
		{`{"a":"x\`, `body at byte 7: got the escape "\"; want one of \" \\ \/ \b \f \n \r \t or \u and four hex digits`},
		{`{"a":"\x41"}`, `body at byte 6: got the escape "\x41"}"; want one of \" \\ \/ \b \f \n \r \t or \u and four hex digits`},
		{`{"a":"\u12G4"}`, `body at byte 6: got the escape "\u12G4"; want one of \" \\ \/ \b \f \n \r \t or \u and four hex digits`},
		{"{\"a\":\"x\ny\"}", `body at byte 7: got the control character "\n" in a string; want it escaped, as in \n`},
		{"{\"a\":\"" + strings.Repeat("x", 77) + "\x00\"}", `body at byte 83: got the control character "\x00" in a string; want it escaped, as in \n`},
		{"{\"a\":\"xé\xff\"}", `body at byte 9: got invalid UTF-8 "\xff"; want a body in UTF-8`},
		{"{\"a\":\"\xed\xa0\x80\"}", `body at byte 6: got invalid UTF-8 "\xed"; want a body in UTF-8`},
		{`{"a":` + deep + strings.Repeat(`]`, 64) + `}`, `body at byte 68: got nesting deeper than 64; want at most 64 levels of objects and arrays`},
		{`{"stream":"yes"}`, `field "stream": got "yes" (string); want true or false`},
		{`{"stream":1}`, `field "stream": got 1 (number); want true or false`},
		{`{"model":1}`, `field "model": got 1 (number); want a string, the model's name, or null`},
		{`{"model":["a"]}`, `field "model": got ["a"] (array); want a string, the model's name, or null`},
		{`{"max_tokens":1.5}`, `field "max_tokens": got 1.5 (number); want an integer from -9223372036854775808 to 9223372036854775807, or null`},
		{`{"max_tokens":9223372036854775808}`, `field "max_tokens": got 9223372036854775808 (number); want an integer from -9223372036854775808 to 9223372036854775807, or null`},
		{`{"max_tokens":"16"}`, `field "max_tokens": got "16" (string); want an integer or null`},
		{`{"sampling_params":{"min_tokens":1e-2}}`, `field "sampling_params.min_tokens": got 1e-2 (number); want an integer from -9223372036854775808 to 9223372036854775807, or null`},
		{`{"sampling_params":3}`, `field "sampling_params": got 3 (number); want an object, an array of them, or null`},
		{`{"messages":"hi"}`, `field "messages": got "hi" (string); want an array of messages`},
		{`{"token_ids":{}}`, `field "token_ids": got {} (object); want an array of token ids`},
		{`{"model":"a","stream":true,"model":"b"}`, `field "model": got a second "model"; want it only once`},
		{`{"kv_transfer_params":1,"kv_transf\u0065r_params":2}`, `field "kv_transfer_params": got a second "kv_transfer_params"; want it only once`},
		{`{"tools":"` + strings.Repeat("é", 50) + `"}`, `field "tools": got "` + strings.Repeat("é", 19) + `… (string); want an array of tools or null`},
	} {
		err := new(Doc).Scan([]byte(tc.body), Limits{})
		var se *SyntaxError
		if !errors.As(err, &se) {
			t.Errorf("Scan(%.60q) = %v, want a *SyntaxError", tc.body, err)
			continue
		}
		if se.Error() != tc.want {
			t.Errorf("Scan(%.60q)\n got %s\nwant %s", tc.body, se, tc.want)
		}
	}
}

func TestScanAccepts(t *testing.T) {
	for _, body := range []string{
		`{}`, " {\t} ", `{"":0}`, `{"a":-0.0e-7}`, `{"a":"\ud800"}`, `{"a":"\udc00\ud800x"}`,
		`{"a":[[],{},[1,2.5,"x",null,true,false]]}`, `{"x":1,"x":2}`, `{"n":-1,"max_tokens":100.000}`,
		`{"a":"` + "\u007f\u2028é漢😀" + `"}`, `{"prompt":[[1,2],[3]]}`, `{"prompt":null}`,
		`{"a":` + strings.Repeat(`[`, 63) + strings.Repeat(`]`, 63) + `}`,
	} {
		scan(t, body)
	}
}

// Arrays of numbers, which are passed over in strides, in every layout, whole and cut off
// at every byte.
func TestNumbersInEveryLayout(t *testing.T) {
	for _, between := range []string{",", ", ", ",  ", ",\n", ",\r\n\t", " ,", " , ", "\n,\n"} {
		for _, number := range []string{"1", "12", "1234567", "12345678", "123456789", "0", "-5", "1.5"} {
			body := `{"prompt":[` + strings.Repeat(number+between, 5) + number + `],"n":1}`
			var d Doc
			if err := d.Scan([]byte(body), Limits{}); err != nil || d.Values[KeyPrompt].Kind != Array || d.Values[KeyN].Kind != Number {
				t.Errorf("%q: %v", body, err)
			}
			for n := range body {
				cut := []byte(body[:n])
				if err := d.Scan(cut[:n:n], Limits{}); err == nil {
					t.Errorf("%q is accepted", cut)
				}
			}
		}
	}
	for _, bad := range []string{`{"a":[1,2,3,4,5, ]}`, "{\"a\":[1,2,3,4,5,\x0b6]}", `{"a":[1,,2,3,4,5]}`, `{"a":[1 2,3,4,5,6]}`, `{"a":[01,2,3,4,5,6]}`} {
		if _, _, err := Find([]byte(bad), "a"); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestDepthLimit(t *testing.T) {
	for _, lim := range []int{1, 2, 10, 1024} {
		nest := func(n int) []byte {
			return []byte(strings.Repeat(`{"a":`, n-1) + `{}` + strings.Repeat(`}`, n-1))
		}
		if err := new(Doc).Scan(nest(lim), Limits{MaxDepth: lim}); err != nil {
			t.Errorf("depth %d under limit %d: %v", lim, lim, err)
		}
		if err := new(Doc).Scan(nest(lim+1), Limits{MaxDepth: lim}); err == nil {
			t.Errorf("depth %d passed limit %d", lim+1, lim)
		}
	}
	// The recursion stays bounded for every configured depth.
	huge := strings.Repeat(`[`, 1<<20)
	if err := new(Doc).Scan([]byte(`{"a":`+huge), Limits{MaxDepth: 1 << 30}); err == nil || !strings.Contains(err.Error(), "1024") {
		t.Error("no hard cap on depth:", err)
	}
}

// The string scan looks at 32 bytes at once: every special byte must be seen at
// every offset, and nothing else be taken for one.
func TestStringEndAtEveryOffset(t *testing.T) {
	for n := 0; n < 80; n++ {
		for c := 0; c < 256; c++ {
			b := []byte(strings.Repeat("a", n) + string([]byte{byte(c)}) + strings.Repeat("b", 40) + `"`)
			end, high := stringEnd(b, 0)
			want := len(b)
			switch {
			case c == '"':
				want = n + 1
			case c == '\\':
				want = len(b) // \b is a good escape
			case c < ' ':
				want = ^n
			}
			if end != want || c >= 0x80 && !high {
				t.Fatalf("byte %#x at %d: end %d high %v, want %d", c, n, end, high, want)
			}
		}
	}
}

func TestFind(t *testing.T) {
	body := []byte(`{"id":"x","usage":{"tokens":9},"tok\u0065ns":[1,2],"kv_transfer_params":{"a":null},"id":"y","model":7}`)
	for name, want := range map[string]string{"tokens": "[1,2]", "usage": `{"tokens":9}`, "kv_transfer_params": `{"a":null}`, "id": `"y"`, "model": "7", "none": ""} {
		v, ok, err := Find(body, name)
		if err != nil || ok != (want != "") || string(body[v.Start:v.End]) != want {
			t.Errorf("Find(%s) = %s %v %v, want %s", name, body[v.Start:v.End], ok, err, want)
		}
	}
	long := strings.Repeat("k", 100)
	if _, ok, _ := Find([]byte(`{"`+strings.Repeat(`\u006b`, 100)+`":1}`), long); !ok {
		t.Error("a long escaped name was not found")
	}
	for _, bad := range []string{``, `[]`, `{"tokens":[1,2]`, `<html>`, `{"a":"` + "\xff" + `"}`} {
		if _, ok, err := Find([]byte(bad), "tokens"); ok || err == nil {
			t.Errorf("Find in %q: ok %v err %v", bad, ok, err)
		}
	}
}

// FindTwo finds for two names what Find finds for each, and on an error neither.
func TestFindTwo(t *testing.T) {
	names := []string{"tokens", "none", "id", "a_name_longer_than_any_known_member"}
	for _, body := range []string{
		`{"id":"x","tokens":[1,2],"id":"y","a_name_longer_than_any_known_m\u0065mber":{"tokens":1}}`, `{}`, `{"i\u0064":null}`,
		`{"id":1,"tokens":[1,2]`, `[]`, `{"id":1} x`,
	} {
		for _, first := range names {
			for _, second := range names {
				one, two, err := FindTwo([]byte(body), first, second)
				want, _, werr := Find([]byte(body), first)
				other, _, _ := Find([]byte(body), second)
				if one != want || two != other || (err == nil) != (werr == nil) {
					t.Errorf("%s and %s in %s: %v, %v, %v; want %v, %v, %v", first, second, body, one, two, err, want, other, werr)
				}
			}
		}
	}
}

func TestWalk(t *testing.T) {
	var got []string
	for it := Walk([]byte(` [1, "a" ,{"b":[2]},[],null]`)); it.Next(); {
		got = append(got, it.Value.Kind.String()+" "+string(it.Raw()))
	}
	if s := strings.Join(got, "|"); s != `number 1|string "a"|object {"b":[2]}|array []|null null` {
		t.Error(s)
	}
	n := 0
	for it := Walk([]byte(`{"a" : 1,"typ\u0065":"text" }`)); it.Next(); n++ {
		if n == 1 && (!it.IsKey("type") || it.IsKey("typ") || string(it.Raw()) != `"text"`) {
			t.Error("second member", string(it.Raw()))
		}
	}
	if n != 2 {
		t.Error(n, "members")
	}
	for _, none := range []string{``, `1`, `[]`, `{}`, `[`, `{"a"`, `{1:2}`} {
		for it := Walk([]byte(none)); it.Next(); {
			t.Errorf("%q has an element", none)
		}
	}
	var zero Iter
	if zero.Next() || zero.IsKey("") {
		t.Error("the zero Iter has an element")
	}
}
