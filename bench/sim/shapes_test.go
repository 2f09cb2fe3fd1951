package sim

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files instead of comparing")

// golden compares got with testdata/name, or writes it with -rewrite.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs (go test -rewrite updates it)\n got %s\nwant %s", file, got, want)
	}
}

// volatile matches values that change from run to run, which are replaced before a comparison.
var volatile = []struct {
	re   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`"(created|created_at)":\d+`), `"$1":1700000000`},
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "ENGINE"},
	{regexp.MustCompile(`("remote_request_id":"[^"]*-)[0-9a-f]{8}"`), `${1}SUFFIX"`},
	{regexp.MustCompile(`"remote_port":\d+`), `"remote_port":5600`},
	{regexp.MustCompile(`embd-[0-9a-f]{16}`), "embd-ID"},
	{regexp.MustCompile(`tcp://127.0.0.1:\d+`), "tcp://127.0.0.1:PORT"},
	{regexp.MustCompile(`process_start_time_seconds \d+\.\d+`), "process_start_time_seconds T"},
	{regexp.MustCompile(`"(endpoint_port_base|replay_endpoint_port_base)":\d+`), `"$1":5557`},
}

func normalized(s string) string {
	for _, v := range volatile {
		s = v.re.ReplaceAllString(s, v.with)
	}
	return s
}

const volatileMetrics = `"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"},"unit":{"enum":["C","F"]}}}}}]`

