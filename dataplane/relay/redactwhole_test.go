package relay

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// A private member of a whole answer is found wherever it stands and however it is written;
// what the client, the model or a text says is not touched.
func TestRedactWholeResponses(t *testing.T) {
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
		redact.InPlace(whole, 200)
		if c.want != "" && strings.Contains(c.want, "transfer_params") && strings.Contains(c.in, `\u00`) {
			var got map[string]any
			if err := json.Unmarshal(whole, &got); err != nil || got["kv_transfer_params"] != strings.Repeat(" ", 6) || got["id"] != "x" {
				t.Errorf("%s\nbecame %s (%v)", c.in, whole, err)
			}
		} else {
			checkRedacted(t, c.in, string(whole), c.want)
		}
		marked := []byte("\ufeff \n" + c.in)
		if redact.InPlace(marked, 200); string(marked[5:]) != string(whole) {
			t.Errorf("behind a byte order mark: %s", marked)
		}
		for cut := range c.in { // an engine that broke off
			broken := []byte(c.in[:cut])
			if redact.InPlace(broken, 200); c.want != "" && strings.Contains(string(broken), "s3cret") {
				t.Errorf("%s\nbecame %s", c.in[:cut], broken)
			}
		}
	}
}

// A refusal that repeats what the engine was sent, as FastAPI's of a request that fails its
// checks does, tells nothing private of it; a schema in an answer is the client's.
func TestRedactRefusals(t *testing.T) {
	const replacement = `{"detail":[{"type":"missing","input":{"kv_transfer_params":{"remote_host":"a"}}}],"schema":{"kv_transfer_params":{"type":"string"}}}`
	answer, refusal := []byte(replacement), []byte(replacement)
	if redact.InPlace(answer, 200); string(answer) != replacement {
		t.Errorf("an answer became %s", answer)
	}
	if redact.InPlace(refusal, 422); strings.Contains(string(refusal), "remote_host") || strings.Contains(string(refusal), "string") || !json.Valid(refusal) {
		t.Errorf("a refusal became %s", refusal)
	}
}

// An engine's refusal that tells a handle in words keeps its status, code and type.
func TestRedactErrorText(t *testing.T) {
	for in, want := range map[string]string{
		`{"error":{"message":"Handshake failed: remote_host='10.0.0.3', remote_port=5600","type":"InternalServerError","code":500}}`: `{"error":{"message":"` + redact.ErrorText + `","type":"InternalServerError","code":500}}`,
		`{"detail":[{"msg":"bad \"kv_transfer_params\": {\"remote_block_ids\": [1, 2, 3, 4]} of this","type":"value_error"}]}`:       `{"detail":[{"msg":"` + redact.ErrorText + `","type":"value_error"}]}`,
		`{"object":"error","message":"no bootstrap_room 4711","code":400}`:                                                           `{"object":"error","message":"redacted","code":400}`,
		`{"object":"error","message":"no bootstrap_room 4711 is known","code":400}`:                                                  `{"object":"error","message":"the engine error is redacted","code":400}`,
		`{"error":{"message":"Handshake failed: remote\u005fhost='10.0.0.3', \u0072emote_port=5600"}}`:                               `{"error":{"message":"` + redact.ErrorText + `"}}`,
		`{"error":{"message":"not a letter: \u0072emote_pot=5600"}}`:                                                                 "",
		`{"message":"ctx_info"}`:                                         `{"message":"redacted"}`,
		`{"error":{"message":"max_tokens is too large: 4096"}}`:          "",
		`{"error":{"message":"it broke off in engine_id=4711 and more`:   `{"error":{"message":"the engine error is redacted`,
		`Internal error: engine_id=4711 is not known here, sorry to say`: redact.ErrorText,
		`Internal Server Error`:                                          "",
	} {
		answer, refusal := []byte(in), []byte(in)
		if redact.InPlace(answer, 200); string(answer) != in {
			t.Errorf("an answer became %s", answer)
		}
		redact.InPlace(refusal, 500)
		got := spaces.ReplaceAllString(string(refusal), "$1")
		if want == "" {
			want = in
		}
		if got != want || len(refusal) != len(in) {
			t.Errorf("%s\nbecame %s", in, refusal)
		}
	}
}

