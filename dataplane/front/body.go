package front

import (
	"errors"
	"io"
	"math"
	"strconv"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
)

const (
	// A body begins in a buffer of at most initialBodyBuf bytes and grows with what
	// has come: a declared length costs the client bytes, not us memory. So much comes
	// with the head in the first read of a connection; then a body of up to shortBodyLimit
	// takes its whole length, of which 1 in shortBodyRatio has come, a longer one that of
	// which 1 in longBodyRatio has.
	initialBodyBuf = 12 << 10
	shortBodyLimit = 1 << 20
	shortBodyRatio = 32
	longBodyRatio  = 8
	// What is left of a body that nobody wants is read away within these
	// bounds to keep the connection; else the connection is closed. The answer says
	// which, so it waits for that: only for what is there or about to come, for a client
	// may send no more before it has the answer.
	drainBytes = 256 << 10
	drainTime  = 20 * time.Millisecond
	// budgetRetry is what a client is told to wait when the memory is spent.
	budgetRetry = time.Second
)

// body is a request's body on its way from the connection.
type body struct {
	stream      io.Reader     // nil: none was announced
	length      int64         // announced; framingChunked: not known
	read        int64         // payload taken from stream
	chunked     chunkedReader // stream, where that is the transfer coding
	atEOF       bool          // stream came to its end
	broken      bool          // stream failed: nothing behind it can be found
	deadline    monoTime      // when all of it must have come
	inReadAhead []byte        // it came with the head, and lies in the connection's read-ahead
	lease       membudget.Lease
	editedLease membudget.Lease // of the edited body, where fields were stripped
}

// open compares fasthttp's reading of the framing with the guard's; false when
// they differ, and then nothing on the connection may be trusted. Of a chunked body
// fasthttp was told another, see onHeadRead.
func (b *body) open(x *Exchange) bool {
	b.stream = x.ctx.RequestBodyStream()
	b.length, b.read, b.broken = x.head.length, 0, false
	seen := int64(x.ctx.Request.Header.ContentLength())
	if b.length == framingNone {
		b.atEOF = true
		return b.stream == nil && (seen == framingNone || seen == 0)
	}
	b.atEOF = false
	b.setDeadline(x, max(b.length, 0))
	if b.stream == nil || b.length != framingChunked {
		return b.stream != nil && seen == b.length
	}
	b.openChunked(x, b.stream)
	return seen == unknownLength
}

// openChunked reads a chunked body from src.
func (b *body) openChunked(x *Exchange, src io.Reader) {
	b.chunked.reset(src, int64(x.srv.initial.MaxHeadBytes))
	b.stream = &b.chunked
}

// openFastPath begins a plain request's body, which may have come whole; false when the
// connection fails.
func (b *body) openFastPath(x *Exchange) bool {
	a := &x.c.readAhead
	b.length, b.read, b.atEOF, b.broken = x.head.length, 0, true, false
	if b.length == framingNone {
		return true
	}
	if b.length == framingChunked {
		b.openChunked(x, bufferedConnReader{x.c})
		b.atEOF = false
		b.setDeadline(x, 0)
		return true
	}
	if received := a.buf.B[a.r:a.w]; b.length <= int64(len(received)) {
		b.inReadAhead, b.read = received[:b.length:b.length], b.length
		a.r += int32(b.length)
		return true
	}
	x.fixedBody = fixedBody{x.c, b.length}
	b.stream, b.atEOF = &x.fixedBody, false
	b.setDeadline(x, b.length)
	return true
}

// setDeadline gives a body of size its time.
func (b *body) setDeadline(x *Exchange, size int64) {
	b.deadline = monoTimeOf(x.Received.Add(x.srv.bodyTime(min(size, x.srv.options().MaxBodyBytes))))
}

// next reads on; it notes the end and failures.
func (b *body) next(c *conn, p []byte) (n int, done bool, err error) {
	if b.length == framingChunked {
		// Its reads of the connection have their time one by one. It is asked for little at
		// once, for what has come gives it more time, see readBody.
		c.chunkedDeadline = b.deadline
		n, err = b.stream.Read(p[:min(len(p), bodyRate/4)])
		c.chunkedDeadline = 0
	} else {
		if err := c.setBodyReadDeadline(b.deadline); err != nil {
			b.broken = true
			return 0, false, err
		}
		n, err = b.stream.Read(p)
	}
	b.read += int64(n)
	if err == io.EOF && b.read < b.length {
		// fasthttp's stream takes the connection's end for the body's.
		err = io.ErrUnexpectedEOF
	}
	if err == io.EOF {
		b.atEOF = true
		return n, true, nil
	}
	b.broken = err != nil && err != errBodyTooLarge
	return n, false, err
}

// drain reads away what is left; false when the connection must be closed.
func (b *body) drain(c *conn) bool {
	if b.atEOF || b.broken || b.stream == nil {
		return b.atEOF && !b.broken
	}
	if b.length-b.read > drainBytes {
		return false
	}
	b.chunked.limit = b.read + drainBytes
	b.deadline = monoTimeOf(time.Now().Add(drainTime))
	sink := membudget.Default.Get(membudget.Page)
	defer membudget.Default.Put(sink)
	for left := int64(drainBytes); left > 0; {
		n, done, err := b.next(c, sink.B)
		if left -= int64(n); done {
			return true
		}
		if err != nil {
			return false
		}
	}
	return false
}

// mayAllocate says whether a body of which so much has come may have room for all of it.
func (b *body) mayAllocate(received int64) bool {
	return b.length <= longBodyRatio*received || b.length <= min(shortBodyRatio*received, shortBodyLimit)
}

