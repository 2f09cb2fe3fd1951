package redact

import (
	"bytes"
	"sluice/dataplane/jsonscan"
)

// nameMatcher collects a word byte by byte and decodes JSON escapes in it. The word is a whole
// string (add), or the last letters of a text (addText).
type nameMatcher struct {
	letters [21]byte // the longest private name has 21 letters
	n       int8     // letters so far; -1: the word is longer
	escape  int8     // bytes of the present escape so far; 0: in none
	code    byte     // the byte that the escape's digits stand for
}

const escapeLen = int8(len(`\u0000`))

// inEscape reports whether the next byte is the second of an escape. A quote there does not end the
// string.
func (s *nameMatcher) inEscape() bool { return s.escape == 1 }

func (s *nameMatcher) tooLong() bool { return s.n < 0 && s.escape == 0 }

func (s *nameMatcher) word() []byte { return s.letters[:max(s.n, 0)] }

func (s *nameMatcher) equals(word string) bool { return string(s.word()) == word }

// add takes the next byte of a string.
func (s *nameMatcher) add(c byte) {
	c, ok := s.letter(c)
	switch {
	case !ok || s.n < 0:
	case c >= 0x80 || int(s.n) == len(s.letters):
		s.n = -1
	default:
		s.letters[s.n] = c
		s.n++
	}
}

// addText takes the next byte of a text. It returns whether a private name may end with it.
func (s *nameMatcher) addText(c byte) bool {
	if c, ok := s.letter(c); ok && c < 0x80 { // bytes of a byte order mark are ignored
		if int(s.n) == len(s.letters) {
			copy(s.letters[:], s.letters[1:])
			s.n--
		}
		s.letters[s.n] = c
		s.n++
		return c == 's'
	}
	return false
}

// endsPrivate reports whether the text ends with a private name.
func (s *nameMatcher) endsPrivate() bool {
	for _, name := range private {
		if bytes.HasSuffix(s.word(), []byte(name)) {
			return true
		}
	}
	return false
}

// letter returns the letter that c is, or that the escape ending with c stands for; 0x80 for one
// that occurs in no private name. ok is false inside an escape.
func (s *nameMatcher) letter(c byte) (letter byte, ok bool) {
	switch d := jsonscan.HexDigit(c); {
	case s.escape == 0 && c == '\\':
		s.escape, s.code = 1, 0
		return 0, false
	case s.escape == 0:
		return c, true
	case s.escape == 1:
		if s.escape = 0; c == 'u' {
			s.escape = 2
			return 0, false
		}
		return 0x80, true
	case d < 0: // not an escape: c stands for itself
		if s.escape = 0; c == '\\' {
			s.escape = 1
		}
		return c, true
	case s.escape < 4 && d > 0 || s.escape == 4 && d > 7:
		s.code = 0x80
	case s.escape == 4:
		s.code |= byte(d) << 4
	case s.escape == 5:
		s.code |= byte(d)
	}
	if s.escape++; s.escape < escapeLen {
		return 0, false
	}
	s.escape = 0
	return s.code, true
}
