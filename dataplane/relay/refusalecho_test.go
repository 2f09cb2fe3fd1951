package relay

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// echoes are refusals in FastAPI's form, which repeat the request that they refuse. Every value in
// them that is private holds s3cret or 70707.
var echoes = []string{
	`{"detail":[{"type":"missing","loc":["body","model"],"msg":"Field required","input":{"prompt":"hi","bootstrap_host":"s3cret","bootstrap_port":70707,"bootstrap_room":70707123,"kv_transfer_params":{"remote_host":"s3cret"},"max_tokens":5}}]}`,
	`{"detail":[{"loc":["body","kv_transfer_params"],"msg":"Field required","input":{"remote_host":"s3cret","remote_engine_id":"s3cret","remote_block_ids":[[70707,1],[70707]],"remote_bootstrap_addr":"http://s3cret:70707","transfer_id":"s3cret-1","remote_port" : 70707 ,"do_remote_prefill":true}}]}`,
	`{"detail":[{"loc":["body"],"msg":"x","input":{"bootstrap\u005fhost":"s3cret","remote_\u0062lock_ids":{"a":[70707]},"remote_engine_id":null}}],"x":"{\"remote_host\": \"s3cret\"}"}`,
	`{"detail":[{"type":"int_type","loc":["body","bootstrap_room"],"msg":"Input should be an integer","input":"s3cret"},{"loc":["body","n"],"msg":"too large","input":5}]}`,
	`{"error":{"message":"bad","param":{"disagg_remote_handshake_port_of_the_prefill_engine":70707}}}`,
}

// TestRefusalEchoes relays refusals whole, and as they come in chunks and reads of every size.
func TestRefusalEchoes(t *testing.T) {
	check := func(how, in, out string) {
		t.Helper()
		if strings.Contains(out, "s3cret") || strings.Contains(out, "70707") || len(out) != len(in) || !json.Valid([]byte(out)) {
			t.Errorf("%s: %s\nbecame %s", how, in, out)
		}
	}
	for _, in := range echoes {
		for _, status := range []int{400, 422, 500} {
			whole := []byte(in)
			redact.InPlace(whole, status)
			check(fmt.Sprint("whole, status ", status), in, string(whole))
			if strings.Contains(in, `"max_tokens":5`) && !strings.Contains(string(whole), `"max_tokens":5`) || !strings.Contains(string(whole), `"msg":"`) && strings.Contains(in, `"msg":"`) {
				t.Errorf("%s\nbecame %s", in, whole)
			}
		}
		for cut := range len(in) + 1 {
			body := []byte(in)
			v := redact.Redactor{DetectFormat: true, IsRefusal: true}
			v.Feed(body[:cut:cut])
			v.Feed(body[cut:])
			if strings.Contains(string(body), "s3cret") || strings.Contains(string(body), "70707") || !json.Valid(body) {
				t.Fatalf("cut at %d: %s\nbecame %s", cut, in, body)
			}
		}
		for _, kind := range []string{"application/json", "text/event-stream"} {
			for _, step := range []int{1000, 50, 3} {
				sent := in
				if kind == "text/event-stream" {
					sent = "data: " + in + "\n\n"
				}
				_, dst, _ := relayOnce(t, Options{}, func(nc *net.TCPConn) {
					send(nc, "HTTP/1.1 422 Unprocessable Entity\r\nContent-Type: "+kind+"\r\nTransfer-Encoding: chunked\r\n\r\n")
					for rest := sent; rest != ""; rest = rest[min(step, len(rest)):] {
						send(nc, chunksOf(rest[:min(step, len(rest))]))
					}
					send(nc, sse.LastChunk)
					waitClosed(nc)
				})
				got := string(dechunk(t, dst.got))
				if kind == "text/event-stream" {
					got = strings.TrimSuffix(strings.TrimPrefix(got, "data: "), "\n\n")
				}
				check(fmt.Sprint(kind, " in chunks of ", step), in, got)
			}
		}
	}
}

// relayReads gives what a client gets of a chunked body that comes in these reads, and how the stream
// stands then.
func relayReads(t *testing.T, protocol sse.Protocol, reads ...string) (string, *stream) {
	t.Helper()
	var dst collectingConn
	s := newDiscardStream()
	s.dst, s.resp, s.scan.protocol, s.scan.KeepsOversized = &dst, new(upstream.Response), protocol, true
	t.Cleanup(func() { s.scan.Release(); s.editor.release() })
	for _, read := range reads {
		s.forward([]byte(read), time.Now())
	}
	return string(dst.b), s
}

