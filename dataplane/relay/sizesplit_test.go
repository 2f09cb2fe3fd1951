package relay

import (
	"strings"
	"testing"

	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// TestSizesAreJudgedFirst: of a chunk's size the client gets nothing before its end has come,
// wherever reads cut it, and nothing at all when it is too large or none. Sizes that are well
// formed pass as they came.
func TestSizesAreJudgedFirst(t *testing.T) {
	long := "data: " + strings.Repeat("x", 2*maxBufferedEvent)
	for _, k := range []struct {
		name, good string
		opt        Options
		scanning   bool
	}{
		{"bytes", "3\r\n{\"a\r\n4;x=y\r\n\": 1\r\n00A\r\n}123456789\r\n", Options{Protocol: sse.Opaque}, false},
		{"JSON", "3\r\n{\"a\r\n4\r\n\": 1\r\n00A\r\n}123456789\r\n", Options{}, false},
		{"a long event", chunksOf(long) + "4\r\nabcd\r\n00A\r\n0123456789\r\n", Options{}, true},
	} {
		for _, bad := range []string{"", "zz", "123g\r\n", "ffffffffffffffff\r\n", "12345678901234567\r\n", "0123456789abcde \r\n"} {
			body := k.good + bad
			from := len(k.good) - 12
			for one := from; one < len(body); one++ {
				for two := one + 1; two <= len(body); two++ {
					if k.scanning && two > one+1 && two < len(body) {
						continue // enough of a body that takes long
					}
					s := &stream{dst: new(collectingConn), resp: new(upstream.Response), extras: &noExtras, streamSettings: &streamSettings{}, chunked: true, scanning: k.scanning}
					s.scan.protocol, s.scan.KeepsOversized, s.scan.usage = k.opt.Protocol, true, noUsage
					if !k.scanning && k.opt.Protocol != sse.Opaque {
						s.editor = &editor{partial: &partialEvent{streaming: true, redactor: redact.Redactor{DetectFormat: true}}}
					}
					var got []byte
					for _, part := range [...]string{body[:one], body[one:two], body[two:]} {
						if part == "" || s.broken != nil {
							continue
						}
						out, err := s.readChunked([]byte(part))
						got = append(got, out...)
						s.broken = err
						s.editor.releaseSent()
						if len(got) > len(k.good) {
							t.Fatalf("%s, cut at %d and %d: %q is out of %q", k.name, one, two, got[len(k.good):], bad)
						}
					}
					if string(got) != k.good || (s.broken != nil) != (bad != "") {
						t.Fatalf("%s, cut at %d and %d: %d bytes of %d are out, %v", k.name, one, two, len(got), len(k.good), s.broken)
					}
					s.scan.Release()
					s.editor.release()
				}
			}
		}
	}
}