// TestShapes holds every answer's bytes, against captures of vLLM 0.32 by review.
func TestShapes(t *testing.T) {
	cases := []struct{ name, path, body string }{
		{"chat", "/v1/chat/completions", `{"model":"sim","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"Hello"}]}],"max_tokens":5}`},
		{"chat_stream", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":4,"stream":true}`},
		{"chat_stream_usage_ids", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_completion_tokens":2,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true}`},
		{"chat_stream_continuous", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
		{"chat_stream_n2", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"stream":true,"n":2}`},
		{"chat_n2", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"n":2,"return_token_ids":true}`},
		{"chat_tool", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"tool_choice":"required",` + volatileMetrics + `}`},
		{"chat_tool_stream", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"stream":true,"tool_choice":{"type":"function","function":{"name":"get_weather"}},` + volatileMetrics + `}`},
		{"chat_tool_asked", "/v1/chat/completions", `{"messages":[{"role":"user","content":"use get_weather please"}],` + volatileMetrics + `}`},
		{"chat_prefill", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`},
		{"chat_prefill_stream", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":1,"stream":true,"kv_transfer_params":{"do_remote_decode":true}}`},
		{"completion", "/v1/completions", `{"prompt":"Once upon a time","max_tokens":4,"return_token_ids":true}`},
		{"completion_list", "/v1/completions", `{"prompt":[[300,301],"and so"],"max_tokens":2,"n":2}`},
		{"completion_stream", "/v1/completions", `{"prompt":[300,301,302],"max_tokens":3,"stream":true,"return_token_ids":true}`},
		{"completion_stream_usage", "/v1/completions", `{"prompt":[300,301,302],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}`},
		{"completion_logprobs", "/v1/completions", `{"prompt":"Once upon a time","max_tokens":3,"logprobs":2}`},
		{"completion_stream_logprobs", "/v1/completions", `{"prompt":"Once upon a time","max_tokens":3,"logprobs":0,"stream":true}`},
		{"chat_logprobs", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"logprobs":true}`},
		{"chat_stream_logprobs", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2,"logprobs":true,"top_logprobs":2,"stream":true}`},
		{"generate_stream_logprobs", "/inference/v1/generate", `{"token_ids":[300,301,302],"sampling_params":{"max_tokens":2,"logprobs":2},"stream":true}`},
		{"chat_choice", "/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"structured_outputs":{"choice":["no","yes, but late","maybe"]}}`},
		{"completion_echo", "/v1/completions", `{"prompt":"Once upon","max_tokens":2,"echo":true}`},
		{"generate", "/inference/v1/generate", `{"token_ids":[300,301,302],"sampling_params":{"max_tokens":3}}`},
		{"generate_stream", "/inference/v1/generate", `{"token_ids":[300,301,302],"sampling_params":{"max_tokens":2},"stream":true}`},
		{"generate_prefill", "/inference/v1/generate", `{"token_ids":[300,301,302],"sampling_params":{"max_tokens":1},"kv_transfer_params":{"do_remote_decode":true}}`},
		{"responses", "/v1/responses", `{"input":"Hello","instructions":"Be brief.","max_output_tokens":3}`},
		{"responses_stream", "/v1/responses", `{"input":[{"role":"user","content":[{"type":"input_text","text":"Hello"}]}],"max_output_tokens":3,"stream":true}`},
		{"responses_tool_stream", "/v1/responses", `{"input":"Hi","stream":true,"tool_choice":"required","tools":[{"type":"function","name":"f","parameters":{"properties":{"a":{"type":"boolean"}}}}]}`},
		{"responses_prefill", "/v1/responses", `{"input":"Hello","max_output_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`},
		{"messages", "/v1/messages", `{"system":"Be brief.","messages":[{"role":"user","content":"Hello"}],"max_tokens":3}`},
		{"messages_stream", "/v1/messages", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"stream":true}`},
		{"messages_tool", "/v1/messages", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":99,"tool_choice":{"type":"any"},"tools":[{"name":"f","input_schema":{"properties":{"a":{"type":"string"}}}}]}`},
		{"messages_tool_stream", "/v1/messages", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":99,"stream":true,"tool_choice":{"type":"any"},"tools":[{"name":"f","input_schema":{"properties":{"a":{"type":"string"}}}}]}`},
		{"messages_prefill", "/v1/messages", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`},
		{"count_tokens", "/v1/messages/count_tokens", `{"messages":[{"role":"user","content":"Hello"}]}`},
		{"embeddings", "/v1/embeddings", `{"input":["a","b"],"dimensions":3}`},
		{"embeddings_base64", "/v1/embeddings", `{"input":[300,301],"dimensions":3,"encoding_format":"base64"}`},
		{"tokenize", "/tokenize", `{"prompt":"Hello, brave new world"}`},
		{"tokenize_chat", "/tokenize", `{"messages":[{"role":"user","content":"Hello"}],"return_token_strs":true}`},
		{"detokenize", "/detokenize", `{"tokens":[300,301,302]}`},

		{"error_json", "/v1/chat/completions", `{"messages":`},
		{"error_type", "/v1/chat/completions", `{"messages":"x"}`},
		{"error_no_messages", "/v1/chat/completions", `{}`},
		{"error_model", "/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"Hello"}]}`},
		{"error_model_messages", "/v1/messages", `{"model":"other","max_tokens":1,"messages":[{"role":"user","content":"Hello"}]}`},
		{"error_params", "/v1/completions", `{"prompt":"a","kv_transfer_params":"abc"}`},
		{"error_too_long", "/v1/completions", `{"prompt":"a","max_tokens":100000000}`},
		{"error_max_tokens", "/v1/completions", `{"prompt":"a","max_tokens":0}`},
		{"error_min_tokens", "/v1/completions", `{"prompt":"a","max_tokens":1,"min_tokens":5}`},
		{"error_stream_options", "/v1/completions", `{"prompt":"a","stream_options":{"include_usage":true}}`},
		{"error_n", "/v1/completions", `{"prompt":"a","n":0}`},
		{"error_prompt", "/v1/completions", `{"prompt":[]}`},
		{"error_ids", "/inference/v1/generate", `{"token_ids":[1,-2]}`},
		{"error_path", "/v1/nowhere", `{}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := fastOptions(t, Options{})
			a := post(t, e, c.path, c.body, "X-Request-Id", "r1")
			golden(t, c.name+".txt", normalized(fmt.Sprintf("POST %s\n%s\n\n%d\n%s\n", c.path, c.body, a.status, a.body)))
		})
	}
}

func TestGetShapes(t *testing.T) {
	e := fastOptions(t, Options{Ranks: 2, MaxModelLen: 4096})
	var b strings.Builder
	for _, path := range []string{"/health", "/version", "/load", "/kv_event_sources", "/server_info", "/is_sleeping", "/metrics", "/nowhere", "/v1/chat/completions"} {
		status, body := get(t, e.URL()+path)
		fmt.Fprintf(&b, "GET %s\n%d\n%s\n\n", path, status, body)
	}
	golden(t, "get.txt", normalized(b.String()))
	_, body := get(t, e.URL()+"/v1/models")
	for _, want := range []string{`"id":"sim"`, `"max_model_len":4096`, `"object":"list"`} {
		if !strings.Contains(body, want) {
			t.Errorf("/v1/models lacks %s: %s", want, body)
		}
	}
}

// TestChunks holds the framing: one SSE event to one HTTP chunk.
func TestChunks(t *testing.T) {
	e := fastOptions(t, Options{})
	raw := rawExchange(t, e.Addr(), request("/v1/chat/completions", `{"messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"stream":true}`, "Connection: close"))
	head, body, _ := strings.Cut(raw, "\r\n\r\n")
	for _, want := range []string{"HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked"} {
		if !strings.Contains(head, want) {
			t.Errorf("head lacks %q: %s", want, head)
		}
	}
	chunks := unchunk(t, body)
	for _, c := range chunks {
		if !strings.HasPrefix(c, "data: ") || !strings.HasSuffix(c, "\n\n") || strings.Count(c, "\n\n") != 1 {
			t.Errorf("chunk is not one event: %q", c)
		}
	}
	if len(chunks) != 5 { // role, three tokens, [DONE]
		t.Errorf("%d chunks, want 5: %q", len(chunks), chunks)
	}
}

func TestCoalesce(t *testing.T) {
	e := fastOptions(t, Options{Coalesce: true})
	raw := rawExchange(t, e.Addr(), request("/v1/completions", `{"prompt":"a","max_tokens":4,"n":3,"stream":true}`, "Connection: close"))
	_, body, _ := strings.Cut(raw, "\r\n\r\n")
	events := 0
	chunks := unchunk(t, body)
	for _, c := range chunks {
		events += strings.Count(c, "\n\n")
	}
	if events != 13 || len(chunks) > 5 {
		t.Errorf("%d events in %d chunks, want 13 in at most 5", events, len(chunks))
	}
}

func TestStopStrings(t *testing.T) {
	e := fastOptions(t, Options{})
	ask := func(stop string, stream bool) string {
		return fmt.Sprintf(`{"prompt":"Once upon","max_tokens":64,"ignore_eos":true,"stop":%s,"stream":%v}`, stop, stream)
	}
	full := post(t, e, "/v1/completions", ask("null", false)).text()
	words := strings.Fields(full)
	stop := words[20][:2] + "" // in the middle of a word
	at := strings.Index(full, stop)
	a := post(t, e, "/v1/completions", ask(`["nothing like it","`+stop+`"]`, false))
	if got := a.text(); got != full[:at] {
		t.Errorf("stopped text %q, want %q", got, full[:at])
	}
	if r := a.choice()["stop_reason"]; r != stop {
		t.Errorf("stop_reason %v, want %q", r, stop)
	}
	streamed := streamText(post(t, e, "/v1/completions", ask(`"`+stop+`"`, true)).body)
	if streamed != full[:at] {
		t.Errorf("streamed text %q, want %q", streamed, full[:at])
	}
}
