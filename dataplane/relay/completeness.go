package relay

import (
	"bytes"
	"math/bits"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// finishTracker counts the choices of an OpenAI stream that have a finish reason. Each of the first
// sixteen is known by its index; the others are only counted.
type finishTracker struct {
	choices uint16 // the highest index seen or requested, plus one
	first   uint16 // bit i: choice i has finished
	others  uint16 // how many of the others have finished
	// unscanned: the last event that could have been the end of the answer was not scanned.
	unscanned bool
	end       answerEnd
}

// answerEnd says whether the answer of an OpenAI stream has ended, before [DONE].
type answerEnd uint8

const (
	endUnknown     answerEnd = iota // only [DONE] ends the answer
	endAfterUsage                   // the client asked for usage, which has not been sent
	endAfterFinish                  // the finish reasons of all choices end the answer
	endSeen                         // the answer has ended
)

// knownChoices is the number of choices that have a bit.
const knownChoices = 16

// expect records that n choices were requested.
func (f *finishTracker) expect(n int) {
	f.choices = max(f.choices, uint16(min(max(n, 0), apiformat.MaxChoiceIndex)))
}

// add records an event of choice index; -1: the engine sent an invalid index.
func (f *finishTracker) add(index int, finished bool) {
	index = min(max(index, 0), apiformat.MaxChoiceIndex-1)
	f.choices, f.unscanned = max(f.choices, uint16(index+1)), false
	switch {
	case !finished:
	case index < knownChoices:
		f.first |= 1 << index
	case f.others < apiformat.MaxChoiceIndex:
		f.others++
	}
	f.checkEnd()
}

// usageSent records an event with usage and without choices.
func (f *finishTracker) usageSent() {
	if f.end == endAfterUsage {
		f.end = endAfterFinish
		f.checkEnd()
	}
}

func (f *finishTracker) checkEnd() {
	if f.end >= endAfterFinish {
		if f.end = endAfterFinish; f.all() {
			f.end = endSeen
		}
	}
}

// answered reports whether the stream lacks nothing of its answer but perhaps [DONE].
func (s *streamScanner) answered() bool { return s.ended || s.finishes.end == endSeen }

// all reports whether there were choices and all of them have finished.
func (f *finishTracker) all() bool {
	return f.choices > 0 && bits.OnesCount16(f.first)+int(f.others) >= int(f.choices)
}

// complete reports whether a stream that ends here has sent its whole answer, as its protocol
// proves it: by the last event, an error event, or in OpenAI's protocols the finish reasons of all
// choices, after which [DONE] adds nothing. tail: a last event that lacks only its line ends counts
// as well.
func (s *streamScanner) complete(tail bool) bool {
	if s.hasProof() || s.finishes.unscanned {
		return true
	}
	if !tail || s.Partial == nil || s.Oversized {
		return false
	}
	last := s.Partial.B
	if data := sse.EventData(last); bytes.Equal(data, sse.DoneData) || isWholeObject(data) {
		s.event(last)
	}
	return s.hasProof()
}

func (s *streamScanner) hasProof() bool {
	return s.ended || s.failed || s.protocol == sse.OpenAI && s.finishes.all()
}

// isWholeObject reports whether data is exactly one JSON object.
func isWholeObject(data []byte) bool {
	w := jsonscan.Cursor{Data: data}
	if w.Peek() != '{' {
		return false
	}
	w.Skip()
	return !w.Bad && w.Peek() == 0
}
