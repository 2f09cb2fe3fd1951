package ascii

import (
	"strings"
	"testing"
)

// lower is the definition that EqualFold is compared with.
func lower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

func TestEqualFoldOfEveryByte(t *testing.T) {
	for x := range 128 {
		for y := range 128 {
			a, b := "x"+string(rune(x)), "X"+string(rune(y))
			if got, want := EqualFold(a, []byte(b)), lower(a) == lower(b); got != want {
				t.Errorf("EqualFold(%q, %q) = %v; want %v", a, b, got, want)
			}
		}
	}
}

func TestEqualFold(t *testing.T) {
	for _, k := range []struct {
		a, b string
		want bool
	}{
		{"", "", true},
		{"Content-Type", "content-type", true},
		{"Content-Type", "content-typ", false},
		{"chunked", "chun\u212aed", false},                     // Kelvin sign
		{"tran\u017ffer-encoding", "transfer-encoding", false}, // long s
		{"\xe4", "\xc4", false},                                // letters of Latin-1
	} {
		if got := EqualFold(k.a, k.b); got != k.want {
			t.Errorf("EqualFold(%q, %q) = %v; want %v", k.a, k.b, got, k.want)
		}
		if got := EqualFold([]byte(k.b), []byte(k.a)); got != k.want {
			t.Errorf("EqualFold of bytes %q, %q = %v; want %v", k.b, k.a, got, k.want)
		}
	}
}
