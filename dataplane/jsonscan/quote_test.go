package jsonscan

import (
	"encoding/json"
	"reflect"
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

func TestEscapeUnprintable(t *testing.T) {
	for text, want := range map[string]string{
		`{"a":"päivää 🙂"}` + "\n":        `{"a":"päivää 🙂"}` + "\n",
		"\"\u009b31m\u0085\"":            `"\u009b31m\u0085"`,
		"\"a\u202eb\u2066c\u200fd\x7f\"": `"a\u202eb\u2066c\u200fd\u007f"`,
		"\"\U000e0001x\"":                `"\udb40\udc01x"`,
		"\"\x9bx\ufffd\"":                `"\ufffdx` + "\ufffd" + `"`,
		"":                               "",
	} {
		got := string(EscapeUnprintable([]byte(text)))
		if got != want {
			t.Errorf("%q became %s, want %s", text, got, want)
		}
		var before, after any
		if text != "" && (json.Unmarshal([]byte(text), &before) != nil || json.Unmarshal([]byte(got), &after) != nil || !reflect.DeepEqual(before, after)) {
			t.Errorf("%q is read as %q, and %s as %q", text, before, got, after)
		}
	}
	text := []byte(`{"msg":"request","model":"ä"}`)
	if n := testing.AllocsPerRun(10, func() { EscapeUnprintable(text) }); n != 0 {
		t.Errorf("%v allocations for a printable text", n)
	}
}
