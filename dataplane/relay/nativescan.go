package relay

import (
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/transcript"
)

// nativeScan is what streamScanner knows of such events, and of those of vLLM's
// /inference/v1/generate, which have ids and no text either.
type nativeScan struct {
	shape *nativeScanShape // nil: nothing learned, as in all other streams
}

// eventWalker walks one event and records the positions of the values that nativeScan needs, and
// whether the event has more than content.
type eventWalker struct {
	jsonscan.Cursor
	hasOther      bool
	from, to      int // position of its content (to 0: none)
	textAt, idsAt jsonscan.Value
	counts        [3]int // positions of the values of nativeScanShape.gaps; -1: none
}

type nativeScanShape struct {
	shape   transcript.NativeShape
	scratch []uint32
	gaps    [3]int // prompt_tokens, completion_tokens, cached_tokens
}

// learn keeps the shape of the event walked.
func (n *nativeScan) learn(w *eventWalker) {
	if n.shape == nil {
		n.shape = new(nativeScanShape)
	}
	k := n.shape
	k.shape.LearnEvent(w.Data, w.textAt, w.idsAt, w.counts[1])
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
		if v := k.shape.Number(data, k.gaps[i]); v >= 0 {
			*to = v
		}
	}
	return true
}
