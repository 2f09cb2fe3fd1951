package jsonscan

import (
	"fmt"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// AppendQuoted appends s as a JSON string. Invalid UTF-8 is copied; a scan of the result rejects
// it.
func AppendQuoted[T string | []byte](dst []byte, s T) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		dst = append(append(dst, s[from:i]...), '\\')
		switch from = i + 1; c {
		case '"', '\\':
			dst = append(dst, c)
		case '\n':
			dst = append(dst, 'n')
		default:
			dst = append(dst, 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return append(append(dst, s[from:]...), '"')
}

// QuotedLen returns how many bytes AppendQuoted appends for s.
func QuotedLen[T string | []byte](s T) int {
	n := len(s) + 2
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\' || c == '\n':
			n++
		case c < ' ':
			n += 5
		}
	}
	return n
}

// EscapeUnprintable returns a JSON text with escapes in place of the characters from DEL on that are
// not printable, such as C1 controls and those that change the direction of text: a terminal may
// interpret them. The value of the JSON stays the same. A byte that is not UTF-8 becomes \ufffd.
// Without such characters the result is text itself.
func EscapeUnprintable(text []byte) []byte {
	var out []byte
	done := 0 // text[:done] is in out
	for at := 0; at < len(text); {
		if text[at] < 0x7f {
			at++
			continue
		}
		r, size := utf8.DecodeRune(text[at:])
		if invalid := r == utf8.RuneError && size == 1; invalid || !unicode.IsPrint(r) {
			out = append(out, text[done:at]...)
			for _, unit := range utf16.AppendRune(nil, r) {
				out = fmt.Appendf(out, `\u%04x`, unit)
			}
			done = at + size
		}
		at += size
	}
	if done == 0 {
		return text
	}
	return append(out, text[done:]...)
}
