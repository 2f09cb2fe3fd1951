package membudget

// Lease is a pooled buffer together with the bytes that it takes of a budget. The zero Lease
// has no buffer. A Lease belongs to one goroutine at a time and must not be copied while it
// has a buffer.
type Lease struct {
	budget   *Budget
	pool     *Pool
	buf      *Buffer
	acquired int64
}

// Lease returns a buffer of n bytes and counts the size of its class against b. If b refuses
// them it returns false and no buffer.
func (p *Pool) Lease(b *Budget, n int) (Lease, bool) {
	size := int64(SizeOf(n))
	if !b.Acquire(size) {
		return Lease{}, false
	}
	return Lease{budget: b, pool: p, buf: p.Get(n), acquired: size}, true
}

// Bytes returns the buffer, nil if there is none. The slice is borrowed until the next Grow,
// Fill or Release. Its capacity is its length, because Grow copies only the length: bytes
// that a holder wrote behind it would be replaced by what the new buffer contained before,
// another request's data.
func (l *Lease) Bytes() []byte {
	if l.buf == nil {
		return nil
	}
	return l.buf.B[:len(l.buf.B):len(l.buf.B)]
}

// Fill extends the buffer to the size of its class, which the budget counts already, and
// returns it.
func (l *Lease) Fill() []byte {
	if l.buf == nil {
		return nil
	}
	l.buf.B = l.buf.B[:cap(l.buf.B)]
	return l.buf.B
}

// Grow extends the buffer to n bytes and keeps its contents. The new bytes have arbitrary
// content. If the budget refuses the growth, Grow changes nothing and returns false.
func (l *Lease) Grow(n int) bool {
	if l.buf == nil {
		return false
	}
	if n <= cap(l.buf.B) {
		l.buf.B = l.buf.B[:max(n, len(l.buf.B))]
		return true
	}
	size := int64(SizeOf(n))
	if !l.budget.Acquire(size) {
		return false
	}
	bigger := l.pool.Get(n)
	copy(bigger.B, l.buf.B)
	l.pool.Put(l.buf)
	l.budget.Release(l.acquired)
	l.buf, l.acquired = bigger, size
	return true
}

// Size returns the bytes that the lease takes of its budget.
func (l *Lease) Size() int64 { return l.acquired }

// Release returns the buffer to its pool and its bytes to the budget. Further calls do
// nothing.
func (l *Lease) Release() {
	if l.buf == nil {
		return
	}
	l.pool.Put(l.buf)
	l.budget.Release(l.acquired)
	*l = Lease{}
}
