package engineapi

import (
	"slices"
	"strconv"
	"time"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
)

// callContext is the member "context" of a request: properties of the call, not of the
// generation.
type callContext struct {
	id      string // X-Request-Id of all legs
	trace   []upstream.Field
	timeout time.Duration // of the whole request; 0: none
}

// maxTimeout is the maximum timeout_ms, in milliseconds.
const maxTimeout = 24 * 3600 * 1000

func (c *callContext) read(raw []byte) error {
	var room [32]byte
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind <= jsonscan.Null {
			continue
		}
		name, value := string(it.Key(room[:0])), it.Raw()
		bad := func(want string) error {
			return &FieldError{Field: "context." + name, Got: quoteValue(value, it.Value.Kind), Want: want}
		}
		switch name {
		case "id":
			if !requestID(value, it.Value.Kind) {
				return bad("a string of 1 to 128 visible ASCII characters without quotes and backslashes, and no address in it")
			}
			c.id = string(value[1 : len(value)-1])
		case "traceparent", "tracestate":
			if !isHeaderValue(value, it.Value.Kind) || len(value) <= 2 {
				return bad("a string of visible ASCII, at most 256 characters")
			}
			if name == "traceparent" && !traceparent(value[1:len(value)-1]) {
				return bad("a W3C trace parent, 00-TRACE_ID-SPAN_ID-FLAGS in small hexadecimal digits, ids not all 0")
			}
			if slices.ContainsFunc(c.trace, func(f upstream.Field) bool { return f.Name == name }) {
				return &FieldError{Field: "context." + name, Got: "it twice", Want: "it once"}
			}
			c.trace = append(c.trace, upstream.Field{Name: name, Value: string(value[1 : len(value)-1])})
		case "timeout_ms":
			if !integer(1, maxTimeout)(value, it.Value.Kind) {
				return bad("an integer from 1 to " + strconv.Itoa(maxTimeout))
			}
			c.timeout = time.Duration(atoi(value)) * time.Millisecond
		default: // engines do not read context either, so the member would have no effect
			return &FieldError{Field: "context." + name, Got: "a member that is not known", Want: "id, traceparent, tracestate or timeout_ms"}
		}
	}
	return nil
}

// traceparent checks a traceparent of W3C's Trace Context: fields of 2, 32, 16 and 2
// hexadecimal digits. A version later than 00 may have more after another dash.
func traceparent(v []byte) bool {
	if len(v) < 55 || len(v) > 55 && (v[55] != '-' || v[0] == '0' && v[1] == '0') || v[0] == 'f' && v[1] == 'f' {
		return false
	}
	zero := true // of the field being read
	for i, b := range v[:55] {
		switch i {
		case 2, 35, 52:
			if b != '-' || i > 2 && zero {
				return false
			}
			zero = true
			continue
		}
		if (b < '0' || b > '9') && (b < 'a' || b > 'f') {
			return false
		}
		zero = zero && b == '0'
	}
	return true
}

// requestID checks that a request id may appear unescaped in headers and logs.
func requestID(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.String || len(raw) <= 2 || len(raw) > 130 || fieldrules.NamesPeer(raw) {
		return false
	}
	for _, b := range raw[1 : len(raw)-1] {
		if b <= ' ' || b > '~' || b == '"' || b == '\'' || b == '`' || b == '\\' {
			return false
		}
	}
	return true
}
