package relay

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"net"
	"reflect"
	"regexp"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

const handle = `{"remote_block_ids":[[70707]],"remote_host":"s3cret }]\"","n":{"a":[1]},"remote_port":70707}`

// redactCases are events' data, and what is left of each: "": all.
var redactCases = []struct{ in, want string }{
	{`{"choices":[{"delta":{"content":"kv_transfer_params\":{"}}],"kv_transfer_params":` + handle + `,"usage":null}`,
		`{"choices":[{"delta":{"content":"kv_transfer_params\":{"}}],"kv_transfer_params":null,"usage":null}`},
	{`{"kv_transfer_params" : "s3cret\"70707","ec_transfer_params":[70707,{"a":"s3cret"}],"id":"x"}`, `{"kv_transfer_params":"","ec_transfer_params":[],"id":"x"}`},
	{`{"kv_transfer_params":70707.5e3,"choices":[{"disaggregated_params":` + handle + `,"text":"a"},{"text":"b","disaggregated_params": -70707 }]}`,
		`{"kv_transfer_params":0,"choices":[{"disaggregated_params":null,"text":"a"},{"text":"b","disaggregated_params":0}]}`},
	{`{"kv_transfer_params": { "remote_host":"s3cret"},"disaggregated_params":` + handle + `}`, `{"kv_transfer_params":{},"disaggregated_params":null}`},
	{`{"type":"response.completed","response":{"output":[{"kv_transfer_params":1}],"kv_transfer_params":` + handle + `}}`,
		`{"type":"response.completed","response":{"output":[{"kv_transfer_params":0}],"kv_transfer_params":null}}`},
	{`{"type":"message_start","message":{"kv_transfer_params":` + handle + `,"id":"m"}}`, `{"type":"message_start","message":{"kv_transfer_params":null,"id":"m"}}`},
	{`{"kv_transfer_params":null,"a":{"kv_transfer_params":{"deep":"s3cret"}},"choices":[{"message":{"kv_transfer_params":1}},["kv_transfer_params"]]}`,
		`{"kv_transfer_params":null,"a":{"kv_transfer_params":null},"choices":[{"message":{"kv_transfer_params":0}},["kv_transfer_params"]]}`},
	{`{"choices":[{"delta":{"content":"a","kv_transfer_params":` + handle + `,"x":[[{"disaggregated_params":[70707]}]]}}],"usage":{"b":{"ec_transfer_params":"s3cret"}}}`,
		`{"choices":[{"delta":{"content":"a","kv_transfer_params":null,"x":[[{"disaggregated_params":[]}]]}}],"usage":{"b":{"ec_transfer_params":""}}}`},
	{`{"kv_transfer_param\u0073":` + handle + `,"delta":{"\u006Bv\u005ftransfer_params" : "s3cret","\u0065c_transfer_params":70707},"id":"x"}`,
		`{"kv_transfer_params":null,"delta":{"kv_transfer_params":"","ec_transfer_params":0},"id":"x"}`},
	{`{"delta":{"input":{"kv_transfer_params":{"a":1}},"tools":[{"kv_transfer_params":{"a":1}},[]],"metadata":"x"},"kv_transfer_params":` + handle + `}`,
		`{"delta":{"input":{"kv_transfer_params":{"a":1}},"tools":[{"kv_transfer_params":{"a":1}},[]],"metadata":"x"},"kv_transfer_params":null}`},
	{`{"kv_transfer_params\u0000":{"a":1},"kv_transfer_params\n":2,"\\u006bv_transfer_params":3,"xkv_transfer_params":{},"text":"\u006bv_transfer_params"}`, ""},
	{`{"a":"kv_transfer_params","b":["kv_transfer_params",{"c":1}],"c":"\",\"kv_transfer_params\":{\"x\":1}"}`, ""},
	{`{"kv_transfer_params":null,"choices":[{"disaggregated_params":null,"delta":{"tool_calls":[{"function":{"arguments":"{\"kv_transfer_params\": 1}"}}]}}]}`, ""},
	{`[{"kv_transfer_params":1}]`, `[{"kv_transfer_params":0}]`},
	{`[DONE]`, ""},
	{`{"kv_transfer_params":{},"choices":[]}`, ""},
}

