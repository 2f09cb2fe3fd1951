package relay

import "sluice/dataplane/jsonscan"

// nativeShape is the shape of the token events of SGLang's /generate. They differ in text,
// output_ids and counts. Walking the rest of each would cost more than all other work for an event.
type nativeShape struct {
	jsonscan.EventShape
	text, ids, count int // gaps; -1: no such member
}

// learn keeps the shape of data. count is the position of completion_tokens; -1: none.
func (n *nativeShape) learn(data []byte, text, ids jsonscan.Value, count int) {
	if ids.Kind != jsonscan.Array || !n.Learn(data, text, ids) {
		n.Reset()
		return
	}
	n.text, n.ids, n.count = -1, n.Gap(ids.Start), n.Gap(count)
	if text.Kind == jsonscan.String {
		n.text = n.Gap(text.Start)
	}
}

// number returns the value in a gap as jsonWalker.number does; -1 for gap -1.
func (n *nativeShape) number(data []byte, gap int) int {
	if gap < 0 {
		return -1
	}
	w := jsonWalker{b: data, i: n.Start(gap)}
	return w.number()
}

// nativeScan is what streamScanner knows of such events, and of those of vLLM's
// /inference/v1/generate, which have ids and no text either.
type nativeScan struct {
	shape *nativeScanShape // nil: nothing learned, as in all other streams
}

// eventWalker walks one event and records the positions of the values that nativeScan needs, and
// whether the event has more than content.
type eventWalker struct {
	jsonWalker
	hasOther      bool
	from, to      int // position of its content (to 0: none)
	textAt, idsAt jsonscan.Value
	counts        [3]int // positions of the values of nativeScanShape.gaps; -1: none
}

type nativeScanShape struct {
	shape   nativeShape
	scratch []uint32
	gaps    [3]int // prompt_tokens, completion_tokens, cached_tokens
}

// learn keeps the shape of the event walked.
func (n *nativeScan) learn(w *eventWalker) {
	if n.shape == nil {
		n.shape = new(nativeScanShape)
	}
	k := n.shape
	k.shape.learn(w.b, w.textAt, w.idsAt, w.counts[1])
	k.shape.Cumulative = true // known text is not read again; an event that does not repeat it does not match
	for i, at := range w.counts {
		k.gaps[i] = k.shape.Gap(at)
	}
}

// counts reads the counts of an event that has the shape.
func (n *nativeScan) counts(data []byte, u *Usage) (ok bool) {
	k := n.shape
	if k == nil {
		return false
	}
	if k.scratch, _, ok = k.shape.Match(k.scratch[:0], data); !ok {
		return false
	}
	for i, to := range [...]*int{&u.Prompt, &u.Completion, &u.Cached} {
		if v := k.shape.number(data, k.gaps[i]); v >= 0 {
			*to = v
		}
	}
	return true
}
