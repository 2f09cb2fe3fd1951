package jsonscan

import "bytes"

// Cursor steps through a JSON text without decoding it. It finds members by name and skips the
// rest. It does not validate: on text that it cannot follow it sets Bad, and every further step
// ends at once. Escapes in keys are decoded. It reads answers and events of engines; a request body,
// which must be validated, is read by Doc.
//
//	w := jsonscan.Cursor{Data: text}
//	w.Enter('{')
//	for key, ok := w.Member(); ok; key, ok = w.Member() {
//		switch string(key) {
//		case "id":
//			id = w.Word()
//		default:
//			w.Skip()
//		}
//	}
type Cursor struct {
	Data []byte // the text, borrowed
	Pos  int    // where the next step begins
	Bad  bool   // the text cannot be followed
}

// Peek skips white space and returns the next byte; 0 at the end.
func (w *Cursor) Peek() byte {
	for w.Pos < len(w.Data) {
		switch c := w.Data[w.Pos]; c {
		case ' ', '\t', '\n', '\r':
			w.Pos++
		default:
			return c
		}
	}
	return 0
}

// At returns where the present value begins.
func (w *Cursor) At() int {
	w.Peek()
	return w.Pos
}

// Enter steps into an object or array. If the value is something else it is skipped and enter
// returns false.
func (w *Cursor) Enter(open byte) bool {
	if w.Peek() == open {
		w.Pos++
		return true
	}
	w.Skip()
	return false
}

// Member returns the next key of the entered object and moves to its value; false at the object's
// end.
func (w *Cursor) Member() (key []byte, ok bool) {
	c := w.Peek()
	if c == ',' {
		w.Pos++
		c = w.Peek()
	}
	if c == '}' {
		w.Pos++
		return nil, false
	}
	if c != '"' || w.Bad {
		return nil, w.fail()
	}
	key = w.StringBody()
	if w.Peek() != ':' {
		return nil, w.fail()
	}
	w.Pos++
	return PlainName(key), !w.Bad
}

// maxPlainName bounds the names whose escapes are decoded.
const maxPlainName = 64

// PlainName decodes the escapes of a JSON string that is a plain name, and returns any other string
// unchanged. The result may stand in JSON again. Only a name with escapes allocates.
func PlainName(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted
	}
	var room [maxPlainName]byte
	name := room[:0]
	for i := 0; i < len(quoted) && len(name) < len(room); i++ {
		c := quoted[i]
		if c == '\\' {
			var ok bool
			if c, ok = EscapedByte(quoted[i:]); !ok {
				return quoted
			}
			i += len(`\u0000`) - 1
		}
		if !IsWordByte(c) {
			return quoted
		}
		name = append(name, c)
		if i == len(quoted)-1 {
			return bytes.Clone(name)
		}
	}
	return quoted
}

// EscapedByte decodes the escape \u00XX at the beginning of b.
func EscapedByte(b []byte) (c byte, ok bool) {
	if len(b) < len(`\u0000`) || string(b[:len(`\u00`)]) != `\u00` {
		return 0, false
	}
	high, low := HexDigit(b[4]), HexDigit(b[5])
	return byte(high<<4 | low), high >= 0 && low >= 0
}

// Element moves to the next element of the entered array; false at its end.
func (w *Cursor) Element() bool {
	c := w.Peek()
	if c == ',' {
		w.Pos++
		c = w.Peek()
	}
	if c == ']' {
		w.Pos++
		return false
	}
	if c == 0 || c == '}' || w.Bad {
		return w.fail()
	}
	return true
}

func (w *Cursor) fail() bool {
	w.Bad = true
	w.Pos = len(w.Data)
	return false
}

// StringBody returns the inside of the present string, escapes included.
func (w *Cursor) StringBody() []byte {
	start := w.Pos + 1
	for end := start; end < len(w.Data); end++ {
		n := bytes.IndexByte(w.Data[end:], '"')
		if n < 0 {
			break
		}
		end += n
		escapes := 0 // a quote after an odd number of backslashes is part of the string
		for i := end - 1; i >= start && w.Data[i] == '\\'; i-- {
			escapes++
		}
		if escapes%2 == 0 {
			w.Pos = end + 1
			return w.Data[start:end]
		}
	}
	w.fail()
	return nil
}

