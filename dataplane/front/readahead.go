package front

import (
	"sluice/dataplane/membudget"
)

// readAhead is the read-ahead of a connection: the head of its next request, with what came
// behind it. A connection that sends nothing has none, and one that trickles its head a
// small one (lobby.go). What the plain lane leaves to fasthttp is read from here first.
type readAhead struct {
	buf     *membudget.Buffer
	r, w    int32
	headLen int32 // where the head ends; 0: it has not come whole
	readErr error // after the bytes that came
	// count is of buf, where half a head that waits is longer than a page.
	count membudget.Count
}

// isRequestStart says whether a request may begin with b; for something else no head is
// waited for.
func isRequestStart(b byte) bool { return tokenByte[b] || b == '\r' || b == '\n' }

// read gives bytes that were read ahead.
func (a *readAhead) read(p []byte) int {
	n := copy(p, a.buf.B[a.r:a.w])
	if a.r += int32(n); a.r == a.w {
		a.release()
	}
	return n
}

// resize puts what came into a buffer of another size.
func (a *readAhead) resize(size int) {
	next := membudget.Default.Get(size)
	if a.buf != nil {
		copy(next.B, a.buf.B[:a.w])
		membudget.Default.Put(a.buf)
	}
	a.buf = next
}

func (a *readAhead) release() {
	if a.buf != nil {
		membudget.Default.Put(a.buf)
	}
	a.buf, a.r, a.w, a.headLen = nil, 0, 0, 0
	a.count.Release()
}

// acquireBudget counts the buffer against b where it is longer than a page, until drop; false when
// b is spent.
func (a *readAhead) acquireBudget(b *membudget.Budget) bool {
	more := cap(a.buf.B) - int(a.count.Used())
	if cap(a.buf.B) <= membudget.Page || more <= 0 {
		return true
	}
	if a.count.Used() == 0 {
		a.count = b.Count()
	}
	return a.count.Acquire(more)
}
