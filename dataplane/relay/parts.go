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

// countParts counts the buffers that hold parts of events against the budget. It returns
// false when the budget is spent; then the parts are released.
func (s *stream) countParts() bool {
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
	kib := uint16(min(held>>10, math.MaxUint16))
	more := (int64(kib) - int64(s.counted)) << 10
	if more == 0 || s.budget == nil {
		return true
	}
	if more < 0 {
		s.budget.Release(-more)
	} else if !s.budget.Acquire(more) {
		s.dropParts()
		s.uncountParts()
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
