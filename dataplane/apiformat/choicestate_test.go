package apiformat

import "testing"

// TestOffsets: where a text goes on is counted as engines do it, in characters.
func TestOffsets(t *testing.T) {
	for _, k := range []struct {
		logprobs, moved string
		behind          int
	}{
		{`{"text_offset":[0,6],"token_logprobs":[-1,-2],"tokens":[" since"," be"],"top_logprobs":[{" since":-1},null]}`,
			`{"text_offset":[7,13],"token_logprobs":[-1,-2],"tokens":[" since"," be"],"top_logprobs":[{" since":-1},null]}`, 9},
		{`{"tokens":["a","\u00e9\ud83d\ude00\n\"ü"],"text_offset":[3,4]}`, `{"tokens":["a","\u00e9\ud83d\ude00\n\"ü"],"text_offset":[10,11]}`, 9},
		{`{"tokens":["a"],"text_offset":[-1]}`, `{"tokens":["a"],"text_offset":[-1]}`, -1}, // SGLang knows none
		{`{"tokens":[],"text_offset":[]}`, `{"tokens":[],"text_offset":[]}`, -1},
		{`{"tokens":[""],"text_offset":[5]}`, `{"tokens":[""],"text_offset":[12]}`, 5},
		{`{"content":[]}`, `{"content":[]}`, -1},
		{`null`, `null`, -1},
	} {
		if got := string(appendShiftedOffsets(nil, []byte(k.logprobs), 7)); got != k.moved {
			t.Errorf("%s moved is %s, want %s", k.logprobs, got, k.moved)
		}
		if got := string(appendShiftedOffsets(nil, []byte(k.logprobs), 0)); got != k.logprobs {
			t.Errorf("%s not moved is %s", k.logprobs, got)
		}
		if got := nextTextOffset([]byte(k.logprobs)); got != k.behind {
			t.Errorf("behind %s: %d, want %d", k.logprobs, got, k.behind)
		}
	}
}