var emptyForms = regexp.MustCompile(`_params":(\{\}|" *")`)

// checkRedacted says what is wrong with out, which in became.
func checkRedacted(t *testing.T, in, out, want string) {
	t.Helper()
	if want == "" {
		if out != in {
			t.Errorf("%s\nbecame %s", in, out)
		}
		return
	}
	var got, meant any
	err := json.Unmarshal([]byte(out), &got)
	if json.Unmarshal([]byte(want), &meant) != nil {
		t.Fatal(want)
	}
	// In pieces an object may be emptied in the place of null.
	norm := func(v any) any {
		b, _ := json.Marshal(v)
		return emptyForms.ReplaceAllString(string(b), `_params":null`)
	}
	if err != nil || len(out) != len(in) || !reflect.DeepEqual(norm(got), norm(meant)) {
		t.Errorf("%s\nbecame %s (%v)\nwant   %s", in, out, err, want)
	}
}

func TestRedact(t *testing.T) {
	for _, c := range redactCases {
		body := []byte(c.in)
		redact.InPlace(body, 200)
		checkRedacted(t, c.in, string(body), c.want)
		for cut := range len(c.in) + 1 {
			body := []byte(c.in)
			var v redact.Redactor
			v.Feed(body[:cut:cut])
			v.Feed(body[cut:])
			checkRedacted(t, c.in, string(body), c.want)
		}
	}
	// A whole answer may be events.
	var events, veiled string
	for _, c := range redactCases {
		body := []byte(c.in)
		var v redact.Redactor
		v.Feed(body)
		events += "data: " + c.in + "\r\n\r\n"
		veiled += "data: " + string(body) + "\r\n\r\n"
	}
	whole := []byte(events)
	if redact.InPlace(whole, 200); string(whole) != veiled {
		t.Errorf("%s\nbecame %s\nwant   %s", events, whole, veiled)
	}
	// Data of several lines, and what stands between.
	event := "event: x\r\nid: {\"kv_transfer_params\":1}\r\ndata: {\"kv_transfer_params\": {\"a\":\r\ndata: \"s3cret\"},\r\n: data: \"\r\ndata: \"b\":1}\r\n\r\n"
	b := []byte(event + event)
	v := redact.Redactor{DetectFormat: true}
	v.Feed(b)
	if got := string(b); strings.Contains(got, "s3cret") || strings.Count(got, "\r\ndata: ") != 6 || strings.Count(got, "\"b\":1}\r\n\r\n") != 2 || strings.Count(got, "id: {\"kv_transfer_params    \r\n") != 2 {
		t.Errorf("%q", got)
	}
}

// allEnds end an answer, whatever the protocol.
var allEnds = []string{": a comment\n\n", "event: message_stop\ndata: {}\n\n", "event: response.completed\ndata: {}\n\n", "data: [DONE]\n\n"}

