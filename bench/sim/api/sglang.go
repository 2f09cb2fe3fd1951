package api

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// SGLangFormats are SGLang's generating endpoints (0.5.23).
var SGLangFormats = map[string]func(*Response) Format{
	"/generate":            newNativeFormat,
	"/v1/chat/completions": newSGLangChat,
	"/v1/completions":      newSGLangCompletion,
}

// ReadSGLangBody parses a request of one of SGLangFormats.
func ReadSGLangBody(path string, raw []byte) (*Body, error) {
	if path == "/generate" {
		return readNative(raw)
	}
	return ReadBody(raw)
}

// sglangSince reports whether the engine is SGLang 0.5.patch or later; a version that
// cannot be parsed is later.
func (o *Config) sglangSince(patch int) bool {
	var minor, have int
	n, _ := fmt.Sscanf(o.Version, "0.%d.%d", &minor, &have)
	return n < 2 || minor > 5 || minor == 5 && have >= patch
}

// SGLangError returns an error of SGLang's OpenAI endpoints and of its HTTP layer:
// flat.
func SGLangError(status int, msg, param string) []byte {
	b := append([]byte(nil), `{"object":"error","message":`...)
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
	return append(b, '}')
}

// OneOrMany parses a scalar or a list of T; list reports which. Null and absent are
// nil.
func OneOrMany[T any](raw json.RawMessage, name, want string) (vals []T, list bool, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, false, nil
	}
	var one T
	if json.Unmarshal(raw, &one) == nil {
		return []T{one}, false, nil
	}
	if json.Unmarshal(raw, &vals) != nil || len(vals) == 0 {
		return nil, false, Refuse(400, name, "1 validation error:\n  {'loc': 'body.%s', 'msg': 'Input should be %s, or a list of them'}", name, want)
	}
	return vals, true, nil
}
