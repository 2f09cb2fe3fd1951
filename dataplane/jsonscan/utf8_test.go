package jsonscan

import (
	"bytes"
	"testing"
	"unicode/utf8"
)

// Every sequence of up to three bytes, and of four by their classes, is judged
// as the standard library judges it, at several offsets in a word.
func TestValidUTF8(t *testing.T) {
	edges := []byte{0, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff}
	pads := []int{0, 3, 6, 9, 12, 15, 28, 29, 30, 31, 32, 63}
	if testing.Short() {
		pads = []int{3, 30}
	}
	tail := bytes.Repeat([]byte("a"), 32) // a whole block behind the bytes
	long := make([]byte, 0, 128)
	for _, pad := range pads {
		buf := make([]byte, pad, pad+4)
		for i := range buf {
			buf[i] = 'a'
		}
		check := func(b []byte) {
			want := utf8.Valid(b)
			if validUTF8(b) != want || validBy8(b) != want {
				t.Fatalf("validUTF8(%x) is %v, validBy8 %v", b, validUTF8(b), validBy8(b))
			}
			if long = append(append(long[:0], b...), tail...); validUTF8(long) != want {
				t.Fatalf("validUTF8(%x) is %v", long, !want)
			}
		}
		for x := 0; x < 1<<16; x++ {
			check(append(buf, byte(x>>8), byte(x)))
		}
		for _, c0 := range edges {
			for _, c1 := range edges {
				for _, c2 := range edges {
					check(append(buf, c0, c1, c2))
					for _, c3 := range edges {
						check(append(buf, c0, c1, c2, c3))
					}
				}
			}
		}
	}
}
