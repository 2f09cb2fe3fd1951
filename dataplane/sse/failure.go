package sse

import "strconv"

// Failure is the error event that the client gets when a stream fails in the middle.
type Failure struct {
	Message string
	Code    int // an HTTP status
}

// openAIType returns the error's type in OpenAI's protocols, the same as of an error response with
// that status.
func (f Failure) openAIType() string {
	switch f.Code {
	case 499:
		return "client_closed_request"
	case 503:
		return "service_unavailable"
	}
	return "upstream_error"
}

// anthropicType returns the error's type in Anthropic's protocol.
func (f Failure) anthropicType() string {
	switch f.Code {
	case 503:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	return "api_error"
}

// AppendEvent appends the error as the last events of protocol p. number is the sequence_number,
// which Responses has.
func (f Failure) AppendEvent(dst []byte, p Protocol, number int64) []byte {
	switch p {
	case Anthropic:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\""...)
		dst = append(dst, f.anthropicType()...)
		dst = append(dst, "\",\"message\":\""...)
		dst = append(dst, f.Message...)
		return append(dst, "\"}}\n\n"...)
	case Responses:
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":\""...)
		dst = append(dst, f.openAIType()...)
		dst = append(dst, "\",\"message\":\""...)
		dst = append(dst, f.Message...)
		dst = append(dst, "\",\"param\":null,\"sequence_number\":"...)
		dst = strconv.AppendInt(dst, number, 10)
		return append(dst, "}\n\n"...)
	}
	dst = append(dst, "data: {\"error\":{\"message\":\""...)
	dst = append(dst, f.Message...)
	dst = append(dst, "\",\"type\":\""...)
	dst = append(dst, f.openAIType()...)
	dst = append(dst, "\",\"param\":null,\"code\":"...)
	dst = strconv.AppendInt(dst, int64(f.Code), 10)
	return append(dst, "}}\n\ndata: [DONE]\n\n"...)
}

// AnthropicStatus returns the HTTP status of an error type (raw JSON); 500 for engine errors.
func AnthropicStatus(kind []byte) int {
	switch string(kind) {
	case `"invalid_request_error"`, `"authentication_error"`, `"billing_error"`, `"permission_error"`, `"not_found_error"`, `"request_too_large"`:
		return 400
	}
	return 500
}
