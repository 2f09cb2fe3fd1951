package relay

import "bytes"

// private are members of answers that tell where KV lies and what its state is:
// no client's business. TensorRT-LLM has its own in every choice, the others
// stand on top.
var private = [...]string{"disaggregated_params", "kv_transfer_params", "ec_transfer_params"}

// Strip is the Rewriter that replaces the values of private members by null. It
// has no state.
type Strip struct{}

// Event implements Rewriter.
func (Strip) Event(dst, event []byte) []byte { return AppendStripped(dst, event) }

// AppendStripped appends an event or a whole JSON answer without the values of its
// private members; one that holds none is copied as it is. A private member in
// what is no JSON is not passed on: nothing at all is appended.
func AppendStripped(dst, text []byte) []byte {
	if !holdsPrivate(text) {
		return append(dst, text...)
	}
	from := bytes.IndexByte(text, '{')
	if from < 0 {
		return dst
	}
	mark := len(dst)
	dst = append(dst, text[:from]...)
	w := walker{b: text, i: from}
	copied := from
	drop := func() {
		w.peek()
		dst = append(append(dst, text[copied:w.i]...), "null"...)
		w.skip()
		copied = w.i
	}
	w.enter('{')
	for key, ok := w.member(); ok; key, ok = w.member() {
		switch {
		case isPrivate(key):
			drop()
		case string(key) == "choices" && w.peek() == '[':
			w.enter('[')
			for w.element() {
				if !w.enter('{') {
					continue
				}
				for key, ok := w.member(); ok; key, ok = w.member() {
					if isPrivate(key) {
						drop()
					} else {
						w.skip()
					}
				}
			}
		default:
			w.skip()
		}
	}
	if w.bad {
		return dst[:mark]
	}
	return append(dst, text[copied:]...)
}

func isPrivate(key []byte) bool {
	for _, name := range private {
		if string(key) == name {
			return true
		}
	}
	return false
}

// holdsPrivate says whether text may hold a private member that is not null.
func holdsPrivate(text []byte) bool {
	for rest := text; ; {
		i := bytes.Index(rest, []byte(`_params"`))
		if i < 0 {
			return false
		}
		name := rest[:i+len(`_params`)]
		rest = rest[i+len(`_params"`):]
		for _, p := range private {
			if bytes.HasSuffix(name, []byte(p)) && !bytes.HasPrefix(bytes.TrimLeft(rest, ": \t\r\n"), null) {
				return true
			}
		}
	}
}
