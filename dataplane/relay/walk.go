package relay

import "bytes"

// jsonWalker steps through a JSON text without decoding it. It finds members by name and skips the
// rest. It does not validate: on text that it cannot follow it sets bad, and every further step
// ends at once. Escapes in keys are decoded.
type jsonWalker struct {
	b   []byte
	i   int
	bad bool
}

func (w *jsonWalker) peek() byte {
	for w.i < len(w.b) {
		switch c := w.b[w.i]; c {
		case ' ', '\t', '\n', '\r':
			w.i++
		default:
			return c
		}
	}
	return 0
}

// at returns where the present value begins.
func (w *jsonWalker) at() int {
	w.peek()
	return w.i
}

// enter steps into an object or array. If the value is something else it is skipped and enter
// returns false.
func (w *jsonWalker) enter(open byte) bool {
	if w.peek() == open {
		w.i++
		return true
	}
	w.skip()
	return false
}

// member returns the next key of the entered object and moves to its value; false at the object's
// end.
func (w *jsonWalker) member() (key []byte, ok bool) {
	c := w.peek()
	if c == ',' {
		w.i++
		c = w.peek()
	}
	if c == '}' {
		w.i++
		return nil, false
	}
	if c != '"' || w.bad {
		return nil, w.fail()
	}
	key = w.stringBody()
	if w.peek() != ':' {
		return nil, w.fail()
	}
	w.i++
	return plainName(key), !w.bad
}

// maxPlainName bounds the names whose escapes are decoded.
const maxPlainName = 64

// plainName decodes the escapes of a JSON string that is a plain name, and returns any other string
// unchanged. The result may stand in JSON again. Only a name with escapes allocates.
func plainName(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted
	}
	var room [maxPlainName]byte
	name := room[:0]
	for i := 0; i < len(quoted) && len(name) < len(room); i++ {
		c := quoted[i]
		if c == '\\' {
			var ok bool
			if c, ok = escapedByte(quoted[i:]); !ok {
				return quoted
			}
			i += len(`\u0000`) - 1
		}
		if !isWordByte(c) {
			return quoted
		}
		name = append(name, c)
		if i == len(quoted)-1 {
			return bytes.Clone(name)
		}
	}
	return quoted
}

// escapedByte decodes the escape \u00XX at the beginning of b.
func escapedByte(b []byte) (c byte, ok bool) {
	if len(b) < len(`\u0000`) || string(b[:len(`\u00`)]) != `\u00` {
		return 0, false
	}
	high, low := hexDigit(b[4]), hexDigit(b[5])
	return byte(high<<4 | low), high >= 0 && low >= 0
}

// element moves to the next element of the entered array; false at its end.
func (w *jsonWalker) element() bool {
	c := w.peek()
	if c == ',' {
		w.i++
		c = w.peek()
	}
	if c == ']' {
		w.i++
		return false
	}
	if c == 0 || c == '}' || w.bad {
		return w.fail()
	}
	return true
}

func (w *jsonWalker) fail() bool {
	w.bad = true
	w.i = len(w.b)
	return false
}

// stringBody returns the inside of the present string, escapes included.
func (w *jsonWalker) stringBody() []byte {
	start := w.i + 1
	for end := start; end < len(w.b); end++ {
		n := bytes.IndexByte(w.b[end:], '"')
		if n < 0 {
			break
		}
		end += n
		escapes := 0 // a quote after an odd number of backslashes is part of the string
		for i := end - 1; i >= start && w.b[i] == '\\'; i-- {
			escapes++
		}
		if escapes%2 == 0 {
			w.i = end + 1
			return w.b[start:end]
		}
	}
	w.fail()
	return nil
}

// text returns a string value. Another value is skipped, and the result is nil.
func (w *jsonWalker) text() []byte {
	if w.peek() == '"' {
		return w.stringBody()
	}
	w.skip()
	return nil
}

// word is text for a value that is compared with known words. Escapes are decoded.
func (w *jsonWalker) word() []byte { return plainName(w.text()) }

// number returns a non-negative integer value; -1 for any other value.
func (w *jsonWalker) number() int {
	n, digits := 0, 0
	for w.peek(); w.i < len(w.b); w.i++ {
		d := w.b[w.i] - '0'
		if d > 9 || digits == 18 {
			break
		}
		n = n*10 + int(d)
		digits++
	}
	if digits > 0 && w.i < len(w.b) {
		switch w.b[w.i] {
		case ',', '}', ']', ' ', '\n', '\r', '\t':
			return n
		}
	}
	w.skip()
	return -1
}

// null reports whether the value is null or missing. It does not move.
func (w *jsonWalker) null() bool {
	c := w.peek()
	return c == 'n' || c == 0
}

// skipNumbers skips an array that has only numbers: the ids of a whole prompt, which byte by byte
// would take as long as the rest of an answer.
func (w *jsonWalker) skipNumbers() bool {
	if w.i+1 >= len(w.b) || w.b[w.i+1]-'0' > 9 {
		return false // the end of another array may be far away
	}
	n := bytes.IndexByte(w.b[w.i:], ']')
	if n < 0 {
		return false
	}
	for _, c := range [...]byte{'"', '[', '{', '}'} {
		if bytes.IndexByte(w.b[w.i+1:w.i+n], c) >= 0 {
			return false
		}
	}
	w.i += n + 1
	return true
}

// skip moves past the present value.
func (w *jsonWalker) skip() {
	switch w.peek() {
	case 0:
		w.fail()
		return
	case '"':
		w.stringBody()
		return
	case '[':
		if w.skipNumbers() {
			return
		}
	case '{':
	default:
		for w.i < len(w.b) {
			switch w.b[w.i] {
			case ',', '}', ']', ' ', '\n', '\r', '\t':
				return
			}
			w.i++
		}
		return
	}
	depth, b := 0, w.b
	for i := w.i; i < len(b); i++ {
		switch b[i] {
		case '"':
			w.i = i
			w.stringBody()
			i = w.i - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				w.i = i + 1
				return
			}
		}
	}
	w.fail()
}

// raw returns the value at w as it is written and moves past it.
func (w *jsonWalker) raw() []byte {
	w.peek()
	from := w.i
	w.skip()
	return w.b[from:w.i]
}

// unsigned reads a non-negative integer; -1: there is none.
func (w *jsonWalker) unsigned() int {
	n, from := 0, w.i
	for ; w.i < len(w.b) && w.i-from < 18; w.i++ {
		d := w.b[w.i] - '0'
		if d > 9 {
			break
		}
		n = n*10 + int(d)
	}
	if w.i == from {
		return -1
	}
	return n
}

// hasElements skips a value and returns whether it is an array that is not empty.
func (w *jsonWalker) hasElements() bool {
	if w.peek() != '[' {
		w.skip()
		return false
	}
	probe := jsonWalker{b: w.b, i: w.i + 1}
	c := probe.peek()
	w.skip()
	return c != ']' && c != 0
}

func hexDigit(c byte) int {
	switch {
	case c-'0' <= 9:
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

func isWordByte(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c-'0' <= 9 || c == '_' || c == '-' || c == '.'
}
