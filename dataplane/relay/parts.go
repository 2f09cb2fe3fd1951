package relay

import (
	"errors"
	"math"

	"sluice/dataplane/membudget"
)

// uncountedParts is how many bytes of an event that has not come whole a stream may hold
// without taking them of Options.Budget. Most events are shorter, so that most splits cost
// no atomic operation, and a spent budget ends only streams of long events.
const uncountedParts = 8 << 10

// errPartsSpent is the detail of MemorySpent.
var errPartsSpent = errors.New("part of an event cannot be held: limits.body_budget is spent")

// uncountedKept is likewise what a stream may keep for another engine: 4,096 ids, or less
// text. Few streams keep more.
const uncountedKept = 16 << 10

// countParts counts the buffers that hold parts of events, and what is kept for another
// engine, against the budget. Where it is spent, first nothing is kept any more, so that the
// stream cannot move. It returns false when the parts alone do not fit; then they are released.
func (s *stream) countParts() bool {
	kept := 0
	if t := s.rare.carry.Transcript; t != nil {
		if t.forgets() {
			t.forget()
		}
		if kept = t.kept(); kept <= uncountedKept {
			kept = 0
		}
		if kept > 0 && !s.countHeld(kept) {
			t.forget()
			kept = 0
		}
		if kept > 0 {
			return true
		}
	}
	if s.countHeld(0) {
		return true
	}
	s.dropParts()
	s.uncountParts()
	return false
}

// countHeld counts the parts of events and kept bytes more; false, and nothing changed, where
// the budget is spent.
func (s *stream) countHeld(kept int) bool {
	held := s.scan.held()
	if e := s.edit; e != nil {
		held += e.events.held()
		if e.held != nil && e.held.buf != nil {
			held += cap(e.held.buf.B)
		}
	}
	if held <= uncountedParts {
		held = 0
	}
	kib := uint16(min((held+kept)>>10, math.MaxUint16))
	more := (int64(kib) - int64(s.counted)) << 10
	if more == 0 || s.budget == nil {
		return true
	}
	if more < 0 {
		s.budget.Release(-more)
	} else if !s.budget.Acquire(more) {
		return false
	}
	s.counted = kib
	return true
}

// dropParts releases the memory of the parts of a stream that ends. An event that was held
// back stays marked as such, for the client has not seen its beginning.
func (s *stream) dropParts() {
	between := s.scan.between()
	s.scan.drop()
	if !between {
		s.scan.over = true // the client may have half an event
	}
	e := s.edit
	if e == nil {
		return
	}
	e.events.drop()
	if e.held != nil && e.held.buf != nil {
		membudget.Default.Put(e.held.buf)
		e.held.buf = membudget.Default.Get(1)
	}
}

// uncountParts gives back what countParts has taken.
func (s *stream) uncountParts() {
	if s.counted > 0 {
		s.budget.Release(int64(s.counted) << 10)
		s.counted = 0
	}
}

// held is the memory of the event's bytes so far.
func (f *framer) held() int {
	if f.carry == nil {
		return 0
	}
	return cap(f.carry.B)
}
