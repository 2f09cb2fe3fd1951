package http1

import (
	"strings"
	"testing"
)

// FuzzBareEndScanner compares the scanner, fed in two pieces, with a search of the whole.
func FuzzBareEndScanner(f *testing.F) {
	for _, s := range []string{"", "\r\n", "GET / HTTP/1.1\r\nHost: a\r\n\r\nbody\n", "GET /\n", "\n\nG\r\n\r\n", "a\r\r\n\r\n", "\r\r\r", "\rG", "\n\rG", "a\rb\r\n\r\n", "a\r\n\n"} {
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, raw []byte, at int) {
		at = max(0, min(at, len(raw)))
		var s BareEndScanner
		s.Scan(raw[:at])
		s.Scan(raw[at:])
		head, begin := string(raw), len(raw)-len(strings.TrimLeft(string(raw), LineEnds))
		if end := strings.Index(head[begin:], "\r\n\r\n"); end >= 0 {
			head = head[:begin+end+4]
		}
		want := false
		for i := range head {
			if head[i] == '\n' && i >= begin && head[i-1] != '\r' || head[i] == '\r' && i+1 < len(head) && head[i+1] != '\n' {
				want = true
			}
		}
		if s.Bare != want {
			t.Errorf("%q cut at %d: bare %v, want %v", raw, at, s.Bare, want)
		}
		if len(head) == len(raw) && !strings.HasSuffix(head[begin:], "\r\n\r\n") && (HasBareEnd(raw[:at], 0) || HasBareEnd(raw, at)) != want {
			t.Errorf("%q cut at %d: hasBareEnd is %v", raw, at, !want)
		}
	})
}
