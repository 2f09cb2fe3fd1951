package api

import (
	"cmp"
	"net/http"
	"strconv"
	"unicode/utf8"
)

// errorType returns vLLM's name of an error status.
func errorType(status int) string {
	switch status {
	case 400:
		return "BadRequestError"
	case 404:
		return "NotFoundError"
	case 422:
		return "UnprocessableEntityError"
	case 500:
		return "InternalServerError"
	case 501:
		return "NotImplementedError"
	case 503:
		return "ServiceUnavailableError"
	}
	return cmp.Or(http.StatusText(status), "Unknown")
}

// VLLMError returns an error in vLLM's format (0.10.1 and later).
func VLLMError(status int, msg, param string) []byte {
	b := append([]byte(nil), `{"error":{"message":`...)
	b = AppendJSON(b, msg)
	b = append(b, `,"type":`...)
	b = AppendJSON(b, errorType(status))
	b = append(b, `,"param":`...)
	if param == "" {
		b = append(b, "null"...)
	} else {
		b = AppendJSON(b, param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(status), 10)
	return append(b, "}}"...)
}

// anthropicError returns an error of /v1/messages.
func anthropicError(kind, msg string) []byte {
	b := append([]byte(nil), `{"type":"error","error":{"type":`...)
	b = AppendJSON(b, kind)
	b = append(b, `,"message":`...)
	b = AppendJSON(b, msg)
	return append(b, "}}"...)
}

const hexDigits = "0123456789abcdef"

// AppendJSON appends s as a JSON string, as pydantic does: only quotes, backslashes and
// control bytes are escaped. Invalid UTF-8 becomes U+FFFD.
func AppendJSON(b []byte, s string) []byte {
	b = append(b, '"')
	b = appendEscaped(b, s)
	return append(b, '"')
}

func appendEscaped(b []byte, s string) []byte {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, '\\', 'n')
		case c == '\t':
			b = append(b, '\\', 't')
		case c == '\r':
			b = append(b, '\\', 'r')
		case c < 0x20:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		case c < 0x80:
			b = append(b, c)
		default:
			n := runeLen(s[i:])
			if n == 0 {
				b = append(b, "\uFFFD"...)
				continue
			}
			b = append(b, s[i:i+n]...)
			i += n - 1
		}
	}
	return b
}

// runeLen returns the length of the first UTF-8 sequence of s, or 0 if it is invalid.
func runeLen(s string) int {
	r, n := utf8.DecodeRuneInString(s)
	if r == utf8.RuneError && n < 2 {
		return 0
	}
	return n
}
