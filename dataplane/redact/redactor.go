package redact

import (
	"bytes"
	"sluice/dataplane/jsonscan"
)

// Redactor blanks the private members of JSON in place. Its input may be cut anywhere. A value
// becomes null, or an empty value of its type, followed by spaces up to its old length, so that no
// framing around it changes.
//
// Private members are found at any depth and however their names are escaped, except in members
// that hold the client's or the model's own data (IsExemptMember), and never inside a string. In
// the other lines of an event stream, comments included, and in data that is not JSON, everything
// from such a name to the end of the line is blanked.
type Redactor struct {
	events       bool // an event stream: JSON follows "data:", lines end with LF, CR or both
	DetectFormat bool // the first byte decides whether it is an event stream
	IsRefusal    bool // it may repeat the request: nothing in it is exempt
	IsFailure    bool // it reports a failure, in text that may contain private values
	// watches: whether the event reports a failure may be unknown, because it is too long for the
	// scanner or passed on before its end. Error text that names a handle is blanked.
	watches  bool
	watched  bool // in a string that is searched for a handle's name
	named    bool // the last string names a handle
	inError  bool // watches: in an error that the event reports, which is redacted as a refusal
	isKind   bool // watches: in the string that may say that the event is an error
	atHandle bool // in a refusal, a value named a member of a handle: the "input" that follows is that member's value
	cr       bool // the last byte was a CR that ended a line
	line     redactLine
	text     nameMatcher // of a line that is not JSON; else the last bytes of a watched string

	str        bool
	lastString nameMatcher // the beginning of the last string
	next       valueClass
	exempt     bool // in an exempt value
	blanking   blankMode
	fill       string // bytes that replace the next ones, before spaces
	depth      int32  // brackets that are open
	base       int32  // the depth at which the blanked or exempt value ends
	errorBase  int32  // the depth at which inError ends
}

// NewEventRedactor returns a redactor of an event stream. failure: the scanner has found an error
// event that names a handle. Such an event may repeat the request, as a refusal does.
func NewEventRedactor(failure bool) Redactor {
	return Redactor{events: true, IsFailure: failure, IsRefusal: failure, watches: true}
}

// redactLine is the position in a line of an event stream.
type redactLine uint8

const (
	lineStart     redactLine = iota // at its beginning
	lineFieldName                   // in the field's name
	lineData                        // in data
	lineOther                       // in another field, a comment, or data that is not JSON
	linePrivate                     // after a private name in such a line
)

// valueClass is how the next value is treated.
type valueClass uint8

const (
	valuePlain     valueClass = iota
	valuePrivate              // of a private member
	valueExempt               // of an exempt member
	valueErrorText            // an engine's error text, of a failure
	valueWatched              // the same where it is unknown whether there is a failure
	valueKind                 // of a member that may say that the event is an error
)

// blankMode is what replaces the bytes of a value.
type blankMode uint8

const (
	blankNone      blankMode = iota
	blankNumber              // digits become one 0
	blankString              // in a string that is blanked
	blankErrorText           // the next byte is the first of an error text, which is blanked
	blankBrackets            // in an object or array whose brackets stay
	blankNull                // in an object that becomes null
)

// Feed blanks private values in p, the next bytes of the body.
func (v *Redactor) Feed(p []byte) {
	if v.DetectFormat && len(p) > 0 {
		v.DetectFormat, v.events = false, !beginsJSON(p[0])
	}
	for i := 0; i < len(p); i++ {
		if v.events && (v.line != lineData || p[i] == '\n' || p[i] == '\r') {
			p[i] = v.outside(p[i])
			continue
		}
		if n := v.skippable(p[i:]); n > 0 {
			i += n - 1
			continue
		}
		next := byte(0)
		if i+1 < len(p) {
			next = p[i+1]
		}
		inside := v.str
		p[i] = v.json(p[i], next)
		switch {
		case v.blanking == blankErrorText:
			v.blanking, v.fill = blankString, redactedTextFor(stringBodyLen(p[i+1:]))
		case v.watched && !inside:
			v.beginWatched(p[i+1:])
		}
	}
}

