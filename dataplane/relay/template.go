package relay

import "bytes"

// maxTemplate bounds each half of a template, so that a stream stays small.
const maxTemplate = 256

// template is the text around the content string of an event in which nothing
// but that content was of interest. An event with the same text around another
// string says nothing new either, and need not be walked: in a stream that is
// nearly every event, at the cost of two comparisons.
type template struct {
	text   []byte // before, then after; made once in a stream, as large as they are
	before int    // bytes of it; 0: nothing learned
}

// learn keeps data around the string inside data[from:to].
func (t *template) learn(data []byte, from, to int) {
	if from > maxTemplate || len(data)-to > maxTemplate {
		t.before = 0
		return
	}
	if need := len(data) - (to - from); cap(t.text) < need {
		t.text = make([]byte, 0, need)
	}
	t.text = append(append(t.text[:0], data[:from]...), data[to:]...)
	t.before = from
}

// matches says whether data is the template around one string. The text before
// ends with the string's opening quote and the text after begins with its
// closing one; what is between must hold no other.
func (t *template) matches(data []byte) bool {
	from := t.before
	to := len(data) - (len(t.text) - from)
	if from == 0 || from > to || !bytes.Equal(data[:from], t.text[:from]) || !bytes.Equal(data[to:], t.text[from:]) {
		return false
	}
	i := from
	for i < to {
		switch data[i] {
		case '"':
			return false
		case '\\':
			i++
		}
		i++
	}
	return i == to // beyond: the closing quote is escaped
}
