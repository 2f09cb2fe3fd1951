package relay

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

// bigEvents are events far over the bound, and what is to be seen of each: what a client
// may have sent (instructions, tools) and the answer are in the same event as the usage.
func bigEvents() []bigEvent {
	long := strings.Repeat(`lines \"of\" text {[,\\ `, 3<<10)
	ids := strings.Repeat("151643, ", 4<<10) + "1"
	item := `{"type":"message","id":"m","content":[{"type":"output_text","text":"` + long + `","annotations":[],"logprobs":[[` + ids + `]]}]}`
	usage := `"usage":{"input_tokens":11,"input_tokens_details":{"cached_tokens":8},"output_tokens":22000,"output_tokens_details":{"reasoning_tokens":3},"total_tokens":22011}`
	response := func(kind, status, more string) string {
		return `{"type":"` + kind + `","sequence_number":7,"response":{"id":"r","instructions":"` + long + `","tools":[` + item + `],"metadata":{"usage":"x"},` + more +
			`"status":"` + status + `","output":[` + strings.Repeat(item+" , ", 4) + item + `],"text":{"format":{"schema":{"usage":{"input_tokens":1},"a":{"b":{"c":"` + long + `"}}}}},` + usage + `,"user":null}}`
	}
	chat := `{"choices":[{"delta":{"tool_calls":[%s]},"logprobs":{"content":[` + item + `]},"finish_reason":"stop","text":"%s"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}`
	spread := strings.Repeat(`{"index":1,"delta":{"role":"assistant"},"finish_reason":null},`, 4000) + "{}"
	return []bigEvent{
		{"response.completed", sse.Responses, "event: response.completed\ndata: " + response("response.completed", "completed", ""), scanResult{1, 0, false, false, true, "completed", Usage{11, 22000, 8}}},
		{"without its event line", sse.Responses, "data:" + response("response.incomplete", "incomplete", ""), scanResult{1, 0, false, false, true, "incomplete", Usage{11, 22000, 8}}},
		{"response.failed", sse.Responses, "id: 4\nevent: response.failed\ndata: " + response("response.failed", "failed", `"error":{"message":"`+long+`"},`), scanResult{1, 0, false, true, true, "failed", Usage{11, 22000, 8}}},
		{"response.created ends nothing", sse.Responses, "event: response.created\ndata: " + response("response.created", "in_progress", ""), scanResult{1, 0, false, false, false, "", Usage{11, 22000, 8}}},
		{"message_delta", sse.Anthropic, "event: message_delta\ndata: " + `{"type":"message_delta","delta":{"x":"` + long + `","stop_reason":"end_turn"},"usage":{"output_tokens":15}}`, scanResult{1, 0, false, false, false, "end_turn", Usage{-1, 15, -1}}},
		{"message_stop", sse.Anthropic, `data: {"x":` + item + `,"type":"message_stop"}`, scanResult{1, 0, false, false, true, "", noUsage}},
		{"content", sse.OpenAI, fmt.Sprintf(`data: `+chat, "", long), scanResult{1, 0, true, false, false, "stop", Usage{3, 4, 2}}},
		{"tool calls", sse.OpenAI, fmt.Sprintf(`data: `+chat, item, ""), scanResult{1, 0, true, false, false, "stop", Usage{3, 4, 2}}},
		{"no token", sse.OpenAI, fmt.Sprintf(`data: `+chat, " ", ""), scanResult{1, 0, false, false, false, "stop", Usage{3, 4, 2}}},
		{"ids", sse.OpenAI, `data: {"prompt_token_ids":[` + ids + `],"choices":[{"token_ids":[` + ids + `],"prompt_token_ids":[` + ids + `],"finish_reason":"length"}]}`, scanResult{1, 0, true, false, false, "length", noUsage}},
		{"native", sse.OpenAI, `data: {"text":"` + long + `","output_ids":[` + ids + `],"meta_info":{"input_token_logprobs":[[` + ids + `]],"prompt_tokens":5,"completion_tokens":6,"finish_reason":{"type":"stop"}}}`, scanResult{1, 0, true, false, false, "stop", Usage{5, 6, -1}}},
		{"error", sse.OpenAI, `data: {"error":{"message":"` + long + `"}}`, scanResult{1, 0, false, true, false, "", noUsage}},
		{"a key that is long", sse.OpenAI, `data: {"` + long + `":1,"choices":[{"finish_reason":"stop"}]}`, scanResult{1, 0, false, false, false, "stop", noUsage}},
		{"behind a comment", sse.OpenAI, `: {[" ` + long + "\ndata: " + `{"choices":[{"finish_reason":"stop"}]}`, scanResult{1, 0, false, false, false, "stop", noUsage}},
		{"choices beyond the bound", sse.OpenAI, `data: {"choices":[` + spread + `],"usage":{"prompt_tokens":3}}`, scanResult{1, 1, false, false, false, "", noUsage}},
		{"nested without end", sse.OpenAI, `data: {"a":` + strings.Repeat("[", 100<<10), scanResult{1, 1, false, false, false, "", noUsage}},
	}
}

type bigEvent struct {
	name     string
	protocol sse.Protocol
	body     string
	want     scanResult
}

