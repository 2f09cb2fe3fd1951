package relay

import (
	"errors"
	"math"

	"sluice/dataplane/membudget"
)

// unbudgetedPartial is how many bytes of an event that has not come whole a stream may hold
// without taking them of Options.Budget. Most events are shorter, so that most splits cost
// no atomic operation, and a spent budget ends only streams of long events.
const unbudgetedPartial = 8 << 10

// errPartialBudget is the detail of BudgetExhausted.
var errPartialBudget = errors.New("part of an event cannot be held: limits.memory_budget is spent")

// uncountedKept is likewise what a stream may keep for another engine: 4,096 ids, or less
// text. Few streams keep more.
const uncountedKept = 16 << 10

// acquirePartialBudget counts the buffers that hold parts of events, and what is kept for another
// engine, against the budget. Where it is spent, first nothing is kept any more, so that the
// stream cannot move. It returns false when the parts alone do not fit; then they are released.
func (s *stream) acquirePartialBudget() bool {
	kept := 0
	if t := s.extras.migration.Transcript; t != nil {
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
	s.releasePartial()
	s.releasePartialBudget()
	return false
}

// countHeld counts the parts of events and kept bytes more; false, and nothing changed, where
// the budget is spent.
func (s *stream) countHeld(kept int) bool {
	held := s.scan.partialSize()
	if e := s.editor; e != nil {
		held += e.events.partialSize()
		if e.partial != nil && e.partial.buf != nil {
			held += cap(e.partial.buf.B)
		}
	}
	if held <= unbudgetedPartial {
		held = 0
	}
	kib := uint16(min((held+kept)>>10, math.MaxUint16))
	more := (int64(kib) - int64(s.budgetKiB)) << 10
	if more == 0 || s.budget == nil {
		return true
	}
	if more < 0 {
		s.budget.Release(-more)
	} else if !s.budget.Acquire(more) {
		return false
	}
	s.budgetKiB = kib
	return true
}

// releasePartial releases the memory of the parts of a stream that ends. An event that was held
// back stays marked as such, for the client has not seen its beginning.
func (s *stream) releasePartial() {
	between := s.scan.atBoundary()
	s.scan.release()
	if !between {
		s.scan.oversized = true // the client may have half an event
	}
	e := s.editor
	if e == nil {
		return
	}
	e.events.release()
	if e.partial != nil && e.partial.buf != nil {
		membudget.Default.Put(e.partial.buf)
		e.partial.buf = membudget.Default.Get(1)
	}
}

// releasePartialBudget gives back what acquirePartialBudget has taken.
func (s *stream) releasePartialBudget() {
	if s.budgetKiB > 0 {
		s.budget.Release(int64(s.budgetKiB) << 10)
		s.budgetKiB = 0
	}
}

// partialSize is the memory of the event's bytes so far.
func (f *eventFramer) partialSize() int {
	if f.partial == nil {
		return 0
	}
	return cap(f.partial.B)
}
