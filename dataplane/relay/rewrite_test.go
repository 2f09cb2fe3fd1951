package relay

import (
	"bytes"
	"strings"
	"testing"
)

// shout is a Rewriter that drops comments and writes data in capitals.
type shout struct{}

func (shout) Event(dst, event []byte) []byte {
	data := DataOf(event)
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
		e := editor{rewriter: shout{}}
		var got []byte
		for _, part := range []string{sse[:cut], sse[cut:]} {
			e.out = e.out[:0]
			e.feed([]byte(part))
			got = append(got, e.out...)
		}
		e.end()
		if string(got) != want {
			t.Fatalf("cut at %d: got %q, want %q", cut, got, want)
		}
	}
}

func TestRewriteKeepsNoEventBack(t *testing.T) {
	e := editor{rewriter: shout{}}
	e.feed([]byte("data: " + strings.Repeat("x", 2*maxCarry)))
	e.feed([]byte("\n\ndata: y\n\n"))
	if got := string(e.out); got != tooBigEvent+"data: Y\n\n" {
		t.Errorf("an event over the bound gives %q; want an error event, then the next one", got)
	}
}
