package redact

import (
	"bytes"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// InPlace blanks the private members of a whole response body in place: in JSON at any depth
// and however their names are escaped, except in members that hold the client's own data
// (IsExemptMember). A body that begins with neither an object nor an array is redacted as the event
// stream it may be. Most bodies have no private member and are searched, not parsed.
//
// status is the HTTP status. A refusal (400 and above) may repeat the request, and so the members
// that the router added to it. Nothing in it is exempt, members whose names name a part of a handle
// are blanked, and strings that name one are replaced by ErrorText.
func InPlace(body []byte, status int) {
	refusal := status >= 400
	tells := refusal && MayNameHandle(body)
	text := bytes.TrimLeft(bytes.TrimPrefix(body, byteOrderMark), jsonSpace)
	switch {
	case len(text) > 0 && (text[0] == '{' || text[0] == '['):
		if tells || MayHoldPrivateValue(text) {
			redactJSON(text, refusal)
		}
	case tells || MayNamePrivate(body):
		v := Redactor{events: true, IsRefusal: refusal, IsFailure: tells}
		if v.Feed(body); tells && !bytes.Contains(body, sse.DataPrefix) {
			redactText(body) // not an event stream
		}
	}
}

var jsonNull = []byte("null")

var byteOrderMark = []byte("\ufeff")

// redactJSON steps from string to string. A string followed by a colon is a key.
func redactJSON(text []byte, refusal bool) {
	w := jsonscan.Cursor{Data: text}
	atHandle := false // a value named a member of a handle: the "input" that follows is that member's value
	for {
		i := bytes.IndexByte(w.Data[w.Pos:], '"')
		if i < 0 {
			return
		}
		w.Pos += i
		from := w.Pos + 1
		key := w.StringBody()
		if w.Bad { // the body ends inside the string
			key = text[from:]
		}
		if w.Peek() != ':' {
			if refusal && MayNameHandle(key) {
				redactText(key)
				atHandle = true
			}
			continue
		}
		w.Pos++
		switch at := w.At(); {
		case isPrivateEscaped(key), refusal && (MayNameHandle(key) || atHandle && string(jsonscan.PlainName(key)) == "input"):
			w.Skip()
			blankWhole(text[at:w.Pos])
		case refusal && string(jsonscan.PlainName(key)) == "loc":
			atHandle = false
		case !refusal && IsExemptMember(key):
			w.Skip()
		}
	}
}

// IsExemptMember reports whether a member holds the client's or the model's own data: the arguments
// of a tool call, the tools and metadata of the request, the schema of the answer, the variables of
// a prompt.
func IsExemptMember(key []byte) bool {
	switch string(key) {
	case "input", "tools", "metadata", "schema", "variables":
		return true
	}
	return false
}

// isPrivateEscaped is IsPrivate for a key that may have escapes.
func isPrivateEscaped(key []byte) bool { return IsPrivate(jsonscan.PlainName(key)) }

// blankWhole replaces a value by null or an empty value of its type, and spaces.
func blankWhole(v []byte) {
	v = bytes.TrimRight(v, jsonSpace)
	if len(v) == 0 || bytes.Equal(v, jsonNull) {
		return
	}
	inner := v[1:]
	switch first, last := v[0], v[len(v)-1]; {
	case len(v) > 1 && (first == '"' && last == '"' || first == '[' && last == ']'):
		inner = v[1 : len(v)-1]
	case len(v) >= len(jsonNull) && first != '-' && first-'0' > 9:
		inner = v[copy(v, jsonNull):]
	case first == '{' && last == '}':
		inner = v[1 : len(v)-1]
	default:
		v[0] = '0'
	}
	for i := range inner {
		inner[i] = ' '
	}
}
