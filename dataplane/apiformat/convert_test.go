package apiformat

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

var rewriteGolden = flag.Bool("rewrite", false, "rewrite the golden files")

// conversions are completions streams as engines send them, and what asked for
// them. vLLM 0.32's shapes unless the name says otherwise.
var conversions = []struct {
	name string
	conv func() *Conversion
	in   string
}{
	{"chat", chatOf(nil), completionStream},
	{"chat, first token from prefill", chatOf(&FirstToken{ID: 785, Text: []byte(`The`)}), completionStream},
	{"chat, first token, token ids asked", chatOf(&FirstToken{ID: 785, Text: []byte(`The`), IDs: true}),
		`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,2,785],"token_ids":[9]}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[10]}]}` + "\n\ndata: [DONE]\n\n"},
	{"chat, first token without text", chatOf(&FirstToken{ID: 7, Text: nil}), completionStream},
	{"chat, first token with logprobs", chatOf(&FirstToken{ID: 785, Text: []byte(`The`), Logprobs: []byte(`{"text_offset":[0],"token_logprobs":[-0.25],"tokens":["The"],"top_logprobs":[{"The":-0.25,"A":-1.5,"An":-3}]}`)}), logprobStream},
	{"chat, logprobs", chatOf(nil), logprobStream},
	{"completions, first token with logprobs", func() *Conversion {
		return &Conversion{Cached: -1, First: &FirstToken{ID: 785, Text: []byte(`The`), Logprobs: []byte(`{"text_offset":[0],"token_logprobs":[-0.25],"tokens":["The"],"top_logprobs":[{"The":-0.25}]}`)}}
	}, logprobStream},
	{"chat, two choices interleaved", func() *Conversion { c := chatOf(nil)(); c.Choices = 2; return c },
		`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":1,"text":"b","logprobs":null,"finish_reason":null,"stop_reason":null}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":1,"text":"b2","logprobs":null,"finish_reason":"stop","stop_reason":"\n"}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"stop_reason":null},{"index":1,"text":"","logprobs":null,"finish_reason":null}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}}` + "\n\ndata: [DONE]\n\n"},
	{"chat, usage in every chunk", func() *Conversion { c := chatOf(&FirstToken{Text: []byte(`A`)})(); c.Cached = 4; return c },
		`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":6,"total_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":6,"x":1}}}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":6,"total_tokens":8,"completion_tokens":2,"prompt_tokens_details":null}}` + "\n\ndata: [DONE]\n\ndata: [DONE]\n\n"},
	{"chat, error in mid-stream", chatOf(nil),
		`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}` + "\n\n" +
			`data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\ndata: [DONE]\n\n"},
	{"chat, error first, as vLLM 0.10.0 writes it", chatOf(&FirstToken{Text: []byte(`A`)}),
		`data: {"object":"error","message":"boom","type":"InternalServerError","param":null,"code":500}` + "\n\ndata: [DONE]\n\n"},
	{"chat, comments, CRLF, further members and another engine's id", chatOf(nil),
		": keep-alive\n\n" + `data: {"id":"6b1f","system_fingerprint":"fp","object":"text_completion","metrics":{"a":[1,{}]},"created":1763690000.5,"model":"a\"b","choices":[{"index":0,"text":"x\"\\\u00e9é"}],"kv_transfer_params":{"remote_host":"10.0.0.1"}}` + "\r\n\r\n" + `data: {"id":"6b1f","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","finish_reason":"stop","matched_stop":2}]}` + "\n\n"},
	{"chat, what cannot be followed", chatOf(nil), "data: {\"choices\":[{\"index\":0,\"text\":\"a\n\ndata: nonsense\n\nevent: x\ndata: 1\ndata: 2\n\n"},
	{"completions, first token from prefill", func() *Conversion {
		return &Conversion{First: &FirstToken{ID: 785, Text: []byte(`The`), IDs: true}, Cached: 3}
	},
		`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,2,785],"token_ids":[9]}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":".","logprobs":null,"finish_reason":"stop","stop_reason":null,"prompt_token_ids":null,"token_ids":[10]}]}` + "\n\n" +
			`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}` + "\n\ndata: [DONE]\n\n"},
}

func chatOf(first *FirstToken) func() *Conversion {
	return func() *Conversion { return &Conversion{Chat: true, First: first, TopLogprobs: 2, Cached: -1} }
}

const completionStream = `data: {"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}` + "\n\n" +
	`data: {"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}` + "\n\n" +
	`data: {"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}` + "\n\n" +
	`data: {"id":"cmpl-r1","object":"text_completion","created":1763690000,"model":"m","choices":[],"usage":{"prompt_tokens":6,"total_tokens":8,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}},"system_fingerprint":"fp"}` + "\n\n" +
	"data: [DONE]\n\n"

const logprobStream = `data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" cé","logprobs":{"text_offset":[0,2],"token_logprobs":[-0.5,null],"tokens":[" c\u00e9","x"],"top_logprobs":[{" c\u00e9":-0.5,"\n":-1.25,"\ufffd":-9},null]},"finish_reason":null,"stop_reason":null}]}` + "\n\n" +
	`data: {"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":{"text_offset":[4],"token_logprobs":[-1e-05],"tokens":["\ud83d\ude00"],"top_logprobs":[{"\"":-2}]},"finish_reason":"length","stop_reason":null}]}` + "\n\ndata: [DONE]\n\n"

