package engineapi

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/membudget"
	"sluice/router/pd"
)

// TestErrorMessages: an error quotes the caller's names and values truncated and as valid
// UTF-8, because not every msgpack library can read an error item with other bytes.
func TestErrorMessages(t *testing.T) {
	long := strings.Repeat("n", 1<<20)
	many := new(strings.Builder)
	for i := range maxEngineFields + 1 {
		fmt.Fprintf(many, `,"m%d":0`, i)
	}
	for _, k := range []struct{ body, field, say string }{
		{`{"token_ids":[1],"sampling_options":{"temperature":"` + strings.Repeat("é", 99) + `"}}`, "sampling_options.temperature", "éé…"},
		{`{"token_ids":[1],"sampling_options":{"temperature":"a` + strings.Repeat("é", 99) + `"}}`, "sampling_options.temperature", "éé…"},
		{`{"token_ids":[1],"routing":{"` + long + `":1}}`, "routing." + long[:192] + "…", "want one of"},
		{`{"token_ids":[1],"` + long + `":{"kv_transfer_params":1}}`, long[:200] + "…", "set by the router"},
		{`{"token_ids":[1],"extra_args":1,"extra_args":2}`, "extra_args", "it twice"},
		{`{"token_ids":[1],"routing":{"cache_salt":""}}`, "routing.cache_salt", "not empty"},
		{`{"token_ids":[1],"stop_conditions":{"stop":["a",""]}}`, "stop_conditions.stop", "empty"},
		{`{"token_ids":[1],"sampling_options":{"echo":true}}`, "sampling_options.echo", "set by the router"},
		{`{"token_ids":[1],"stop_conditions":{"cache_salt":"x"}}`, "stop_conditions.cache_salt", "set by the router"},
		{`{"token_ids":[1]` + many.String() + `}`, "", "more than 256 members"},
		{`{"token_ids":[1],"output_options":{"x":1` + many.String() + `}}`, "output_options", "more than 256 members"},
	} {
		var f *FieldError
		err := new(request).parse([]byte(k.body))
		if !errors.As(err, &f) || f.shownName() != k.field || !strings.Contains(f.Error(), k.say) || !utf8.ValidString(f.Error()) || len(f.Error()) > 1000 {
			t.Errorf("%.80s: %.300v; want field %.80q and %q", k.body, err, k.field, k.say)
		}
	}
}

// TestMsgpackAsJSON: a msgpack request becomes equivalent JSON. A value that JSON cannot
// represent is rejected with the name of its member, never omitted.
func TestMsgpackAsJSON(t *testing.T) {
	str := func(s string) []byte { return msgp.AppendString(nil, s) }
	one := func(key string, value []byte) []byte {
		return append(msgp.AppendString(msgp.AppendMapHeader(nil, 1), key), value...)
	}
	for _, k := range []struct {
		in        []byte
		want, bad string
	}{
		{in: one("a", msgp.AppendFloat64(nil, 12345678)), want: `{"a":12345678}`},
		{in: one("a", msgp.AppendFloat64(nil, -1<<53)), want: `{"a":-9007199254740992}`},
		{in: one("a", msgp.AppendFloat32(nil, 0.1)), want: `{"a":0.1}`},
		{in: one("a", msgp.AppendFloat64(nil, 1e30)), want: `{"a":1e+30}`},
		{in: one("a", str("ü\n")), want: `{"a":"ü\n"}`},
		{in: one("a", msgp.AppendBytes(nil, []byte{1, 2})), want: `{"a":"AQI="}`},
		{in: one("a", one("b", str("\xff"))), bad: `"a": "b": the string is not UTF-8`},
		{in: one("\xff", str("a")), bad: "key of a map: the string is not UTF-8"},
		{in: one("a", msgp.AppendFloat64(nil, math.Inf(1))), bad: `"a": the number +Inf`},
		{in: one(strings.Repeat("é", 90), []byte{0xc1}), bad: "éé…"},
	} {
		var made jsonWriter
		rest, err := made.read(k.in, fromPacked(membudget.NewBudget(1<<20)))
		got := string(made.dst)
		made.mem.Release()
		switch {
		case k.bad != "":
			if err == nil || !strings.Contains(err.Error(), k.bad) || !utf8.ValidString(err.Error()) || len(err.Error()) > 300 {
				t.Errorf("%q: %v; want %q", k.in, err, k.bad)
			}
		case err != nil || len(rest) > 0 || got != k.want:
			t.Errorf("%q: %s, %v; want %s", k.in, got, err, k.want)
		}
	}
}

