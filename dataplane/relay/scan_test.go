package relay

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// load reads a capture and gives its decoded body.
func load(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(name, ".http") {
		_, framed, ok := bytes.Cut(b, []byte("\r\n\r\n"))
		if !ok {
			t.Fatalf("%s has no head", name)
		}
		return dechunk(t, framed)
	}
	return b
}

func dechunk(t testing.TB, framed []byte) []byte {
	t.Helper()
	var c upstream.Chunks
	var out []byte
	for len(framed) > 0 && !c.Done() {
		n, payload, err := c.Next(framed)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, payload...)
		framed = framed[n:]
	}
	if !c.Done() || len(framed) > 0 {
		t.Fatalf("chunked body: done %v, %d bytes behind it", c.Done(), len(framed))
	}
	return out
}

// scanResult is what a scanner may be asked for.
type scanResult struct {
	Events, TooBig       int64
	Token, Failed, Ended bool
	Finish               string
	Usage                Usage
}

func scanResultOf(s *streamScanner) scanResult {
	return scanResult{s.events, int64(s.tooBig), s.token, s.failed, s.ended, s.finish, s.usage}
}

func newScanner(p sse.Protocol) *streamScanner {
	s := &streamScanner{protocol: p, usage: noUsage}
	s.KeepsOversized = true
	return s
}

func scanAll(p sse.Protocol, pieces ...[]byte) scanResult {
	s := newScanner(p)
	for _, b := range pieces {
		s.feed(b)
	}
	defer s.Release()
	return scanResultOf(s)
}

var captures = []struct {
	file     string
	protocol sse.Protocol
	want     scanResult
}{
	{"vllm_chat.http", sse.OpenAI, scanResult{8, 0, true, false, true, "length", Usage{13, 5, -1}}},
	{"sglang_chat.http", sse.OpenAI, scanResult{9, 0, true, false, true, "length", Usage{13, 5, -1}}},
	{"vllm_completions.sse", sse.OpenAI, scanResult{4, 0, true, false, true, "length", Usage{-1, -1, -1}}},
	{"vllm_generate.sse", sse.OpenAI, scanResult{2, 0, true, false, true, "length", Usage{-1, -1, -1}}},
	{"anthropic.sse", sse.Anthropic, scanResult{8, 0, true, false, true, "end_turn", Usage{41, 15, 16}}},
	{"responses.sse", sse.Responses, scanResult{6, 0, true, false, true, "completed", Usage{37, 11, 32}}},
}

// Every capture, cut at every byte, in LF and in CRLF, gives the same.
func TestScanCapturesSplitAnywhere(t *testing.T) {
	for _, c := range captures {
		for _, crlf := range []bool{false, true} {
			body := load(t, c.file)
			if crlf {
				body = bytes.ReplaceAll(body, []byte("\n"), []byte("\r\n"))
			}
			if got := scanAll(c.protocol, body); got != c.want {
				t.Errorf("%s crlf=%v whole: %+v, want %+v", c.file, crlf, got, c.want)
			}
			for i := range body {
				if got := scanAll(c.protocol, body[:i], body[i:]); got != c.want {
					t.Fatalf("%s crlf=%v cut at %d: %+v, want %+v", c.file, crlf, i, got, c.want)
				}
			}
			s := newScanner(c.protocol)
			for i := range body {
				s.feed(body[i : i+1])
			}
			if got := scanResultOf(s); got != c.want || !s.AtBoundary() {
				t.Errorf("%s crlf=%v byte by byte: %+v between=%v", c.file, crlf, got, s.AtBoundary())
			}
		}
	}
}

