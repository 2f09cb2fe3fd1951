package transcript

import "sluice/dataplane/jsonscan"

// NativeShape is the shape of the token events of SGLang's /generate. They differ in text,
// output_ids and counts. Walking the rest of each would cost more than all other work for an event.
type NativeShape struct {
	jsonscan.EventShape
	text, ids, count int // gaps; -1: no such member
}

// LearnEvent keeps the shape of data. count is the position of completion_tokens; -1: none.
func (n *NativeShape) LearnEvent(data []byte, text, ids jsonscan.Value, count int) {
	if ids.Kind != jsonscan.Array || !n.Learn(data, text, ids) {
		n.Reset()
		return
	}
	n.text, n.ids, n.count = -1, n.Gap(ids.Start), n.Gap(count)
	if text.Kind == jsonscan.String {
		n.text = n.Gap(text.Start)
	}
}

// Number returns the value in a gap as jsonscan.Cursor.Number does; -1 for gap -1.
func (n *NativeShape) Number(data []byte, gap int) int {
	if gap < 0 {
		return -1
	}
	w := jsonscan.Cursor{Data: data, Pos: n.Start(gap)}
	return w.Number()
}
