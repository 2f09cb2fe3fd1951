package relay

import "strconv"

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
}

// appendEvent renders the failure as the protocol's last events.
func (f failure) appendEvent(dst []byte, p Protocol) []byte {
	switch p {
	case Anthropic:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\""...)
		dst = append(dst, f.message...)
		return append(dst, "\"}}\n\n"...)
	case Responses:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":\"upstream_error\",\"message\":\""...)
		dst = append(dst, f.message...)
		return append(dst, "\",\"param\":null}\n\n"...)
	}
	dst = append(dst, "data: {\"error\":{\"message\":\""...)
	dst = append(dst, f.message...)
	dst = append(dst, "\",\"type\":\"upstream_error\",\"param\":null,\"code\":"...)
	dst = strconv.AppendInt(dst, int64(f.code), 10)
	return append(dst, "}}\n\ndata: [DONE]\n\n"...)
}

const lastChunk = "0\r\n\r\n"

// goodEnd is what must be sent, as it is, so that a chunked event stream whose engine has
// gone still ends as the protocol says; nil when no such thing is possible
// because the client holds half an event or half a chunk.
func (s *stream) goodEnd() []byte {
	f, known := failures[s.cause]
	if !known || !s.chunked {
		return nil
	}
	if convert := s.rare.convert; convert != nil {
		return convert.End(s.cause)
	}
	ending, last := s.chunks.Ending()
	missing, ok := s.chunks.Boundary()
	switch {
	case s.edit.on():
		// What the client has are whole events in whole chunks of our own.
		if missing = ""; last {
			return []byte(lastChunk)
		}
	case last:
		return []byte(ending)
	case !ok || !s.scanning || !s.scan.between():
		return nil
	}
	out := append(make([]byte, 0, 512), missing...)
	var event []byte
	switch {
	case s.scan.ended:
		// The client has had the whole answer.
	case s.scan.failed && s.scan.protocol == OpenAI:
		event = append(event, "data: [DONE]\n\n"...)
	default:
		event = f.appendEvent(event, s.scan.protocol)
	}
	if len(event) > 0 {
		out = strconv.AppendInt(out, int64(len(event)), 16)
		out = append(out, "\r\n"...)
		out = append(out, event...)
		out = append(out, "\r\n"...)
	}
	return append(out, lastChunk...)
}
