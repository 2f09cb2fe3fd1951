package membudget

// Count is one holder's share of a budget for memory that is not leased, such as slices that
// grow on Go's heap. A zero or nil Count has no budget and bounds nothing. It belongs to one
// goroutine at a time.
type Count struct {
	budget *Budget
	used   int64
}

// Count returns an empty count against b. If b is nil it counts nothing.
func (b *Budget) Count() Count { return Count{budget: b} }

// Acquire counts n more bytes. If the budget refuses them it counts nothing and returns false.
func (c *Count) Acquire(n int) bool {
	if c == nil || c.budget == nil {
		return true
	}
	if !c.budget.Acquire(int64(n)) {
		return false
	}
	c.used += int64(max(n, 0))
	return true
}

// Return releases n of the counted bytes, at most all of them. It does nothing on a nil Count.
func (c *Count) Return(n int) {
	if c == nil || c.budget == nil {
		return
	}
	give := min(int64(max(n, 0)), c.used)
	c.budget.Release(give)
	c.used -= give
}

// Used returns the counted bytes.
func (c *Count) Used() int64 { return c.used }

// Release releases all counted bytes. The Count may be used again.
func (c *Count) Release() {
	c.budget.Release(c.used)
	c.used = 0
}
