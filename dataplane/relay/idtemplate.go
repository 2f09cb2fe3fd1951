package relay

import "bytes"

// idTemplate is the text around the content and the ids of an event that says
// nothing else. Events with the same text around others need not be walked.
type idTemplate struct {
	text        []byte // before, then mid, then after; made once in a stream, as large as they are
	before, mid int32  // bytes of them; before 0: nothing learned
}

// learn keeps event around its text and its ids, brackets included.
func (p *idTemplate) learn(event []byte, textFrom, textTo, idsFrom, idsTo int) {
	p.before = 0
	if textFrom > maxTemplate || idsFrom-textTo > maxTemplate || len(event)-idsTo > maxTemplate || textTo > idsFrom {
		return
	}
	if need := textFrom + idsFrom - textTo + len(event) - idsTo; cap(p.text) < need {
		p.text = make([]byte, 0, need)
	}
	p.text = append(append(append(p.text[:0], event[:textFrom]...), event[textTo:idsFrom]...), event[idsTo:]...)
	p.before, p.mid = int32(textFrom), int32(idsFrom-textTo)
}

// match says whether event is the template around a text and ids, and takes the
// ids in; from and to are where they lie.
func (p *idTemplate) match(event []byte, t *Transcript) (from, to int, ok bool) {
	first := int(p.before)
	before, mid, after := p.text[:first], p.text[first:first+int(p.mid)], p.text[first+int(p.mid):]
	to = len(event) - len(after)
	if first == 0 || to <= first || event[to-1] != ']' || !bytes.Equal(event[:first], before) || !bytes.Equal(event[to:], after) {
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
	t.told(&t.Sequence, text, len(t.Out)-had)
	return from, to, true
}
