package routed

import (
	"strconv"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
)

// callContext is the member "context" of a request: what belongs to the call and
// not to what is asked.
type callContext struct {
	id      string // X-Request-Id of all legs
	trace   []upstream.Field
	timeout time.Duration // of the whole request; 0: none
}

// maxTimeout bounds timeout_ms, in milliseconds.
const maxTimeout = 24 * 3600 * 1000

func (c *callContext) read(raw []byte) error {
	var room [32]byte
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind <= jsonscan.Null {
			continue
		}
		name, value := string(it.Key(room[:0])), it.Raw()
		bad := func(want string) error {
			return &FieldError{Field: "context." + name, Got: shown(value, it.Value.Kind), Want: want}
		}
		switch name {
		case "id":
			if !requestID(value, it.Value.Kind) {
				return bad("a string of 1 to 128 visible ASCII characters without quotes and backslashes, and no address in it")
			}
			c.id = string(value[1 : len(value)-1])
		case "traceparent", "tracestate":
			if !word(value, it.Value.Kind) || len(value) <= 2 {
				return bad("a string of visible ASCII, at most 256 characters")
			}
			c.trace = append(c.trace, upstream.Field{Name: name, Value: string(value[1 : len(value)-1])})
		case "timeout_ms":
			if !integer(1, maxTimeout)(value, it.Value.Kind) {
				return bad("an integer from 1 to " + strconv.Itoa(maxTimeout))
			}
			c.timeout = time.Duration(atoi(value)) * time.Millisecond
		default: // no engine's either: what it asks for would not be done
			return &FieldError{Field: "context." + name, Got: "a member that is not known", Want: "id, traceparent, tracestate or timeout_ms"}
		}
	}
	return nil
}

// requestID is one that may stand in headers and logs unescaped.
func requestID(raw []byte, kind jsonscan.Kind) bool {
	if kind != jsonscan.String || len(raw) <= 2 || len(raw) > 130 || front.NamesPeer(raw) {
		return false
	}
	for _, b := range raw[1 : len(raw)-1] {
		if b <= ' ' || b > '~' || b == '"' || b == '\'' || b == '`' || b == '\\' {
			return false
		}
	}
	return true
}
