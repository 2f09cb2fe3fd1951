package pd

import "testing"

func TestParseTraceID(t *testing.T) {
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for header, want := range map[string]bool{
		"00-" + id + "-" + span + "-01":                       true,
		"00-" + id + "-" + span + "-03":                       true,
		"01-" + id + "-" + span + "-01-future":                true,
		"00-" + id + "-" + span + "-00":                       false, // not sampled
		"00-" + id + "-" + span + "-0g":                       false,
		"00-" + id + "-" + span + "-0":                        false,
		"00-" + id + "_" + span + "-01":                       false,
		"00-xyz92f3577b34da6a3ce929d0e0e4736-" + span + "-01": false,
		"": false, "00": false,
	} {
		got := parseTraceID([]byte(header))
		if (got != [16]byte{}) != want || want && (got[0] != 0x4b || got[15] != 0x36) {
			t.Errorf("%q: %x", header, got)
		}
	}
}
