package relay

import "bytes"

// veil blanks the private members of JSON where it lies, fed in pieces cut anywhere: the
// value becomes null, or an empty one of its kind, and spaces as many as it was long, so
// that no framing around it changes. They are found at any depth and however their names
// are written, but for those in what is the client's or the model's own (isOwnWords); never
// in a string. Of an event stream's other lines, comments among them, and of data that is
// no JSON, all is blanked from such a name to the line's end.
type veil struct {
	events  bool // event stream: JSON stands behind "data:", lines end with LF, CR or both
	guess   bool // the first byte will tell whether it is one
	refusal bool // it repeats what the engine was sent: nothing in it is left alone
	telling bool // it tells of a failure in words that tell private things too
	cr      bool // the last byte was a CR that ended a line
	line    veilLine
	text    spelling // of the line, where it is no JSON

	str   bool
	last  spelling // of the last string
	comes veilMeaning
	own   bool // in a value that is left alone
	blank veilBlank
	fill  string // what stands in the place of the bytes to come, before spaces
	depth int32  // of brackets
	base  int32  // where the value ends that is blanked or left alone
}

// veilLine is where in a line of an event stream.
type veilLine uint8

const (
	veilStart veilLine = iota // nowhere
	veilName                  // in the field's name
	veilData                  // in data
	veilOther                 // in another field, a comment, or what is no JSON
	veilTold                  // behind a private name in such
)

// veilMeaning is what the value to come is.
type veilMeaning uint8

const (
	veilPlain   veilMeaning = iota
	veilPrivate             // of a private member
	veilOwn                 // to be left alone
	veilWords               // an engine's, on a failure
)

// veilBlank is what becomes of the value's bytes.
type veilBlank uint8

const (
	veilNot      veilBlank = iota
	veilNumber             // digits become one 0
	veilString             // in a string that is the value
	veilTelling            // likewise, and the next is its first byte: an engine's words
	veilBrackets           // in an object or array whose brackets stay
	veilNull               // in an object that becomes null
)

// feed blanks what is private in the next bytes.
func (v *veil) feed(p []byte) {
	if v.guess && len(p) > 0 {
		v.guess, v.events = false, !beginsJSON(p[0])
	}
	for i := 0; i < len(p); i++ {
		if v.events && (v.line != veilData || p[i] == '\n' || p[i] == '\r') {
			p[i] = v.outside(p[i])
			continue
		}
		if n := v.dull(p[i:]); n > 0 {
			i += n - 1
			continue
		}
		next := byte(0)
		if i+1 < len(p) {
			next = p[i+1]
		}
		if p[i] = v.json(p[i], next); v.blank == veilTelling {
			v.blank, v.fill = veilString, withheldIn(wordsLen(p[i+1:]))
		}
	}
}