// Of an event far over the bound is seen what would be seen of a small one, however it is
// cut, and so is the event behind it; no more memory is held for it.
func TestScanBigEvents(t *testing.T) {
	for _, c := range bigEvents() {
		end := "\n\n"
		if c.protocol == sse.OpenAI {
			end += "data: [DONE]\n\n"
			c.want.Events, c.want.Ended = 2, true
		}
		for _, crlf := range []bool{false, true} {
			body := []byte(c.body + end)
			if crlf {
				body = bytes.ReplaceAll(body, []byte("\n"), []byte("\r\n"))
			}
			random := rand.New(rand.NewPCG(1, 2))
			for _, most := range []int{5, 1000, 32 << 10} {
				s := newScanner(c.protocol)
				for rest := body; len(rest) > 0; {
					n := min(len(rest), 1+random.IntN(most))
					s.feed(rest[:n])
					rest = rest[n:]
					if s.Partial != nil && cap(s.Partial.B) > sse.MaxPartialEvent {
						t.Fatalf("%s: a carry of %d bytes", c.name, cap(s.Partial.B))
					}
				}
				if got := scanResultOf(s); got != c.want || !s.AtBoundary() || !s.private {
					t.Errorf("%s crlf=%v by %d: %+v, want %+v; between %v, private %v", c.name, crlf, most, got, c.want, s.AtBoundary(), s.private)
				}
				s.Release()
			}
		}
	}
}

// An answer that is whole by its last event, however long that is, has no error event
// behind it where the engine closes.
func TestBigLastEvent(t *testing.T) {
	c := bigEvents()[0]
	for _, k := range []struct{ head, body string }{
		{streamHead, chunksOf(c.body + "\n\n")},
		{"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", c.body + "\n\n"},
	} {
		res, dst, _ := relayOnce(t, Options{Protocol: sse.Responses}, func(nc *net.TCPConn) { send(nc, k.head+k.body) })
		if strings.Contains(string(dst.got), "upstream_error") || res.Usage != c.want.Usage || res.Finish != "completed" || res.Unscanned != 0 || !res.Reusable {
			t.Errorf("%+v, got …%s", res, dst.got[max(0, len(dst.got)-300):])
		}
	}
}

// The scan gets the same result from a truncated event as from the whole event.
func TestTruncatedScansTheSame(t *testing.T) {
	for _, c := range captures {
		body := load(t, c.file)
		for _, step := range []int{1, 3, 1 << 20} {
			if got := scanTruncated(c.protocol, body, step); got != c.want {
				t.Errorf("%s by %d: %+v, want %+v", c.file, step, got, c.want)
			}
		}
	}
}

// scanTruncated walks every event of body thinned.
func scanTruncated(p sse.Protocol, body []byte, step int) scanResult {
	s := newScanner(p)
	for len(body) > 0 {
		n, event, _ := s.Next(body)
		body = body[n:]
		var tr truncator
		var kept []byte
		for i := 0; i < len(event); i += step {
			kept = tr.append(kept, event[i:min(i+step, len(event))], p == sse.OpenAI)
		}
		if len(kept) > 0 {
			s.event(kept)
		}
	}
	return scanResultOf(s)
}

// For every input, the truncated event is not longer than the event, does not depend on where it is split,
// and may be written over it.
func FuzzTruncate(f *testing.F) {
	for _, c := range captures {
		f.Add(load(f, c.file), uint8(c.protocol), uint(5))
	}
	f.Add([]byte("data: {\"a\":[[1,\"\\\\\\\"]\",{}],{\"b\":[]}],\"c\":{\"d\":{\"e\":{\"f\":{\"g\":1}}}}}\n\n"), uint8(0), uint(1))
	f.Fuzz(func(t *testing.T, body []byte, protocol uint8, step uint) {
		arrays := protocol%3 == 0
		var whole, pieces, over truncator
		want := whole.append(nil, body, arrays)
		var got []byte
		n := int(step%64) + 1
		for i := 0; i < len(body); i += n {
			got = pieces.append(got, body[i:min(i+n, len(body))], arrays)
		}
		in := bytes.Clone(body)
		in = over.append(in[:0], in, arrays)
		if !bytes.Equal(got, want) || !bytes.Equal(in, want) || len(want) > len(body) {
			t.Fatalf("%q whole %q, by %d %q, in place %q", body, want, n, got, in)
		}
	})
}

func TestTruncateAllocates(t *testing.T) {
	piece := []byte(strings.Repeat(`{"a":"`+strings.Repeat("x", 100)+`\n","b":[1,2,{"c":[]}]},`, 50))
	var tr truncator
	room := make([]byte, 0, len(piece))
	if n := testing.AllocsPerRun(100, func() { room = tr.append(room[:0], piece, false) }); n > 0 {
		t.Errorf("%v allocations for a piece", n)
	}
}

func BenchmarkScanBigEvent(b *testing.B) {
	c := bigEvents()[0]
	body := []byte(c.body + "\n\n")
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	s := newScanner(c.protocol)
	b.ResetTimer()
	for range b.N {
		for i := 0; i < len(body); i += largeRead {
			s.feed(body[i:min(i+largeRead, len(body))])
		}
	}
}
