package jsonscan

import (
	"math"
	"slices"
	"testing"
)

func TestTokenIDs(t *testing.T) {
	for raw, want := range map[string][]uint32{
		`[]`: nil, ` [ ] `: nil, `[0]`: {0}, `[1,2,3]`: {1, 2, 3}, "[ 4294967295 ,\n7 , 0]": {math.MaxUint32, 7, 0},
	} {
		got, err := TokenIDs(nil, []byte(raw))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("TokenIDs(%s) = %v, %v", raw, got, err)
		}
	}
	for _, raw := range []string{``, `1`, `[`, `[1`, `[1,`, `[1,]`, `[,]`, `[-1]`, `[1.0]`, `[1e3]`, `[01]`, `[4294967296]`, `[99999999999999999999999]`,
		`[[1]]`, `["1"]`, `[null]`, `[1] x`, `[]]`, `[1 2]`, `{}`, "[1\x00]"} {
		dst := []uint32{9}
		if got, err := TokenIDs(dst, []byte(raw)); err == nil || !slices.Equal(got, dst) {
			t.Errorf("TokenIDs(%q) = %v, %v, want an error and what was there", raw, got, err)
		}
	}
}

func TestAppendTokenIDs(t *testing.T) {
	for _, ids := range [][]uint32{nil, {0}, {1, 22, math.MaxUint32}} {
		raw := AppendTokenIDs([]byte("x"), ids)
		got, err := TokenIDs(nil, raw[1:])
		if err != nil || !slices.Equal(got, ids) || raw[0] != 'x' {
			t.Errorf("%v -> %s -> %v, %v", ids, raw, got, err)
		}
	}
}

func TestParseInt(t *testing.T) {
	for raw, want := range map[string]int64{"0": 0, "-0": 0, "12": 12, "-7": -7, "5.0": 5, "9223372036854775807": math.MaxInt64, "-9223372036854775808": math.MinInt64} {
		if n, ok := parseInt([]byte(raw)); !ok || n != want {
			t.Errorf("parseInt(%s) = %d, %v", raw, n, ok)
		}
	}
	for _, raw := range []string{"", "-", "1.5", "1e2", "9223372036854775808", "-9223372036854775809", "18446744073709551617", "x"} {
		if n, ok := parseInt([]byte(raw)); ok {
			t.Errorf("parseInt(%s) = %d", raw, n)
		}
	}
}

func TestUnquote(t *testing.T) {
	for raw, want := range map[string]string{
		`""`: "", `"a"`: "a", `"\"\\\/\b\f\n\r\t"`: "\"\\/\b\f\n\r\t", `"\u0041\u00e9x"`: "Aéx", `"\ud83d\ude00"`: "😀",
		`"\ud83dx"`: "\ufffdx", `"\ude00"`: "\ufffd", `"\ud83d\ud83d\ude00"`: "\ufffd😀", `"\ud83d\n"`: "\ufffd\n",
	} {
		if got := string(Unquote(nil, []byte(raw))); got != want {
			t.Errorf("Unquote(%s) = %q, want %q", raw, got, want)
		}
		if got := string(Unquote([]byte("x"), []byte(raw))); got != "x"+want {
			t.Errorf("Unquote with a prefix (%s) = %q", raw, got)
		}
	}
}
