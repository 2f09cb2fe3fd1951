package reqbody

import (
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

func TestBatched(t *testing.T) {
	for prompt, want := range map[string]bool{
		``: false, `"abc"`: false, `[]`: false, `[1,2,3]`: false, `["one"]`: false, `[[1,2,3]]`: false,
		`["a","b"]`: true, `[[1],[2]]`: true, `[ "a,b" ]`: false, `["a\",\"b"]`: false, "[\n[1,2],\t[3]]": true,
	} {
		if got := isMultiPrompt([]byte(prompt)); got != want {
			t.Errorf("batched(%s) = %v, want %v", prompt, got, want)
		}
	}
}

// TestRawTokens checks that only a flat list of ids is copied as the client wrote it.
func TestRawTokens(t *testing.T) {
	for raw, is := range map[string]bool{"[1,2]": true, "[ \n1]": true, "[[1,2]]": false, `"1"`: false, `["1"]`: false, "[]": false, "1": false, "": false, "[": false} {
		if got := NumberArray([]byte(raw)); is != (string(got) == raw && got != nil) {
			t.Errorf("%q: %q; want it: %v", raw, got, is)
		}
	}
}

func TestChoices(t *testing.T) {
	for _, k := range []struct {
		kind  front.Kind
		body  string
		n     int
		exact bool
	}{
		{front.Chat, `{}`, 1, true},
		{front.Chat, `{"n":null}`, 1, true},
		{front.Chat, `{"n":3}`, 3, true},
		{front.Chat, `{"n":2,"use_beam_search":true}`, 2, false},
		{front.Completions, `{"prompt":["a"],"n":2}`, 2, true},
		{front.Completions, `{"prompt":["a","b"],"n":2}`, 2, false},
		{front.Completions, `{"prompt":"a","best_of":4}`, 0, false},
		{front.NativeGenerate, `{"text":"a"}`, 0, false},
		{front.Messages, `{}`, 0, false},
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(k.body), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		if n, exact := Choices(k.kind, &doc); n != k.n || exact != k.exact {
			t.Errorf("%v %s: %d, %v; want %d, %v", k.kind, k.body, n, exact, k.n, k.exact)
		}
	}
}