func TestScanEvents(t *testing.T) {
	none := noUsage
	for _, c := range []struct {
		name     string
		protocol sse.Protocol
		body     string
		want     scanResult
	}{
		{"role only is not a token", sse.OpenAI, `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"null content is not a token", sse.OpenAI, `data: {"choices":[{"delta":{"role":"assistant","content":null,"reasoning_content":null,"tool_calls":null}}]}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"empty tool_calls is not a token", sse.OpenAI, `data: {"choices":[{"delta":{"tool_calls":[ ]}}]}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"content", sse.OpenAI, `data: {"choices":[{"delta":{"content":"x"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"reasoning", sse.OpenAI, `data: {"choices":[{"delta":{"reasoning":"x"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"reasoning_content", sse.OpenAI, `data: {"choices":[{"delta":{"reasoning_content":"x"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"tool call", sse.OpenAI, `data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"second choice has the token", sse.OpenAI, `data: {"choices":[{"delta":{"content":""}},{"delta":{"content":"y"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"prompt ids are not a token", sse.OpenAI, `data: {"choices":[{"text":"","prompt_token_ids":[1,2],"token_ids":[]}]}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"token ids", sse.OpenAI, `data: {"choices":[{"token_ids":[7]}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"no space after the colon, spaces in JSON", sse.OpenAI, `data:{ "choices" : [ { "finish_reason" : "stop" } ] , "usage" : { "prompt_tokens" : 3 , "completion_tokens" : 4 , "prompt_tokens_details" : { "cached_tokens" : 2 } } }` + "\n\n", scanResult{1, 0, false, false, false, "stop", Usage{3, 4, 2}}},
		{"finish reason inside content", sse.OpenAI, `data: {"choices":[{"delta":{"content":"\"finish_reason\":\"stop\",\\"},"finish_reason":null}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"usage and error inside content", sse.OpenAI, `data: {"choices":[{"delta":{"content":"},\"usage\":{\"prompt_tokens\":9},\"error\":{}"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"finish reason deeper down is not the choice's", sse.OpenAI, `data: {"metrics":{"finish_reason":"stop","usage":{"prompt_tokens":1},"error":{"a":1}},"choices":[]}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"null usage", sse.OpenAI, `data: {"choices":[],"usage":null,"error":null}` + "\n\n", scanResult{1, 0, false, false, false, "", none}},
		{"escaped backslash before the closing quote", sse.OpenAI, `data: {"choices":[{"delta":{"content":"\\"},"finish_reason":"stop"}]}` + "\n\n", scanResult{1, 0, true, false, false, "stop", none}},
		{"unknown finish reason", sse.OpenAI, `data: {"choices":[{"finish_reason":"because"}]}` + "\n\n", scanResult{1, 0, false, false, false, "because", none}},
		{"error event", sse.OpenAI, `data: {"error": {"message": "boom", "type": "X", "param": null, "code": 500}}` + "\n\ndata: [DONE]\n\n", scanResult{2, 0, false, true, true, "X 500", none}},
		{"flat error event", sse.OpenAI, `data: {"object":"error","message":"boom"}` + "\n\n", scanResult{1, 0, false, true, false, "", none}},
		{"comments and blank lines", sse.OpenAI, ": keep-alive\n\n\n\n: x\r\n\r\ndata: [DONE]\n\n", scanResult{1, 0, false, false, true, "", none}},
		{"DONE in content", sse.OpenAI, `data: {"choices":[{"delta":{"content":"data: [DONE]\n\n"}}]}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"half an event does not count", sse.OpenAI, `data: {"choices":[{"finish_reason":"stop"}]}` + "\n", scanResult{0, 0, false, false, false, "", none}},
		{"several data lines", sse.OpenAI, "data: {\ndata: }\n\n", scanResult{1, 1, false, false, false, "", none}},
		{"garbage", sse.OpenAI, "data: {\"choices\":[{{{\"finish_reason\":\n\ndata: ]\n\ndata:\n\ndata: \"\n\n", scanResult{4, 0, false, false, false, "", none}},
		{"anthropic without event lines", sse.Anthropic, `data: {"type":"content_block_delta","delta":{"text":"x"}}` + "\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"anthropic error", sse.Anthropic, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n", scanResult{1, 0, false, true, true, "overloaded_error", none}},
		{"responses failed", sse.Responses, "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n\n", scanResult{1, 0, false, true, true, "failed", none}},
		{"responses reasoning delta", sse.Responses, "event: response.reasoning_text.delta\ndata: {\"delta\":\"x\"}\n\n", scanResult{1, 0, true, false, false, "", none}},
		{"responses incomplete", sse.Responses, `data: {"type":"response.incomplete","response":{"status":"incomplete"}}` + "\n\n", scanResult{1, 0, false, false, true, "incomplete", none}},
	} {
		if got := scanAll(c.protocol, []byte(c.body)); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
		for i := range c.body {
			if got := scanAll(c.protocol, []byte(c.body[:i]), []byte(c.body[i:])); got != c.want {
				t.Errorf("%s cut at %d: %+v, want %+v", c.name, i, got, c.want)
				break
			}
		}
	}
}

// Events like the one before are known by their text; what differs is looked at.
func TestScanTemplate(t *testing.T) {
	ev := func(content, rest string) string {
		return `data: {"id":"x","choices":[{"index":0,"delta":{"content":"` + content + `"},` + rest + "}]}\n\n"
	}
	const null = `"finish_reason":null`
	head := ev("a", null) + ev("b", null)
	for _, c := range []struct{ body, finish string }{
		{head, ""},
		{head + ev("c", `"finish_reason":"stop"`), "stop"},
		{head + ev("", `"finish_reason":"stop"`), "stop"},
		{head + ev(`c"},"finish_reason":"length","x":{"y":"`, null), "length"}, // the text around is the same
		{head + ev(`c\"},\"finish_reason\":\"length\",\"x\":{\"y\":\"`, null), ""},
		{head + ev(`\\`, null) + ev(`\\"},"finish_reason":"length","x":{"y":"`, null), "length"},
		{head + ev(`\`, null) + ev("c", `"finish_reason":"stop"`), "stop"}, // malformed, then good
		{head + ev(strings.Repeat("long ", 100), null) + ev("c", `"finish_reason":"stop"`), "stop"},
		{ev("a", `"x":"`+strings.Repeat("y", 300)+`",`+null) + ev("b", `"x":"`+strings.Repeat("y", 300)+`","finish_reason":"stop"`), "stop"},
		{ev("a", `"finish_reason":"stop"`) + ev("b", `"finish_reason":"length"`), "length"},
	} {
		got := scanAll(sse.OpenAI, []byte(c.body))
		if got.Finish != c.finish || !got.Token || got.Events != int64(strings.Count(c.body, "\n\n")) {
			t.Errorf("%s: %+v", c.body, got)
		}
	}
	s := newScanner(sse.OpenAI)
	s.feed([]byte(head))
	if !s.template.Matches([]byte(strings.TrimSuffix(ev(`some \"text\" \u00e4`, null), "\n\n")[len("data: "):])) {
		t.Error("the template does not match its like")
	}
}

func TestUsageOf(t *testing.T) {
	for body, want := range map[string]Usage{
		`{"id":"x","usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":4,"prompt_tokens_details":null}}`:       {5, 4, -1},
		`{"usage":{"prompt_tokens":5,"completion_tokens":4,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":3}}}`: {5, 4, 3},
		`{"usage":{"input_tokens":5,"output_tokens":4,"cache_read_input_tokens":2}}`:                                       {7, 4, 2},
		`{"usage":{"cache_creation_input_tokens":3,"cache_read_input_tokens":2,"input_tokens":5,"output_tokens":4}}`:       {10, 4, 2},
		`{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":1},"output_tokens":4}}`:                        {5, 4, 1},
		`{"choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":7}"}}],"usage":{"prompt_tokens":1}}`:              {1, -1, -1},
		`{"a\\":"\\","b\"":"\"usage\\\"","usage\"":{"prompt_tokens":7},"usage":{"prompt_tokens":1}}`:                       {1, -1, -1},
		`{"usage":{"prompt_tokens":-1,"completion_tokens":1.5,"prompt_tokens_details":{"cached_tokens":"3"}}}`:             noUsage,
		`{"usage":{"prompt_tokens":99999999999999999999}}`:                                                                 noUsage,
		`{"usage":null}`: noUsage,
		`{"usage":`:      noUsage,
		`[]`:             noUsage,
		``:               noUsage,
	} {
		if got := UsageOf([]byte(body)); got != want {
			t.Errorf("UsageOf(%s) = %+v, want %+v", body, got, want)
		}
	}
}
