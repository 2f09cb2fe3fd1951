package front

import (
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"sluice/dataplane/sse"
)

// Error implements Exchange.
func (x *httpExchange) Error(reason Reason, param, message string, retryAfter time.Duration) {
	if x.headSent() {
		if retryAfter > 0 {
			message += retryAfterText(retryAfterSeconds(retryAfter))
		}
		x.errorAfterHead(reason, param, message)
		return
	}
	if !x.beginResponse(reason.Status()) {
		return
	}
	x.path.addHeader("X-Sluice-Reason", string(reason))
	if retryAfter > 0 {
		x.path.addHeader("Retry-After", retryAfterSeconds(retryAfter))
	}
	x.path.addHeader("Content-Type", "application/json")
	x.scratch = appendError(x.scratch[:0], x.protocol(), reason, param, message, x.RequestID)
	x.path.setBody(x.scratch)
	x.reportRefused(reason, param)
}

// protocol returns the protocol whose error form the client reads: the endpoint's. If the
// request has no route, it is Anthropic's for paths under /v1/messages and for clients that
// send Anthropic-Version.
func (x *httpExchange) protocol() sse.Protocol {
	const messages = "/v1/messages"
	path := string(x.head.Path)
	switch {
	case x.Endpoint != nil:
		return x.Endpoint.Protocol
	case path == messages, strings.HasPrefix(path, messages+"/"), x.head.Find("Anthropic-Version") != nil:
		return sse.Anthropic
	}
	return sse.OpenAI
}

// appendError appends the body of an error response.
func appendError(dst []byte, protocol sse.Protocol, reason Reason, param, message, requestID string) []byte {
	return appendErrorOf(dst, protocol, reason, 0, param, message, requestID)
}

// appendErrorOf is appendError with status as the error's code, if the reason has none and
// status is not 0. In an event stream nothing else shows the status.
func appendErrorOf(dst []byte, protocol sse.Protocol, reason Reason, status int, param, message, requestID string) []byte {
	row, ok := reasonTable[reason]
	if !ok {
		row = reasonTable[Internal]
	}
	if protocol == sse.Anthropic {
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = appendJSONString(dst, anthropicType(row.status))
		dst = append(dst, `,"message":`...)
		dst = appendJSONString(dst, message)
		dst = append(dst, `},"request_id":`...)
		dst = appendJSONString(dst, requestID)
		return append(dst, '}')
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = appendJSONString(dst, message)
	dst = append(dst, `,"type":`...)
	dst = appendJSONString(dst, row.typ)
	dst = append(dst, `,"param":`...)
	dst = appendJSONOrNull(dst, param)
	dst = append(dst, `,"code":`...)
	if row.code == "" && status > 0 {
		dst = strconv.AppendInt(dst, int64(status), 10)
	} else {
		dst = appendJSONOrNull(dst, row.code)
	}
	return append(dst, `}}`...)
}

// anthropicType is the error type of Anthropic's API for an HTTP status.
func anthropicType(status int) string {
	switch status {
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

func appendJSONOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return appendJSONString(dst, s)
}

// appendJSONString appends s as a JSON string. Bytes that are not UTF-8 become U+FFFD.
func appendJSONString(dst []byte, s string) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		b := s[i]
		if b >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += n
			continue
		}
		i++
		switch {
		case b == '"' || b == '\\':
			dst = append(dst, '\\', b)
		case b == '\n':
			dst = append(dst, '\\', 'n')
		case b < ' ' || b == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[b>>4], hexDigits[b&15])
		default:
			dst = append(dst, b)
		}
	}
	return append(dst, '"')
}
