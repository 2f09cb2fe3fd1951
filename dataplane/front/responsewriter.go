package front

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/membudget"
)

// responseWriter composes a non-streaming response on the fast path. finishResponse moves its
// buffer and its budget to conn.pending.
type responseWriter struct {
	buf      *membudget.Buffer // nil: nothing is written
	n        int               // bytes written to buf
	linesEnd int               // where the header lines end; the Date line ends there
	count    membudget.Count   // budget of a long response
}

// unbudgetedResponse is the longest response that is not counted against the memory budget.
const unbudgetedResponse = 64 << 10

// unboundedResponse is the longest first response of a connection for which the kernel's send
// buffer is not bounded. Connections with one short response save the system call.
const unboundedResponse = 16 << 10

// acquireResponseBudget counts a response of n bytes against the memory budget until it is
// written. If the budget is exhausted it answers with an error and returns false. A response
// through fasthttp is counted until fasthttp has it.
func (x *Exchange) acquireResponseBudget(n int) bool {
	if n <= unbudgetedResponse || x.responseState != responsePending {
		return true
	}
	x.response.count = x.Budget().Count()
	if x.response.count.Acquire(membudget.SizeOf(n + membudget.Page)) {
		return true
	}
	x.Error(BudgetExhausted, "", "the memory for bodies is spent: the response cannot be buffered; try again", budgetRetry)
	return false
}

// grow makes room for n more bytes.
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

// addHeaderLine adds a header line to the response that beginResponse has begun.
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

// writeStatus begins a response on the fast path with its status line.
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
	dateSize  = len(dateName) + len(time.RFC1123) + len("\r\n") // HTTP's date format is as long as RFC1123
	closeLine = "Connection: close\r\n"
)

// setIdentityBody sets a copy of body as the response body, uncompressed.
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

// finishResponse completes the response on the fast path and moves it to conn.pending. keep says
// that the connection may serve another request.
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
		r.count.Return(more) // the head is shorter than acquireResponseBudget assumed
	}
	h.buf, h.n, h.sent, h.count = r.buf, r.n, 0, r.count
	*r = responseWriter{}
}

// dateLine is the Date line of one second.
type dateLine struct {
	second int64
	line   [dateSize]byte
}

var cachedDate atomic.Pointer[dateLine]

// appendDate appends the Date line for now. It formats one line a second.
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