// beginWatched searches a string for a handle's name. p is the string after its opening quote. A
// string that contains one is blanked; if it is a key, its value is blanked instead. When p ends
// inside the string, watch continues the search.
func (v *Redactor) beginWatched(p []byte) {
	n := stringBodyLen(p)
	v.watched, v.named = n == len(p), MayNameHandle(p[:n])
	if after := bytes.TrimLeft(p[min(n+1, len(p)):], jsonSpace); len(after) > 0 && after[0] == ':' {
		return // a key: classify uses v.named
	}
	if v.named {
		v.blanking, v.fill, v.watched, v.atHandle = blankString, redactedTextFor(n), false, true
	}
}

// watch takes the next byte of a watched string. After a handle's name the rest of the string is
// blanked.
func (v *Redactor) watch(c byte) {
	v.text.addText(c)
	if word := v.text.word(); bytes.IndexByte(word, '_') >= 0 && endsWithHandleWord(word) {
		v.named, v.atHandle, v.watched, v.blanking, v.fill = true, true, false, blankString, ""
	}
}

// NeedsWhole reports whether the next bytes may hold the text of an error, which chunks may split. They
// are then collected for FeedAll.
func (v *Redactor) NeedsWhole() bool { return v.IsFailure || v.watches && !v.str }

// FeedAll feeds parts as one. The length of an error text, which chunks may split, decides what
// replaces it.
func (v *Redactor) FeedAll(parts [][]byte) {
	if len(parts) == 1 {
		v.Feed(parts[0])
		return
	}
	whole := bytes.Join(parts, nil)
	v.Feed(whole)
	for _, part := range parts {
		whole = whole[copy(part, whole):]
	}
}

// stringBodyLen returns the length of the string whose inside begins with p; len(p) if p ends
// inside it.
func stringBodyLen(p []byte) int {
	w := jsonscan.Cursor{Data: p, Pos: -1} // -1: where the opening quote would be
	if words := w.StringBody(); !w.Bad {
		return len(words)
	}
	return len(p)
}

// beginsJSON reports whether a body whose first byte is c may be JSON, after white space or a byte
// order mark, and not an event stream.
func beginsJSON(c byte) bool { return c <= ' ' || c == '{' || c == '[' || c == '"' || c == 0xef }

// skippable returns how many bytes of p can be skipped. Most lie inside strings and arrays of
// numbers.
func (v *Redactor) skippable(p []byte) int {
	n := 0
	switch {
	case v.blanking != blankNone:
		return 0
	case v.str && v.watched:
		return 0
	case v.str && v.lastString.tooLong():
		n = bytes.IndexAny(p, "\"\\\n\r")
	case !v.str && v.depth > 0 && v.next == valuePlain && v.events:
		// Data may look like JSON without being JSON: {'name': …}. So letters, of which JSON has
		// few, are not skipped.
		for n < len(p) && isNumberByte(p[n]) {
			n++
		}
	case !v.str && v.depth > 0 && v.next == valuePlain:
		n = bytes.IndexAny(p, "\":{}[]\n\r")
	}
	if n < 0 {
		return len(p)
	}
	return n
}

// outside takes a byte outside an event's data and returns what replaces it.
func (v *Redactor) outside(c byte) byte {
	cr := v.cr
	v.cr = c == '\r'
	switch {
	case c == '\n' && cr: // part of a CRLF
	case c == '\n' || c == '\r':
		if v.line == lineStart { // an empty line
			*v = Redactor{events: true, IsRefusal: v.IsRefusal, IsFailure: v.IsFailure, watches: v.watches, cr: v.cr}
		}
		v.line, v.text = lineStart, nameMatcher{}
	case v.line == linePrivate:
		return ' '
	case v.line == lineFieldName && c == ':' && v.text.equals("data"):
		v.line = lineData
	default:
		if c == ':' {
			v.line = lineOther
		} else if v.line == lineStart {
			v.line = lineFieldName
		}
		v.inText(c)
	}
	return c
}

// inText takes a byte of a line that is not JSON.
func (v *Redactor) inText(c byte) {
	if v.text.addText(c) && v.text.endsPrivate() {
		v.line = linePrivate
	}
}

