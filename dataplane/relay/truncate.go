package relay

import (
	"sluice/dataplane/membudget"
	"sluice/dataplane/sse"
)

// truncator shortens an event that is too large to be buffered to what the scan looks for. The last
// events of a stream repeat whole answers (response.completed has all output, instructions and
// tools beside the usage). Long strings and numbers are cut, and what lies deeper than the scan
// looks becomes an empty object, or an array of one number if it had an element. The result is
// scanned like any event. The input may be cut anywhere.
type truncator struct {
	depth        uint8 // open brackets
	droppedDepth uint8 // the depth whose content is dropped; 0: none
	kept         uint8 // bytes kept of the present string or of the present run of other bytes; where content is dropped: 1 after the first byte
	mode         truncateMode
}

type truncateMode uint8

const (
	truncOutside truncateMode = iota
	truncString
	truncEscape        // after a backslash in a string
	truncEscapeDropped // the same; the backslash was dropped
	truncGaveUp        // nothing more is kept of this event
)

const (
	// maxTruncatedString is how much of a string is kept. No name or reason is longer (reasonName).
	maxTruncatedString = 64
	// maxTruncatedDepth is the depth of the usage details of a Response.
	maxTruncatedDepth = 4
	// maxTruncatedArrays is the depth of arrays that are scanned, in OpenAI's protocols: choices.
	maxTruncatedArrays = 2
	maxNesting         = 255
)

// append appends what is kept of p to dst, which may share its beginning with p.
func (t *truncator) append(dst, p []byte, arrays bool) []byte {
	for i := 0; i < len(p); i++ {
		switch t.mode {
		case truncString:
			if t.droppedDepth > 0 || t.kept >= maxTruncatedString {
				for !truncSyntax[p[i]].within {
					if i++; i == len(p) {
						return dst
					}
				}
			}
			dst = t.inString(dst, p[i])
		case truncEscape:
			t.mode = truncString
			dst = append(dst, p[i])
		case truncEscapeDropped:
			t.mode = truncString
		case truncOutside:
			if t.kept >= maxTruncatedString || t.droppedDepth > 0 && t.kept > 0 {
				for !truncSyntax[p[i]].outside {
					if i++; i == len(p) {
						return dst
					}
				}
			}
			dst = t.outside(dst, p[i], arrays)
		case truncGaveUp:
			return dst
		}
	}
	return dst
}

// truncSyntax marks the bytes that change the state: inside strings, and outside where nothing more
// is kept of the present run.
var truncSyntax = [256]struct{ within, outside bool }{
	'"': {true, true}, '\\': {within: true}, '\n': {true, true},
	'{': {outside: true}, '}': {outside: true}, '[': {outside: true}, ']': {outside: true},
}

func (t *truncator) inString(dst []byte, c byte) []byte {
	drops := t.droppedDepth > 0
	switch {
	case c == '\n': // the line ends in any state
		*t = truncator{}
		return append(dst, c)
	case c == '"':
		t.mode, t.kept = truncOutside, min(t.droppedDepth, 1)
	case drops || t.kept >= maxTruncatedString:
		drops = true
		if c == '\\' {
			t.mode = truncEscapeDropped
		}
	default:
		t.kept++
		if c == '\\' {
			t.mode = truncEscape
		}
	}
	if drops {
		return dst
	}
	return append(dst, c)
}

func (t *truncator) outside(dst []byte, c byte, arrays bool) []byte {
	switch c {
	case '\n':
		*t = truncator{}
		return append(dst, c)
	case ' ', '\t', '\r':
		return dst
	case '}', ']':
		if t.droppedDepth == t.depth {
			t.droppedDepth = 0
		}
		t.depth -= min(t.depth, 1)
		if t.droppedDepth > 0 {
			return dst
		}
		t.kept = 0
		return append(dst, c)
	}
	if t.droppedDepth > 0 && t.kept == 0 {
		if t.kept = 1; len(dst) > 0 && dst[len(dst)-1] == '[' {
			dst = append(dst, '0')
		}
	}
	switch c {
	case '"':
		t.mode = truncString
	case '{', '[':
		if t.depth == maxNesting {
			t.mode = truncGaveUp
			return dst
		}
		if t.depth++; t.droppedDepth == 0 {
			t.kept = 0
			if t.depth > maxTruncatedDepth || c == '[' && !(arrays && t.depth <= maxTruncatedArrays) {
				t.droppedDepth = t.depth
			}
			return append(dst, c)
		}
	default:
		if t.droppedDepth > 0 || t.kept >= maxTruncatedString {
			return dst
		}
		t.kept++
		return append(dst, c)
	}
	if t.droppedDepth > 0 {
		return dst
	}
	t.kept = 0
	return append(dst, c)
}

// truncated processes the next bytes of an event beyond the bound. ended: these are its last. It
// returns the shortened event when it has ended. tooBig: the shortened event is beyond the bound
// too.
func (s *streamScanner) truncated(p []byte, ended bool) (event []byte, tooBig bool) {
	arrays := s.protocol == sse.OpenAI
	if !s.truncating {
		s.truncating, s.truncator = true, truncator{}
		first := s.Partial
		if first == nil || cap(first.B) < sse.MaxPartialEvent {
			s.Partial = membudget.Default.Get(sse.MaxPartialEvent)
		}
		if first == nil {
			s.Partial.B = s.Partial.B[:0]
		} else {
			s.Partial.B = s.truncator.append(s.Partial.B[:0], first.B, arrays)
			if first != s.Partial {
				membudget.Default.Put(first)
			}
		}
	}
	for len(p) > 0 && s.Partial != nil { // what is kept of p is no longer than p
		n := min(len(p), cap(s.Partial.B)-len(s.Partial.B))
		s.Partial.B = s.truncator.append(s.Partial.B, p[:n], arrays)
		if p = p[n:]; n == 0 || s.truncator.mode == truncGaveUp {
			s.Release()
		}
	}
	if !ended {
		return nil, false
	}
	if s.truncating = false; s.Partial == nil {
		return nil, true
	}
	return s.Partial.B, false
}
