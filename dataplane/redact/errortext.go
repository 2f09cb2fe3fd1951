package redact

import (
	"bytes"
	"sluice/dataplane/jsonscan"
)

// ErrorText replaces an engine's error text that names a part of a handle. Refusals of vLLM and
// SGLang repeat parts of handles.
const ErrorText = "the engine error is redacted: it says where KV is stored"

// shorterTexts replace texts that are too short for ErrorText. Every handleName is long enough
// for the last one.
var shorterTexts = [...]string{"the engine error is redacted", "redacted"}

// redactedTextFor returns the longest of these texts that fits into n bytes; "": none fits.
func redactedTextFor(n int) string {
	if n >= len(ErrorText) {
		return ErrorText
	}
	for _, text := range shorterTexts {
		if n >= len(text) {
			return text
		}
	}
	return ""
}

// handleNames are parts of the names of the members of handles, of all families.
var handleNames = [...][]byte{
	[]byte("_transfer_params"), []byte("disaggregated_params"),
	[]byte("remote_host"), []byte("remote_port"), []byte("remote_block"), []byte("remote_engine"), []byte("remote_request"),
	[]byte("remote_bootstrap"), []byte("remote_agent"), []byte("remote_handshake"), []byte("remote_notify"),
	[]byte("bootstrap_"), []byte("engine_id"), []byte("block_ids"), []byte("transfer_id"), []byte("prefill_addr"),
	[]byte("ctx_request_id"), []byte("ctx_info"), []byte("opaque_state"),
}

// MayNameHandle reports whether an engine's error text may name a part of a handle, however its
// letters are escaped.
func MayNameHandle(text []byte) bool {
	return hasHandleWord(text) || escapesLetters(text) && hasHandleWord(withoutEscapes(text))
}

// withoutEscapes returns text with escapes \u00XX replaced by the bytes that they stand for.
func withoutEscapes(text []byte) []byte {
	plain := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if c, ok := jsonscan.EscapedByte(text[i:]); ok {
			plain = append(plain, c)
			i += len(`\u0000`) - 1
			continue
		}
		plain = append(plain, text[i])
	}
	return plain
}

func hasHandleWord(text []byte) bool {
	for _, word := range handleNames {
		if bytes.Contains(text, word) {
			return true
		}
	}
	return false
}

// endsWithHandleWord reports whether text, which has no escapes, ends with one of handleNames.
func endsWithHandleWord(text []byte) bool {
	for _, word := range handleNames {
		if bytes.HasSuffix(text, word) {
			return true
		}
	}
	return false
}

// redactText replaces text, the inside of a string or text that is not JSON, by ErrorText or a
// shorter one, and spaces.
func redactText(text []byte) {
	for i := copy(text, redactedTextFor(len(text))); i < len(text); i++ {
		text[i] = ' '
	}
}

// isErrorObject reports whether a member that is an object or an array describes an error. A
// message may be one of a chat.
func isErrorObject(key []byte) bool { return string(key) == "error" || string(key) == "detail" }

// isErrorText reports whether a member of an error event holds text of the engine.
func isErrorText(key []byte) bool {
	switch string(key) {
	case "message", "error", "detail", "msg":
		return true
	}
	return false
}
