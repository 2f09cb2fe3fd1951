package relay

import (
	"bytes"
	"math/bits"
)

// finishTracker counts which of the choices of an OpenAI stream have told their finish reason. Of
// the first sixteen each is known; of those behind them, how many.
type finishTracker struct {
	choices uint16 // the highest index told of, or asked for, and one
	first   uint16 // bit i: choice i has finished
	others  uint16 // how many of those behind them have
	// blind: an event was not looked into, and none came behind it by which that was not
	// the last of an answer.
	unscanned bool
}

// knownChoices are those that have a bit.
const knownChoices = 16

// expect notes that n choices were asked for.
func (f *finishTracker) expect(n int) {
	f.choices = max(f.choices, uint16(min(max(n, 0), maxChoiceIndex)))
}

// add takes in an event of choice index, which is -1 where the engine writes nonsense.
func (f *finishTracker) add(index int, finished bool) {
	index = min(max(index, 0), maxChoiceIndex-1)
	f.choices, f.unscanned = max(f.choices, uint16(index+1)), false
	switch {
	case !finished:
	case index < knownChoices:
		f.first |= 1 << index
	case f.others < maxChoiceIndex:
		f.others++
	}
}

// all says whether there were choices, and all of them have finished.
func (f *finishTracker) all() bool {
	return f.choices > 0 && bits.OnesCount16(f.first)+int(f.others) >= int(f.choices)
}

// complete says whether a stream that ends here has told its whole answer, by its protocol's
// proof: the last event, an error, or of OpenAI's the finish reasons of all choices, behind
// which [DONE] says nothing new. tail: what is behind the last whole event counts where it
// lacks nothing but the ends of its lines.
func (s *streamScanner) complete(tail bool) bool {
	if s.hasProof() || s.finishes.unscanned {
		return true
	}
	if !tail || s.partial == nil || s.oversized {
		return false
	}
	last := s.partial.B
	if data := EventData(last); bytes.Equal(data, done) || isWholeObject(data) {
		s.event(last)
	}
	return s.hasProof()
}

func (s *streamScanner) hasProof() bool {
	return s.ended || s.failed || s.protocol == OpenAI && s.finishes.all()
}

// isWholeObject says whether data is one JSON object to its end.
func isWholeObject(data []byte) bool {
	w := jsonWalker{b: data}
	if w.peek() != '{' {
		return false
	}
	w.skip()
	return !w.bad && w.peek() == 0
}