// TestReadsThatEndInsideEvents sends hundreds of events, one chunk each, in reads that all end inside
// an event. Each event is held until it is whole, so that an engine that dies can be reported behind
// the last whole one, and a handle in an error event is blanked.
func TestReadsThatEndInsideEvents(t *testing.T) {
	for _, events := range []int{10, maxEventParts + 1, 200} {
		body := strings.Repeat(chunksOf(chunkEvent), events)
		reads := []string{body[:100]}
		for rest := body[100:]; rest != ""; {
			n := min(len(chunksOf(chunkEvent)), len(rest))
			reads = append(reads, rest[:n])
			rest = rest[n:]
		}
		reads = reads[:len(reads)-1] // the last event has not ended
		got, s := relayReads(t, sse.OpenAI, reads...)
		if s.editor.partial.streaming || !strings.HasSuffix(got, "\n\n\r\n") && !strings.HasSuffix(got, "\n\n") {
			t.Errorf("%d events: streaming %v, the client has %.80q", events, s.editor.partial.streaming, got[max(len(got)-80, 0):])
		}
		if s.setCause(EngineClosed, errIncomplete); true {
			if end, _ := s.properEnd(); !strings.Contains(string(end), failures[EngineClosed].Message) {
				t.Errorf("%d events: the end is %q", events, end)
			}
		}
		failure := `data: {"error":{"message":"no answer of remote_host=s3cret, remote_port=5600, after 3 tries","code":500}}` + "\n\n"
		last := chunksOf(failure)
		reads = append(reads, body[len(strings.Join(reads, "")):]+last[:40], last[40:])
		got, s = relayReads(t, sse.OpenAI, reads...)
		if strings.Contains(got, "s3cret") || !s.scan.failed || !strings.Contains(got, "redacted") {
			t.Errorf("%d events: an error event became %q", events, got[len(got)-len(last):])
		}
	}
}

