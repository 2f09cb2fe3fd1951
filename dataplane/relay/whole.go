package relay

import (
	"bytes"
	"math/bits"
)

// finishes counts which of the choices of an OpenAI stream have told their finish reason. Of
// the first sixteen each is known; of those behind them, how many.
type finishes struct {
	choices uint16 // the highest index told of, or asked for, and one
	first   uint16 // bit i: choice i has finished
	others  uint16 // how many of those behind them have
	// blind: an event was not looked into, and none came behind it by which that was not
	// the last of an answer.
	blind bool
}

// knownChoices are those that have a bit.
const knownChoices = 16

// expect notes that n choices were asked for.
func (f *finishes) expect(n int) { f.choices = max(f.choices, uint16(min(max(n, 0), noChoice))) }

// tell takes in an event of choice index, which is -1 where the engine writes nonsense.
func (f *finishes) tell(index int, finished bool) {
	index = min(max(index, 0), noChoice-1)
	f.choices, f.blind = max(f.choices, uint16(index+1)), false
	switch {
	case !finished:
	case index < knownChoices:
		f.first |= 1 << index
	case f.others < noChoice:
		f.others++
	}
}

// all says whether there were choices, and all of them have finished.
func (f *finishes) all() bool {
	return f.choices > 0 && bits.OnesCount16(f.first)+int(f.others) >= int(f.choices)
}

// whole says whether a stream that ends here has told its whole answer, by its protocol's
// proof: the last event, an error, or of OpenAI's the finish reasons of all choices, behind
// which [DONE] says nothing new. tail: what is behind the last whole event counts where it
// lacks nothing but the ends of its lines.
func (s *scanner) whole(tail bool) bool {
	if s.proven() || s.finishes.blind {
		return true
	}
	if !tail || s.carry == nil || s.over {
		return false
	}
	last := s.carry.B
	if loneCR(last) {
		return true // lines that end so are not read: nobody can tell
	}
	if data := DataOf(last); bytes.Equal(data, done) || isWholeObject(data) {
		s.event(last)
	}
	return s.proven()
}

func (s *scanner) proven() bool {
	return s.ended || s.failed || s.protocol == OpenAI && s.finishes.all()
}

// loneCR says whether a carriage return stands before another byte than the end of its line.
func loneCR(b []byte) bool {
	for i := bytes.IndexByte(b, '\r'); i >= 0 && i+1 < len(b); {
		if b[i+1] != '\n' {
			return true
		}
		next := bytes.IndexByte(b[i+1:], '\r')
		if next < 0 {
			break
		}
		i += 1 + next
	}
	return false
}

// isWholeObject says whether data is one JSON object to its end.
func isWholeObject(data []byte) bool {
	w := walker{b: data}
	if w.peek() != '{' {
		return false
	}
	w.skip()
	return !w.bad && w.peek() == 0
}
