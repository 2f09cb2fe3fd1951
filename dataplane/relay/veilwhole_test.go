package relay

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// wholeWants are what is left of those veilCases of which a whole answer tells less than
// a stream's event.
var wholeWants = map[string]string{
	`{"type":"response.completed","response":{"output":[{"kv_transfer_params":1}],"kv_transfer_params":` + handle + `}}`:                              `{"type":"response.completed","response":{"output":[{"kv_transfer_params":0}],"kv_transfer_params":null}}`,
	`{"kv_transfer_params":null,"a":{"kv_transfer_params":{"deep":"stays"}},"choices":[{"message":{"kv_transfer_params":1}},["kv_transfer_params"]]}`: `{"kv_transfer_params":null,"a":{"kv_transfer_params":null},"choices":[{"message":{"kv_transfer_params":0}},["kv_transfer_params"]]}`,
	`[{"kv_transfer_params":1}]`: `[{"kv_transfer_params":0}]`,
}

func wholeWant(in, want string) string {
	if whole := wholeWants[in]; whole != "" {
		return whole
	}
	return want
}

// A private member of a whole answer is found wherever it stands and however it is written;
// what the client, the model or a text says is not touched.
func TestVeilOfWholeAnswers(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{"kv_transfer_param\u0073":` + handle + `,"\u006Bv\u005ftransfer_params" : "s3cret","id":"x"}`, `{"kv_transfer_params":"","id":"x"}`},
		{`{"error":{"kv_transfer_params":` + handle + `,"message":"m"},"x":{"delta":[[{"ec_transfer_params":[70707,{"a":1}]}]]}}`, `{"error":{"kv_transfer_params":null,"message":"m"},"x":{"delta":[[{"ec_transfer_params":[]}]]}}`},
		{`[{"disaggregated_params":` + handle + `},1]`, `[{"disaggregated_params":null},1]`},
		{`{"kv_transfer_params":-70707.5,"disaggregated_params":true,"ec_transfer_params":{"a":"\\\"s3cret"}}`, `{"kv_transfer_params":0,"disaggregated_params":null,"ec_transfer_params":null}`},
		{`{"kv_transfer_params":null,"kv_transfer_params":"s3cret"}`, `{"kv_transfer_params":""}`},
		{`{"content":[{"type":"tool_use","input":{"kv_transfer_params":{"a":1}}}],"kv_transfer_params":{"s3cret":1}}`, `{"content":[{"type":"tool_use","input":{"kv_transfer_params":{"a":1}}}],"kv_transfer_params":null}`},
		{`{"text":"\"kv_transfer_params\":{\"a\":1} \u005f","a":["kv_transfer_params","kv_transfer_param\u0073"],"kv_transfer_params\u0000":1,"kv_transfer_params\n":2}`, ""},
	} {
		whole := []byte(c.in)
		Veil(whole, 200)
		if c.want != "" && strings.Contains(c.want, "transfer_params") && strings.Contains(c.in, `\u00`) {
			var got map[string]any
			if err := json.Unmarshal(whole, &got); err != nil || got["kv_transfer_params"] != strings.Repeat(" ", 6) || got["id"] != "x" {
				t.Errorf("%s\nbecame %s (%v)", c.in, whole, err)
			}
		} else {
			checkVeiled(t, c.in, string(whole), c.want)
		}
		marked := []byte("\ufeff \n" + c.in)
		if Veil(marked, 200); string(marked[5:]) != string(whole) {
			t.Errorf("behind a byte order mark: %s", marked)
		}
		for cut := range c.in { // an engine that broke off
			broken := []byte(c.in[:cut])
			if Veil(broken, 200); c.want != "" && strings.Contains(string(broken), "s3cret") {
				t.Errorf("%s\nbecame %s", c.in[:cut], broken)
			}
		}
	}
}

// A refusal that repeats what the engine was sent, as FastAPI's of a request that fails its
// checks does, tells nothing private of it; a schema in an answer is the client's.
func TestVeilOfRefusals(t *testing.T) {
	const said = `{"detail":[{"type":"missing","input":{"kv_transfer_params":{"remote_host":"a"}}}],"schema":{"kv_transfer_params":{"type":"string"}}}`
	answer, refusal := []byte(said), []byte(said)
	if Veil(answer, 200); string(answer) != said {
		t.Errorf("an answer became %s", answer)
	}
	if Veil(refusal, 422); strings.Contains(string(refusal), "remote_host") || strings.Contains(string(refusal), "string") || !json.Valid(refusal) {
		t.Errorf("a refusal became %s", refusal)
	}
}

// FuzzVeil: what is JSON stays so, as long as it was, and has no private member left that
// says anything, but in what is the client's own.
func FuzzVeil(f *testing.F) {
	for _, c := range veilCases {
		f.Add([]byte(c.in))
	}
	f.Add([]byte(`[{"a":{"kv_transfer_param\u0073":{"b":[1]}}}]`))
	f.Fuzz(func(t *testing.T, in []byte) {
		out := append([]byte(nil), in...)
		Veil(out, 200)
		if !json.Valid(in) || !strings.HasPrefix(strings.TrimLeft(string(in), jsonSpace), "{") {
			return
		}
		var v any
		d := json.NewDecoder(bytes.NewReader(out))
		d.UseNumber() // some are beyond a float64
		if err := d.Decode(&v); err != nil {
			t.Fatalf("%q\nbecame %q: %v", in, out, err)
		}
		noneTold(t, v)
	})
}

func noneTold(t *testing.T, v any) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			noneTold(t, e)
		}
	case map[string]any:
		for key, e := range v {
			if isPrivate([]byte(key)) {
				switch e := e.(type) {
				case nil, json.Number, bool:
				case string:
					if strings.Trim(e, " ") != "" {
						t.Errorf("%s is %q", key, e)
					}
				case map[string]any:
					if len(e) > 0 {
						t.Errorf("%s is %v", key, e)
					}
				case []any:
					if len(e) > 0 {
						t.Errorf("%s is %v", key, e)
					}
				}
			} else if !isOwnWords([]byte(key)) {
				noneTold(t, e)
			}
		}
	}
}

func BenchmarkVeil(b *testing.B) {
	code := strings.Repeat(`It is said that \"water\" boils at 100 degrees.\n`, 80)
	text := strings.Repeat("It is said that water boils at a hundred degrees. ", 4)
	text = strings.Repeat(text+`\n`, 20)
	for name, body := range map[string]string{
		"prose, told null": `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":null}`,
		"code, told null":  `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + code + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":null}`,
		"told":             `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":` + handle + `}`,
	} {
		b.Run(name, func(b *testing.B) {
			room := make([]byte, len(body))
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				copy(room, body)
				Veil(room, 200)
			}
		})
	}
}
