package transcript

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Packed ids are read back unchanged, for all ids, in the space that their bits need.
func TestPackedIDs(t *testing.T) {
	for width := 0; width <= 32; width++ {
		for _, n := range []int{0, 1, 2, 7, 8, 9, 64, 1000} {
			ids := make([]uint32, n)
			for i := range ids {
				ids[i] = uint32(rand.Uint64() >> (64 - width))
			}
			p := PackIDs(ids)
			if got := p.Append([]uint32{7}); p.Len() != n || got[0] != 7 || !slices.Equal(got[1:], ids) {
				t.Fatalf("%d ids of %d bits: %d come back as %v, want %v", n, width, p.Len(), got, ids)
			}
			if most := packedHeader + (n*max(width, 1)+7)/8; len(p.packed) > most {
				t.Errorf("%d ids of %d bits take %d bytes, want at most %d", n, width, len(p.packed), most)
			}
		}
	}
}