var spaces = regexp.MustCompile(` +("|$)`)

// Nor is it passed on in the event with which a stream ends, or one that another engine was asked behind.
func TestRedactErrorTextInStreams(t *testing.T) {
	for message, want := range map[string]string{
		`Failed: remote_host='s3cret', remote_port=70707 and a word more that is long enough`: redact.ErrorText,
		`Failed: remote_host='s3cret', remote_port=70707 and so on`:                           redact.ErrorText,
		`Failed: remote_host='s3cret', remote_port=70707 and so`:                              "the engine error is redacted",
		`no engine_id s3cret`: "redacted",
	} {
		testRedactErrorTextInStreams(t, message, want)
	}
}

func testRedactErrorTextInStreams(t *testing.T, message, replacement string) {
	for _, c := range []struct {
		protocol sse.Protocol
		event    string
	}{
		{sse.OpenAI, `data: {"error":{"message":"` + message + `","type":"InternalServerError","code":500}}`},
		{sse.OpenAI, `data: {"error":{"message":"` + message + `","detail":"","msg":"oops","code":500}}`},
		{sse.OpenAI, `data: {"\u0065rror":{"message":"` + message + `","type":"InternalServerError","code":500}}`},
		{sse.OpenAI, `data: {"object":"error","message":"` + message + `","type":"InternalServerError","code":500}`},
		{sse.OpenAI, `data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"` + message + `","status_code":500}}}`},
		{sse.Anthropic, "event: error\ndata: " + `{"type":"error","error":{"type":"api_error","message":"` + message + `"}}`},
		{sse.Responses, "event: response.failed\ndata: " + `{"type":"response.failed","response":{"status":"failed","error":{"code":"x","message":"` + message + `"}}}`},
	} {
		for _, step := range []int{1000, 40} { // 7 would be more than maxEventParts reads, or not
			for _, opt := range []Options{{}, {Rewrite: &identityRewriter{}}} {
				opt.Protocol = c.protocol
				whole := chunkEvent + c.event + "\n\ndata: [DONE]\n\n"
				_, dst, _ := relayOnce(t, opt, func(nc *net.TCPConn) {
					send(nc, streamHead)
					for rest := whole; rest != ""; rest = rest[min(step, len(rest)):] {
						send(nc, chunksOf(rest[:min(step, len(rest))]))
					}
					send(nc, sse.LastChunk)
					waitClosed(nc)
				})
				want := chunkEvent + strings.Replace(c.event, message, replacement+strings.Repeat(" ", len(message)-len(replacement)), 1) + "\n\ndata: [DONE]\n\n"
				want = strings.Replace(want, `"oops"`, `"    "`, 1) // no room for any
				if got := string(dechunk(t, dst.got)); got != want {
					t.Errorf("in chunks of %d: %s\nbecame %s", step, c.event, got)
				}
			}
		}
	}
}

// FuzzRedact: what is JSON stays so, as long as it was, and has no private member left that
// says anything, but in what is the client's own; as a whole answer, and as the data of an
// event, in whatever chunks and reads its stream comes.
func FuzzRedact(f *testing.F) {
	for _, c := range redactCases {
		f.Add([]byte(c.in), uint(7), uint(5))
	}
	f.Add([]byte(`[{"a":{"kv_transfer_param\u0073":{"b":[1]}}}]`), uint(3), uint(100))
	f.Add([]byte(`{"choices":[{"delta":{"content":"x\u00e9","kv_transfer_params":{"b":[1]}}}]}`), uint(100), uint(1000))
	f.Fuzz(func(t *testing.T, in []byte, chunk, read uint) {
		out := append([]byte(nil), in...)
		redact.InPlace(out, 200)
		streamed := redactedStream(t, in, int(chunk%512)+1, int(read%512)+1)
		if !json.Valid(in) || !strings.HasPrefix(strings.TrimLeft(string(in), " \t\r\n"), "{") {
			return
		}
		noneLeaked(t, in, out)
		if bytes.ContainsAny(in, "\n\r") {
			return // of more than one line
		}
		if len(streamed) != len(in) || !mayLeak(in) && !bytes.Equal(streamed, in) {
			t.Fatalf("%q\nbecame %q", in, streamed)
		}
		noneLeaked(t, in, streamed)
	})
}

