package relay

import (
	"strings"
	"testing"
	"time"

	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// TestMixedLineEnds relays streams whose line ends are every combination of LF, CRLF and CR, cut
// into reads of several sizes. Each stream is complete: it gets no error event, and one [DONE].
func TestMixedLineEnds(t *testing.T) {
	lineEnds := []string{"\n", "\r\n", "\r"}
	var eventEnds []string
	for _, a := range lineEnds {
		for _, b := range lineEnds {
			if a+b != "\r\n" { // CR and LF are one line end
				eventEnds = append(eventEnds, a+b)
			}
		}
	}
	const (
		token  = `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}`
		finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`
	)
	bare := func(s string) string { return strings.NewReplacer("\r", "", "\n", "").Replace(s) }
	for _, first := range eventEnds {
		for _, second := range eventEnds {
			for _, third := range eventEnds {
				for _, last := range eventEnds {
					body := token + first + token + second + finish + third + "data: [DONE]" + last
					for _, read := range []int{len(body) + 100, 61, 1} {
						for _, rewritten := range []bool{false, true} {
							framed := append(sse.AppendChunk(nil, []byte(body)), sse.LastChunk...)
							var dst collectingConn
							s := newDiscardStream()
							s.dst, s.resp = &dst, new(upstream.Response)
							if rewritten {
								s.editor = &editor{rewriter: &identityRewriter{}}
							}
							for rest := framed; len(rest) > 0; {
								n := min(read, len(rest))
								if ended := s.forward(rest[:n:n], time.Now()); ended != (n == len(rest)) {
									t.Fatalf("%q in reads of %d, rewritten %v: ended %v: %v", body, read, rewritten, ended, s.err)
								}
								rest = rest[n:]
							}
							res := s.finish()
							got := string(dechunk(t, dst.b))
							if res.Cause != Completed || res.Err != nil || res.Finish != "stop" || res.Events < 3 || bare(got) != bare(body) {
								t.Fatalf("%q in reads of %d, rewritten %v: %+v\ngot %q", body, read, rewritten, res, got)
							}
						}
					}
				}
			}
		}
	}
}
