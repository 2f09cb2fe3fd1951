package jsonscan

import (
	"testing"
	"unicode/utf8"
)

// Every sequence of up to three bytes, and of four by their classes, is judged
// as the standard library judges it, at several offsets in a word.
func TestValidUTF8(t *testing.T) {
	edges := []byte{0, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xec, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff}
	for pad := 0; pad < 16; pad += 3 {
		buf := make([]byte, pad, pad+4)
		for i := range buf {
			buf[i] = 'a'
		}
		check := func(b []byte) {
			if validUTF8(b) != utf8.Valid(b) {
				t.Fatalf("validUTF8(%x) = %v", b, validUTF8(b))
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
