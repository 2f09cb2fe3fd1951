package pd

import (
	"bytes"
	"slices"
	"testing"
)

func TestSplitWords(t *testing.T) {
	for in, want := range map[string][]string{
		"":               nil,
		" ,\t ,":         nil,
		"a":              {"a"},
		"a,b":            {"a", "b"},
		" a ,, b\tc/1 ,": {"a", "b", "c/1"},
	} {
		if got := slices.Collect(splitWords([]byte(in))); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// TestLongSteeringListCostsNothing checks that the router reads only the first words of a list as
// long as a body may be. Splitting the whole list first took 1.2 GiB beyond limits.memory_budget.
func TestLongSteeringListCostsNothing(t *testing.T) {
	list := bytes.Repeat([]byte("a,"), 16<<20)
	got := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			n := 0
			for range splitWords(list) {
				if n++; n > maxHeaderWords {
					break
				}
			}
		}
	}).AllocedBytesPerOp()
	if got > 16<<10 {
		t.Errorf("the first %d words of a list of %d bytes take %d bytes", maxHeaderWords, len(list), got)
	}
}