func TestTraceparent(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for v, want := range map[string]bool{
		good: true, "01" + good[2:] + "-more": true, "01" + good[2:]: true,
		"": false, "x": false, good + "-more": false, "01" + good[2:] + "more": false, "ff" + good[2:]: false, strings.ToUpper(good): false,
		"00-" + strings.Repeat("0", 32) + good[35:]: false, good[:36] + strings.Repeat("0", 16) + "-01": false, good[:54]: false, strings.ReplaceAll(good, "-", "0"): false,
	} {
		if got := traceparent([]byte(v)); got != want {
			t.Errorf("%q: %v", v, got)
		}
	}
}

// TestMedia covers the formats of Dynamo's preprocessors: objects without offsets, and token
// ids padded to whole blocks.
func TestMedia(t *testing.T) {
	ids := func(n int) string { return "[" + strings.TrimSuffix(strings.Repeat("7,", n), ",") + "]" }
	object := func(hash, offsets string) string {
		return `{"mm_objects":[{"mm_hash":` + hash + `,"offsets":` + offsets + `}]}`
	}
	numbered := func(hash uint64, from, to int) pd.Medium {
		return pd.Medium{Hash: hash, HashOnly: true, From: from, To: to}
	}
	crowd := strings.TrimSuffix(strings.Repeat(`{"mm_hash":1,"offsets":[[0,1]]},`, maxMedia+1), ",")
	wide := strings.TrimSuffix(strings.Repeat(`{"mm_hash":1,"offsets":[[0,16777216]]},`, maxMedia), ",")
	for _, k := range []struct {
		name, info string
		tokens     int // number of tokens used for the look-up
		media      []pd.Medium
		field      string
	}{
		{name: "without offsets", info: `{"block_mm_infos":[null,` + object("5", "[]") + `,` + object("5", "[]") + `,` + object("6", "[]") + `]}`,
			media: []pd.Medium{numbered(5, 16, 48), numbered(6, 48, 64)}},
		{name: "with offsets", info: `{"block_mm_infos":[null,` + object(`"cat"`, "[[2,16]]") + `,` + object(`"cat"`, "[[0,3],[9,11]]") + `]}`,
			media: []pd.Medium{{Key: "cat", From: 18, To: 35}, {Key: "cat", From: 41, To: 43}}},
		{name: "padded", info: `{"routing_token_ids":` + ids(64) + `,"block_mm_infos":[],"expanded_prompt_len":50}`, tokens: 50},
		{name: "length not said", info: `{"routing_token_ids":` + ids(64) + `,"expanded_prompt_len":0}`, tokens: 64},
		{name: "no ids", info: `{"routing_token_ids":[],"expanded_prompt_len":50}`},
		{name: "too long", info: `{"routing_token_ids":` + ids(64) + `,"expanded_prompt_len":65}`, field: "mm_routing_info.expanded_prompt_len"},
		{name: "too many", info: `{"block_mm_infos":[{"mm_objects":[` + crowd + `]}]}`, field: "mm_routing_info.block_mm_infos"},
		{name: "too wide", info: `{"routing_token_ids":` + ids(1<<16) + `,"block_mm_infos":[{"mm_objects":[` + wide + `]}]}`, field: "mm_routing_info.block_mm_infos"},
		{name: "no offsets", info: `{"block_mm_infos":[{"mm_objects":[{"mm_hash":1}]}]}`, field: "mm_routing_info.block_mm_infos[0]"},
	} {
		r := new(request)
		if err := r.parse([]byte(`{"token_ids":` + ids(100) + `,"mm_routing_info":` + k.info + `}`)); err != nil {
			t.Errorf("%s: %v", k.name, err)
			continue
		}
		err := r.media(16)
		var f *FieldError
		if errors.As(err, &f); err != nil && f == nil || k.field != "" && (f == nil || f.Field != k.field) || k.field == "" && err != nil {
			t.Errorf("%s: %v; want field %q", k.name, err, k.field)
		}
		if err == nil && (len(r.hints.Tokens) != k.tokens || !slices.Equal(r.hints.Media, k.media)) {
			t.Errorf("%s: %d tokens, %+v; want %d and %+v", k.name, len(r.hints.Tokens), r.hints.Media, k.tokens, k.media)
		}
	}
}

