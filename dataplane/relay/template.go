package relay

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// maxTemplate bounds each part of a template, so that a stream stays small.
const maxTemplate = 256

// eventShape is the text around what differs between the events of a stream and between the
// streams of a model: the id and the time that a stream's events begin with, and their
// content. All streams have one together, and it is not changed.
type eventShape struct {
	text []byte // the parts, one after the other
	// Where the parts end: before the id, between it and the time, behind that up to the
	// content, and between the content and the ids, where there are some; the rest is what
	// follows.
	id, time, content, mid int32
}

// eventTemplate is the text around the content string of an event in which nothing
// but that content was of interest. An event with the same text around another
// string says nothing new either, and need not be walked: in a stream that is
// nearly every event, at the cost of a few comparisons.
type eventTemplate struct {
	shape     *eventShape // nil: nothing learned
	idAndTime string      // the stream's id and time, one behind the other
	idLen     uint8       // bytes of own that are the id's
	learned   uint8       // how often something was learned
	headLen   uint16      // of an idTemplate: bytes behind "data: " that all events begin with, the last too; 0: not told
}

// maxLearned bounds how often a stream learns: one whose events differ each time otherwise
// than by their content is walked.
const maxLearned = 16

// learn keeps data around the string inside data[from:to].
func (t *eventTemplate) learn(data []byte, from, to int) {
	t.learnParts(data[:from], nil, data[to:])
}

func (t *eventTemplate) learnParts(before, mid, after []byte) {
	t.shape = nil
	if t.learned == maxLearned || len(before) > maxTemplate || len(mid) > maxTemplate || len(after) > maxTemplate {
		return
	}
	t.learned++
	id, idTo, at, atTo := idAndTimeOf(before)
	t.shape = shapes.intern([5][]byte{before[:id], before[idTo:at], before[atTo:], mid, after})
	if len(t.idAndTime) != idTo-id+atTo-at || t.idAndTime[:idTo-id] != string(before[id:idTo]) || t.idAndTime[idTo-id:] != string(before[at:atTo]) {
		t.idAndTime = string(before[id:idTo]) + string(before[at:atTo])
	}
	t.idLen = uint8(idTo - id)
}

var (
	idMember   = []byte(`"id":"`)
	timeMember = []byte(`"created":`)
)

// idAndTimeOf gives where the id and the time lie in the beginning of an event; nothing, at its
// beginning, where it does not have them so.
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

// matchHead says whether data begins as the template does, and where its content begins then.
func (t *eventTemplate) matchHead(data []byte) (from int, ok bool) {
	s := t.shape
	if s == nil {
		return 0, false
	}
	id := int(s.id)
	idTo := id + int(t.idLen)
	at := idTo + int(s.time-s.id)
	atTo := at + len(t.idAndTime) - int(t.idLen)
	from = atTo + int(s.content-s.time)
	if from > len(data) {
		return 0, false
	}
	return from, string(data[id:idTo]) == t.idAndTime[:t.idLen] && bytes.Equal(data[:id], s.text[:s.id]) &&
		string(data[at:atTo]) == t.idAndTime[t.idLen:] && bytes.Equal(data[idTo:at], s.text[s.id:s.time]) && bytes.Equal(data[atTo:from], s.text[s.time:s.content])
}

// appendBefore appends what the template's events begin with, up to their content.
func (t *eventTemplate) appendBefore(b []byte) []byte {
	s := t.shape
	if s == nil {
		return b
	}
	b = append(append(b, s.text[:s.id]...), t.idAndTime[:t.idLen]...)
	b = append(append(b, s.text[s.id:s.time]...), t.idAndTime[t.idLen:]...)
	return append(b, s.text[s.time:s.content]...)
}

// matches says whether data is the template around one string. The text before
// ends with the string's opening quote and the text after begins with its
// closing one; what is between must hold no other.
func (t *eventTemplate) matches(data []byte) bool {
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

// shapeTable is what streams have learned of events' shapes, each once. A stream keeps its
// shape, whether the table still has it or not.
type shapeTable struct {
	all  atomic.Pointer[[]*eventShape] // replaced as a whole
	mu   sync.Mutex                    // of those who replace it
	next int                           // which of maxShapes gives way
}

// maxShapes is how many the table has, of at most 1,280 bytes: some for each model.
const maxShapes = 64

var shapes shapeTable

// intern gives the shape of these parts.
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
