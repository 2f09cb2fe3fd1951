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
	// A body begins in a buffer of at most firstBody bytes and grows with what
	// has come: a declared length costs the client bytes, not us memory. So much comes
	// with the head in the first read of a connection; then a body of up to shortBody
	// takes its whole length, of which 1 in shortGrowth has come, a longer one that of
	// which 1 in longGrowth has.
	firstBody   = 12 << 10
	shortBody   = 1 << 20
	shortGrowth = 32
	longGrowth  = 8
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
	stream  io.Reader // nil: none was announced
	length  int64     // announced; framingChunked: not known
	read    int64     // payload taken from stream
	chunked chunked   // stream, where that is the transfer coding
	ended   bool      // stream came to its end
	broken  bool      // stream failed: nothing behind it can be found
	by      moment    // when all of it must have come
	whole   []byte    // it came with the head, and lies in the connection's read-ahead
	lease   membudget.Lease
	special membudget.Lease // of the edited body, where fields were stripped
}

// open compares fasthttp's reading of the framing with the guard's; false when
// they differ, and then nothing on the connection may be trusted. Of a chunked body
// fasthttp was told another, see headRead.
func (b *body) open(x *Exchange) bool {
	b.stream = x.ctx.RequestBodyStream()
	b.length, b.read, b.broken = x.head.length, 0, false
	seen := int64(x.ctx.Request.Header.ContentLength())
	if b.length == framingNone {
		b.ended = true
		return b.stream == nil && (seen == framingNone || seen == 0)
	}
	b.ended = false
	b.lasts(x, max(b.length, 0))
	if b.stream == nil || b.length != framingChunked {
		return b.stream != nil && seen == b.length
	}
	b.unchunk(x, b.stream)
	return seen == endless
}

// unchunk reads a chunked body from src.
func (b *body) unchunk(x *Exchange, src io.Reader) {
	b.chunked.begins(src, int64(x.srv.opt.MaxHeadBytes))
	b.stream = &b.chunked
}

// here begins a plain request's body, which may have come whole; false when the
// connection fails.
func (b *body) here(x *Exchange) bool {
	a := &x.c.ahead
	b.length, b.read, b.ended, b.broken = x.head.length, 0, true, false
	if b.length == framingNone {
		return true
	}
	if b.length == framingChunked {
		b.unchunk(x, onward{x.c})
		b.ended = false
		b.lasts(x, 0)
		return true
	}
	if came := a.buf.B[a.r:a.w]; b.length <= int64(len(came)) {
		b.whole, b.read = came[:b.length:b.length], b.length
		a.r += int32(b.length)
		return true
	}
	x.rest = rest{x.c, b.length}
	b.stream, b.ended = &x.rest, false
	b.lasts(x, b.length)
	return true
}

// lasts gives a body of size its time.
func (b *body) lasts(x *Exchange, size int64) {
	b.by = momentOf(x.Received.Add(x.srv.bodyTime(min(size, x.srv.live().MaxBodyBytes))))
}

