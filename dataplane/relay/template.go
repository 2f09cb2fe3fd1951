package relay

import "bytes"

// maxTemplate bounds each half of a template, so that a stream stays small.
const maxTemplate = 256

// template is the text around the content string of an event in which nothing
// but that content was of interest. An event with the same text around another
// string says nothing new either, and need not be walked: in a stream that is
// nearly every event, at the cost of two comparisons.
type template struct {
	before, after       [maxTemplate]byte
	beforeLen, afterLen int
}

// learn keeps data around the string inside data[from:to].
func (t *template) learn(data []byte, from, to int) {
	if from > maxTemplate || len(data)-to > maxTemplate {
		t.beforeLen = 0
		return
	}
	t.beforeLen = copy(t.before[:], data[:from])
	t.afterLen = copy(t.after[:], data[to:])
}

// matches says whether data is the template around one string. The text before
// ends with the string's opening quote and the text after begins with its
// closing one; what is between must hold no other.
func (t *template) matches(data []byte) bool {
	from, to := t.beforeLen, len(data)-t.afterLen
	if from == 0 || from > to || !bytes.Equal(data[:from], t.before[:from]) || !bytes.Equal(data[to:], t.after[:t.afterLen]) {
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
