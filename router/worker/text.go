package worker

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable reports whether a worker's name or version s is completely visible in logs, metrics and
// the console: valid UTF-8 without control characters, without characters that change the direction
// of the text, and without zero-width ones. The only printable space is U+0020.
func Printable(s string) bool { return utf8.ValidString(s) && !strings.ContainsFunc(s, hidden) }

func hidden(r rune) bool {
	return r == utf8.RuneError || !unicode.IsPrint(r) || r >= 0x80 && unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
