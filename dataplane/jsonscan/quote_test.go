package jsonscan

import (
	"encoding/json"
	"testing"
)

func TestQuotedIsReadBack(t *testing.T) {
	for _, s := range []string{"", "plain", `"quoted" \ back`, "line\nfeed\ttab\x00nul\x1f", "päivää 🙂", "\u2028"} {
		raw := AppendQuoted([]byte("x"), s)[1:]
		var got string
		if err := json.Unmarshal(raw, &got); err != nil || got != s {
			t.Errorf("%q became %s: %q, %v", s, raw, got, err)
		}
		if n := QuotedLen(s); n != len(raw) {
			t.Errorf("%q is said to become %d bytes, and became %d", s, n, len(raw))
		}
		if got := string(Unquote([]byte("y"), raw)); got != "y"+s {
			t.Errorf("%s read back as %q", raw, got)
		}
	}
}
