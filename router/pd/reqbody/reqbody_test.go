package reqbody

import "testing"

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
