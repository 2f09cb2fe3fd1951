package transcript

import "bytes"

// idTemplate is the text around the content and the ids of an event that has nothing else. Events
// with the same surrounding text are not walked.
type idTemplate struct{ EventTemplate }

// learn keeps event around its text and its ids, brackets included.
func (p *idTemplate) learn(event []byte, textFrom, textTo, idsFrom, idsTo int) {
	if p.shape, p.headLen = nil, 0; textTo <= idsFrom {
		p.learnParts(event[:textFrom], event[textTo:idsFrom], event[idsTo:])
	}
}

// learnHead keeps the head of all events before there is an event to learn from. begun is "data: "
// followed by the head. The template has then the stream's id and time, but matches nothing.
func (p *idTemplate) learnHead(begun []byte) bool {
	if p.learnParts(begun, nil, nil); p.shape != nil {
		p.headLen = uint16(len(begun) - len("data: "))
	}
	return p.shape != nil
}

// startsWith reports whether the template begins with head.
func (p *idTemplate) startsWith(head []byte) bool {
	var scratch [2 * maxTemplate]byte
	data, ok := bytes.CutPrefix(p.appendBefore(scratch[:0]), []byte("data: "))
	if ok && len(head) > 0 && bytes.HasPrefix(data, head) {
		p.headLen = uint16(len(head))
	}
	return p.headLen > 0
}

// match reports whether event is the template around a text and ids, and records the ids. from and
// to are where they lie.
func (p *idTemplate) match(event []byte, t *Transcript) (from, to int, ok bool) {
	first, ok := p.matchHead(event)
	if !ok {
		return 0, 0, false
	}
	mid, after := p.shape.text[p.shape.content:p.shape.mid], p.shape.text[p.shape.mid:]
	if len(after) == 0 {
		return 0, 0, false // only a head has been learned
	}
	to = len(event) - len(after)
	if to <= first || event[to-1] != ']' || !bytes.Equal(event[to:], after) {
		return 0, 0, false
	}
	for from = to - 2; from > first && (event[from]-'0' <= 9 || event[from] == ','); from-- {
	}
	textTo := from - len(mid)
	if event[from] != '[' || textTo <= first || !bytes.Equal(event[textTo:from], mid) {
		return 0, 0, false
	}
	text := event[first:textTo]
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"' || c < ' ':
			return 0, 0, false
		case c == '\\':
			if i++; i == len(text) {
				return 0, 0, false
			}
		}
	}
	had := len(t.Out)
	for at := from + 1; at < to; {
		id, digits := uint64(0), 0
		for ; event[at]-'0' <= 9 && digits < 11; at++ {
			id = id*10 + uint64(event[at]-'0')
			digits++
		}
		if digits == 0 || id>>32 != 0 || event[at] != ',' && event[at] != ']' {
			t.Out = t.Out[:had]
			return 0, 0, false
		}
		t.Out = append(t.Out, uint32(id))
		at++
	}
	t.addIDs(&t.ChoiceState, text, len(t.Out)-had)
	return from, to, true
}
