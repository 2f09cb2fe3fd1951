package requestlog

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
)

// TraceID and SpanID identify a trace and a span (W3C Trace Context, level 1). Zero is invalid.
type (
	TraceID [16]byte
	SpanID  [8]byte
)

// TraceContext is the content of a traceparent header; the zero value is none.
type TraceContext struct {
	ID      TraceID
	Span    SpanID
	Sampled bool
	State   string // tracestate; "" if none
}

// Trace is the trace of a request.
type Trace struct {
	ID      TraceID // Parent.ID, or a new one; zero if requests have no traces
	Span    SpanID  // of the request
	Parent  TraceContext
	Sampled bool
}

// maxTracestate is the length in bytes above which a tracestate is dropped, as the specification
// permits.
const maxTracestate = 512

func newTrace(parent, state []byte) Trace {
	t := Trace{Span: newSpanID()}
	if p, ok := ParseTraceparent(parent); ok {
		if len(state) <= maxTracestate && isPrintable(state) {
			p.State = string(state)
		}
		t.Parent, t.ID = p, p.ID
		return t
	}
	binary.NativeEndian.PutUint64(t.ID[:8], rand.Uint64()|1) // never zero
	binary.NativeEndian.PutUint64(t.ID[8:], rand.Uint64())
	return t
}

// isPrintable reports whether b is ASCII without control characters, as a tracestate must be. Other
// bytes could make a whole batch of spans invalid.
func isPrintable(b []byte) bool {
	for _, c := range b {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return true
}

func newSpanID() (s SpanID) {
	binary.NativeEndian.PutUint64(s[:], rand.Uint64()|1) // never zero
	return s
}

const (
	traceparentLength = 55 // 00-<32 digits>-<16 digits>-<2 digits>
	sampledFlag       = 1
)

// ParseTraceparent parses a traceparent header. Later versions may append fields; their first
// fields are read as those of version 00.
func ParseTraceparent(b []byte) (c TraceContext, ok bool) {
	if len(b) < traceparentLength || b[2] != '-' || b[35] != '-' || b[52] != '-' {
		return TraceContext{}, false
	}
	var version, flags [1]byte
	for _, f := range [...]struct{ to, from []byte }{{version[:], b[:2]}, {c.ID[:], b[3:35]}, {c.Span[:], b[36:52]}, {flags[:], b[53:55]}} {
		for _, d := range f.from {
			if d >= 'A' && d <= 'F' { // only lower case is valid
				return TraceContext{}, false
			}
		}
		if _, err := hex.Decode(f.to, f.from); err != nil {
			return TraceContext{}, false
		}
	}
	more := len(b) > traceparentLength
	if version[0] == 0xff || version[0] == 0 && more || more && b[traceparentLength] != '-' || c.ID == (TraceID{}) || c.Span == (SpanID{}) {
		return TraceContext{}, false
	}
	c.Sampled = flags[0]&sampledFlag != 0
	return c, true
}

func formatTraceparent(id TraceID, span SpanID, sampled bool) string {
	var b [traceparentLength]byte
	copy(b[:], "00-")
	hex.Encode(b[3:35], id[:])
	b[35] = '-'
	hex.Encode(b[36:52], span[:])
	copy(b[52:], "-00")
	if sampled {
		b[54] = '1'
	}
	return string(b[:])
}