func (b *body) release() {
	b.lease.Release()
	b.editedLease.Release()
	b.stream, b.chunked.src, b.inReadAhead = nil, nil, nil
}

// readBody reads the whole body into leased memory and makes it Doc.Body's
// bytes; when it cannot, it answers and gives false.
func (x *Exchange) readBody() bool {
	b, limit := &x.body, x.srv.options().MaxBodyBytes
	if b.length > limit {
		return x.rejectTooLarge()
	}
	b.chunked.limit = limit
	if b.stream == nil {
		x.Doc.Body = b.inReadAhead
		return true
	}
	first := int64(initialBodyBuf)
	if b.length >= 0 {
		first = min(first, max(b.length, 1))
		if b.stream == &x.fixedBody && b.mayAllocate(int64(x.c.readAhead.w-x.c.readAhead.r)) {
			first = b.length
		}
	}
	lease, ok := membudget.Default.Lease(x.srv.budget, int(first))
	if !ok {
		return x.rejectBudgetExhausted()
	}
	b.lease = lease
	buf, extended := b.lease.Bytes(), int64(0)
	for {
		if int(b.read) == len(buf) {
			want := min(4*b.read, limit)
			// The last step is a long one, so that little of the body lies in the buffer
			// that is replaced, and is copied: two of nearly its size would be three times
			// the body.
			if b.length >= 0 && b.mayAllocate(b.read) {
				want = b.length
			}
			if !b.lease.Grow(int(want)) {
				return x.rejectBudgetExhausted()
			}
			buf = b.lease.Bytes()
		}
		if b.length == framingChunked && b.read-extended >= bodyRate {
			extended = b.read
			b.setDeadline(x, b.read)
		}
		_, done, err := b.next(x.c, buf[b.read:])
		switch {
		case err == errBodyTooLarge:
			return x.rejectTooLarge()
		case err != nil:
			return x.rejectBodyError(err)
		case done:
			x.Doc.Body = buf[:b.read]
			return true
		}
	}
}

func (x *Exchange) rejectTooLarge() bool {
	x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(x.srv.options().MaxBodyBytes, 10)+" bytes", 0)
	return false
}

func (x *Exchange) rejectBudgetExhausted() bool {
	x.Error(BudgetExhausted, "", "the memory for request bodies is spent; try again", budgetRetry)
	return false
}

func (x *Exchange) rejectBodyError(err error) bool {
	switch failure := x.c.readFailure(); {
	case failure == RequestTimeout:
		x.Error(RequestTimeout, "", "the request body did not come in time", 0)
	case x.c.endedByDrain():
		x.Error(Drained, "", drainedMessage, drainRetry)
	case failure == ClientGone:
		x.Error(ClientGone, "", "the connection was closed inside the request body", 0)
	default:
		x.Error(BadHTTP, "", "cannot read the request body: "+err.Error(), 0)
	}
	return false
}

// scan fills Doc, and deals with the members that a client may not send or not send so (see
// engineFields). When it refuses, it has answered and gives false.
func (x *Exchange) scan() bool {
	limits := jsonscan.Limits{MaxDepth: x.srv.options().MaxDepth}
	if err := x.Doc.Scan(x.Doc.Body, limits); err != nil {
		return x.rejectBadJSON(err)
	}
	if !x.checkFields() {
		return false
	}
	var edits [16]jsonscan.Edit // more than engineFields has keys
	cut := 0
	for i := range engineFields {
		f := &engineFields[i]
		switch {
		case f.key == noKey || !x.Doc.Has(f.key):
			continue
		case f.rule == routerOnly && !x.srv.options().StripForbidden:
			x.Error(ForbiddenField, f.name, "field "+strconv.Quote(f.name)+" "+routerOnlyMessage, 0)
			return false
		case f.rule == requestName && x.Endpoint.Kind != ResponsesAPI:
			continue
		}
		// A request_id of the Responses API is cut whatever it is: vLLM stores the
		// answer under it, in the place of another client's of that id.
		edits[cut] = jsonscan.Edit{Key: f.key, Op: jsonscan.Remove}
		cut++
	}
	if cut == 0 {
		return true
	}
	lease, ok := membudget.Default.Lease(x.srv.budget, len(x.Doc.Body))
	if !ok {
		return x.rejectBudgetExhausted()
	}
	x.body.editedLease = lease
	edited := x.Doc.Edited(x.body.editedLease.Bytes()[:0], edits[:cut]...)
	if err := x.Doc.Scan(edited, limits); err != nil {
		return x.rejectBadJSON(err)
	}
	return true
}

func (x *Exchange) rejectBadJSON(err error) bool {
	reason, field := BadJSON, ""
	var syntax *jsonscan.SyntaxError
	if errors.As(err, &syntax) && syntax.Field != "" {
		reason, field = BadField, syntax.Field
	}
	x.Error(reason, field, err.Error(), 0)
	return false
}

// LeaseMemory gives n bytes counted like a body's, for a copy that may outlive the exchange;
// false when the budget is spent. The caller releases them. For a detached exchange its
// maker counts them, or nobody does.
func (x *Exchange) LeaseMemory(n int) (membudget.Lease, bool) {
	switch {
	case x.leaseMemory != nil:
		return x.leaseMemory(n)
	case x.srv == nil:
		return membudget.Default.Lease(unbounded, n)
	}
	return membudget.Default.Lease(x.srv.budget, n)
}

// Budget counts the exchange's bodies; nil for a detached one whose maker counts nothing.
func (x *Exchange) Budget() *membudget.Budget {
	if x.srv == nil {
		return x.budget
	}
	return x.srv.budget
}

var unbounded = membudget.NewBudget(math.MaxInt64)