// feedAll is feed of parts that are seen together: only so it is known how much room there is
// in the place of an engine's words, which chunks may have cut.
func (v *veil) feedAll(parts [][]byte) {
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

// wordsLen is how long the inside of a string is that begins with p; all of p where its end
// is not in it.
func wordsLen(p []byte) int {
	w := walker{b: p, i: -1} // where its quote would be
	if words := w.str(); !w.bad {
		return len(words)
	}
	return len(p)
}

// beginsJSON says whether a body whose first byte this is may be JSON, behind space or a
// byte order mark, and no event stream.
func beginsJSON(c byte) bool { return c <= ' ' || c == '{' || c == '[' || c == '"' || c == 0xef }

// dull is how many bytes of p say nothing: most are inside of strings, and of arrays of
// numbers.
func (v *veil) dull(p []byte) int {
	n := 0
	switch {
	case v.blank != veilNot:
		return 0
	case v.str && v.last.tooLong():
		n = bytes.IndexAny(p, "\"\\\n\r")
	case !v.str && v.depth > 0 && v.comes == veilPlain && v.events:
		// What looks like JSON may be none: {'name': …}. So letters are looked at, of
		// which JSON has few.
		for n < len(p) && isNumberByte(p[n]) {
			n++
		}
	case !v.str && v.depth > 0 && v.comes == veilPlain:
		n = bytes.IndexAny(p, "\":{}[]\n\r")
	}
	if n < 0 {
		return len(p)
	}
	return n
}

// outside takes a byte that is not in an event's data, and gives what stands in its place.
func (v *veil) outside(c byte) byte {
	cr := v.cr
	v.cr = c == '\r'
	switch {
	case c == '\n' && cr: // of the same line end
	case c == '\n' || c == '\r':
		if v.line == veilStart { // the empty line
			*v = veil{events: true, refusal: v.refusal, telling: v.telling, cr: v.cr}
		}
		v.line, v.text = veilStart, spelling{}
	case v.line == veilTold:
		return ' '
	case v.line == veilName && c == ':' && v.text.is("data"):
		v.line = veilData
	default:
		if c == ':' {
			v.line = veilOther
		} else if v.line == veilStart {
			v.line = veilName
		}
		v.inText(c)
	}
	return c
}

// inText takes a byte of a line that is no JSON.
func (v *veil) inText(c byte) {
	if v.text.slide(c) && v.text.endsPrivate() {
		v.line = veilTold
	}
}

// json takes the next byte of JSON, before next (0: not known), and gives what stands in
// its place.
func (v *veil) json(c, next byte) byte {
	switch {
	case v.blank != veilNot:
		return v.blanked(c)
	case v.str:
		if c == '"' && !v.last.quoted() {
			v.str = false
		} else {
			v.last.add(c)
		}
		return c
	}
	switch c {
	case ' ', '\t', '\n', '\r':
		return c
	case ':': // the string before it is a key
		if v.comes = veilPlain; !v.own {
			v.comes = v.meaning()
		}
		return c
	case '"':
		v.str, v.last = true, spelling{}
		switch v.comes {
		case veilWords:
			v.blank = veilTelling
		case veilPrivate:
			v.blank = veilString
		}
	case '{', '[':
		v.depth++
		switch v.comes {
		case veilPrivate:
			v.comes, v.blank, v.base = veilPlain, veilBrackets, v.depth-1
			if c == '{' && next == '"' { // as long as null at least
				v.blank, v.fill = veilNull, "ull"
				return 'n'
			}
		case veilOwn:
			v.own, v.base = true, v.depth-1
		}
	case '}', ']':
		v.depth = max(v.depth-1, 0)
		v.own = v.own && v.depth > v.base
	default:
		switch {
		case v.comes == veilPrivate && (c == '-' || c-'0' <= 9):
			v.comes, v.blank = veilPlain, veilNumber
			return '0'
		case v.events && v.depth == 0: // no JSON
			v.line, v.text = veilOther, spelling{}
			v.inText(c)
		case v.events && (isNumberByte(c) || isLiteralByte(c)):
			v.text.slide(c) // it may be the beginning of a name
		case v.events: // no JSON either
			v.line = veilOther
			v.inText(c)
		}
	}
	v.comes = veilPlain
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

// meaning is what the last string, a key, says of its value.
func (v *veil) meaning() veilMeaning {
	key := v.last.word()
	switch {
	case isPrivate(key):
		return veilPrivate
	case v.telling && isMessage(key):
		return veilWords
	case !v.refusal && isOwnWords(key):
		return veilOwn
	}
	return veilPlain
}

// blanked gives what stands in the place of a byte of a private value.
func (v *veil) blanked(c byte) byte {
	switch {
	case v.blank == veilNumber:
		if c != ',' && c != '}' && c != ']' {
			return ' '
		}
		v.blank = veilNot
		return v.json(c, 0)
	case v.str && (c != '"' || v.last.quoted()):
		v.last.add(c)
	case v.str:
		if v.str = false; v.blank == veilString {
			v.blank, v.fill = veilNot, ""
			return c
		}
	case c == '"':
		v.str, v.last = true, spelling{}
	case c == '{' || c == '[':
		v.depth++
	case c == '}' || c == ']':
		if v.depth--; v.depth == v.base {
			brackets := v.blank == veilBrackets
			v.blank = veilNot
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
