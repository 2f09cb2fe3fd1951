package relay

import "bytes"

// private are members of answers that tell where KV lies and what its state is:
// no client's business. TensorRT-LLM has its own in every choice, the others
// stand on top.
var private = [...]string{"disaggregated_params", "kv_transfer_params", "ec_transfer_params"}

// RedactRewriter is the Rewriter that cuts private members out, with their names. It has no
// state.
type RedactRewriter struct{}

// Event implements Rewriter.
func (RedactRewriter) Event(dst, event []byte) []byte { return AppendRedacted(dst, event) }

// MaxEvent implements Roomy.
func (RedactRewriter) MaxEvent() int { return maxMigratableEvent }

// AppendRedacted appends an event or a whole JSON answer without its private members;
// all other bytes stay as they are, and one that holds none is copied whole. A private
// member in what is no JSON is not passed on: nothing at all is appended.
func AppendRedacted(dst, text []byte) []byte {
	if !mayHoldPrivate(text) {
		return append(dst, text...)
	}
	from := bytes.IndexByte(text, '{')
	if from < 0 {
		return dst
	}
	mark := len(dst)
	s := memberRemover{w: jsonWalker{b: text, i: from}, dst: dst}
	s.w.enter('{')
	s.object(true)
	if s.w.bad {
		return dst[:mark]
	}
	return append(s.dst, text[s.copied:]...)
}

// RedactFrom takes the private members out of what stands in text behind from, as
// AppendRedacted does; text that holds none is given as it is.
func RedactFrom(text []byte, from int) []byte {
	if !mayHoldPrivate(text[from:]) {
		return text
	}
	return AppendRedacted(text[:from:from], text[from:])
}

// memberRemover copies text but for private members.
type memberRemover struct {
	w      jsonWalker
	dst    []byte
	copied int // up to here text is in dst, or cut
}

// object passes over the members of the object entered: of the answer (top) or of a
// choice. A member goes with the comma before it, the first of an object with the one
// behind.
func (s *memberRemover) object(top bool) {
	w := &s.w
	kept, end := false, w.i // end: behind the brace, or the member before
	for key, ok := w.member(); ok; key, ok = w.member() {
		switch {
		case isPrivate(key):
			s.dst = append(s.dst, w.b[s.copied:end]...)
			w.skip()
			if end = w.i; !kept && w.peek() == ',' {
				w.i++
				end = w.i
			}
			s.copied = end
			continue
		case top && string(key) == "choices" && w.peek() == '[':
			w.enter('[')
			for w.element() {
				if w.enter('{') {
					s.object(false)
				}
			}
		default:
			w.skip()
		}
		kept, end = true, w.i
	}
}

func isPrivate(key []byte) bool {
	for _, name := range private {
		if string(key) == name {
			return true
		}
	}
	return false
}

// mayHoldPrivate says whether text may hold a private member.
func mayHoldPrivate(text []byte) bool { return nextPrivate(text) >= 0 }

// mayHoldPrivateValue says whether JSON may hold a private member that is not null, however its
// name is written; vLLM's answers all have one that is.
func mayHoldPrivateValue(text []byte) bool {
	if bytes.IndexByte(text, '\\') >= 0 && escapesLetters(text) {
		return true
	}
	for {
		n := nextPrivate(text)
		if n < 0 {
			return false
		}
		text = text[n:]
		value, colon := bytes.CutPrefix(bytes.TrimLeft(text, jsonSpace), []byte{':'})
		if !colon || !bytes.HasPrefix(bytes.TrimLeft(value, jsonSpace), null) {
			return true
		}
	}
}

// mayNamePrivate says whether text that is no JSON may hold a private name.
func mayNamePrivate(text []byte) bool {
	return bytes.Contains(text, []byte("_params")) || escapesLetters(text)
}

// shortestPrivateName is the length of the shortest private name.
const shortestPrivateName = len("ec_transfer_params")

// escapesLetters says whether an ASCII letter or an underscore may be written as an escape,
// which writers of JSON do not do.
func escapesLetters(text []byte) bool {
	for {
		i := bytes.Index(text, []byte(`\u00`))
		if i < 0 {
			return false
		}
		if text = text[i+len(`\u00`):]; len(text) > 0 && text[0]-'5' <= 2 {
			return true
		}
	}
}

const jsonSpace = " \t\r\n"

// nextPrivate is where what may be a private member's key ends in text, with its quote if it
// has one; -1 where there is none. What is no JSON may have keys in other quotes, or in none.
func nextPrivate(text []byte) int {
	for at := 0; ; {
		i := bytes.Index(text[at:], []byte(`_params`))
		if i < 0 {
			return -1
		}
		at += i + len(`_params`)
		name := text[:at]
		switch {
		case at == len(text):
		case text[at] == '\\': // inside of a string
			continue
		case text[at] == '"':
			at++
		}
		for _, p := range private {
			if bytes.HasSuffix(name, []byte(p)) {
				return at
			}
		}
	}
}
