package relay

import (
	"errors"
	"strings"
)

// errorMember reads what an error says of itself besides words: those of an engine may
// repeat what it was sent, and its own log has them.
func (s *scanner) errorMember(w *walker) {
	told := !w.null() // as null it stands in events of an answer too
	if !w.enter('{') {
		if told {
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
	s.tellsError(kind, code)
}

// tellsError keeps an error's type and code, as they stand in its JSON, in the place of a
// finish reason, of which none comes behind it.
func (s *scanner) tellsError(kind, code []byte) {
	s.finish = strings.TrimSpace(string(aWord(kind)) + " " + string(aWord(code)))
}

// mostWord is how long a type or a code may be.
const mostWord = 64

// aWord is the inside of a JSON string, or a number, that is a name and nothing more: it
// stands in log lines.
func aWord(value []byte) []byte {
	if n := len(value); n > 1 && value[0] == '"' {
		value = plainName(value[1 : n-1])
	} else if n == 0 || value[0]-'0' > 9 && value[0] != '-' { // null, or no word
		return nil
	}
	if len(value) > mostWord {
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

// toldError is what an engine said of its failure.
func (s *scanner) toldError() error {
	if s.finish == "" {
		return errTold
	}
	return errors.New(errTold.Error() + ": " + s.finish)
}

var errTold = errors.New("an error event of the engine's")
