package membudget

import (
	"math"
	"sync/atomic"
)

// Budget is a bound in bytes on what many goroutines hold together. Acquire
// never waits: a caller that is refused says so to its client. Safe for
// concurrent use.
type Budget struct {
	limit   atomic.Int64
	used    atomic.Int64
	peak    atomic.Int64
	refused atomic.Uint64
	parent  *Budget // counts what this one gives too; nil: none
}

// NewBudget makes a budget of limit bytes; zero or less refuses everything.
func NewBudget(limit int64) *Budget {
	b := new(Budget)
	b.SetLimit(limit)
	return b
}

// NewChild makes a budget that says how much its own users hold of b, which is the bound.
func (b *Budget) NewChild() *Budget {
	part := NewBudget(math.MaxInt64)
	part.parent = b
	return part
}

// SetLimit changes the bound. What is held beyond a lower one stays held; nothing more is
// given until it has been released.
func (b *Budget) SetLimit(limit int64) { b.limit.Store(max(limit, 0)) }

// Acquire takes n bytes, or none and says false. n of zero or less takes none.
func (b *Budget) Acquire(n int64) bool {
	if n <= 0 {
		return true
	}
	limit := b.limit.Load()
	if n > limit || b.parent != nil && !b.parent.Acquire(n) {
		b.refused.Add(1)
		return false
	}
	// Add first, undo when over: one atomic operation on the way that matters.
	// Near the limit two callers may refuse each other where one would fit.
	used := b.used.Add(n)
	if used > limit {
		b.used.Add(-n)
		b.parent.Release(n)
		b.refused.Add(1)
		return false
	}
	for peak := b.peak.Load(); used > peak && !b.peak.CompareAndSwap(peak, used); peak = b.peak.Load() {
	}
	return true
}

// Release gives n acquired bytes back; of a nil Budget, nothing.
func (b *Budget) Release(n int64) {
	for ; b != nil && n > 0; b = b.parent {
		b.used.Add(-n)
	}
}

// Used is what is held now, in bytes; it may be over Limit for the moment in
// which a refused Acquire is undone.
func (b *Budget) Used() int64 { return b.used.Load() }

// Peak is the most that was ever held at once, in bytes.
func (b *Budget) Peak() int64 { return b.peak.Load() }

// Limit is the bound in bytes.
func (b *Budget) Limit() int64 { return b.limit.Load() }

// Refused counts the Acquire calls that were refused.
func (b *Budget) Refused() uint64 { return b.refused.Load() }
