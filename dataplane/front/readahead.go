package front

import (
	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
)

// readAhead is the input of a connection that has been read but not used: the head of its next
// request and the bytes behind it. It has no buffer if the client has sent nothing, and a
// small one in the pending-header queue (pendingheads.go). When the fast path passes a
// connection to fasthttp, fasthttp reads these bytes first.
type readAhead struct {
	buf     *membudget.Buffer // nil: no bytes
	r, w    int32             // buf.B[r:w] is unused
	headLen int32             // where the head ends; 0: it is incomplete
	readErr error             // follows the bytes
	// count is the budget that buf uses while an incomplete head has more than a page.
	count membudget.Count
}

// isRequestStart reports whether a request may begin with b. If not, the server does not wait
// for the rest of the head.
func isRequestStart(b byte) bool { return http1.IsTokenByte(b) || b == '\r' || b == '\n' }

// read copies unused bytes to p, and releases the buffer when none are left.
func (a *readAhead) read(p []byte) int {
	n := copy(p, a.buf.B[a.r:a.w])
	if a.r += int32(n); a.r == a.w {
		a.release()
	}
	return n
}

// resize moves the bytes to a buffer of another size, which must have room for them.
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

// acquireBudget counts the buffer against b, if it is larger than a page, until release. It
// returns false if b is exhausted.
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