// next reads on; it notes the end and failures.
func (b *body) next(c *conn, p []byte) (n int, done bool, err error) {
	if b.length == framingChunked {
		// Its reads of the connection have their time one by one. It is asked for little at
		// once, for what has come gives it more time, see readBody.
		c.pace = b.by
		n, err = b.stream.Read(p[:min(len(p), bodyRate/4)])
		c.pace = 0
	} else {
		if err := c.awaitBody(b.by); err != nil {
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
		b.ended = true
		return n, true, nil
	}
	b.broken = err != nil && err != errAnnounced
	return n, false, err
}

// drain reads away what is left; false when the connection must be closed.
func (b *body) drain(c *conn) bool {
	if b.ended || b.broken || b.stream == nil {
		return b.ended && !b.broken
	}
	if b.length-b.read > drainBytes {
		return false
	}
	b.chunked.limit = b.read + drainBytes
	b.by = momentOf(time.Now().Add(drainTime))
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

// fits says whether a body of which so much has come may have room for all of it.
func (b *body) fits(came int64) bool {
	return b.length <= longGrowth*came || b.length <= min(shortGrowth*came, shortBody)
}

func (b *body) release() {
	b.lease.Release()
	b.special.Release()
	b.stream, b.chunked.src, b.whole = nil, nil, nil
}

// readBody reads the whole body into leased memory and makes it Doc.Body's
// bytes; when it cannot, it answers and gives false.
func (x *Exchange) readBody() bool {
	b, limit := &x.body, x.srv.live().MaxBodyBytes
	if b.length > limit {
		return x.tooLarge()
	}
	b.chunked.limit = limit
	if b.stream == nil {
		x.Doc.Body = b.whole
		return true
	}
	first := int64(firstBody)
	if b.length >= 0 {
		first = min(first, max(b.length, 1))
		if b.stream == &x.rest && b.fits(int64(x.c.ahead.w-x.c.ahead.r)) {
			first = b.length
		}
	}
	lease, ok := membudget.Default.Lease(x.srv.budget, int(first))
	if !ok {
		return x.budgetSpent()
	}
	b.lease = lease
	buf, extended := b.lease.Bytes(), int64(0)
	for {
		if int(b.read) == len(buf) {
			want := min(4*b.read, limit)
			// The last step is a long one, so that little of the body lies in the buffer
			// that is replaced, and is copied: two of nearly its size would be three times
			// the body.
			if b.length >= 0 && b.fits(b.read) {
				want = b.length
			}
			if !b.lease.Grow(int(want)) {
				return x.budgetSpent()
			}
			buf = b.lease.Bytes()
		}
		if b.length == framingChunked && b.read-extended >= bodyRate {
			extended = b.read
			b.lasts(x, b.read)
		}
		_, done, err := b.next(x.c, buf[b.read:])
		switch {
		case err == errAnnounced:
			return x.tooLarge()
		case err != nil:
			return x.bodyFailed(err)
		case done:
			x.Doc.Body = buf[:b.read]
			return true
		}
	}
}

func (x *Exchange) tooLarge() bool {
	x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(x.srv.live().MaxBodyBytes, 10)+" bytes", 0)
	return false
}

func (x *Exchange) budgetSpent() bool {
	x.Error(BudgetSpent, "", "the memory for request bodies is spent; try again", budgetRetry)
	return false
}

func (x *Exchange) bodyFailed(err error) bool {
	switch failure := x.c.readFailure(); {
	case failure == RequestTimeout:
		x.Error(RequestTimeout, "", "the request body did not come in time", 0)
	case x.c.wasCut():
		x.Error(Drained, "", partingText, drainRetry)
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
	limits := jsonscan.Limits{MaxDepth: x.srv.live().MaxDepth}
	if err := x.Doc.Scan(x.Doc.Body, limits); err != nil {
		return x.badBody(err)
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
		case f.rule == routerOnly && !x.srv.live().StripForbidden:
			x.Error(ForbiddenField, f.name, "field "+strconv.Quote(f.name)+" "+routersOwn, 0)
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
		return x.budgetSpent()
	}
	x.body.special = lease
	edited := x.Doc.Edited(x.body.special.Bytes()[:0], edits[:cut]...)
	if err := x.Doc.Scan(edited, limits); err != nil {
		return x.badBody(err)
	}
	return true
}

func (x *Exchange) badBody(err error) bool {
	reason, field := BadJSON, ""
	var syntax *jsonscan.SyntaxError
	if errors.As(err, &syntax) && syntax.Field != "" {
		reason, field = BadField, syntax.Field
	}
	x.Error(reason, field, err.Error(), 0)
	return false
}

// Lend gives n bytes counted like a body's, for a copy that may outlive the exchange;
// false when the budget is spent. The caller releases them. For a detached exchange its
// maker counts them, or nobody does.
func (x *Exchange) Lend(n int) (membudget.Lease, bool) {
	switch {
	case x.lend != nil:
		return x.lend(n)
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
