package relay

import "bytes"

// RedactInPlace blanks the private members of a whole answer where it lies, as veil does in a
// stream's: in JSON at any depth and however their names are written, but for what the
// client wrote itself (isExemptMember); of what begins as neither object nor array, in the events
// it may be. Most answers tell nothing private, and are searched but not walked through.
//
// status is the answer's: a refusal repeats what the engine was sent, and so the router's
// own members among the client's words. There nothing is left alone, and of strings that
// tell a handle in words withheld takes the place.
func RedactInPlace(body []byte, status int) {
	refusal := status >= 400
	tells := refusal && mayNameHandle(body)
	text := bytes.TrimLeft(bytes.TrimPrefix(body, byteOrderMark), jsonSpace)
	switch {
	case len(text) > 0 && (text[0] == '{' || text[0] == '['):
		if tells || mayHoldPrivateValue(text) {
			redactJSON(text, refusal)
		}
	case tells || mayNamePrivate(body):
		v := redactor{events: true, isRefusal: refusal, isFailure: tells}
		if v.feed(body); tells && !bytes.Contains(body, dataPrefix) {
			redactText(body) // no events
		}
	}
}

var byteOrderMark = []byte("\ufeff")

// redactJSON goes from string to string: one that a colon follows is a key.
func redactJSON(text []byte, refusal bool) {
	w := jsonWalker{b: text}
	atHandle := false // in a refusal, a value names a handle's member: the input that follows is that member's
	for {
		i := bytes.IndexByte(w.b[w.i:], '"')
		if i < 0 {
			return
		}
		w.i += i
		from := w.i + 1
		key := w.stringBody()
		if w.bad { // the engine broke off in it
			key = text[from:]
		}
		if w.peek() != ':' {
			if refusal && mayNameHandle(key) {
				redactText(key)
				atHandle = true
			}
			continue
		}
		w.i++
		switch at := w.at(); {
		case isPrivateEscaped(key), refusal && (mayNameHandle(key) || atHandle && string(plainName(key)) == "input"):
			w.skip()
			blankWhole(text[at:w.i])
		case refusal && string(plainName(key)) == "loc":
			atHandle = false
		case !refusal && isExemptMember(key):
			w.skip()
		}
	}
}

// isExemptMember says whether a member holds what is the client's or the model's own: what a
// tool is called with, the tools and the metadata of the request, the schema that the
// answer is to have, what is put into a prompt.
func isExemptMember(key []byte) bool {
	switch string(key) {
	case "input", "tools", "metadata", "schema", "variables":
		return true
	}
	return false
}

// isPrivateEscaped is isPrivate of a key that may have escapes.
func isPrivateEscaped(key []byte) bool { return isPrivate(plainName(key)) }

func hexDigit(c byte) int {
	switch {
	case c-'0' <= 9:
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

// blankWhole makes null, or an empty value of its kind, of a value, and spaces.
func blankWhole(v []byte) {
	v = bytes.TrimRight(v, jsonSpace)
	if len(v) == 0 || bytes.Equal(v, null) {
		return
	}
	inner := v[1:]
	switch first, last := v[0], v[len(v)-1]; {
	case len(v) > 1 && (first == '"' && last == '"' || first == '[' && last == ']'):
		inner = v[1 : len(v)-1]
	case len(v) >= len(null) && first != '-' && first-'0' > 9:
		inner = v[copy(v, null):]
	case first == '{' && last == '}':
		inner = v[1 : len(v)-1]
	default:
		v[0] = '0'
	}
	for i := range inner {
		inner[i] = ' '
	}
}
