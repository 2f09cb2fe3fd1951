package relay

import "bytes"

// redactor blanks the private members of JSON where it lies, fed in pieces cut anywhere: the
// value becomes null, or an empty one of its kind, and spaces as many as it was long, so
// that no framing around it changes. They are found at any depth and however their names
// are written, but for those in what is the client's or the model's own (isExemptMember); never
// in a string. Of an event stream's other lines, comments among them, and of data that is
// no JSON, all is blanked from such a name to the line's end.
type redactor struct {
	events       bool // event stream: JSON stands behind "data:", lines end with LF, CR or both
	detectFormat bool // the first byte will tell whether it is one
	isRefusal    bool // it repeats what the engine was sent: nothing in it is left alone
	isFailure    bool // it tells of a failure in words that tell private things too
	// watches: whether the event reports a failure may be unknown, because it is too long for the
	// scanner or passed on before its end. Error text that names a handle is blanked.
	watches  bool
	watched  bool // in a string in which a handle's name is looked for
	named    bool // the last string names a handle
	atHandle bool // in a refusal, a value names a handle's member: the input that follows is that member's
	cr       bool // the last byte was a CR that ended a line
	line     redactLine
	text     nameMatcher // of the line, where it is no JSON; else the last bytes of a watched string

	str        bool
	lastString nameMatcher // of the last string
	next       valueClass
	exempt     bool // in a value that is left alone
	blanking   blankMode
	fill       string // what stands in the place of the bytes to come, before spaces
	depth      int32  // of brackets
	base       int32  // where the value ends that is blanked or left alone
}

// newEventRedactor returns a redactor of an event stream. failure: the scanner has found an error
// event that names a handle. Such an event may repeat the request, as a refusal does.
func newEventRedactor(failure bool) redactor {
	return redactor{events: true, isFailure: failure, isRefusal: failure, watches: true}
}

// redactLine is where in a line of an event stream.
type redactLine uint8

const (
	lineStart     redactLine = iota // nowhere
	lineFieldName                   // in the field's name
	lineData                        // in data
	lineOther                       // in another field, a comment, or what is no JSON
	linePrivate                     // behind a private name in such
)

// valueClass is what the value to come is.
type valueClass uint8

const (
	valuePlain     valueClass = iota
	valuePrivate              // of a private member
	valueExempt               // to be left alone
	valueErrorText            // an engine's, on a failure
	valueWatched              // likewise, where it is not known yet whether there is a failure
)

// blankMode is what becomes of the value's bytes.
type blankMode uint8

const (
	blankNone      blankMode = iota
	blankNumber              // digits become one 0
	blankString              // in a string that is the value
	blankErrorText           // likewise, and the next is its first byte: an engine's words
	blankBrackets            // in an object or array whose brackets stay
	blankNull                // in an object that becomes null
)