// json takes a byte of JSON and returns what replaces it. next is the byte after it; 0: unknown.
func (v *Redactor) json(c, next byte) byte {
	switch {
	case v.blanking != blankNone:
		return v.blankByte(c)
	case v.str:
		if c == '"' && !v.lastString.inEscape() {
			v.str, v.watched = false, false
			if v.isKind && v.lastString.equals("error") {
				v.inError, v.errorBase = true, 0
			}
			v.isKind = false
		} else if v.lastString.add(c); v.watched {
			v.watch(c)
		}
		return c
	}
	switch c {
	case ' ', '\t', '\n', '\r':
		return c
	case ':': // the string before it was a key
		if v.next = valuePlain; !v.exempt {
			v.next = v.classify()
		}
		return c
	case '"':
		v.str, v.lastString, v.named = true, nameMatcher{}, false
		v.isKind = v.next == valueKind
		if v.watched = !v.exempt && (v.refuses() || v.next == valueWatched); v.watched {
			v.text = nameMatcher{}
		}
		switch v.next {
		case valueErrorText:
			v.blanking = blankErrorText
		case valuePrivate:
			v.blanking, v.watched = blankString, false
		}
	case '{', '[':
		v.depth++
		switch v.next {
		case valueWatched:
			if !v.inError && isErrorObject(v.lastString.word()) {
				v.inError, v.errorBase = true, v.depth-1
			}
		case valuePrivate:
			v.next, v.blanking, v.base = valuePlain, blankBrackets, v.depth-1
			if c == '{' && next == '"' { // at least as long as null
				v.blanking, v.fill = blankNull, "ull"
				return 'n'
			}
		case valueExempt:
			v.exempt, v.base = true, v.depth-1
		}
	case '}', ']':
		v.depth = max(v.depth-1, 0)
		v.exempt = v.exempt && v.depth > v.base
		v.inError = v.inError && v.depth > v.errorBase
	default:
		switch {
		case v.next == valuePrivate && (c == '-' || c-'0' <= 9):
			v.next, v.blanking = valuePlain, blankNumber
			return '0'
		case v.events && v.depth == 0: // not JSON
			v.line, v.text = lineOther, nameMatcher{}
			v.inText(c)
		case v.events && (isNumberByte(c) || isLiteralByte(c)):
			v.text.addText(c) // possibly the beginning of a name
		case v.events: // not JSON either
			v.line = lineOther
			v.inText(c)
		}
	}
	v.next = valuePlain
	return c
}

// isNumberByte reports whether c may stand in an array of numbers.
func isNumberByte(c byte) bool {
	return c-'0' <= 9 || c == ',' || c == ' ' || c == '-' || c == '.' || c == '+' || c == '\t'
}

// isLiteralByte reports whether c may stand in true, false, null or the exponent of a number.
func isLiteralByte(c byte) bool {
	switch c {
	case 't', 'r', 'u', 'e', 'f', 'a', 'l', 's', 'n', 'E':
		return true
	}
	return false
}

// refuses reports whether what is read may repeat the request.
func (v *Redactor) refuses() bool { return v.IsRefusal || v.inError }

// classify returns how the value of the last string, a key, is treated.
func (v *Redactor) classify() valueClass {
	key := v.lastString.word()
	switch {
	case IsPrivate(key), v.refuses() && (v.named || v.atHandle && string(key) == "input"):
		return valuePrivate
	case v.refuses() && string(key) == "loc":
		v.atHandle = false
	case v.IsFailure && isErrorText(key):
		return valueErrorText
	case v.watches && isErrorText(key):
		return valueWatched
	case !v.refuses() && IsExemptMember(key):
		return valueExempt
	case v.watches && v.depth == 1 && (string(key) == "object" || string(key) == "type"):
		return valueKind
	}
	return valuePlain
}

// blankByte takes a byte of a private value and returns what replaces it.
func (v *Redactor) blankByte(c byte) byte {
	switch {
	case v.blanking == blankNumber:
		if c != ',' && c != '}' && c != ']' {
			return ' '
		}
		v.blanking = blankNone
		return v.json(c, 0)
	case v.str && (c != '"' || v.lastString.inEscape()):
		v.lastString.add(c)
	case v.str:
		if v.str = false; v.blanking == blankString {
			v.blanking, v.fill = blankNone, ""
			return c
		}
	case c == '"':
		v.str, v.lastString = true, nameMatcher{}
	case c == '{' || c == '[':
		v.depth++
	case c == '}' || c == ']':
		if v.depth--; v.depth == v.base {
			brackets := v.blanking == blankBrackets
			v.blanking = blankNone
			if brackets {
				return c
			}
		}
	}
	if len(v.fill) > 0 {
		c, v.fill = v.fill[0], v.fill[1:]
		return c
	}
	return ' '
}
