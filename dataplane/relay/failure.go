package relay

import (
	"strconv"

	"sluice/dataplane/upstream"
)

// failure is what the client is told when the engine leaves it in mid-stream.
type failure struct {
	message string
	code    int
}

var failures = map[Cause]failure{
	EngineClosed:  {"the engine closed the connection before the end of the stream", 502},
	Cut:           {"the router ended the stream: another part of this request failed", 502},
	Drained:       {"the router is shutting down; send the request again", 503},
	EngineStalled: {"the engine took too long to go on with the stream", 504},
	Deadline:      {"the request's time is over", 504},
	EngineBroke:   {"the engine broke the framing of its stream", 502},
	EngineEnded:   {"the engine ended the stream before the end of the answer", 502},
}

// appendEvent renders the failure as the protocol's last events; number is how many
// came before, which Responses tells.
func (f failure) appendEvent(dst []byte, p Protocol, number int64) []byte {
	switch p {
	case Anthropic:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\""...)
		dst = append(dst, f.message...)
		return append(dst, "\"}}\n\n"...)
	case Responses:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":\"upstream_error\",\"message\":\""...)
		dst = append(dst, f.message...)
		dst = append(dst, "\",\"param\":null,\"sequence_number\":"...)
		dst = strconv.AppendInt(dst, number, 10)
		return append(dst, "}\n\n"...)
	}
	dst = append(dst, "data: {\"error\":{\"message\":\""...)
	dst = append(dst, f.message...)
	dst = append(dst, "\",\"type\":\"upstream_error\",\"param\":null,\"code\":"...)
	dst = strconv.AppendInt(dst, int64(f.code), 10)
	return append(dst, "}}\n\ndata: [DONE]\n\n"...)
}

// number is the sequence_number of the next event of Responses. Engines count from 0, so
// it is how many events there were, until another engine's are made into such.
func (s *stream) number() int64 {
	if c := s.rare.carry; c != nil {
		if r, ok := c.Transcript.speak().(*responsesStream); ok {
			return int64(r.seq)
		}
	}
	return s.scan.events
}

const lastChunk = "0\r\n\r\n"

// goodEnd is what must be sent, as it is, so that an event stream whose engine has
// gone still ends as the protocol says; nil when no such thing is possible
// because the client holds half an event or half a chunk, or was told a length.
func (s *stream) goodEnd() []byte {
	f, known := failures[s.cause]
	if !known || !s.chunked && (!s.scanning || !s.unframed()) {
		return nil
	}
	if s.err == errTooBig {
		f.message = s.err.Error()
	}
	if convert := s.rare.convert; convert != nil {
		return convert.End(s.cause)
	}
	chunks := &s.chunks
	if s.edit.holding() { // what is held is not shown
		chunks = &s.edit.held.chunks
	}
	ending, last := chunks.Ending()
	missing, ok := chunks.Boundary()
	switch {
	case !s.chunked:
		if !s.edit.on() && !s.atEvent() {
			return nil
		}
		return s.appendLast(make([]byte, 0, 512), f)
	case s.edit.on():
		// What the client has are whole events in whole chunks of our own.
		if missing = ""; last {
			return []byte(lastChunk)
		}
	case last:
		return []byte(ending)
	case !ok || !s.scanning || !s.atEvent():
		return nil
	}
	out := append(make([]byte, 0, 512), missing...)
	if event := s.appendLast(nil, f); len(event) > 0 {
		out = strconv.AppendInt(out, int64(len(event)), 16)
		out = append(out, "\r\n"...)
		out = append(out, event...)
		out = append(out, "\r\n"...)
	}
	return append(out, lastChunk...)
}

// appendLast appends the events that are missing behind those that the client has.
func (s *stream) appendLast(dst []byte, f failure) []byte {
	switch {
	case s.scan.ended: // it has had the whole answer
		return dst
	case s.scan.failed && s.scan.protocol == OpenAI:
		return append(dst, "data: [DONE]\n\n"...)
	}
	return f.appendEvent(dst, s.scan.protocol, s.number())
}

// unframed says whether the body may have any end: it ends with the connection, or dst
// frames it.
func (s *stream) unframed() bool {
	if f, ok := s.dst.(Framer); ok && f.Frames() {
		return true
	}
	return s.resp.ContentLength == upstream.LengthToClose
}