// Text returns a string value. Another value is skipped, and the result is nil.
func (w *Cursor) Text() []byte {
	if w.Peek() == '"' {
		return w.StringBody()
	}
	w.Skip()
	return nil
}

// Word is text for a value that is compared with known words. Escapes are decoded.
func (w *Cursor) Word() []byte { return PlainName(w.Text()) }

// Number returns a non-negative integer value; -1 for any other value.
func (w *Cursor) Number() int {
	n, digits := 0, 0
	for w.Peek(); w.Pos < len(w.Data); w.Pos++ {
		d := w.Data[w.Pos] - '0'
		if d > 9 || digits == 18 {
			break
		}
		n = n*10 + int(d)
		digits++
	}
	if digits > 0 && w.Pos < len(w.Data) {
		switch w.Data[w.Pos] {
		case ',', '}', ']', ' ', '\n', '\r', '\t':
			return n
		}
	}
	w.Skip()
	return -1
}

// Null reports whether the value is null or missing. It does not move.
func (w *Cursor) Null() bool {
	c := w.Peek()
	return c == 'n' || c == 0
}

// skipNumbers skips an array that has only numbers: the ids of a whole prompt, which byte by byte
// would take as long as the rest of an answer.
func (w *Cursor) skipNumbers() bool {
	if w.Pos+1 >= len(w.Data) || w.Data[w.Pos+1]-'0' > 9 {
		return false // the end of another array may be far away
	}
	n := bytes.IndexByte(w.Data[w.Pos:], ']')
	if n < 0 {
		return false
	}
	for _, c := range [...]byte{'"', '[', '{', '}'} {
		if bytes.IndexByte(w.Data[w.Pos+1:w.Pos+n], c) >= 0 {
			return false
		}
	}
	w.Pos += n + 1
	return true
}

// Skip moves past the present value.
func (w *Cursor) Skip() {
	switch w.Peek() {
	case 0:
		w.fail()
		return
	case '"':
		w.StringBody()
		return
	case '[':
		if w.skipNumbers() {
			return
		}
	case '{':
	default:
		for w.Pos < len(w.Data) {
			switch w.Data[w.Pos] {
			case ',', '}', ']', ' ', '\n', '\r', '\t':
				return
			}
			w.Pos++
		}
		return
	}
	depth, b := 0, w.Data
	for i := w.Pos; i < len(b); i++ {
		switch b[i] {
		case '"':
			w.Pos = i
			w.StringBody()
			i = w.Pos - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				w.Pos = i + 1
				return
			}
		}
	}
	w.fail()
}

// Raw returns the value at w as it is written and moves past it.
func (w *Cursor) Raw() []byte {
	w.Peek()
	from := w.Pos
	w.Skip()
	return w.Data[from:w.Pos]
}

// Unsigned reads a non-negative integer; -1: there is none.
func (w *Cursor) Unsigned() int {
	n, from := 0, w.Pos
	for ; w.Pos < len(w.Data) && w.Pos-from < 18; w.Pos++ {
		d := w.Data[w.Pos] - '0'
		if d > 9 {
			break
		}
		n = n*10 + int(d)
	}
	if w.Pos == from {
		return -1
	}
	return n
}

// HasElements skips a value and returns whether it is an array that is not empty.
func (w *Cursor) HasElements() bool {
	if w.Peek() != '[' {
		w.Skip()
		return false
	}
	probe := Cursor{Data: w.Data, Pos: w.Pos + 1}
	c := probe.Peek()
	w.Skip()
	return c != ']' && c != 0
}

// HexDigit returns the value of a hexadecimal digit; -1 if c is none.
func HexDigit(c byte) int {
	switch {
	case c-'0' <= 9:
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

// IsWordByte reports whether c may stand in a plain name.
func IsWordByte(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c-'0' <= 9 || c == '_' || c == '-' || c == '.'
}

// MemberOf returns one member of an object; nil: there is none.
func MemberOf(object []byte, name string) (value []byte) {
	w := Cursor{Data: object}
	if !w.Enter('{') {
		return nil
	}
	for key, more := w.Member(); more; key, more = w.Member() {
		if string(key) == name {
			value = w.Raw()
		} else {
			w.Skip()
		}
	}
	return value
}
