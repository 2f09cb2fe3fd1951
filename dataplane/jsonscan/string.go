package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// String appends the unescaped string member to dst. With no escape in the
// value and a nil dst it returns the body's own bytes without copying. A member
// that is no string appends nothing. An escaped lone surrogate becomes U+FFFD.
func (d *Doc) String(k Key, dst []byte) []byte {
	if d.Values[k].Kind != String {
		return dst
	}
	return Unquote(dst, d.Raw(k))
}

// Unquote is String for any string that a scan has accepted, with its quotes.
func Unquote(dst, quoted []byte) []byte {
	if len(quoted) < 2 {
		return dst
	}
	raw := quoted[1 : len(quoted)-1]
	if dst == nil && bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	return appendUnescaped(dst, raw)
}

// Eight bytes are looked at together. For a byte c < 0x80 the top bit of
// (c^2)-0x21 is set only where c is '"' (0x22^2 = 0x20) or below 0x20, and that
// of (c^'\\')-1 only where c is '\\'. A borrow runs upwards from such a byte
// alone, so the lowest marked byte is always a true one.
const (
	ones = 0x0101010101010101
	tops = 0x8080808080808080
)

func specials(w uint64) uint64 {
	return ((w ^ 0x02*ones) - 0x21*ones) | ((w ^ '\\'*ones) - ones)
}

// stringEnd gives the offset after the closing quote of the string whose first
// character is at i, and whether it holds bytes from 0x80 on (not yet checked).
// A malformed string gives ^offset of what is wrong: len(b), a control
// character, or the backslash of a bad escape.
func stringEnd(b []byte, i int) (end int, high bool) {
	var acc uint64
	for {
		for i+32 <= len(b) {
			p := b[i : i+32 : i+32]
			w0 := binary.LittleEndian.Uint64(p)
			w1 := binary.LittleEndian.Uint64(p[8:])
			w2 := binary.LittleEndian.Uint64(p[16:])
			w3 := binary.LittleEndian.Uint64(p[24:])
			m0, m1 := specials(w0)&^w0, specials(w1)&^w1
			m2, m3 := specials(w2)&^w2, specials(w3)&^w3
			if (m0|m1|m2|m3)&tops == 0 {
				acc |= w0 | w1 | w2 | w3
				i += 32
				continue
			}
			// Bytes behind the closing quote may be counted as high here; that
			// costs a check of the string, never an answer.
			acc |= w0
			if m0 &= tops; m0 != 0 {
				i += bits.TrailingZeros64(m0) / 8
				break
			}
			acc |= w1
			if m1 &= tops; m1 != 0 {
				i += 8 + bits.TrailingZeros64(m1)/8
				break
			}
			acc |= w2
			if m2 &= tops; m2 != 0 {
				i += 16 + bits.TrailingZeros64(m2)/8
				break
			}
			acc |= w3
			i += 24 + bits.TrailingZeros64(m3&tops)/8
			break
		}
		for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= ' ' {
			acc |= uint64(b[i])
			i++
		}
		if i >= len(b) {
			return ^len(b), false
		}
		switch b[i] {
		case '"':
			return i + 1, acc&tops != 0
		case '\\':
			n := escapeLen(b[i:])
			if n == 0 {
				return ^i, false
			}
			i += n
		default:
			return ^i, false
		}
	}
}

// escapeLen is the length of the escape that b begins with, 0 when it is none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if len(b) >= 6 && hex(b[2]) < 16 && hex(b[3]) < 16 && hex(b[4]) < 16 && hex(b[5]) < 16 {
			return 6
		}
	}
	return 0
}

// hex is the value of a hex digit, 255 when c is none.
func hex(c byte) byte {
	switch {
	case c-'0' <= 9:
		return c - '0'
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return c | 0x20 - 'a' + 10
	}
	return 255
}

// appendUnescaped appends the text of raw, a well-formed string without its
// quotes.
func appendUnescaped(dst, raw []byte) []byte {
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 {
			return append(dst, raw...)
		}
		dst = append(dst, raw[:i]...)
		raw = raw[i:]
		n := escapeLen(raw)
		switch {
		case n == 6:
			r := rune4(raw)
			if utf16.IsSurrogate(r) {
				low := rune(utf8.RuneError)
				if escapeLen(raw[6:]) == 6 {
					low = rune4(raw[6:])
				}
				if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
					n = 12
				}
			}
			dst = utf8.AppendRune(dst, r)
		case n == 2:
			dst = append(dst, plainEscape(raw[1]))
		default:
			return dst // not well-formed; the scan would have said so
		}
		raw = raw[n:]
	}
}

func rune4(b []byte) rune {
	return rune(hex(b[2]))<<12 | rune(hex(b[3]))<<8 | rune(hex(b[4]))<<4 | rune(hex(b[5]))
}

func plainEscape(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}
