package jsonscan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

// String returns the text of a string member, as Text does; nothing for a member that is not a
// string.
func (d *Doc) String(k Key) []byte {
	if !d.has(k) || d.Values[k].Kind != String {
		return nil
	}
	return Text(d.Raw(k))
}

// Text returns the text of a JSON string, with its quotes, that a scan has accepted. Without escapes
// it is the string's own bytes, which the caller must not write to; Unquote copies. An escaped lone
// surrogate becomes U+FFFD.
func Text(quoted []byte) []byte {
	if len(quoted) < 2 {
		return nil
	}
	raw := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw[:len(raw):len(raw)]
	}
	return appendUnescaped(nil, raw)
}

// Unquote appends the text of a JSON string, as Text gives it, to dst. The result never shares memory
// with quoted, so that it can be scratch memory of the next call.
func Unquote(dst, quoted []byte) []byte {
	if len(quoted) < 2 {
		return dst
	}
	return appendUnescaped(dst, quoted[1:len(quoted)-1])
}

// Eight bytes are compared at a time. For a byte c < 0x80 the top bit of (c^2)-0x21 is set only if
// c is '"' (0x22^2 = 0x20) or below 0x20, and that of (c^'\\')-1 only if c is '\\'. A borrow can
// mark the byte above such a byte as well, so each mark is verified; none is missed. Marks on bytes
// from 0x80 on have no meaning.
const (
	lowBits  = 0x0101010101010101
	highBits = 0x8080808080808080
)

func markSpecial(w uint64) uint64 {
	return ((w ^ 0x02*lowBits) - 0x21*lowBits) | ((w ^ '\\'*lowBits) - lowBits)
}

// packHighBits gathers the top bits of m's eight bytes in the low eight bits.
func packHighBits(m uint64) uint32 {
	return uint32((m & highBits) * 0x0002040810204081 >> 56)
}

// stringEnd returns the offset after the closing quote of the string whose first character is at i,
// and whether it may contain bytes from 0x80 on. high may also be set by bytes after the quote,
// which costs a superfluous check. For a malformed string it returns ^offset of the error: len(b),
// a control character, or the backslash of an invalid escape.
func stringEnd(b []byte, i int) (end int, high bool) {
	if !wide {
		return stringEndBy8(b, i)
	}
	var acc uint64
	if i+8 <= len(b) { // most names, and many values, end within eight bytes
		w := binary.LittleEndian.Uint64(b[i:])
		if marks := markSpecial(w) &^ w & highBits; marks != 0 {
			if at := i + bits.TrailingZeros64(marks)/8; b[at] == '"' {
				return at + 1, w&highBits != 0
			}
		}
	}
	for i+32 <= len(b) {
		at, above := wideString(unsafe.SliceData(b), i, len(b), &escapeLens)
		if above != 0 {
			acc = highBits
		}
		if i = at; i == len(b) {
			break
		}
		switch c := b[i]; {
		case c == '"':
			return i + 1, acc != 0
		case c == '\\':
			n := escapeLen(b[i:])
			if n == 0 {
				return ^i, false
			}
			i += n
		case c < ' ':
			return ^i, false
		default: // less than a block is left
			return stringTail(b, i, acc)
		}
	}
	return stringTail(b, i, acc)
}

// stringEndBy8 is stringEnd without special instructions.
func stringEndBy8(b []byte, i int) (end int, high bool) {
	var acc uint64
blocks:
	for i+32 <= len(b) {
		p := b[i : i+32 : i+32]
		w0 := binary.LittleEndian.Uint64(p)
		w1 := binary.LittleEndian.Uint64(p[8:])
		w2 := binary.LittleEndian.Uint64(p[16:])
		w3 := binary.LittleEndian.Uint64(p[24:])
		m0, m1, m2, m3 := markSpecial(w0), markSpecial(w1), markSpecial(w2), markSpecial(w3)
		if (m0|m1|m2|m3|w0|w1|w2|w3)&highBits == 0 {
			i += 32
			continue
		}
		acc |= w0 | w1 | w2 | w3
		m0, m1, m2, m3 = m0&^w0, m1&^w1, m2&^w2, m3&^w3
		if (m0|m1|m2|m3)&highBits == 0 {
			i += 32
			continue
		}
		// Escapes are dense in code and prose, so all marks of the block are used before the next
		// block is loaded.
		marks := packHighBits(m0) | packHighBits(m1)<<8 | packHighBits(m2)<<16 | packHighBits(m3)<<24
		for marks != 0 {
			at := bits.TrailingZeros32(marks) & 31
			marks &= marks - 1
			switch c := p[at]; {
			case c == '\\':
				n := 2
				if j := i + at + 1; j >= len(b) || escapeLens[b[j]] != 2 {
					if n = escapeLen(b[i+at:]); n == 0 {
						return ^(i + at), false
					}
				}
				next := at + n
				if next >= 32 {
					i += next
					continue blocks
				}
				marks = marks >> (next & 31) << (next & 31)
			case c == '"':
				return i + at + 1, acc&highBits != 0
			case c < ' ':
				return ^(i + at), false
			}
		}
		i += 32
	}
	return stringTail(b, i, acc)
}

// stringTail is stringEnd for the last bytes of b.
func stringTail(b []byte, i int, acc uint64) (end int, high bool) {
	for i < len(b) {
		switch c := b[i]; {
		case c == '\\':
			n := escapeLen(b[i:])
			if n == 0 {
				return ^i, false
			}
			i += n
		case c == '"':
			return i + 1, acc&highBits != 0
		case c < ' ':
			return ^i, false
		default:
			acc |= uint64(c)
			i++
		}
	}
	return ^len(b), false
}

// escapeLen returns the length of the escape at the beginning of b; 0: it is invalid.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	if n := escapeLens[b[1]]; n != 6 {
		return int(n)
	}
	if len(b) >= 6 && hex(b[2]) < 16 && hex(b[3]) < 16 && hex(b[4]) < 16 && hex(b[5]) < 16 {
		return 6
	}
	return 0
}

// escapeLens is the length of an escape by the byte after its backslash.
var escapeLens = [256]uint8{'"': 2, '\\': 2, '/': 2, 'b': 2, 'f': 2, 'n': 2, 'r': 2, 't': 2, 'u': 6}

// hex returns the value of a hex digit; 255: c is none.
func hex(c byte) byte {
	switch {
	case c-'0' <= 9:
		return c - '0'
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return c | 0x20 - 'a' + 10
	}
	return 255
}

// appendUnescaped appends the text of raw, a well-formed string without quotes.
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
			dst = append(dst, simpleEscape(raw[1]))
		default:
			return dst // malformed; the scan would have rejected it
		}
		raw = raw[n:]
	}
}

func rune4(b []byte) rune {
	return rune(hex(b[2]))<<12 | rune(hex(b[3]))<<8 | rune(hex(b[4]))<<4 | rune(hex(b[5]))
}

func simpleEscape(c byte) byte {
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

// StringEnd returns the offset after the JSON string whose opening quote is at b[i]; len(b) if it
// does not end.
func StringEnd(b []byte, i int) int {
	end, _ := stringEnd(b, i+1)
	if end < 0 {
		return len(b)
	}
	return end
}
