package front

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/membudget"
)

// room is where the whole answer to a plain request is written. Its memory goes to
// conn.held with it.
type room struct {
	buf   *membudget.Buffer // nil: nothing is written
	n     int               // of buf
	lines int               // where the header lines end; the Date's place is before
	count membudget.Count   // of a long answer
}

// uncountedAnswer is how long an answer may be without being counted as bodies are.
const uncountedAnswer = 64 << 10

// unboundAnswer is how long the first answer of a connection may be without a bound on the
// kernel's send buffer. Connections with one short answer save the system call.
const unboundAnswer = 16 << 10

// countAnswer counts an answer of n bytes until it has left; where the budget is spent it
// answers so, and gives false. One that goes by fasthttp is counted until it is handed over.
func (x *Exchange) countAnswer(n int) bool {
	if n <= uncountedAnswer || x.answer != unanswered {
		return true
	}
	x.room.count = x.Budget().Count()
	if x.room.count.Take(membudget.SizeOf(n + membudget.Page)) {
		return true
	}
	x.Error(BudgetSpent, "", "the memory for bodies is spent: the answer cannot be held; try again", budgetRetry)
	return false
}

func (r *room) need(n int) {
	switch {
	case r.buf == nil:
		r.buf, r.n = membudget.Default.Get(max(n, membudget.Page)), 0
	case r.n+n > len(r.buf.B):
		more := membudget.Default.Get(max(r.n+n, 2*len(r.buf.B)))
		copy(more.B, r.buf.B[:r.n])
		membudget.Default.Put(r.buf)
		r.buf = more
	}
}

func put[T []byte | string](r *room, text T) {
	r.need(len(text))
	r.n += copy(r.buf.B[r.n:], text)
}

func (r *room) number(n int64) {
	var digits [20]byte
	put(r, strconv.AppendInt(digits[:0], n, 10))
}

func (r *room) drop() {
	if r.buf != nil {
		membudget.Default.Put(r.buf)
	}
	r.count.Release()
	*r = room{}
}

// addLine adds a header line to a whole answer that was begun.
func addLine[N, V []byte | string](x *Exchange, name N, value V) {
	if x.ctx != nil {
		x.ctx.Response.Header.AddBytesKV([]byte(name), []byte(value))
		return
	}
	r := &x.room
	put(r, name)
	put(r, ": ")
	put(r, value)
	put(r, "\r\n")
}

// status begins the answer to a plain request.
func (r *room) status(status int) {
	r.n = 0
	put(r, "HTTP/1.1 ")
	r.number(int64(status))
	put(r, " ")
	put(r, phrase(status))
	put(r, "\r\n")
}

const (
	dateName  = "Date: "
	dateSize  = len(dateName) + len(time.RFC1123) + len("\r\n") // as much as http's own form has
	closeLine = "Connection: close\r\n"
)

// putBody makes a copy of body the answer's.
func (x *Exchange) putBody(body []byte) {
	if x.ctx != nil {
		x.c.boundFor(len(body))
		x.ctx.Response.SetBody(body)
		return
	}
	r, status := &x.room, x.c.ended.status
	if status >= 200 && status != 204 && status != 304 {
		put(r, "Content-Length: ")
		r.number(int64(len(body)))
		put(r, "\r\n")
	} else {
		body = nil
	}
	r.need(dateSize + len(closeLine) + len("\r\n") + len(body))
	r.n += dateSize
	r.lines = r.n
	put(r, "\r\n")
	put(r, body)
}

// seal ends the answer to a plain request and gives it to the connection.
func (x *Exchange) seal(keep bool) {
	h, r := &x.c.held, &x.room
	h.buf, h.ok = nil, keep
	if r.buf == nil {
		return
	}
	date := r.buf.B[r.lines-dateSize : r.lines : r.lines]
	appendDate(date[:0], time.Now())
	if !keep {
		r.need(len(closeLine))
		b := r.buf.B
		copy(b[r.lines+len(closeLine):], b[r.lines:r.n])
		r.n += len(closeLine)
		copy(b[r.lines:], closeLine)
	}
	x.c.boundFor(r.n)
	if more := int(r.count.Taken()) - cap(r.buf.B); more > 0 {
		r.count.Return(more) // the head was shorter than was allowed for
	}
	h.buf, h.n, h.out, h.count = r.buf, r.n, 0, r.count
	*r = room{}
}

// dated is a second's Date line.
type dated struct {
	second int64
	line   [dateSize]byte
}

var lastDate atomic.Pointer[dated]

func appendDate(dst []byte, now time.Time) []byte {
	d := lastDate.Load()
	if d == nil || d.second != now.Unix() {
		d = &dated{second: now.Unix()}
		line := append(fasthttp.AppendHTTPDate(append(d.line[:0], dateName...), now), "\r\n"...)
		copy(d.line[:], line)
		lastDate.Store(d)
	}
	return append(dst, d.line[:]...)
}
