package membudget

import (
	"math"
	"sync/atomic"
)

// Budget is a limit in bytes on the memory that many goroutines hold together. Acquire never
// waits; a caller that is refused tells its client. Budget is safe for concurrent use.
type Budget struct {
	limit   atomic.Int64
	used    atomic.Int64
	peak    atomic.Int64
	refused atomic.Uint64
	parent  *Budget // counts the same bytes too; nil: none
}

// NewBudget returns a budget of limit bytes. A limit of zero or less refuses everything.
func NewBudget(limit int64) *Budget {
	b := new(Budget)
	b.SetLimit(limit)
	return b
}

// NewChild returns a budget whose bytes count in b too. It has no limit of its own until
// SetLimit, and reports what its own users hold of b.
func (b *Budget) NewChild() *Budget {
	part := NewBudget(math.MaxInt64)
	part.parent = b
	return part
}

// SetLimit changes the limit. If holders have more than a lower limit they keep it, and
// Acquire refuses until enough has been released.
func (b *Budget) SetLimit(limit int64) { b.limit.Store(max(limit, 0)) }

// Acquire counts n bytes and returns true, or counts nothing and returns false if they would
// exceed the limit. If n is zero or less it counts nothing and returns true.
func (b *Budget) Acquire(n int64) bool {
	if n <= 0 {
		return true
	}
	limit := b.limit.Load()
	if n > limit || b.parent != nil && !b.parent.Acquire(n) {
		b.refused.Add(1)
		return false
	}
	// Adding first and undoing on excess needs one atomic operation in the common case.
	// Near the limit two callers may both be refused although one would fit.
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

// Release returns n acquired bytes. It does nothing on a nil Budget.
func (b *Budget) Release(n int64) {
	for ; b != nil && n > 0; b = b.parent {
		b.used.Add(-n)
	}
}

// Used returns the bytes held now. It may exceed Limit briefly while a refused Acquire is
// undone.
func (b *Budget) Used() int64 { return b.used.Load() }

// Peak returns the largest number of bytes ever held at once.
func (b *Budget) Peak() int64 { return b.peak.Load() }

// Limit returns the limit in bytes.
func (b *Budget) Limit() int64 { return b.limit.Load() }

// Refused returns how many Acquire calls were refused.
func (b *Budget) Refused() uint64 { return b.refused.Load() }
