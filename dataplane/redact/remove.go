package redact

import (
	"bytes"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// private are the members of responses that describe where KV lies, which no client may see.
// TensorRT-LLM puts its own into every choice; the others are top-level members.
var private = [...]string{"disaggregated_params", "kv_transfer_params", "ec_transfer_params"}

// Rewriter is a Rewriter that removes private members with their names. It has no state.
type Rewriter struct{}

// Event implements Rewriter.
func (Rewriter) Event(dst, event []byte) []byte { return Append(dst, event) }

// MaxEvent implements LargeEventRewriter.
func (Rewriter) MaxEvent() int { return sse.MaxLargeEvent }

// Append appends an event or a JSON body to dst without its private members. All other
// bytes stay as they are. If text names a private member but is not JSON, nothing is appended.
func Append(dst, text []byte) []byte {
	if !mayHoldPrivate(text) {
		return append(dst, text...)
	}
	from := bytes.IndexByte(text, '{')
	if from < 0 {
		return dst
	}
	mark := len(dst)
	s := memberRemover{w: jsonscan.Cursor{Data: text, Pos: from}, dst: dst}
	s.w.Enter('{')
	s.object(true)
	if s.w.Bad {
		return dst[:mark]
	}
	return append(s.dst, text[s.copied:]...)
}

// From removes the private members of text[from:], as AppendRedacted does. It returns text
// itself if there are none.
func From(text []byte, from int) []byte {
	if !mayHoldPrivate(text[from:]) {
		return text
	}
	return Append(text[:from:from], text[from:])
}

// memberRemover copies text without its private members.
type memberRemover struct {
	w      jsonscan.Cursor
	dst    []byte
	copied int // text[:copied] is in dst, or removed
}

// object copies the members of an object that has been entered: the top level, or a choice. A
// member is removed with the comma before it, the first member with the comma after it.
func (s *memberRemover) object(top bool) {
	w := &s.w
	kept, end := false, w.Pos // where the brace or the last kept member ends
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch {
		case IsPrivate(key):
			s.dst = append(s.dst, w.Data[s.copied:end]...)
			w.Skip()
			if end = w.Pos; !kept && w.Peek() == ',' {
				w.Pos++
				end = w.Pos
			}
			s.copied = end
			continue
		case top && string(key) == "choices" && w.Peek() == '[':
			w.Enter('[')
			for w.Element() {
				if w.Enter('{') {
					s.object(false)
				}
			}
		default:
			w.Skip()
		}
		kept, end = true, w.Pos
	}
}

// IsPrivate reports whether members with this name are private to engines and the router. key is the
// name without quotes and escapes.
func IsPrivate(key []byte) bool {
	for _, name := range private {
		if string(key) == name {
			return true
		}
	}
	return false
}

// mayHoldPrivate reports whether text may have a private member.
func mayHoldPrivate(text []byte) bool { return nextPrivate(text) >= 0 }

// MayHoldPrivateValue reports whether JSON may have a private member that is not null, however its
// name is escaped. All responses of vLLM have one that is null.
func MayHoldPrivateValue(text []byte) bool {
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
		if !colon || !bytes.HasPrefix(bytes.TrimLeft(value, jsonSpace), jsonNull) {
			return true
		}
	}
}

// MayNamePrivate reports whether text that is not JSON may contain a private name.
func MayNamePrivate(text []byte) bool {
	return bytes.Contains(text, []byte("_params")) || escapesLetters(text)
}

// ShortestPrivateName is the length of the shortest private name.
const ShortestPrivateName = len("ec_transfer_params")

// escapesLetters reports whether an ASCII letter or an underscore may be escaped, which JSON
// encoders do not do.
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

// nextPrivate returns where the next possible private name ends in text, after its quote if it has
// one; -1 if there is none. In text that is not JSON, names may have other quotes or none.
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
		case text[at] == '\\': // inside a string
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