// TestHoldsAfterLongEvent checks that an event too long to be held does not leave the next one
// unguarded where both share a read.
func TestHoldsAfterLongEvent(t *testing.T) {
	long := chunksOf(`data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 3*maxBufferedEvent) + `"}}]}` + "\n\n")
	failure := chunksOf(`data: {"error":{"message":"no answer of remote_host=s3cret, remote_port=5600","code":500}}` + "\n\n")
	cut := len(long) - 10
	got, _ := relayReads(t, sse.OpenAI, long[:50_000], long[50_000:cut], long[cut:]+failure[:50], failure[50:])
	if strings.Contains(got, "s3cret") || len(got) != len(long)+len(failure) {
		t.Errorf("the client got %q", got[len(long):])
	}
}

// TestLongErrorEvents relays error events that are too long to be held.
func TestLongErrorEvents(t *testing.T) {
	filler := strings.Repeat("the engine has much to say. ", 4*maxBufferedEvent/28)
	for _, c := range []struct {
		protocol sse.Protocol
		event    string
	}{
		{sse.OpenAI, `data: {"error":{"message":"` + filler + `remote_host='s3cret', remote_port=70707","type":"InternalServerError","code":500}}`},
		{sse.OpenAI, `data: {"error":{"message":"remote_host='s3cret', remote_port=70707` + filler + `","type":"InternalServerError","code":500}}`},
		{sse.OpenAI, `data: {"filler":"` + filler + `","error":{"message":"remote\u005fhost='s3cret', remote_port=70707","code":500}}`},
		{sse.OpenAI, `data: {"detail":"` + filler + filler + `remote_engine_id=s3cret 70707"}`},
		{sse.Anthropic, "event: error\ndata: " + `{"type":"error","error":{"type":"api_error","message":"` + filler + `bootstrap_room 70707 s3cret"}}`},
		{sse.Responses, "event: response.failed\ndata: " + `{"type":"response.failed","response":{"error":{"code":"x","message":"` + filler + `remote_block_ids [70707] s3cret"}}}`},

		// Members that are named like those of handles.
		{sse.OpenAI, `data: {"error":{"message":"` + filler + `","remote_host":"s3cret","remote_port":70707,"code":500}}`},
		{sse.OpenAI, `data: {"error":{"remote_host":"s3cret","remote_port":70707,"message":"` + filler + `","code":500}}`},
		{sse.OpenAI, `data: {"error":{"message":"` + filler + `","param":{"handle":{"remote_block_ids":[[70707]],"remote\u005fengine_id":"s3cret"}},"code":500}}`},
		{sse.OpenAI, `data: {"object":"error","message":"` + filler + `","remote_host":"s3cret","x":[{"bootstrap_room":70707}]}`},
		{sse.OpenAI, `data: {"detail":[{"loc":["body","remote_port"],"msg":"` + filler + `","input":70707,"ctx":{"remote_host":"s3cret"}}]}`},
		{sse.Anthropic, "event: error\ndata: " + `{"type":"error","filler":"` + filler + `","error":{"type":"api_error","transfer_id":"s3cret"},"engine_id":70707}`},
		{sse.Responses, "event: response.failed\ndata: " + `{"type":"response.failed","response":{"x":"` + filler + `","error":{"code":"x","opaque_state":{"a":"s3cret","b":70707}}}}`},
	} {
		for _, chunk := range []int{1 << 20, 8000, 100} {
			for _, read := range []int{1 << 20, 4096, 1000} {
				var framed, reads []byte
				for rest := c.event + "\n\n"; rest != ""; rest = rest[min(chunk, len(rest)):] {
					framed = sse.AppendChunk(framed, []byte(rest[:min(chunk, len(rest))]))
				}
				var parts []string
				for reads = framed; len(reads) > 0; reads = reads[min(read, len(reads)):] {
					parts = append(parts, string(reads[:min(read, len(reads))]))
				}
				got, _ := relayReads(t, c.protocol, parts...)
				if strings.Contains(string(dechunkAll(got)), "s3cret") || strings.Contains(string(dechunkAll(got)), "70707") || len(got) != len(framed) {
					t.Errorf("%.60s in chunks of %d and reads of %d passes %d bytes of %d, with s3cret: %v", c.event, chunk, read, len(got), len(framed), strings.Contains(got, "s3cret"))
				}
			}
		}
	}
}

// TestLongEventsKeepWords: what a model says about handles, in an event that is too long to be held,
// passes unchanged. It is not an error.
func TestLongEventsKeepWords(t *testing.T) {
	filler := strings.Repeat("word ", maxBufferedEvent)
	for _, event := range []string{
		`data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"` + filler + `remote_host=x"},"message":{"remote_host":"x","content":"remote_port"}}],"remote_host":"x"}`,
		`data: {"choices":[{"index":0,"delta":{"content":"` + filler + `"}}],"type":"errors","engine_id":"x","error":null,"remote_host":"x"}`,
		`data: {"choices":[{"index":0,"delta":{"content":"` + filler + `"}}],"x":{"type":"error","remote_host":"x"},"remote_host":"x"}`,
	} {
		for _, read := range []int{1 << 20, 4096} {
			var parts []string
			framed := chunksOf(event + "\n\n")
			for reads := framed; reads != ""; reads = reads[min(read, len(reads)):] {
				parts = append(parts, reads[:min(read, len(reads))])
			}
			if got, _ := relayReads(t, sse.OpenAI, parts...); got != framed {
				t.Errorf("in reads of %d: got ….%s", read, got[max(0, len(got)-200):])
			}
		}
	}
}

// dechunkAll gives the payload of chunks whose last one has not come.
func dechunkAll(framed string) string { return payloadOf(framed) }

// TestBareErrors relays error events without an error member.
func TestBareErrors(t *testing.T) {
	for _, c := range []struct {
		protocol sse.Protocol
		event    string
		failed   bool
	}{
		{sse.OpenAI, `data: {"detail":"KV of remote_engine_id=s3cret, remote_host=s3cret is lost"}`, true},
		{sse.OpenAI, `data: {"detail":[{"loc":["body"],"msg":"no remote_engine_id=s3cret is known, and no other"}]}`, true},
		{sse.OpenAI, `data: {"d\u0065tail":"KV of remote\u005fengine_id=s3cret, remote_host=s3cret is lost"}`, true},
		{sse.OpenAI, `data: {"message":"KV of remote_engine_id=s3cret, remote_host=s3cret is lost","code":500}`, false},
		{sse.OpenAI, `data: {"detail":null,"choices":[]}`, false},
		{sse.Anthropic, `data: {"detail":"KV of remote_engine_id=s3cret, remote_host=s3cret is lost"}`, true},
		{sse.Responses, `data: {"detail":"KV of remote_engine_id=s3cret, remote_host=s3cret is lost"}`, true},
	} {
		for _, rewrite := range []sse.Rewriter{nil, &identityRewriter{}} {
			sent := c.event + "\n\n"
			res, dst, _ := relayOnce(t, Options{Protocol: c.protocol, Rewrite: rewrite}, func(nc *net.TCPConn) {
				send(nc, streamHead+chunksOf(sent)+sse.LastChunk)
				waitClosed(nc)
			})
			got := string(dechunk(t, dst.got))
			if strings.Contains(got, "s3cret") || res.SawErrorEvent != c.failed || c.failed != (res.Cause == EngineReportedError) {
				t.Errorf("%s: %+v, got %s", c.event, res, got)
			}
		}
	}
}