// convertAll feeds a stream in pieces of the framing's own making.
func convertAll(c *Conversion, pieces ...string) string {
	var f sse.Framer
	var out []byte
	for _, p := range pieces {
		for b := []byte(p); len(b) > 0; {
			n, event, _ := f.Next(b)
			b = b[n:]
			if event != nil {
				out = c.Event(out, event)
				f.Release()
			}
		}
	}
	return string(out)
}

func TestConversion(t *testing.T) {
	var out strings.Builder
	for _, c := range conversions {
		got := convertAll(c.conv(), c.in)
		fmt.Fprintf(&out, "# %s\n%s\n-- becomes --\n%s\n", c.name, c.in, got)
		for _, event := range strings.Split(got, "\n\n") {
			data, ok := strings.CutPrefix(event, "data: {")
			if ok && !strings.Contains(c.name, "cannot") && !json.Valid([]byte("{"+data)) {
				t.Errorf("%s: no JSON: %s", c.name, event)
			}
		}
		for at := range len(c.in) {
			if split := convertAll(c.conv(), c.in[:at], c.in[at:]); split != got {
				t.Fatalf("%s: cut at byte %d gives\n%s\nwant\n%s", c.name, at, split, got)
			}
		}
	}
	golden(t, "testdata/convert_streams.txt", out.String())
}

func TestWholeConversion(t *testing.T) {
	lp := []byte(`{"text_offset":[0],"token_logprobs":[-0.25],"tokens":["The"],"top_logprobs":[{"The":-0.25}]}`)
	first := &FirstToken{ID: 785, Text: []byte(`The`), IDs: true}
	answer := `{"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" c\u00e9\"","logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":[9,10],"prompt_logprobs":null,"prompt_token_ids":[1,2,785],"routed_experts":null}],"service_tier":null,"system_fingerprint":"fp","usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}},"kv_transfer_params":null}`
	logged := `{"id":"cmpl-r1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" cat","logprobs":{"text_offset":[0],"token_logprobs":[-0.5],"tokens":[" cat"],"top_logprobs":[{" cat":-0.5," dog":-0.75}]},"finish_reason":"length"},{"index":1,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}`
	var out strings.Builder
	for _, c := range []struct {
		name string
		conv Conversion
		in   string
	}{
		{"chat", Conversion{Chat: true, Cached: -1}, answer},
		{"chat, first token", Conversion{Chat: true, First: first, Cached: 1}, answer},
		{"chat, logprobs and two choices", Conversion{Chat: true, First: &FirstToken{Text: []byte("The"), Logprobs: lp}, TopLogprobs: 1, Cached: -1}, logged},
		{"completions, first token and logprobs", Conversion{First: &FirstToken{ID: 785, Text: []byte("The"), Logprobs: lp}, Cached: -1}, logged},
		{"completions, first token and ids", Conversion{First: first, Cached: -1}, answer},
		{"an error", Conversion{Chat: true}, `{"error":{"message":"x","code":400}}`},
		{"no JSON", Conversion{Chat: true}, `{"id":"x","choices":[{{{`},
		{"not even an object", Conversion{Chat: true}, `[1]`},
	} {
		got := c.conv.Body(nil, []byte(c.in))
		if json.Valid([]byte(c.in)) && !json.Valid(got) {
			t.Errorf("%s: no JSON: %s", c.name, got)
		}
		fmt.Fprintf(&out, "# %s\n%s\n-- becomes --\n%s\n\n", c.name, c.in, got)
	}
	golden(t, "testdata/convert_bodies.txt", out.String())
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *rewriteGolden {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs; run with -rewrite and review the diff. Got:\n%s", path, got)
	}
}

func TestConversionAllocatesNothing(t *testing.T) {
	event := []byte(strings.SplitAfter(completionStream, "\n\n")[0])
	c := chatOf(nil)()
	buf := c.Event(nil, event)
	logged := []byte(strings.SplitAfter(logprobStream, "\n\n")[0])
	buf = c.Event(buf, logged)
	for name, ev := range map[string][]byte{"text": event, "logprobs": logged} {
		if n := testing.AllocsPerRun(1000, func() { buf = c.Event(buf[:0], ev) }); n != 0 {
			t.Errorf("%s: %v allocations a chunk", name, n)
		}
	}
}

func FuzzConversion(f *testing.F) {
	for _, c := range conversions {
		f.Add(c.in, true)
		f.Add(c.in, false)
	}
	f.Fuzz(func(t *testing.T, in string, chat bool) {
		c := &Conversion{Chat: chat, First: &FirstToken{ID: 1, Text: []byte("T"), IDs: true}, TopLogprobs: 2}
		for _, event := range strings.SplitAfter(in, "\n\n") {
			out := c.Event(nil, []byte(event))
			data := sse.EventData([]byte(event))
			if len(data) > 0 && !json.Valid(data) {
				break // what an engine breaks stays broken
			}
			if len(data) == 0 {
				continue
			}
			for _, made := range strings.Split(string(out), "\n\n") {
				if made != "" && string(out) != event && !json.Valid(sse.EventData([]byte(made))) {
					t.Fatalf("%q became %q", event, made)
				}
			}
		}
		c.Body(nil, []byte(in))
	})
}

// BenchmarkConversion is one chunk of text: walked, rewritten, appended.
func BenchmarkConversion(b *testing.B) {
	event := []byte(strings.SplitAfter(completionStream, "\n\n")[0])
	c := chatOf(nil)()
	buf := c.Event(nil, event)
	b.ReportAllocs()
	b.SetBytes(int64(len(event)))
	for b.Loop() {
		buf = c.Event(buf[:0], event)
	}
}