// Nothing private reaches a client, in whatever framing and pieces it comes, rewritten or not; all else is as it was, byte by byte.
func TestPrivateMembersOfStreams(t *testing.T) {
	var events, want []string
	for _, c := range redactCases {
		if c.in == "[DONE]" {
			continue // nothing passes behind it: it stands at the end
		}
		content := `{"choices":[{"index":0,"delta":{"content":"hi"}}]}`
		for _, in := range []string{content, c.in} {
			events = append(events, "data: "+in+"\n\n")
		}
		want = append(want, "", c.want)
	}
	for _, end := range allEnds {
		events, want = append(events, end), append(want, "")
	}
	whole := strings.Join(events, "")
	long := strings.Repeat("x", 100<<10)
	for _, protocol := range []sse.Protocol{sse.OpenAI, sse.Anthropic, sse.Responses} {
		for name, framed := range map[string]string{
			"an event a chunk": chunksOf(events...) + sse.LastChunk,
			"one chunk":        chunksOf(whole) + sse.LastChunk,
			"chunks anywhere":  anyChunks(whole) + sse.LastChunk,
			"to close":         whole,
			"sized":            whole,
		} {
			head := streamHead
			switch name {
			case "to close":
				head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
			case "sized":
				head = fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n", len(whole))
			}
			for _, step := range []int{len(framed), 997, 100, 61, 7} {
				for _, drive := range []string{"as it comes", "rewritten"} {
					opt := Options{Protocol: protocol}
					if drive == "rewritten" {
						opt.Rewrite = &identityRewriter{}
					}
					t.Run(fmt.Sprint(protocol, "/", name, "/", step, "/", drive), func(t *testing.T) {
						serve := func(nc *net.TCPConn) {
							send(nc, head)
							for rest := framed; rest != ""; rest = rest[min(step, len(rest)):] {
								send(nc, rest[:min(step, len(rest))])
							}
							if name != "to close" {
								waitClosed(nc)
							}
						}
						res, dst, _ := relayOnce(t, opt, serve)
						got := dst.got
						if res.Err != nil && protocol == sse.OpenAI {
							t.Fatalf("%+v", res)
						}
						if strings.Contains(head, "chunked") {
							if drive != "rewritten" && len(got) != len(framed) {
								t.Fatalf("%d bytes of %d", len(got), len(framed))
							}
							got = dechunk(t, got)
						}
						if strings.Contains(string(got), "s3cret") || strings.Contains(string(got), "70707") {
							t.Fatalf("%s", got)
						}
						out := strings.SplitAfter(string(got), "\n\n")
						if len(out) < len(events) {
							t.Fatalf("%q", out)
						}
						for i, in := range events {
							data := func(s string) string { return strings.TrimSuffix(strings.TrimPrefix(s, "data: "), "\n\n") }
							checkRedacted(t, data(in), data(out[i]), want[i])
						}
					})
				}
			}
		}
	}
	// An event that is too long to be held flows, and is looked at on its way.
	for _, at := range []string{`{"kv_transfer_params":` + handle + `,"long":"` + long + `"}`, `{"long":"` + long + `","kv_transfer_params":` + handle + `}`, `{"kv_transfer_params":{"s3cret":"` + long + `","n":70707}}`} {
		events := []string{"data: {\"choices\":[]}\n\n", "data: " + at + "\n\n", "data: {\"kv_transfer_params\":" + handle + "}\n\n", "data: [DONE]\n\n"}
		framed := chunksOf(events...) + sse.LastChunk
		res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) { send(nc, streamHead+framed); waitClosed(nc) })
		if got := string(dst.got); res.Err != nil || len(got) != len(framed) || strings.Contains(got, "s3cret") || strings.Contains(got, "70707") || !strings.HasSuffix(got, framed[len(framed)-20:]) {
			t.Errorf("%+v, %d bytes of %d, %.300q", res, len(got), len(framed), got)
		}
	}
}

