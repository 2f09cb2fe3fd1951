package tokenize

import (
	"slices"
	"testing"
)

func TestIDList(t *testing.T) {
	for _, tc := range []struct {
		ids  []uint32
		size int // bytes of an id
	}{
		{nil, 3},
		{[]uint32{0, 1, 255, 256, 65535, 65536, 1<<24 - 1}, 3},
		{[]uint32{0, 1 << 24, 7, 1<<32 - 1}, 4},
	} {
		l := packIDs(tc.ids)
		if cap(l.packed) != tc.size*len(tc.ids) {
			t.Errorf("%v takes %d bytes; want %d an id", tc.ids, cap(l.packed), tc.size)
		}
		if got, want := l.appendTo([]uint32{9}), append([]uint32{9}, tc.ids...); !slices.Equal(got, want) {
			t.Errorf("%v came back as %v; want %v", tc.ids, got, want)
		}
	}
}

func BenchmarkIDList(b *testing.B) {
	ids := make([]uint32, 1600)
	for i := range ids {
		ids[i] = uint32(i * 79)
	}
	l := packIDs(ids)
	for b.Loop() {
		ids = l.appendTo(ids[:0])
	}
}
