package relay

import (
	"errors"
	"strings"
)

// readErrorMember reads what an error says of itself besides words: those of an engine may
// repeat what it was sent, and its own log has them.
func (s *streamScanner) readErrorMember(w *jsonWalker) {
	nonNull := !w.null() // as null it stands in events of an answer too
	if !w.enter('{') {
		if nonNull {
			s.finish = ""
		}
		return
	}
	var kind, code []byte
	for key, ok := w.member(); ok; key, ok = w.member() {
		switch string(key) {
		case "type":
			kind = w.raw()
		case "code":
			code = w.raw()
		default:
			w.skip()
		}
	}
	s.setError(kind, code)
}

// setError keeps an error's type and code, as they stand in its JSON, in the place of a
// finish reason, of which none comes behind it.
func (s *streamScanner) setError(kind, code []byte) {
	s.finish = strings.TrimSpace(string(errorWord(kind)) + " " + string(errorWord(code)))
}

// maxErrorWord is how long a type or a code may be.
const maxErrorWord = 64

// errorWord is the inside of a JSON string, or a number, that is a name and nothing more: it
// stands in log lines.
func errorWord(value []byte) []byte {
	if n := len(value); n > 1 && value[0] == '"' {
		value = plainName(value[1 : n-1])
	} else if n == 0 || value[0]-'0' > 9 && value[0] != '-' { // null, or no word
		return nil
	}
	if len(value) > maxErrorWord {
		return nil
	}
	for _, c := range value {
		if !isWordByte(c) {
			return nil
		}
	}
	return value
}

func isWordByte(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c-'0' <= 9 || c == '_' || c == '-' || c == '.'
}

// engineError is what an engine said of its failure.
func (s *streamScanner) engineError() error {
	if s.finish == "" {
		return errEngineReported
	}
	return errors.New(errEngineReported.Error() + ": " + s.finish)
}

var errEngineReported = errors.New("an error event of the engine's")