// mayLeak is true of all but what has no private name, as far as that is simply seen.
func mayLeak(in []byte) bool {
	return bytes.Contains(in, []byte("_params")) || bytes.Contains(in, []byte(`\u`))
}

// redactedStream gives what a client gets of data as the second of three events.
func redactedStream(t *testing.T, data []byte, chunk, read int) []byte {
	const before, after = chunkEvent + "data: ", "\n\n" + chunkEvent + "data: [DONE]\n\n"
	var dst collectingConn
	s := newDiscardStream()
	s.dst = &dst
	s.resp = new(upstream.Response)
	defer func() { s.scan.Release(); s.editor.release() }()
	var framed []byte
	for rest := []byte(before + string(data) + after); len(rest) > 0; {
		n := min(chunk, len(rest))
		framed = sse.AppendChunk(framed, rest[:n])
		rest = rest[n:]
	}
	for rest := append(framed, sse.LastChunk...); len(rest) > 0; {
		n := min(read, len(rest))
		if ended := s.forward(rest[:n:n], time.Now()); ended != (n == len(rest)) {
			t.Fatalf("%q ended its stream: %v", data, s.err)
		}
		rest = rest[n:]
	}
	out := dechunk(t, dst.b)
	if len(out) != len(before)+len(data)+len(after) || string(out[:len(before)]) != before {
		t.Fatalf("%q\nbecame %q", data, out)
	}
	return out[len(before) : len(before)+len(data)]
}

// collectingConn is a client that keeps what it gets.
type collectingConn struct {
	noHooks
	b []byte
}

func (g *collectingConn) Write(p []byte) (int, error)      { g.b = append(g.b, p...); return len(p), nil }
func (g *collectingConn) SetWriteDeadline(time.Time) error { return nil }

// noneLeaked looks through all of out, which in became, members that stand twice too.
func noneLeaked(t *testing.T, in, out []byte) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(out))
	d.UseNumber() // some are beyond a float64
	var inside []json.Delim
	for key := false; ; {
		token, err := d.Token()
		if err == io.EOF && len(inside) == 0 {
			return
		}
		if err != nil {
			t.Fatalf("%q\nbecame %q: %v", in, out, err)
		}
		name, isString := token.(string)
		if key && isString {
			if own := redact.IsExemptMember([]byte(name)); own || redact.IsPrivate([]byte(name)) {
				var value any
				if err := d.Decode(&value); err != nil || !own && leaks(value) {
					t.Fatalf("%q\nbecame %q: %s is %v (%v)", in, out, name, value, err)
				}
				continue
			}
			key = false
			continue
		}
		if delim, ok := token.(json.Delim); ok {
			if delim == '{' || delim == '[' {
				inside = append(inside, delim)
			} else {
				inside = inside[:len(inside)-1]
			}
		}
		key = len(inside) > 0 && inside[len(inside)-1] == '{'
	}
}

// leaks says whether a private member's value says anything.
func leaks(value any) bool {
	switch v := value.(type) {
	case string:
		return strings.Trim(v, " ") != ""
	case json.Number:
		return v != "0"
	case map[string]any:
		return len(v) > 0
	case []any:
		return len(v) > 0
	}
	return false
}

func BenchmarkRedact(b *testing.B) {
	code := strings.Repeat(`It is said that \"water\" boils at 100 degrees.\n`, 80)
	text := strings.Repeat("It is said that water boils at a hundred degrees. ", 4)
	text = strings.Repeat(text+`\n`, 20)
	for name, body := range map[string]string{
		"prose, error null": `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":null}`,
		"code, error null":  `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + code + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":null}`,
		"error":             `{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5},"kv_transfer_params":` + handle + `}`,
	} {
		b.Run(name, func(b *testing.B) {
			room := make([]byte, len(body))
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				copy(room, body)
				redact.InPlace(room, 200)
			}
		})
	}
}
