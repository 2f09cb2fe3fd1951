package membudget

// Count is what one holder has taken of a budget for memory that is no Lease's: slices
// that grow on Go's heap. The zero Count, and a nil one, is of no budget and bounds
// nothing. It belongs to one goroutine at a time.
type Count struct {
	budget *Budget
	used   int64
}

// Count begins a count against b, which may be nil: then nothing is counted.
func (b *Budget) Count() Count { return Count{budget: b} }

// Acquire counts n bytes more; false, and nothing counted, when the budget is spent.
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

// Return gives n of the bytes that are counted back; of a nil Count, nothing.
func (c *Count) Return(n int) {
	if c == nil || c.budget == nil {
		return
	}
	give := min(int64(max(n, 0)), c.used)
	c.budget.Release(give)
	c.used -= give
}

// Used is what is counted, in bytes.
func (c *Count) Used() int64 { return c.used }

// Release gives back all that was counted; the Count may be used again.
func (c *Count) Release() {
	c.budget.Release(c.used)
	c.used = 0
}
