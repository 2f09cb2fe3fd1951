package relay

import "bytes"

// idTemplate is the text around the content and the ids of an event that says
// nothing else. Events with the same text around others need not be walked.
type idTemplate struct {
	before, mid, after          [maxTemplate]byte
	beforeLen, midLen, afterLen int
}

// learn keeps event around its text and its ids, brackets included.
func (p *idTemplate) learn(event []byte, textFrom, textTo, idsFrom, idsTo int) {
	p.beforeLen = 0
	if textFrom > maxTemplate || idsFrom-textTo > maxTemplate || len(event)-idsTo > maxTemplate || textTo > idsFrom {
		return
	}
	p.beforeLen = copy(p.before[:], event[:textFrom])
	p.midLen = copy(p.mid[:], event[textTo:idsFrom])
	p.afterLen = copy(p.after[:], event[idsTo:])
}

// match says whether event is the template around a text and ids, and takes the
// ids in; from and to are where they lie.
func (p *idTemplate) match(event []byte, t *Transcript) (from, to int, ok bool) {
	to = len(event) - p.afterLen
	if p.beforeLen == 0 || to <= p.beforeLen || event[to-1] != ']' ||
		!bytes.Equal(event[:p.beforeLen], p.before[:p.beforeLen]) || !bytes.Equal(event[to:], p.after[:p.afterLen]) {
		return 0, 0, false
	}
	for from = to - 2; from > p.beforeLen && (event[from]-'0' <= 9 || event[from] == ','); from-- {
	}
	textTo := from - p.midLen
	if event[from] != '[' || textTo <= p.beforeLen || !bytes.Equal(event[textTo:from], p.mid[:p.midLen]) {
		return 0, 0, false
	}
	text := event[p.beforeLen:textTo]
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
