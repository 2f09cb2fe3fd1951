package front

import (
	"sluice/dataplane/membudget"
)

// ahead is the read-ahead of a connection: the head of its next request, with what came
// behind it. A connection that sends nothing has none, and one that trickles its head a
// small one (lobby.go). What the plain lane leaves to fasthttp is read from here first.
type ahead struct {
	buf    *membudget.Buffer
	r, w   int32
	head   int32 // where the head ends; 0: it has not come whole
	failed error // after the bytes that came
	// count is of buf, where half a head that waits is longer than a page.
	count membudget.Count
}

// beginsRequest says whether a request may begin with b; for something else no head is
// waited for.
func beginsRequest(b byte) bool { return tokenByte[b] || b == '\r' || b == '\n' }

// take gives bytes that were read ahead.
func (a *ahead) take(p []byte) int {
	n := copy(p, a.buf.B[a.r:a.w])
	if a.r += int32(n); a.r == a.w {
		a.drop()
	}
	return n
}

// resize puts what came into a buffer of another size.
func (a *ahead) resize(size int) {
	next := membudget.Default.Get(size)
	if a.buf != nil {
		copy(next.B, a.buf.B[:a.w])
		membudget.Default.Put(a.buf)
	}
	a.buf = next
}

func (a *ahead) drop() {
	if a.buf != nil {
		membudget.Default.Put(a.buf)
	}
	a.buf, a.r, a.w, a.head = nil, 0, 0, 0
	a.count.Release()
}

// counted counts the buffer against b where it is longer than a page, until drop; false when
// b is spent.
func (a *ahead) counted(b *membudget.Budget) bool {
	more := cap(a.buf.B) - int(a.count.Taken())
	if cap(a.buf.B) <= membudget.Page || more <= 0 {
		return true
	}
	if a.count.Taken() == 0 {
		a.count = b.Count()
	}
	return a.count.Take(more)
}
