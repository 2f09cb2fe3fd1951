package front

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/membudget"
)

// responseWriter is where the whole answer to a plain request is written. Its memory goes to
// conn.held with it.
type responseWriter struct {
	buf      *membudget.Buffer // nil: nothing is written
	n        int               // of buf
	linesEnd int               // where the header lines end; the Date's place is before
	count    membudget.Count   // of a long answer
}

// unbudgetedResponse is how long an answer may be without being counted as bodies are.
const unbudgetedResponse = 64 << 10

// unboundedResponse is how long the first answer of a connection may be without a bound on the
// kernel's send buffer. Connections with one short answer save the system call.
const unboundedResponse = 16 << 10

// acquireResponseBudget counts an answer of n bytes until it has left; where the budget is spent it
// answers so, and gives false. One that goes by fasthttp is counted until it is handed over.
func (x *Exchange) acquireResponseBudget(n int) bool {
	if n <= unbudgetedResponse || x.responseState != responsePending {
		return true
	}
	x.response.count = x.Budget().Count()
	if x.response.count.Acquire(membudget.SizeOf(n + membudget.Page)) {
		return true
	}
	x.Error(BudgetExhausted, "", "the memory for bodies is spent: the answer cannot be held; try again", budgetRetry)
	return false
}

func (r *responseWriter) grow(n int) {
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

func appendTo[T []byte | string](r *responseWriter, text T) {
	r.grow(len(text))
	r.n += copy(r.buf.B[r.n:], text)
}

func (r *responseWriter) writeInt(n int64) {
	var digits [20]byte
	appendTo(r, strconv.AppendInt(digits[:0], n, 10))
}

func (r *responseWriter) release() {
	if r.buf != nil {
		membudget.Default.Put(r.buf)
	}
	r.count.Release()
	*r = responseWriter{}
}

// addHeaderLine adds a header line to a whole answer that was begun.
func addHeaderLine[N, V []byte | string](x *Exchange, name N, value V) {
	if x.ctx != nil {
		x.ctx.Response.Header.AddBytesKV([]byte(name), []byte(value))
		return
	}
	r := &x.response
	appendTo(r, name)
	appendTo(r, ": ")
	appendTo(r, value)
	appendTo(r, "\r\n")
}

// writeStatus begins the answer to a plain request.
func (r *responseWriter) writeStatus(status int) {
	r.n = 0
	appendTo(r, "HTTP/1.1 ")
	r.writeInt(int64(status))
	appendTo(r, " ")
	appendTo(r, reasonPhrase(status))
	appendTo(r, "\r\n")
}

const (
	dateName  = "Date: "
	dateSize  = len(dateName) + len(time.RFC1123) + len("\r\n") // as much as http's own form has
	closeLine = "Connection: close\r\n"
)

// setIdentityBody makes a copy of body the answer's.
func (x *Exchange) setIdentityBody(body []byte) {
	if x.ctx != nil {
		x.c.boundFor(len(body))
		x.ctx.Response.SetBody(body)
		return
	}
	r, status := &x.response, x.c.response.status
	if status >= 200 && status != 204 && status != 304 {
		appendTo(r, "Content-Length: ")
		r.writeInt(int64(len(body)))
		appendTo(r, "\r\n")
	} else {
		body = nil
	}
	r.grow(dateSize + len(closeLine) + len("\r\n") + len(body))
	r.n += dateSize
	r.linesEnd = r.n
	appendTo(r, "\r\n")
	appendTo(r, body)
}

// finishResponse ends the answer to a plain request and gives it to the connection.
func (x *Exchange) finishResponse(keep bool) {
	h, r := &x.c.pending, &x.response
	h.buf, h.keepConn = nil, keep
	if r.buf == nil {
		return
	}
	date := r.buf.B[r.linesEnd-dateSize : r.linesEnd : r.linesEnd]
	appendDate(date[:0], time.Now())
	if !keep {
		r.grow(len(closeLine))
		b := r.buf.B
		copy(b[r.linesEnd+len(closeLine):], b[r.linesEnd:r.n])
		r.n += len(closeLine)
		copy(b[r.linesEnd:], closeLine)
	}
	x.c.boundFor(r.n)
	if more := int(r.count.Used()) - cap(r.buf.B); more > 0 {
		r.count.Return(more) // the head was shorter than was allowed for
	}
	h.buf, h.n, h.sent, h.count = r.buf, r.n, 0, r.count
	*r = responseWriter{}
}

// dateLine is a second's Date line.
type dateLine struct {
	second int64
	line   [dateSize]byte
}

var cachedDate atomic.Pointer[dateLine]

func appendDate(dst []byte, now time.Time) []byte {
	d := cachedDate.Load()
	if d == nil || d.second != now.Unix() {
		d = &dateLine{second: now.Unix()}
		line := append(fasthttp.AppendHTTPDate(append(d.line[:0], dateName...), now), "\r\n"...)
		copy(d.line[:], line)
		cachedDate.Store(d)
	}
	return append(dst, d.line[:]...)
}
