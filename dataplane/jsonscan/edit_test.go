package jsonscan

import (
	"bytes"
	"testing"
)

func TestEdited(t *testing.T) {
	val := func(s string) []byte { return []byte(s) }
	for _, tc := range []struct {
		name, body string
		edits      []Edit
		want       string
	}{
		{"none", ` {"a": 1 } `, nil, ` {"a": 1 } `},
		{"set absent", `{"a":1}`, []Edit{{KeyMaxTokens, Set, val("1")}}, `{"a":1,"max_tokens":1}`},
		{"set absent keeps the space", "{\n  \"a\": 1\n}\n", []Edit{{KeyStream, Set, val("false")}}, "{\n  \"a\": 1,\"stream\":false\n}\n"},
		{"set in an empty object", `{ }`, []Edit{{KeyN, Set, val("1")}, {KeyStream, Set, val("true")}}, `{"n":1,"stream":true }`},
		{"set present", `{"max_tokens" : 900 ,"a":1}`, []Edit{{KeyMaxTokens, Set, val("1")}}, `{"max_tokens" : 1 ,"a":1}`},
		{"set null", `{"max_tokens":null}`, []Edit{{KeyMaxTokens, Set, val("1")}}, `{"max_tokens":1}`},
		{"replace present", `{"max_completion_tokens":5}`, []Edit{{KeyMaxCompletionTokens, Replace, val("1")}}, `{"max_completion_tokens":1}`},
		{"replace absent", `{"a":5}`, []Edit{{KeyMaxCompletionTokens, Replace, val("1")}}, `{"a":5}`},
		{"an escaped key stays", `{"\u006e":5}`, []Edit{{KeyN, Set, val("1")}}, `{"\u006e":1}`},
		{"remove first", `{ "stream":true , "a":1}`, []Edit{{Key: KeyStream, Op: Remove}}, `{ "a":1}`},
		{"remove middle", `{"a":1, "stream":true, "b":2}`, []Edit{{Key: KeyStream, Op: Remove}}, `{"a":1, "b":2}`},
		{"remove last", `{"a":1 , "stream":true }`, []Edit{{Key: KeyStream, Op: Remove}}, `{"a":1  }`},
		{"remove only", `{ "stream":true }`, []Edit{{Key: KeyStream, Op: Remove}}, `{  }`},
		{"remove absent", `{"a":1}`, []Edit{{Key: KeyStream, Op: Remove}}, `{"a":1}`},
		{"remove last two", `{"a":1,"n":2,"stream":true}`, []Edit{{Key: KeyStream, Op: Remove}, {Key: KeyN, Op: Remove}}, `{"a":1}`},
		{"remove first two", `{"n":2,"stream":true,"a":1}`, []Edit{{Key: KeyStream, Op: Remove}, {Key: KeyN, Op: Remove}}, `{"a":1}`},
		{"remove all", `{"n":2,"stream":true,"max_tokens":1}`, []Edit{{Key: KeyStream, Op: Remove}, {Key: KeyMaxTokens, Op: Remove}, {Key: KeyN, Op: Remove}}, `{}`},
		{"remove all, set one", `{"n":2,"stream":true}`, []Edit{{KeyMaxTokens, Set, val("1")}, {Key: KeyStream, Op: Remove}, {Key: KeyN, Op: Remove}}, `{"max_tokens":1}`},
		{"remove last, set one", `{"a":1,"stream":true}`, []Edit{{KeyMaxTokens, Set, val("1")}, {Key: KeyStream, Op: Remove}}, `{"a":1,"max_tokens":1}`},
		{"remove around a stranger", `{"n":1,"x":0,"stream":true}`, []Edit{{Key: KeyN, Op: Remove}, {Key: KeyStream, Op: Remove}}, `{"x":0}`},
		{"remove next to a replaced", `{"n":1,"max_tokens":9,"stream":true}`, []Edit{{Key: KeyN, Op: Remove}, {KeyMaxTokens, Replace, val("1")}, {Key: KeyStream, Op: Remove}}, `{"max_tokens":1}`},
		{"nested set, present and absent", `{"sampling_params":{"max_tokens":7,"k":1},"a":2}`,
			[]Edit{{KeySamplingMinTokens, Set, val("0")}, {KeySamplingMaxTokens, Set, val("1")}}, `{"sampling_params":{"max_tokens":1,"k":1,"min_tokens":0},"a":2}`},
		{"nested set in an empty one", `{"sampling_params":{}}`, []Edit{{KeySamplingMaxTokens, Set, val("1")}}, `{"sampling_params":{"max_tokens":1}}`},
		{"nested remove only, and the one after", `{"sampling_params":{"min_tokens":3},"n":1}`, []Edit{{Key: KeySamplingMinTokens, Op: Remove}, {Key: KeyN, Op: Remove}}, `{"sampling_params":{}}`},
		{"nested without parent", `{"a":1}`, []Edit{{KeySamplingMaxTokens, Set, val("1")}}, `{"a":1}`},
		{"nested under null", `{"sampling_params":null}`, []Edit{{KeySamplingMaxTokens, Set, val("1")}}, `{"sampling_params":null}`},
		{"the parent's edit wins", `{"sampling_params":{"max_tokens":2}}`, []Edit{{KeySamplingMaxTokens, Set, val("1")}, {KeySamplingParams, Set, val("{}")}}, `{"sampling_params":{}}`},
		{"a repeated key: the first counts", `{"n":1}`, []Edit{{KeyN, Set, val("2")}, {Key: KeyN, Op: Remove}}, `{"n":2}`},
		{"a repeated nested key", `{"sampling_params":{"n":1,"prompt_logprobs":1}}`, []Edit{{KeySamplingPromptLogprobs, Set, val("2")}, {Key: KeySamplingPromptLogprobs, Op: Remove}}, `{"sampling_params":{"n":1,"prompt_logprobs":2}}`},
		{"prefill leg", `{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":256,"min_tokens":4}`,
			[]Edit{{KeyMaxTokens, Set, val("1")}, {KeyMaxCompletionTokens, Replace, val("1")}, {KeyStream, Set, val("false")}, {Key: KeyStreamOptions, Op: Remove},
				{Key: KeyMinTokens, Op: Remove}, {KeyKVTransferParams, Set, val(`{"do_remote_decode":true}`)}},
			`{"model":"m","messages":[],"stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := scan(t, tc.body)
			if got := string(d.Edited([]byte("x"), tc.edits...)); got != "x"+tc.want {
				t.Errorf("Edited\n got %s\nwant x%s", got, tc.want)
			}
			if got := string(bytes.Join(d.Segments(nil, tc.edits...), nil)); got != tc.want {
				t.Errorf("Segments\n got %s\nwant %s", got, tc.want)
			}
			if string(d.Body) != tc.body {
				t.Error("the body was changed")
			}
		})
	}
}

func TestSegmentsBorrowTheBody(t *testing.T) {
	d := scan(t, `{"model":"m","stream":true,"a":1}`)
	segs := d.Segments(nil, Edit{KeyMaxTokens, Set, []byte("1")}, Edit{Key: KeyStream, Op: Remove})
	if &segs[0][0] != &d.Body[0] {
		t.Error("the first piece is a copy")
	}
	if last := segs[len(segs)-1]; &last[0] != &d.Body[d.Close] {
		t.Error("the last piece is a copy")
	}
}

func TestEditsBeyondTheInlineOnes(t *testing.T) {
	d := scan(t, `{"a":1}`)
	var edits []Edit
	want := `{"a":1`
	for k := Key(0); k < KeySamplingMaxTokens; k++ {
		edits = append(edits, Edit{k, Set, []byte("0")})
		want += `,"` + k.Name() + `":0`
	}
	if got := string(d.Edited(nil, edits...)); got != want+"}" {
		t.Error(got)
	}
}