// TestTRTLLMBody checks the body for TensorRT-LLM, whose server rejects unknown members and has
// different names for some (CompletionRequest in its serve/openai_protocol.py).
func TestTRTLLMBody(t *testing.T) {
	body := func(rest string) (string, error) {
		r := new(request)
		if err := r.parse([]byte(`{"model":"m","token_ids":[1,2],"stop_conditions":{"max_tokens":3}` + rest + `}`)); err != nil {
			t.Fatal(err)
		}
		b, err := r.appendBody(nil, modelPool{dialect: trtllm})
		return string(b), err
	}
	const head = `{"model":"m","prompt":[1,2],"stream":true,"stream_options":{"include_usage":true},"detokenize":false`
	for _, k := range []struct{ rest, want string }{
		{`,"output_options":{"logprobs":2},"routing":{"priority":3}`, `,"max_tokens":3,"logprobs":2}`},
		{`,"sampling_options":{"top_k":-1,"temperature":0.5}`, `,"temperature":0.5,"max_tokens":3}`},
		{`,"sampling_options":{"top_k":4,"guided_decoding":{"json":{"type":"object"},"backend":"xgrammar","regex":null}}`, `,"top_k":4,"response_format":{"type":"json","schema":{"type":"object"}},"max_tokens":3}`},
		{`,"sampling_options":{"guided_decoding":{"json":"{\"type\":\"object\"}"}}`, `,"response_format":{"type":"json","schema":{"type":"object"}},"max_tokens":3}`},
		{`,"sampling_options":{"guided_decoding":{"grammar":"root ::= \"a\""}}`, `,"response_format":{"type":"ebnf","ebnf":"root ::= \"a\""},"max_tokens":3}`},
	} {
		if got, err := body(k.rest); err != nil || got != head+k.want {
			t.Errorf("%s: %v\n got %s\nwant %s", k.rest, err, got, head+k.want)
		}
	}
	for rest, field := range map[string]string{
		`,"routing":{"cache_salt":"a"}`:                                       "routing.cache_salt",
		`,"output_options":{"prompt_logprobs":1}`:                             "output_options.prompt_logprobs",
		`,"sampling_options":{"guided_decoding":{"choice":["a"]}}`:            "sampling_options.guided_decoding.choice",
		`,"sampling_options":{"guided_decoding":{"json":"nonsense"}}`:         "sampling_options.guided_decoding.json",
		`,"sampling_options":{"guided_decoding":{"regex":"a","grammar":"b"}}`: "sampling_options.guided_decoding.grammar",
	} {
		var f *FieldError
		if _, err := body(rest); !errors.As(err, &f) || f.Field != field {
			t.Errorf("%s: %v; want field %q", rest, err, field)
		}
	}
}

// TestLongIDListIsTruncated: of a very long list of ids, only as many are joined as the Runner
// needs to reject the list.
func TestLongIDListIsTruncated(t *testing.T) {
	list := `["a"` + strings.Repeat(`,"a"`, 1<<20) + `]`
	if got := joinIDs([]byte(list)); got != "a"+strings.Repeat(",a", maxJoinedIDs-1) {
		t.Errorf("%d bytes are joined of a list of %d", len(got), len(list))
	}
	if got := joinIDs([]byte(`["a",7,"b"]`)); got != "a,7,b" {
		t.Errorf("%q", got)
	}
}
