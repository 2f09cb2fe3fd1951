package relay

import (
	"errors"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/redact"
	"strings"
)

// readErrorMember reads the type and code of an error. Its message is not kept, because it may
// repeat the request; the engine's own log has it.
func (s *streamScanner) readErrorMember(w *jsonscan.Cursor) {
	nonNull := !w.Null() // events of an answer may have a null error
	if !w.Enter('{') {
		if nonNull {
			s.finish = ""
		}
		return
	}
	var kind, code []byte
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "type":
			kind = w.Raw()
		case "code":
			code = w.Raw()
		default:
			w.Skip()
		}
	}
	s.setError(kind, code)
}

// setError keeps the type and code of an error, as they stand in the JSON, in place of a finish
// reason, which does not follow an error.
func (s *streamScanner) setError(kind, code []byte) {
	s.finish = strings.TrimSpace(string(errorWord(kind)) + " " + string(errorWord(code)))
}

// maxErrorWord bounds the length of a type or code.
const maxErrorWord = 64

// errorWord returns the inside of a JSON string, or a number, if it is a plain name that can stand
// in a log line; else nil.
func errorWord(value []byte) []byte {
	if n := len(value); n > 1 && value[0] == '"' {
		value = jsonscan.PlainName(value[1 : n-1])
	} else if n == 0 || value[0]-'0' > 9 && value[0] != '-' { // null, or not a word
		return nil
	}
	if len(value) > maxErrorWord {
		return nil
	}
	for _, c := range value {
		if !jsonscan.IsWordByte(c) {
			return nil
		}
	}
	return value
}

// engineError returns the error that the engine reported, by its type and code.
func (s *streamScanner) engineError() error {
	if s.finish == "" {
		return errEngineReported
	}
	return errors.New(errEngineReported.Error() + ": " + s.finish)
}

var errEngineReported = errors.New("the engine sent an error event")

// onErrorEvent marks the data of an error event for redaction where it names a part of a handle.
func (s *streamScanner) onErrorEvent(data []byte) {
	if redact.MayNameHandle(data) {
		s.private, s.engineMessage = true, true
	}
}

// onBareError handles an event without a type. One with a detail, {"detail":…}, is an error of the
// engine's web framework and the last event of its stream.
func (s *streamScanner) onBareError(detail bool, data []byte) {
	if detail {
		s.failed, s.ended = true, true
		s.onErrorEvent(data)
	}
}