// feed blanks what is private in the next bytes.
func (v *redactor) feed(p []byte) {
	if v.detectFormat && len(p) > 0 {
		v.detectFormat, v.events = false, !beginsJSON(p[0])
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

// beginWatched looks for a handle's name in a string that begins with p, its quote already read. A
// string that names one is blanked; a key that does has its value blanked instead. Where the end of
// the string is not in p, watch goes on looking.
func (v *redactor) beginWatched(p []byte) {
	n := stringBodyLen(p)
	v.watched, v.named = n == len(p), mayNameHandle(p[:n])
	if after := bytes.TrimLeft(p[min(n+1, len(p)):], jsonSpace); len(after) > 0 && after[0] == ':' {
		return // a key
	}
	if v.named {
		v.blanking, v.fill, v.watched, v.atHandle = blankString, redactedTextFor(n), false, true
	}
}

// watch takes the next byte of a watched string whose end was not known at its beginning. Behind a
// handle's name the string is blanked.
func (v *redactor) watch(c byte) {
	v.text.addText(c)
	if word := v.text.word(); bytes.IndexByte(word, '_') >= 0 && endsWithHandleWord(word) {
		v.named, v.atHandle, v.watched, v.blanking, v.fill = true, true, false, blankString, ""
	}
}

// feedAll is feed of parts that are seen together: only so it is known how much room there is
// in the place of an engine's words, which chunks may have cut.
func (v *redactor) feedAll(parts [][]byte) {
	if len(parts) == 1 {
		v.feed(parts[0])
		return
	}
	whole := bytes.Join(parts, nil)
	v.feed(whole)
	for _, part := range parts {
		whole = whole[copy(part, whole):]
	}
}

// stringBodyLen is how long the inside of a string is that begins with p; all of p where its end
// is not in it.
func stringBodyLen(p []byte) int {
	w := jsonWalker{b: p, i: -1} // where its quote would be
	if words := w.stringBody(); !w.bad {
		return len(words)
	}
	return len(p)
}

// beginsJSON says whether a body whose first byte this is may be JSON, behind space or a
// byte order mark, and no event stream.
func beginsJSON(c byte) bool { return c <= ' ' || c == '{' || c == '[' || c == '"' || c == 0xef }

// skippable is how many bytes of p say nothing: most are inside of strings, and of arrays of
// numbers.
func (v *redactor) skippable(p []byte) int {
	n := 0
	switch {
	case v.blanking != blankNone:
		return 0
	case v.str && v.watched:
		return 0
	case v.str && v.lastString.tooLong():
		n = bytes.IndexAny(p, "\"\\\n\r")
	case !v.str && v.depth > 0 && v.next == valuePlain && v.events:
		// What looks like JSON may be none: {'name': …}. So letters are looked at, of
		// which JSON has few.
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

// outside takes a byte that is not in an event's data, and gives what stands in its place.
func (v *redactor) outside(c byte) byte {
	cr := v.cr
	v.cr = c == '\r'
	switch {
	case c == '\n' && cr: // of the same line end
	case c == '\n' || c == '\r':
		if v.line == lineStart { // the empty line
			*v = redactor{events: true, isRefusal: v.isRefusal, isFailure: v.isFailure, watches: v.watches, cr: v.cr}
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

// inText takes a byte of a line that is no JSON.
func (v *redactor) inText(c byte) {
	if v.text.addText(c) && v.text.endsPrivate() {
		v.line = linePrivate
	}
}

// json takes the next byte of JSON, before next (0: not known), and gives what stands in
// its place.
func (v *redactor) json(c, next byte) byte {
	switch {
	case v.blanking != blankNone:
		return v.blankByte(c)
	case v.str:
		if c == '"' && !v.lastString.inEscape() {
			v.str, v.watched = false, false
		} else if v.lastString.add(c); v.watched {
			v.watch(c)
		}
		return c
	}
	switch c {
	case ' ', '\t', '\n', '\r':
		return c
	case ':': // the string before it is a key
		if v.next = valuePlain; !v.exempt {
			v.next = v.classify()
		}
		return c
	case '"':
		v.str, v.lastString, v.named = true, nameMatcher{}, false
		if v.watched = !v.exempt && (v.isRefusal || v.next == valueWatched); v.watched {
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
		case valuePrivate:
			v.next, v.blanking, v.base = valuePlain, blankBrackets, v.depth-1
			if c == '{' && next == '"' { // as long as null at least
				v.blanking, v.fill = blankNull, "ull"
				return 'n'
			}
		case valueExempt:
			v.exempt, v.base = true, v.depth-1
		}
	case '}', ']':
		v.depth = max(v.depth-1, 0)
		v.exempt = v.exempt && v.depth > v.base
	default:
		switch {
		case v.next == valuePrivate && (c == '-' || c-'0' <= 9):
			v.next, v.blanking = valuePlain, blankNumber
			return '0'
		case v.events && v.depth == 0: // no JSON
			v.line, v.text = lineOther, nameMatcher{}
			v.inText(c)
		case v.events && (isNumberByte(c) || isLiteralByte(c)):
			v.text.addText(c) // it may be the beginning of a name
		case v.events: // no JSON either
			v.line = lineOther
			v.inText(c)
		}
	}
	v.next = valuePlain
	return c
}

// isNumberByte says whether a byte may stand in an array of numbers.
func isNumberByte(c byte) bool {
	return c-'0' <= 9 || c == ',' || c == ' ' || c == '-' || c == '.' || c == '+' || c == '\t'
}

// isLiteralByte says whether a byte may stand in true, false, null or a number's exponent.
func isLiteralByte(c byte) bool {
	switch c {
	case 't', 'r', 'u', 'e', 'f', 'a', 'l', 's', 'n', 'E':
		return true
	}
	return false
}

// classify is what the last string, a key, says of its value.
func (v *redactor) classify() valueClass {
	key := v.lastString.word()
	switch {
	case isPrivate(key), v.isRefusal && (v.named || v.atHandle && string(key) == "input"):
		return valuePrivate
	case v.isRefusal && string(key) == "loc":
		v.atHandle = false
	case v.isFailure && isErrorText(key):
		return valueErrorText
	case v.watches && isErrorText(key):
		return valueWatched
	case !v.isRefusal && isExemptMember(key):
		return valueExempt
	}
	return valuePlain
}

// blankByte gives what stands in the place of a byte of a private value.
func (v *redactor) blankByte(c byte) byte {
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
