package relay

import "bytes"

// redactedText takes the place of what an engine says of a failure, where that tells a handle:
// refusals of vLLM and SGLang repeat parts of it in words.
const redactedText = "the engine's words are withheld: they tell where KV lies"

// shorterTexts take its place where there is no room for it. What names a handle has room for the
// last.
var shorterTexts = [...]string{"the engine's words are withheld", "withheld"}

// redactedTextFor is what of these fits into n bytes, whole; "": nothing does.
func redactedTextFor(n int) string {
	if n >= len(redactedText) {
		return redactedText
	}
	for _, text := range shorterTexts {
		if n >= len(text) {
			return text
		}
	}
	return ""
}

// handleNames are parts of the names that the members of handles have, of all families.
var handleNames = [...][]byte{
	[]byte("_transfer_params"), []byte("disaggregated_params"),
	[]byte("remote_host"), []byte("remote_port"), []byte("remote_block"), []byte("remote_engine"), []byte("remote_request"),
	[]byte("remote_bootstrap"), []byte("remote_agent"), []byte("remote_handshake"), []byte("remote_notify"),
	[]byte("bootstrap_"), []byte("engine_id"), []byte("block_ids"), []byte("transfer_id"), []byte("prefill_addr"),
	[]byte("ctx_request_id"), []byte("ctx_info"), []byte("opaque_state"),
}

// mayNameHandle says whether an engine's words on a failure may tell a handle, however these
// are written in JSON.
func mayNameHandle(text []byte) bool {
	return hasHandleWord(text) || escapesLetters(text) && hasHandleWord(withoutEscapes(text))
}

// withoutEscapes is text with the bytes for which escapes \u00XX stand.
func withoutEscapes(text []byte) []byte {
	plain := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if c, ok := escapedByte(text[i:]); ok {
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

// redactText puts withheld, or what is shorter, in the place of text, the inside of a string or
// what is no JSON, and spaces.
func redactText(text []byte) {
	for i := copy(text, redactedTextFor(len(text))); i < len(text); i++ {
		text[i] = ' '
	}
}

// isErrorText says whether a member of an error event holds an engine's words.
func isErrorText(key []byte) bool {
	switch string(key) {
	case "message", "error", "detail", "msg":
		return true
	}
	return false
}

// onErrorEvent looks at an event by which an engine says that it failed.
func (s *streamScanner) onErrorEvent(data []byte) {
	if mayNameHandle(data) {
		s.private, s.engineMessage = true, true
	}
}

// onBareError handles an event that has no type. One with a detail is a refusal of the engine's web
// framework, {"detail":…}, and the last event of its stream.
func (s *streamScanner) onBareError(detail bool, data []byte) {
	if detail {
		s.failed, s.ended = true, true
		s.onErrorEvent(data)
	}
}
