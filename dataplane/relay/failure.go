package relay

import (
	"bytes"
	"strconv"
	"time"

	"sluice/dataplane/upstream"
)

// streamFailure is what the client is told when the engine leaves it in mid-stream.
type streamFailure struct {
	message string
	code    int // an HTTP status
}

// openAIType is the failure's name in OpenAI's protocols, as a refusal of that status has it.
func (f streamFailure) openAIType() string {
	switch f.code {
	case 499:
		return "client_closed_request"
	case 503:
		return "service_unavailable"
	}
	return "upstream_error"
}

// anthropicType is that in Anthropic's.
func (f streamFailure) anthropicType() string {
	switch f.code {
	case 503:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	return "api_error"
}

var failures = map[Cause]streamFailure{
	EngineClosed:     {"the engine closed the connection before the end of the stream", 502},
	ClientGone:       {"the client has closed its side of the connection, which ends the request", 499},
	Cancelled:        {"the router ended the stream: another part of this request failed", 502},
	Drained:          {"the router is shutting down; send the request again", 503},
	EngineStalled:    {"the engine took too long to go on with the stream", 504},
	Deadline:         {"the request's time is over", 504},
	EngineMalformed:  {"the engine broke the framing of its stream", 502},
	BudgetExhausted:  {"the memory for request bodies and events that have not come whole (limits.memory_budget) is spent; send the request again", 503},
	EngineIncomplete: {"the engine ended the stream before the end of the answer", 502},
}

// appendEvent renders the failure as the protocol's last events; number is how many
// came before, which Responses tells.
func (f streamFailure) appendEvent(dst []byte, p Protocol, number int64) []byte {
	switch p {
	case Anthropic:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\""...)
		dst = append(dst, f.anthropicType()...)
		dst = append(dst, "\",\"message\":\""...)
		dst = append(dst, f.message...)
		return append(dst, "\"}}\n\n"...)
	case Responses:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":\""...)
		dst = append(dst, f.openAIType()...)
		dst = append(dst, "\",\"message\":\""...)
		dst = append(dst, f.message...)
		dst = append(dst, "\",\"param\":null,\"sequence_number\":"...)
		dst = strconv.AppendInt(dst, number, 10)
		return append(dst, "}\n\n"...)
	}
	dst = append(dst, "data: {\"error\":{\"message\":\""...)
	dst = append(dst, f.message...)
	dst = append(dst, "\",\"type\":\""...)
	dst = append(dst, f.openAIType()...)
	dst = append(dst, "\",\"param\":null,\"code\":"...)
	dst = strconv.AppendInt(dst, int64(f.code), 10)
	return append(dst, "}}\n\ndata: [DONE]\n\n"...)
}

// nextSequenceNumber is the sequence_number of the next event of Responses. Engines count from 0, so
// it is how many events there were, until another engine's are made into such.
func (s *stream) nextSequenceNumber() int64 {
	if c := s.migration(); c != nil {
		if r, ok := c.Transcript.getFormatter().(*responsesStream); ok {
			return int64(r.seq)
		}
	}
	return s.scan.events
}

const lastChunk = "0\r\n\r\n"

// properEnd is what must be sent, as it is, so that an event stream whose engine has
// gone still ends as the protocol says; nil when no such thing is possible
// because the client holds half an event, the rest of a chunk would be long, or it was told
// a length. Of a chunk that has begun the rest is out by then. whole: the answer was, by its
// protocol's proof, and no error is told behind it.
func (s *stream) properEnd() (end []byte, complete bool) {
	f, known := failures[s.cause]
	if !known || !s.chunked && (!s.scanning || !s.mayAppend()) {
		return nil, false
	}
	complete = s.scan.ended && !s.scan.failed
	if s.err == errTooBig {
		f.message = s.err.Error()
	}
	if convert := s.extras.convert; convert != nil {
		return convert.End(s.cause), complete
	}
	chunks := &s.chunks
	if s.editor.holdsPartial() { // what is held is not shown
		chunks = &s.editor.partial.chunks
	}
	ending, last := chunks.InTrailers()
	missing, ok := chunks.Boundary()
	switch {
	case !s.chunked:
		if !s.editor.rewrites() && !s.atEventBoundary() {
			return nil, false
		}
		return s.appendMissingEvents(make([]byte, 0, 512), f), complete
	case s.editor.rewrites():
		// What the client has are whole events in whole chunks of our own.
		if missing = ""; last && s.scan.complete(false) {
			return []byte(lastChunk), !s.scan.failed
		}
	case last: // looked at by incomplete
		return []byte(ending), s.scanning && !s.scan.failed
	case !s.scanning || !s.atEventBoundary():
		return nil, false
	case !ok:
		if missing = "\r\n"; !s.padChunk(chunks.Remaining()) {
			return nil, false
		}
	}
	out := append(make([]byte, 0, 512), missing...)
	if event := s.appendMissingEvents(nil, f); len(event) > 0 {
		out = strconv.AppendInt(out, int64(len(event)), 16)
		out = append(out, "\r\n"...)
		out = append(out, event...)
		out = append(out, "\r\n"...)
	}
	return append(out, lastChunk...), complete
}

// maxPadding bounds what is made up of a chunk: a longer one is left as it is.
const maxPadding = 64 << 10

// padding is the inside of a comment of many lines' length.
var padding = bytes.Repeat([]byte{' '}, 4<<10)

// padChunk ends a chunk of which whole events are out, and n bytes are not, by a comment; by
// empty lines where there is no room for one.
func (s *stream) padChunk(n int64) (ok bool) {
	if n <= 0 || n > maxPadding {
		return false
	}
	const head, tail = ":", "\n\n"
	s.dst.BeforeEnd()
	if n < int64(len(head+tail)) {
		return s.writeAt([]byte(tail[:n]), time.Now()) == nil
	}
	err := s.writeAt([]byte(head), time.Now())
	for n -= int64(len(head + tail)); n > 0 && err == nil; {
		part := padding[:min(n, int64(len(padding)))]
		n -= int64(len(part))
		err = s.writeAt(part, time.Now())
	}
	return err == nil && s.writeAt([]byte(tail), time.Now()) == nil
}

// appendMissingEvents appends the events that are missing behind those that the client has.
func (s *stream) appendMissingEvents(dst []byte, f streamFailure) []byte {
	switch {
	case s.scan.ended: // it has had the whole answer
		return dst
	case s.scan.failed && s.scan.protocol == OpenAI:
		return append(dst, "data: [DONE]\n\n"...)
	}
	return f.appendEvent(dst, s.scan.protocol, s.nextSequenceNumber())
}

// mayAppend says whether the body may have any end: it ends with the connection, or dst
// frames it.
func (s *stream) mayAppend() bool {
	return s.dst.Reframes() || s.resp.ContentLength == upstream.LengthToClose
}
