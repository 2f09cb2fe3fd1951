package jsonscan

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
)

// agree holds the two ways of finding a string's end against each other. They may
// differ in high, which is a guess on the safe side.
func agree(t *testing.T, b []byte, i int) {
	t.Helper()
	end, high := stringEnd(b, i)
	want, wantHigh := stringEndBy8(b, i)
	if end != want {
		t.Fatalf("from %d of %q: %d, want %d", i, b, end, want)
	}
	if end < 0 {
		return
	}
	for _, c := range b[i:end] {
		if c >= 0x80 && (!high || !wantHigh) {
			t.Fatalf("from %d of %q: a byte from 0x80 on was not seen (%v, %v)", i, b, high, wantHigh)
		}
	}
}

// Each byte that matters, and each escape, at each place of three blocks and before
// each end of the buffer.
func TestStringEndByBlocks(t *testing.T) {
	for _, mark := range []string{
		`"`, `\"`, `\\`, `\n`, `\\"`, `\\\"`, `\u00e9`, `\u00eg`, `\x`, `\`, "\x00", "\x1f", " ", "\x7f", "\x80", "é", "\xff", `\"\"\"\"`, "\\\x80",
	} {
		for at := range 100 {
			for _, tail := range []int{0, 1, 2, 6, 31, 32, 33, 64, 100} {
				b := []byte(strings.Repeat("a", at) + mark + strings.Repeat("b", tail))
				for _, end := range []string{"", `"`, `",`} {
					whole := append(bytes.Clone(b), end...)
					agree(t, whole[:len(whole):len(whole)], 0)
				}
			}
		}
	}
}

func TestStringEndOfAnything(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const common = `aaaaaaaaaaaaaaaabcdefgh ,.{}[]:\\\""nrtu0159Ef/` + "\x00\x1f\x20\x7f\x80\xc3\xa9\xff"
	for range 50_000 {
		b := make([]byte, r.IntN(300))
		dense := r.IntN(3)
		for i := range b {
			switch {
			case dense == 0 || r.IntN(40) == 0:
				b[i] = common[r.IntN(len(common))]
			default:
				b[i] = 'a' + byte(r.IntN(26))
			}
		}
		agree(t, b, r.IntN(len(b)+1))
	}
}

func FuzzStringEnd(f *testing.F) {
	f.Add([]byte(`a string of more than two blocks, that is, of sixty-four bytes and more: \n \u00e9 \\" and so on"`), 0)
	f.Fuzz(func(t *testing.T, b []byte, i int) {
		if i >= 0 && i <= len(b) {
			agree(t, b, i)
		}
	})
}