// Nor is it passed on in lines without data, however the lines end, and whatever the engine says
// of what it sends.
func TestPrivateMembersOutsideData(t *testing.T) {
	const first = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n"
	ends := strings.Join(allEnds, "")
	for in, want := range map[string]string{
		": keep-alive, of any params_\n\n":                                   "",
		": {\"kv_transfer_params\":{\"a\":\"s3cret\"}}\n\n":                  ": {\"kv_transfer_params",
		": done, kv_transfer_params={'remote_host': 's3cret'}\r\n\r\n":       ": done, kv_transfer_params",
		": \\u006bv_transfer_params s3cret\n\n":                              ": \\u006bv_transfer_params",
		": \"ec_transfer_params\": s3cret\ndata: {\"choices\":[]}\n\n":       ": \"ec_transfer_params",
		"data: {\"choices\":[]}\nid: disaggregated_params s3cret\n\n":        "data: {\"choices\":[]}\nid: disaggregated_params",
		"event: kv_transfer_params remote_host is s3cret\ndata: {}\n\n":      "event: kv_transfer_params",
		"kv_transfer_params: s3cret\n\n":                                     "kv_transfer_params",
		"data: kv_transfer_params=s3cret\n\n":                                "data: kv_transfer_params",
		"data: {'kv_transfer_params':{'remote_host':'s3cret'}}\n\n":          "data: {'kv_transfer_params",
		"data: {\"a\":[1, 2.5e3,true],kv_transfer_params:\"s3cret\"}\n\n":    ",true],kv_transfer_params",
		"data: {\"a\":\"\\\",\"kv_transfer_params\":{\"a\":\"s3cret\"}}\n\n": "\"kv_transfer_params",
		"data: {ec_transfer_params:'s3cret'}\n\n":                            "data: {ec_transfer_params",
		"data: {}\rdata: {\"kv_transfer_params\":\"s3cret\"}\r\r\n":          "data: {\"kv_transfer_params\":\"",
		"\ufeffdata: {\"kv_transfer_params\":\"s3cret\"}\n\n":                "\ufeffdata: {\"kv_transfer_params\":\"",
	} {
		for _, protocol := range []sse.Protocol{sse.OpenAI, sse.Anthropic, sse.Responses} {
			for _, kind := range []string{"Content-Type: text/event-stream\r\n", "", "Content-Type: text/plain\r\n", "Content-Type: application/json\r\n"} {
				for _, step := range []int{1000, 5, 1} {
					for _, events := range []string{in + first, first + first + in} {
						if strings.HasPrefix(in, "\ufeff") && events[0] == 'd' {
							continue
						}
						res, dst, _ := relayOnce(t, Options{Protocol: protocol}, func(nc *net.TCPConn) {
							send(nc, "HTTP/1.1 200 OK\r\n"+kind+"Transfer-Encoding: chunked\r\n\r\n")
							for rest := events + ends; rest != ""; rest = rest[min(step, len(rest)):] {
								send(nc, chunksOf(rest[:min(step, len(rest))]))
							}
							send(nc, sse.LastChunk)
							waitClosed(nc)
						})
						got := string(dechunk(t, dst.got))
						if protocol == sse.OpenAI && res.Err != nil || strings.Contains(got, "s3cret") || len(got) != len(events)+len(ends) ||
							!strings.Contains(got, want) || want == "" && !strings.Contains(got, in) || !strings.Contains(got, first) {
							t.Fatalf("%v, %q by %d: %q\nbecame %q (%+v)", protocol, kind, step, events, got, res)
						}
					}
				}
			}
		}
	}
}

// A whole answer that is passed on as it comes hides them too.
func TestPrivateMembersOfAnswers(t *testing.T) {
	for _, c := range redactCases {
		for _, step := range []int{1000, 9, 1} {
			res, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) {
				send(nc, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
				for rest := c.in; rest != ""; rest = rest[min(step, len(rest)):] {
					send(nc, chunksOf(rest[:min(step, len(rest))]))
				}
				send(nc, sse.LastChunk)
				waitClosed(nc)
			})
			if res.Err != nil {
				t.Fatal(res.Err)
			}
			checkRedacted(t, c.in, string(dechunk(t, dst.got)), c.want)
		}
	}
}

// identityRewriter is a Rewriter that changes nothing.
type identityRewriter struct{}

func (*identityRewriter) Event(dst, event []byte) []byte { return append(dst, event...) }

// anyChunks frames text in chunks that end anywhere.
func anyChunks(text string) string {
	r := rand.New(rand.NewSource(1))
	var b strings.Builder
	for text != "" {
		n := min(1+r.Intn(80), len(text))
		b.WriteString(chunksOf(text[:n]))
		text = text[n:]
	}
	return b.String()
}

// Where nothing private says more than null, an answer is not walked through; where
// something does, or may, it is.
func TestRedactScansOnlyPrivate(t *testing.T) {
	for in, tells := range map[string]bool{
		`{"kv_transfer_params":null,"ec_transfer_params" : null,"id":"x"}`:                    false,
		`{"choices":[{"disaggregated_params":null}],"sampling_params":{"n":1}}`:               false,
		`{"kv_transfer_params":null,"choices":[{"disaggregated_params":{"a":1}}]}`:            true,
		`{"kv_transfer_params":null,"kv_transfer_params":"s3cret"}`:                           true,
		"{\"kv_transfer_params\"\n:\t{}}":                                                     true,
		`{"kv_transfer_params"`:                                                               true,
		`{"sampling_params":null,"choices":[{"text":"\"kv_transfer_params\": is a member"}]}`: false,
	} {
		if got := redact.MayHoldPrivateValue([]byte(in)); got != tells {
			t.Errorf("%s: %v, want %v", in, got, tells)
		}
	}
}
