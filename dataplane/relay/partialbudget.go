package relay

import (
	"errors"
	"math"

	"sluice/dataplane/membudget"
)

// unbudgetedPartial is how many bytes of a partial event a stream may hold without acquiring them
// from Options.Budget. Most events are shorter, so that most splits cost no atomic operation, and
// an exhausted budget ends only streams with long events.
const unbudgetedPartial = 8 << 10

// errPartialBudget is the error of BudgetExhausted.
var errPartialBudget = errors.New("cannot buffer a partial event: limits.memory_budget is exhausted")

// uncountedKept is the same for what a stream keeps for a migration: 4,096 ids, or less text. Few
// streams keep more.
const uncountedKept = 16 << 10

// acquirePartialBudget acquires the memory of partial events and of what is kept for a migration.
// When the budget is exhausted the stream first drops what it keeps, and can no longer migrate.
// acquirePartialBudget returns false when the partial events alone do not fit; they are released
// then.
func (s *stream) acquirePartialBudget() bool {
	kept := 0
	if t := s.extras.migration.Transcript; t != nil {
		if t.Forgotten() {
			t.Forget()
		}
		if kept = t.KeptBytes(); kept <= uncountedKept {
			kept = 0
		}
		if kept > 0 && !s.countHeld(kept) {
			t.Forget()
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

// countHeld acquires the memory of the partial events and of kept bytes. When the budget is
// exhausted it returns false and changes nothing.
func (s *stream) countHeld(kept int) bool {
	held := s.scan.PartialSize()
	if e := s.editor; e != nil {
		held += e.events.PartialSize()
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

// releasePartial releases the partial events of a stream that ends. A held event stays marked as
// held, because the client has not got its beginning.
func (s *stream) releasePartial() {
	between := s.scan.AtBoundary()
	s.scan.Release()
	if !between {
		s.scan.Oversized = true // the client may have part of an event
	}
	e := s.editor
	if e == nil {
		return
	}
	e.events.Release()
	if e.partial != nil && e.partial.buf != nil {
		membudget.Default.Put(e.partial.buf)
		e.partial.buf = membudget.Default.Get(1)
	}
}

// releasePartialBudget releases what acquirePartialBudget has acquired.
func (s *stream) releasePartialBudget() {
	if s.budgetKiB > 0 {
		s.budget.Release(int64(s.budgetKiB) << 10)
		s.budgetKiB = 0
	}
}
