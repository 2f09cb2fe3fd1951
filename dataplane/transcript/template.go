package transcript

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// maxTemplate bounds each part of a template, so that a stream stays small.
const maxTemplate = 256

// eventShape is the text that the events of a stream, and the streams of a model, have in common:
// everything around the id and time of the stream and the content of the event. It is shared by all
// streams and immutable.
type eventShape struct {
	text []byte // the parts, concatenated
	// The ends of the parts: before the id, between id and time, from the time to the content, and
	// between the content and the ids if there are any. The rest follows.
	id, time, content, mid int32
}

// EventTemplate is the text around the content string of an event in which only that content was of
// interest. An event with the same text around another string is not walked. In most streams these
// are nearly all events, and they cost a few comparisons.
type EventTemplate struct {
	shape     *eventShape // nil: nothing learned
	IDAndTime string      // the stream's id and time, concatenated
	idLen     uint8       // length of the id in IDAndTime
	learned   uint8       // how often a template was learned
	headLen   uint16      // of an idTemplate: length of the head after "data: " that all events begin with, the last too; 0: unknown
}

// maxLearned bounds how often a stream learns a template. A stream whose events always differ in
// more than their content is walked.
const maxLearned = 16

// Learn keeps data around the string data[from:to].
func (t *EventTemplate) Learn(data []byte, from, to int) {
	t.learnParts(data[:from], nil, data[to:])
}

func (t *EventTemplate) learnParts(before, mid, after []byte) {
	t.shape = nil
	if t.learned == maxLearned || len(before) > maxTemplate || len(mid) > maxTemplate || len(after) > maxTemplate {
		return
	}
	t.learned++
	id, idTo, at, atTo := idAndTimeOf(before)
	t.shape = shapes.intern([5][]byte{before[:id], before[idTo:at], before[atTo:], mid, after})
	if len(t.IDAndTime) != idTo-id+atTo-at || t.IDAndTime[:idTo-id] != string(before[id:idTo]) || t.IDAndTime[idTo-id:] != string(before[at:atTo]) {
		t.IDAndTime = string(before[id:idTo]) + string(before[at:atTo])
	}
	t.idLen = uint8(idTo - id)
}

var (
	idMember   = []byte(`"id":"`)
	timeMember = []byte(`"created":`)
)

// idAndTimeOf returns the positions of the id and the time in the head of an event. They are empty,
// at its beginning, if the head has another form.
func idAndTimeOf(before []byte) (id, idTo, at, atTo int) {
	if i := bytes.Index(before, idMember); i >= 0 {
		from := i + len(idMember)
		if n := bytes.IndexByte(before[from:], '"'); n >= 0 && n <= 255 {
			id, idTo = from, from+n
		}
	}
	at, atTo = idTo, idTo
	if i := bytes.Index(before[idTo:], timeMember); i >= 0 {
		at = idTo + i + len(timeMember)
		for atTo = at; atTo < len(before) && before[atTo]-'0' <= 9; atTo++ {
		}
	}
	return id, idTo, at, atTo
}

// matchHead reports whether data begins as the template does, and where its content begins.
func (t *EventTemplate) matchHead(data []byte) (from int, ok bool) {
	s := t.shape
	if s == nil {
		return 0, false
	}
	id := int(s.id)
	idTo := id + int(t.idLen)
	at := idTo + int(s.time-s.id)
	atTo := at + len(t.IDAndTime) - int(t.idLen)
	from = atTo + int(s.content-s.time)
	if from > len(data) {
		return 0, false
	}
	return from, string(data[id:idTo]) == t.IDAndTime[:t.idLen] && bytes.Equal(data[:id], s.text[:s.id]) &&
		string(data[at:atTo]) == t.IDAndTime[t.idLen:] && bytes.Equal(data[idTo:at], s.text[s.id:s.time]) && bytes.Equal(data[atTo:from], s.text[s.time:s.content])
}

// appendBefore appends the beginning of the template's events, up to their content.
func (t *EventTemplate) appendBefore(b []byte) []byte {
	s := t.shape
	if s == nil {
		return b
	}
	b = append(append(b, s.text[:s.id]...), t.IDAndTime[:t.idLen]...)
	b = append(append(b, s.text[s.id:s.time]...), t.IDAndTime[t.idLen:]...)
	return append(b, s.text[s.time:s.content]...)
}

// Matches reports whether data is the template around one string. The text before the string ends
// with the opening quote, the text after it begins with the closing quote, and the string must
// contain no other quote and no line end.
func (t *EventTemplate) Matches(data []byte) bool {
	from, ok := t.matchHead(data)
	if !ok {
		return false
	}
	after := t.shape.text[t.shape.mid:]
	to := len(data) - len(after)
	if from > to || !bytes.Equal(data[to:], after) {
		return false
	}
	i := from
	for i < to {
		switch data[i] {
		case '"', '\n':
			return false
		case '\\':
			i++
		}
		i++
	}
	return i == to // beyond: the closing quote is escaped
}

// shapeTable interns the shapes that streams have learned. A stream keeps its shape even if the
// table has dropped it.
type shapeTable struct {
	all  atomic.Pointer[[]*eventShape] // copied on write
	mu   sync.Mutex                    // guards writes
	next int                           // the slot that is replaced next
}

// maxShapes is the capacity of the table: some shapes for each model, of at most 1,280 bytes.
const maxShapes = 64

var shapes shapeTable

// intern returns the shared shape with these parts.
func (t *shapeTable) intern(parts [5][]byte) *eventShape {
	if s := t.find(parts); s != nil {
		return s
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.find(parts); s != nil {
		return s
	}
	text := bytes.Join(parts[:], nil)
	s := &eventShape{text: text[:len(text):len(text)], id: int32(len(parts[0]))}
	s.time = s.id + int32(len(parts[1]))
	s.content = s.time + int32(len(parts[2]))
	s.mid = s.content + int32(len(parts[3]))
	var had []*eventShape
	if all := t.all.Load(); all != nil {
		had = *all
	}
	all := append(make([]*eventShape, 0, len(had)+1), had...)
	if len(all) < maxShapes {
		all = append(all, s)
	} else {
		all[t.next] = s
		t.next = (t.next + 1) % maxShapes
	}
	t.all.Store(&all)
	return s
}

func (t *shapeTable) find(parts [5][]byte) *eventShape {
	all := t.all.Load()
	if all == nil {
		return nil
	}
	for _, s := range *all {
		if s.equal(parts) {
			return s
		}
	}
	return nil
}

func (s *eventShape) equal(parts [5][]byte) bool {
	at := 0
	for i, to := range [5]int{int(s.id), int(s.time), int(s.content), int(s.mid), len(s.text)} {
		if !bytes.Equal(parts[i], s.text[at:to]) {
			return false
		}
		at = to
	}
	return true
}
