package front

import (
	"io"
	"time"

	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
)

// fastExchange is a request on the fast path; see fastpath.go. It writes its response to a
// responseWriter.
type fastExchange struct {
	httpExchange
	fixedBody fixedBody
	response  responseWriter
}

func newFastExchange(s *Server) *fastExchange {
	x := new(fastExchange)
	x.init(s, x)
	return x
}

// openBody prepares the body, which may have arrived
// completely. It returns false if the connection fails.
func (x *fastExchange) openBody() bool {
	b, a := &x.body, &x.c.readAhead
	b.length, b.read, b.arrived, b.atEOF, b.broken = x.head.Length, 0, 0, true, false
	if b.length == http1.LengthNone {
		return true
	}
	if b.length == http1.LengthChunked {
		b.openChunked(&x.httpExchange, bufferedConnReader{x.c})
		b.atEOF = false
		b.setDeadline(&x.httpExchange, 0)
		return true
	}
	if received := a.buf.B[a.r:a.w]; b.length <= int64(len(received)) {
		b.inReadAhead, b.read = received[:b.length:b.length], b.length
		a.r += int32(b.length)
		return true
	}
	x.fixedBody = fixedBody{x.c, b.length}
	b.stream, b.arrived, b.atEOF = &x.fixedBody, int64(a.w-a.r), false
	b.setDeadline(&x.httpExchange, b.length)
	return true
}

// writeStatus implements httpPath.
func (x *fastExchange) writeStatus(status int) { x.response.writeStatus(status) }

// addHeader implements httpPath.
func (x *fastExchange) addHeader(name, value string) {
	r := &x.response
	appendTo(r, name)
	appendTo(r, ": ")
	appendTo(r, value)
	appendTo(r, "\r\n")
}

// setBody implements httpPath.
func (x *fastExchange) setBody(body []byte) {
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

// discardResponse implements httpPath.
func (x *fastExchange) discardResponse() {
	x.response.release()
	x.responseCount.Release()
}

// finishResponse implements httpPath: it moves the response to conn.pending.
func (x *fastExchange) finishResponse(keep bool) {
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
	if more := int(x.responseCount.Used()) - cap(r.buf.B); more > 0 {
		x.responseCount.Return(more) // the head is shorter than acquireResponseBudget assumed
	}
	h.buf, h.n, h.sent, h.count = r.buf, r.n, 0, x.responseCount
	*r, x.responseCount = responseWriter{}, membudget.Count{}
}

// detachStream implements httpPath. The fast path looks at conn.stream when the Handler has returned.
func (x *fastExchange) detachStream() {}

// recycle implements httpPath.
func (x *fastExchange) recycle() {
	x.fixedBody = fixedBody{}
	x.srv.fastExchanges.Put(x)
}

// fixedBody reads a body with Content-Length on the fast path: first from the read-ahead, then
// from the connection.
type fixedBody struct {
	c         *conn
	remaining int64
}

// Read implements io.Reader. It returns io.EOF together with the last byte.
func (r *fixedBody) Read(p []byte) (n int, err error) {
	if r.remaining == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), r.remaining)]
	if a := &r.c.readAhead; a.r < a.w {
		// The read-ahead keeps its buffer, because the head is in it.
		n = copy(p, a.buf.B[a.r:a.w])
		a.r += int32(n)
	} else {
		n, err = r.c.receiveUntilDeadline(p)
	}
	if r.remaining -= int64(n); r.remaining == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// bufferedConnReader reads from the connection through the read-ahead, for a body of unknown
// length: bytes that the body's reader does not take stay there for the next request.
type bufferedConnReader struct{ c *conn }

// Read implements io.Reader. It does not end with the body: the body's own reader finds the end.
func (o bufferedConnReader) Read(p []byte) (n int, err error) {
	a := &o.c.readAhead
	if a.r == a.w {
		free := a.buf.B[a.headLen:]
		if len(p) >= len(free) {
			return o.c.receiveUntilDeadline(p)
		}
		n, err = o.c.receiveUntilDeadline(free)
		a.r, a.w = a.headLen, a.headLen+int32(n)
	}
	n = copy(p, a.buf.B[a.r:a.w])
	a.r += int32(n)
	return n, err
}
