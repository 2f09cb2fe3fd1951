package relay

import (
	"bytes"
	"net"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

// upperCaser is a Rewriter that drops comments and writes data in capitals.
type upperCaser struct{}

func (upperCaser) Event(dst, event []byte) []byte {
	data := sse.EventData(event)
	if data == nil {
		return dst
	}
	dst = append(dst, "data: "...)
	dst = append(dst, bytes.ToUpper(data)...)
	return append(dst, "\n\n"...)
}

// TestRewrite cuts a stream at every byte: the client always gets the same whole
// events, in chunks that follow the framing.
func TestRewrite(t *testing.T) {
	const sse = "data: {\"choices\":[{\"index\":0,\"text\":\"ab\"}]}\n\n: keep-alive\n\ndata: [done]\n\n"
	const want = "data: {\"CHOICES\":[{\"INDEX\":0,\"TEXT\":\"AB\"}]}\n\ndata: [DONE]\n\n"
	for cut := 1; cut < len(sse); cut++ {
		e := editor{rewriter: upperCaser{}, out: new(chunkBuffer)}
		var got []byte
		for _, part := range []string{sse[:cut], sse[cut:]} {
			e.out.b = e.out.b[:0]
			if err := e.feed([]byte(part)); err != nil {
				t.Fatal(err)
			}
			got = append(got, e.out.b...)
		}
		e.release()
		if string(got) != want {
			t.Fatalf("cut at %d: got %q, want %q", cut, got, want)
		}
	}
}

// An event over the bound ends the stream, with an error in its protocol behind the whole
// events; Strip's bound is that of a Transcript.
func TestRewriteEndsAtOversizedEvent(t *testing.T) {
	for p, whole := range map[sse.Protocol]string{
		sse.OpenAI: "data: {}\n\n", sse.Anthropic: "event: ping\ndata: {}\n\n", sse.Responses: "event: x\ndata: {}\n\n",
	} {
		for name, head := range map[string]string{"chunked": streamHead, "to close": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"} {
			long := "data: " + strings.Repeat("x", 2*sse.MaxPartialEvent) + "\n\n"
			send2 := func(nc *net.TCPConn) {
				body := whole + long + "data: y\n\n"
				if name == "chunked" {
					body = chunksOf(whole, long, "data: y\n\n") + sse.LastChunk
				}
				send(nc, head+body)
				waitClosed(nc)
			}
			res, dst, _ := relayOnce(t, Options{Protocol: p, Rewrite: &identityRewriter{}}, send2)
			got := dst.got
			if name == "chunked" {
				got = dechunk(t, got)
			}
			added, ok := strings.CutPrefix(string(got), whole)
			if !ok || res.Cause != EngineMalformed || !strings.Contains(added, errTooBig.Error()) || strings.Contains(added, "data: y") {
				t.Errorf("%v, %s: %+v, %.300q", p, name, res, got)
			}
			checkError(t, p, added)
			if name == "to close" {
				continue
			}
			res, dst, _ = relayOnce(t, Options{Protocol: p, Rewrite: redact.Rewriter{}}, send2)
			if got := string(dechunk(t, dst.got)); !strings.HasPrefix(got, whole+long+"data: y\n\n") {
				t.Errorf("%v: %+v, %d bytes", p, res, len(got))
			}
		}
	}
}
