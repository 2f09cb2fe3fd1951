package membudget

// Lease is a buffer together with the bytes it takes of a budget; Release
// gives both back. The zero Lease holds nothing. It belongs to one goroutine
// at a time and must not be copied while it holds something.
type Lease struct {
	budget   *Budget
	pool     *Pool
	buf      *Buffer
	acquired int64
}

// Lease lends a buffer of n bytes counted against b, by the size of its level;
// false, and nothing lent, when b is spent.
func (p *Pool) Lease(b *Budget, n int) (Lease, bool) {
	size := int64(SizeOf(n))
	if !b.Acquire(size) {
		return Lease{}, false
	}
	return Lease{budget: b, pool: p, buf: p.Get(n), acquired: size}, true
}

// Bytes is the lent memory; nil when nothing is held. Grow, Fill and Release make
// earlier results void. Its capacity is its length: Grow keeps the length, so a holder
// that wrote behind it would lose those bytes to whatever the next buffer held before.
func (l *Lease) Bytes() []byte {
	if l.buf == nil {
		return nil
	}
	return l.buf.B[:len(l.buf.B):len(l.buf.B)]
}

// Fill makes the buffer as long as its level, which the budget has counted already, and
// returns all of it.
func (l *Lease) Fill() []byte {
	if l.buf == nil {
		return nil
	}
	l.buf.B = l.buf.B[:cap(l.buf.B)]
	return l.buf.B
}

// Grow makes the buffer n bytes long and keeps the bytes of its length so far; false, and
// nothing changed, when the budget is spent. The bytes that are new have any content.
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

// Size is what the lease takes of its budget, in bytes.
func (l *Lease) Size() int64 { return l.acquired }

// Release gives the buffer and its bytes back; again, it does nothing.
func (l *Lease) Release() {
	if l.buf == nil {
		return
	}
	l.pool.Put(l.buf)
	l.budget.Release(l.acquired)
	*l = Lease{}
}
