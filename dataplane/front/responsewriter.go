package front

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/membudget"
)

// responseWriter composes a non-streaming response on the fast path. fastExchange.finishResponse
// moves its buffer to conn.pending.
type responseWriter struct {
	buf      *membudget.Buffer // nil: nothing is written
	n        int               // bytes written to buf
	linesEnd int               // where the header lines end; the Date line ends there
}

// unboundedResponse is the longest first response of a connection for which the kernel's send
// buffer is not bounded. Connections with one short response save the system call.
const unboundedResponse = 16 << 10

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
	*r = responseWriter{}
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
