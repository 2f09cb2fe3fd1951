package jsonscan

import (
	"strconv"
	"unicode/utf8"
)

// SyntaxError describes an error in a body and its position. Duplicate known keys, a wrong type of
// a known member, too deep nesting, invalid UTF-8 and trailing bytes are errors of this type too.
// Its text is for the client.
type SyntaxError struct {
	Offset int    // byte offset in the body
	Field  string // dotted name of the member; "": the document
	Got    string // what was found, at most 40 bytes of the body
	Want   string // what is accepted
}

// Error implements error.
func (e *SyntaxError) Error() string {
	where := "body at byte " + strconv.Itoa(e.Offset)
	if e.Field != "" {
		where = "field " + strconv.Quote(e.Field)
	}
	return where + ": got " + e.Got + "; want " + e.Want
}

// maxShown bounds how much of a body an error repeats, in bytes.
const maxShown = 40

// excerpt returns raw as text for an error: printable, and quoted unless it is a JSON string. raw
// is client input.
func excerpt(raw []byte) string {
	cut := len(raw) > maxShown
	if cut {
		raw = raw[:maxShown]
		for len(raw) > maxShown-utf8.UTFMax && !utf8.RuneStart(raw[len(raw)-1]) {
			raw = raw[:len(raw)-1]
		}
		if n := len(raw); n > 0 && raw[n-1] >= utf8.RuneSelf {
			raw = raw[:n-1]
		}
	}
	out := make([]byte, 0, len(raw)+8)
	for len(raw) > 0 {
		r, n := utf8.DecodeRune(raw)
		switch {
		case r == utf8.RuneError && n == 1:
			out = append(out, `\x`...)
			out = strconv.AppendUint(out, uint64(raw[0]), 16)
		case r < ' ' || !strconv.IsPrint(r):
			q := strconv.QuoteRuneToASCII(r)
			out = append(out, q[1:len(q)-1]...)
		default:
			out = append(out, raw[:n]...)
		}
		raw = raw[n:]
	}
	if cut {
		out = append(out, "…"...)
	}
	return string(out)
}

// unexpected describes the unexpected input at offset i of b.
func unexpected(b []byte, i int) string {
	if i >= len(b) {
		return "the end of the body"
	}
	end := min(i+1, len(b))
	for end < len(b) && end < i+16 && isWord(b[i]) && isWord(b[end]) {
		end++
	}
	return `"` + excerpt(b[i:end]) + `"`
}

func isWord(c byte) bool {
	return c >= utf8.RuneSelf || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
