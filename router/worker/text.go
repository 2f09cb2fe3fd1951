package worker

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable says whether s, a name or version that a worker is known by, shows all of itself
// in logs, metrics and the console: it is valid UTF-8 without control characters, without
// characters that change the direction of the text, and without those that take no space.
// Of all spaces only U+0020 is printable.
func Printable(s string) bool { return utf8.ValidString(s) && !strings.ContainsFunc(s, hidden) }

func hidden(r rune) bool {
	return r == utf8.RuneError || !unicode.IsPrint(r) || r >= 0x80 && unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
