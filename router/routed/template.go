package routed

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// template is what stands around the text and the token ids of a stream's events
// that say nothing else. Within a stream it does not change, so that most events
// need not be walked.
type template struct {
	head, mid, tail []byte // mid is empty, and head reaches to the ids, where there is no text
	text            bool
}

// learn keeps data around the values of text (nil: none) and ids, which are parts of
// it.
func (t *template) learn(data, text, ids []byte) {
	from := cap(data) - cap(ids)
	to := from + len(ids)
	t.head = t.head[:0]
	if t.text = text != nil; !t.text {
		t.head = append(t.head, data[:from]...)
		t.mid, t.tail = t.mid[:0], append(t.tail[:0], data[to:]...)
		return
	}
	at := cap(data) - cap(text)
	if at > from {
		return // text behind the ids: no engine writes so
	}
	t.head = append(t.head, data[:at+1]...) // with the opening quote
	t.mid = append(t.mid[:0], data[at+len(text)-1:from]...)
	t.tail = append(t.tail[:0], data[to:]...)
}

// match gives the ids of data where it is the template around a text and ids.
func (t *template) match(data []byte) (ids []byte, ok bool) {
	if len(t.head) == 0 || !bytes.HasPrefix(data, t.head) || !bytes.HasSuffix(data, t.tail) {
		return nil, false
	}
	to := len(data) - len(t.tail)
	from := to - 1
	if from < len(t.head) || data[from] != ']' {
		return nil, false
	}
	for from--; from >= len(t.head) && (data[from]-'0' <= 9 || data[from] == ',' || data[from] == ' '); from-- {
	}
	if from < len(t.head) || data[from] != '[' {
		return nil, false
	}
	if !t.text {
		if from != len(t.head) {
			return nil, false
		}
		return data[from:to], true
	}
	end := from - len(t.mid)
	if end < len(t.head) || !bytes.Equal(data[end:from], t.mid) {
		return nil, false
	}
	for text := data[len(t.head):end]; len(text) > 0; {
		switch c := text[0]; {
		case c == '"' || c < ' ':
			return nil, false
		case c == '\\':
			if len(text) < 2 {
				return nil, false
			}
			text = text[2:]
		default:
			text = text[1:]
		}
	}
	return data[from:to], true
}

// plain takes an event that is the template around new ids.
func (c *converter) plain(data []byte) (done bool, err error) {
	raw, ok := c.around.match(data)
	if !ok {
		return false, nil
	}
	c.begin()
	if c.it.tokens, err = jsonscan.TokenIDs(c.it.tokens, raw); err != nil || len(c.it.tokens) == 0 {
		return false, nil
	}
	return true, c.put()
}
