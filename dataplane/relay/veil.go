package relay

import "bytes"

// veil blanks the private members of JSON where it lies, fed in pieces cut anywhere: the
// value becomes null, or an empty one of its kind, and spaces as many as it was long, so
// that no framing around it changes. It looks where engines write them: on top, in
// choices, and in what the events of Messages and Responses hold (message, response);
// never in a string. What does not begin as an object passes.
type veil struct {
	events bool // event stream: JSON stands behind "data:", lines end with LF
	line   veilLine
	name   [5]byte // of the line's field
	named  int8

	depth   int32 // of brackets
	base    int32 // where the value being blanked ends
	key     [21]byte
	keyLen  int8 // -1: too long for one of ours
	under   veilUnder
	holds   bool // the value on top is of the kind that under means
	str     bool
	escaped bool
	isKey   bool // the string is a key
	wants   bool // a key may follow
	private bool // the key of the value to come is
	blank   veilBlank
	nulls   int8 // letters of null still to be written
	off     bool // no object
}

// veilLine is where in a line of an event stream.
type veilLine uint8

const (
	veilName  veilLine = iota // in the field's name, or before it
	veilData                  // in data
	veilOther                 // in another field, or a comment
)

// veilUnder is which member on top is open.
type veilUnder uint8

const (
	underNone    veilUnder = iota
	underChoices           // its objects are looked at
	underObject            // it is
)

// veilBlank is what becomes of the value's bytes.
type veilBlank uint8

const (
	veilNot      veilBlank = iota
	veilNumber             // digits become one 0
	veilString             // in a string that is the value
	veilBrackets           // in an object or array whose brackets stay
	veilNull               // in an object that becomes null
)

// feed blanks what is private in the next bytes.
func (v *veil) feed(p []byte) {
	if v.off && !v.events {
		return
	}
	for i := 0; i < len(p); i++ {
		if v.events && (v.line != veilData || p[i] == '\n' || p[i] == '\r') {
			v.outside(p[i])
			continue
		}
		if v.off {
			continue
		}
		if v.str && v.blank == veilNot && !v.isKey && !v.escaped { // most bytes are inside strings
			n := bytes.IndexAny(p[i:], "\"\\\n")
			if n < 0 {
				return
			}
			if i += n; p[i] == '\n' {
				i--
				if !v.events {
					i++
				}
				continue
			}
		}
		if !v.str && v.blank == veilNot && !v.private && v.depth > 1 && !v.looked() { // no key here is one of ours
			n := bytes.IndexAny(p[i:], "\"{}[]\n\r")
			if n < 0 {
				return
			}
			if i += n; p[i] == '\n' || p[i] == '\r' {
				if v.events {
					i--
				}
				continue
			}
		}
		next := byte(0)
		if i+1 < len(p) {
			next = p[i+1]
		}
		p[i] = v.json(p[i], next)
	}
}

// outside takes a byte that is not in an event's data.
func (v *veil) outside(c byte) {
	switch {
	case c == '\n':
		if v.line == veilName && v.named == 0 { // the empty line
			*v = veil{events: true}
		}
		v.line, v.named = veilName, 0
	case c == '\r' || v.line != veilName:
	case c == ':':
		v.line = veilOther
		if string(v.name[:v.named]) == "data" {
			v.line = veilData
		}
	case int(v.named) < len(v.name):
		v.name[v.named] = c
		v.named++
	}
}

// json takes the next byte of JSON, before next (0: not known), and gives what stands in
// its place.
func (v *veil) json(c, next byte) byte {
	switch {
	case v.blank != veilNot:
		return v.blanked(c)
	case v.str:
		v.inString(c)
		return c
	}
	switch c {
	case ' ', '\t', '\n', '\r', ':':
		return c
	case '"':
		v.str, v.isKey = true, v.wants
		if v.wants {
			v.keyLen = 0
		}
		if v.private && !v.isKey {
			v.blank, v.base = veilString, v.depth
		}
	case '{', '[':
		if v.private {
			v.blank, v.base = veilBrackets, v.depth
			v.depth++
			if c == '{' && next == '"' { // as long as null at least
				v.blank, v.nulls = veilNull, int8(len(null)-1)
				return null[0]
			}
			return c
		}
		if v.depth == 0 && c == '[' {
			v.off = true
			return c
		}
		if v.depth == 1 {
			v.holds = v.under == underChoices && c == '[' || v.under == underObject && c == '{'
		}
		v.depth++
		v.wants = c == '{' && v.looked()
	case '}', ']':
		v.depth--
		v.wants = false
		if v.depth == 1 {
			v.under, v.holds = underNone, false
		}
	case ',':
		v.private, v.wants = false, v.looked()
	default:
		switch {
		case v.depth == 0:
			v.off = true
		case v.private && (c == '-' || c-'0' <= 9):
			v.blank = veilNumber
			return '0'
		}
	}
	v.private = v.private && v.blank != veilNot
	return c
}

// looked says whether the object that it stands in may have private members. Behind a
// comma in an array of such it is none: no key follows.
func (v *veil) looked() bool {
	switch v.depth {
	case 1:
		return true
	case 2:
		return v.holds && v.under == underObject
	case 3:
		return v.holds && v.under == underChoices
	}
	return false
}

// inString takes a byte of a string.
func (v *veil) inString(c byte) {
	switch {
	case v.escaped:
		v.escaped, v.keyLen = false, -1
	case c == '\\':
		v.escaped = true
	case c == '"':
		if v.str = false; v.isKey {
			v.isKey, v.wants = false, false
			v.keyed()
		}
	case v.isKey && v.keyLen >= 0:
		if int(v.keyLen) == len(v.key) {
			v.keyLen = -1
			return
		}
		v.key[v.keyLen] = c
		v.keyLen++
	}
}

// keyed takes in a key.
func (v *veil) keyed() {
	key := v.key[:max(v.keyLen, 0)]
	v.private = isPrivate(key)
	if v.depth > 1 {
		return
	}
	switch v.under, v.holds = underNone, false; string(key) {
	case "choices":
		v.under = underChoices
	case "message", "response":
		v.under = underObject
	}
}

// blanked gives what stands in the place of a byte of a private value.
func (v *veil) blanked(c byte) byte {
	switch {
	case v.blank == veilNumber:
		if c != ',' && c != '}' && c != ']' {
			return ' '
		}
		v.blank, v.private = veilNot, false
		return v.json(c, 0)
	case v.str && v.escaped:
		v.escaped = false
	case v.str && c == '\\':
		v.escaped = true
	case v.str && c == '"':
		if v.str = false; v.blank == veilString {
			v.blank, v.private = veilNot, false
			return c
		}
	case v.str:
	case c == '"':
		v.str = true
	case c == '{' || c == '[':
		v.depth++
	case c == '}' || c == ']':
		if v.depth--; v.depth == v.base {
			brackets := v.blank == veilBrackets
			v.blank, v.private = veilNot, false
			if brackets {
				return c
			}
		}
	}
	if v.nulls > 0 {
		v.nulls--
		return null[len(null)-1-int(v.nulls)]
	}
	return ' '
}
