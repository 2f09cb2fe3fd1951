package relay

import "sluice/dataplane/membudget"

// thinner keeps of an event that is too large to be carried what the scan looks for, fed in
// pieces cut anywhere: the events of the end repeat whole answers (response.completed has all
// the output, the instructions and the tools beside its usage). Long strings and numbers
// lose their ends, and what lies deeper than the scan looks becomes an empty object, or an
// array of one number where it had any element. What is left is walked as any event.
type thinner struct {
	depth uint8 // of brackets
	shut  uint8 // the depth whose inside is dropped; 0: none
	kept  uint8 // of the present string, or run of other bytes; with shut: 1 behind the first byte
	mode  thinMode
}

type thinMode uint8

const (
	thinOutside thinMode = iota
	thinString
	thinEscape     // behind a backslash in a string
	thinEscapeLeft // likewise; the backslash was dropped
	thinLost       // no more is kept of this event
)

const (
	// thinText is how much of a string is kept: no name or reason is longer (reasonName).
	thinText = 64
	// thinDepth is how deep the usage of a Response lies, with its details.
	thinDepth = 4
	// thinArrays is how deep arrays are looked into, of OpenAI's alone: choices.
	thinArrays = 2
	maxNesting = 255
)

// append appends what is kept of p to dst, which may begin where p begins.
func (t *thinner) append(dst, p []byte, arrays bool) []byte {
	for i := 0; i < len(p); i++ {
		switch t.mode {
		case thinString:
			if t.shut > 0 || t.kept >= thinText {
				for !thinMeans[p[i]].within {
					if i++; i == len(p) {
						return dst
					}
				}
			}
			dst = t.inString(dst, p[i])
		case thinEscape:
			t.mode = thinString
			dst = append(dst, p[i])
		case thinEscapeLeft:
			t.mode = thinString
		case thinOutside:
			if t.kept >= thinText || t.shut > 0 && t.kept > 0 {
				for !thinMeans[p[i]].outside {
					if i++; i == len(p) {
						return dst
					}
				}
			}
			dst = t.outside(dst, p[i], arrays)
		case thinLost:
			return dst
		}
	}
	return dst
}

// thinMeans says of a byte that it changes the state: of those in strings, and of those
// outside, where nothing more is kept of the present run.
var thinMeans = [256]struct{ within, outside bool }{
	'"': {true, true}, '\\': {within: true}, '\n': {true, true},
	'{': {outside: true}, '}': {outside: true}, '[': {outside: true}, ']': {outside: true},
}

func (t *thinner) inString(dst []byte, c byte) []byte {
	drops := t.shut > 0
	switch {
	case c == '\n': // the line ends, whatever stands in it
		*t = thinner{}
		return append(dst, c)
	case c == '"':
		t.mode, t.kept = thinOutside, min(t.shut, 1)
	case drops || t.kept >= thinText:
		drops = true
		if c == '\\' {
			t.mode = thinEscapeLeft
		}
	default:
		t.kept++
		if c == '\\' {
			t.mode = thinEscape
		}
	}
	if drops {
		return dst
	}
	return append(dst, c)
}

func (t *thinner) outside(dst []byte, c byte, arrays bool) []byte {
	switch c {
	case '\n':
		*t = thinner{}
		return append(dst, c)
	case ' ', '\t', '\r':
		return dst
	case '}', ']':
		if t.shut == t.depth {
			t.shut = 0
		}
		t.depth -= min(t.depth, 1)
		if t.shut > 0 {
			return dst
		}
		t.kept = 0
		return append(dst, c)
	}
	if t.shut > 0 && t.kept == 0 {
		if t.kept = 1; len(dst) > 0 && dst[len(dst)-1] == '[' {
			dst = append(dst, '0')
		}
	}
	switch c {
	case '"':
		t.mode = thinString
	case '{', '[':
		if t.depth == maxNesting {
			t.mode = thinLost
			return dst
		}
		if t.depth++; t.shut == 0 {
			t.kept = 0
			if t.depth > thinDepth || c == '[' && !(arrays && t.depth <= thinArrays) {
				t.shut = t.depth
			}
			return append(dst, c)
		}
	default:
		if t.shut > 0 || t.kept >= thinText {
			return dst
		}
		t.kept++
		return append(dst, c)
	}
	if t.shut > 0 {
		return dst
	}
	t.kept = 0
	return append(dst, c)
}

// thinned takes the next bytes of an event that is beyond the bound; ended: its last. It
// gives the event, thin, when it has ended; tooBig: that too is beyond the bound.
func (s *scanner) thinned(p []byte, ended bool) (event []byte, tooBig bool) {
	arrays := s.protocol == OpenAI
	if !s.thinning {
		s.thinning, s.thin = true, thinner{}
		first := s.carry
		if first == nil || cap(first.B) < maxCarry {
			s.carry = membudget.Default.Get(maxCarry)
		}
		if first == nil {
			s.carry.B = s.carry.B[:0]
		} else {
			s.carry.B = s.thin.append(s.carry.B[:0], first.B, arrays)
			if first != s.carry {
				membudget.Default.Put(first)
			}
		}
	}
	for len(p) > 0 && s.carry != nil { // what is kept of p is no longer than p
		n := min(len(p), cap(s.carry.B)-len(s.carry.B))
		s.carry.B = s.thin.append(s.carry.B, p[:n], arrays)
		if p = p[n:]; n == 0 || s.thin.mode == thinLost {
			s.drop()
		}
	}
	if !ended {
		return nil, false
	}
	if s.thinning = false; s.carry == nil {
		return nil, true
	}
	return s.carry.B, false
}
