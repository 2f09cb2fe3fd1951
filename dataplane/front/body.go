package front

import (
	"errors"
	"io"
	"strconv"
	"time"

	"sluice/dataplane/fieldrules"
	"sluice/dataplane/http1"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
)

const (
	// A body starts in a buffer of at most initialBodyBuf bytes, which usually arrive with
	// the head, and grows with the received bytes, so that a declared length alone takes no
	// memory. A body of up to shortBodyLimit gets a buffer of its whole length when 1 byte
	// in shortBodyRatio has arrived, a longer one when 1 in longBodyRatio has.
	initialBodyBuf = 12 << 10
	shortBodyLimit = 1 << 20
	shortBodyRatio = 32
	longBodyRatio  = 8
	// The rest of an unwanted body is read and discarded within these bounds to keep the
	// connection open; beyond them the connection is closed. The response says which, so it
	// waits for the discarded bytes. The time is short, because a client may send no more
	// before it has the response.
	drainBytes = 256 << 10
	drainTime  = 20 * time.Millisecond
	// budgetRetry is the Retry-After of a refusal for want of memory.
	budgetRetry = time.Second
)

// body reads a request's body from the connection.
type body struct {
	stream      io.Reader           // nil: the request has no body
	length      int64               // declared; http1.LengthChunked: unknown
	read        int64               // payload bytes read from stream
	chunked     http1.ChunkedReader // stream, if the body is chunked
	atEOF       bool                // stream has ended
	broken      bool                // stream failed: the next request cannot be found
	deadline    monotime.Time       // by which all of it must have arrived
	arrived     int64               // bytes of an incomplete body that have arrived with the head; 0 if not known
	inReadAhead []byte              // the body in the connection's read-ahead, if it arrived with the head
	lease       membudget.Lease
	editedLease membudget.Lease // of the edited body, if members were removed
}

// openChunked reads a chunked body from src.
func (b *body) openChunked(x *httpExchange, src io.Reader) {
	b.chunked.Reset(src, int64(x.srv.initial.MaxHeadBytes))
	b.stream = &b.chunked
}

// setDeadline sets the deadline for a body of size bytes.
func (b *body) setDeadline(x *httpExchange, size int64) {
	b.deadline = monoTimeOf(x.Received.Add(x.srv.bodyTime(min(size, x.srv.options().MaxBodyBytes))))
}

// next reads the next bytes into p and records the end and failures.
func (b *body) next(c *conn, p []byte) (n int, done bool, err error) {
	if b.length == http1.LengthChunked {
		// Each read of the connection has its own deadline. The reads are small, because
		// received bytes extend the deadline, see readBody.
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
		// fasthttp's stream reports the end of the connection as the end of the body.
		err = io.ErrUnexpectedEOF
	}
	if err == io.EOF {
		b.atEOF = true
		return n, true, nil
	}
	b.broken = err != nil && err != http1.ErrBodyTooLarge
	return n, false, err
}

// drain discards the rest of the body. It returns false if the connection must be closed.
func (b *body) drain(c *conn) bool {
	if b.atEOF || b.broken || b.stream == nil {
		return b.atEOF && !b.broken
	}
	if b.length-b.read > drainBytes {
		return false
	}
	b.chunked.Limit = b.read + drainBytes
	b.deadline = monoTimeOf(time.Now().Add(c.srv.initial.drainTime))
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

// mayAllocate reports whether a body of which received bytes have arrived may get a buffer for
// all of it.
func (b *body) mayAllocate(received int64) bool {
	return b.length <= longBodyRatio*received || b.length <= min(shortBodyRatio*received, shortBodyLimit)
}

func (b *body) release() {
	b.lease.Release()
	b.editedLease.Release()
	b.stream, b.chunked.Src, b.inReadAhead = nil, nil, nil
}

// readBody reads the whole body into leased memory and sets Doc.Body. If it fails, it responds
// and returns false.
func (x *httpExchange) readBody() bool {
	b, limit := &x.body, x.srv.options().MaxBodyBytes
	if b.length > limit {
		return x.rejectTooLarge()
	}
	b.chunked.Limit = limit
	if b.stream == nil {
		x.Doc.Body = b.inReadAhead
		return true
	}
	first := int64(initialBodyBuf)
	if b.length >= 0 {
		first = min(first, max(b.length, 1))
		if b.arrived > 0 && b.mayAllocate(b.arrived) {
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
			// The last step is long, so that the replaced buffer is small: two buffers of
			// nearly the body's size would take twice its memory and a long copy.
			if b.length >= 0 && b.mayAllocate(b.read) {
				want = b.length
			}
			if !b.lease.Grow(int(want)) {
				return x.rejectBudgetExhausted()
			}
			buf = b.lease.Bytes()
		}
		if b.length == http1.LengthChunked && b.read-extended >= bodyRate {
			extended = b.read
			b.setDeadline(x, b.read)
		}
		_, done, err := b.next(x.c, buf[b.read:])
		switch {
		case err == http1.ErrBodyTooLarge:
			return x.rejectTooLarge()
		case err != nil:
			return x.rejectBodyError(err)
		case done:
			x.Doc.Body = buf[:b.read]
			return true
		}
	}
}

func (x *httpExchange) rejectTooLarge() bool {
	x.Error(BodyTooLarge, "", "the request body is larger than "+strconv.FormatInt(x.srv.options().MaxBodyBytes, 10)+" bytes", 0)
	return false
}

func (x *httpExchange) rejectBudgetExhausted() bool {
	x.Error(BudgetExhausted, "", "the memory for request bodies is exhausted; try again", budgetRetry)
	return false
}

func (x *httpExchange) rejectBodyError(err error) bool {
	switch failure := x.c.readFailure(); {
	case failure == RequestTimeout:
		x.Error(RequestTimeout, "", "the request body did not arrive in time", 0)
	case x.c.endedByDrain():
		x.Error(Drained, "", drainedMessage, drainRetry)
	case failure == ClientGone:
		x.Error(ClientGone, "", "the connection was closed inside the request body", 0)
	default:
		x.Error(BadHTTP, "", "cannot read the request body: "+err.Error(), 0)
	}
	return false
}

// scan parses Doc.Body and applies the rules of engineFields. If it refuses the body, it
// responds and returns false.
func (x *httpExchange) scan() bool {
	limits := jsonscan.Limits{MaxDepth: x.srv.options().MaxDepth}
	if err := x.Doc.Scan(x.Doc.Body, limits); err != nil {
		return x.rejectBadJSON(err)
	}
	if !x.checkFields() || !x.checkModelName() {
		return false
	}
	if name := fieldrules.RouterOnlyMember(&x.Doc); name != "" && !x.srv.options().StripForbidden {
		x.Error(ForbiddenField, name, "field "+strconv.Quote(name)+" "+fieldrules.RouterOnlyMessage, 0)
		return false
	}
	// A request_id is always removed for the Responses API: vLLM stores the response under it and
	// would replace another client's response with the same id.
	var room [fieldrules.MaxRemovals]jsonscan.Edit
	edits := fieldrules.AppendRemovals(room[:0], &x.Doc, x.Endpoint.Kind == ResponsesAPI)
	if len(edits) == 0 {
		return true
	}
	lease, ok := membudget.Default.Lease(x.srv.budget, len(x.Doc.Body))
	if !ok {
		return x.rejectBudgetExhausted()
	}
	x.body.editedLease = lease
	edited := x.Doc.Edited(x.body.editedLease.Bytes()[:0], edits...)
	if err := x.Doc.Scan(edited, limits); err != nil {
		return x.rejectBadJSON(err)
	}
	return true
}

// checkFields checks every member of the body that the table knows. If it refuses one, it
// answers the request and returns false.
func (x *httpExchange) checkFields() bool {
	bad := fieldrules.Check(&x.Doc, x.srv.options().MediaHosts)
	if bad == nil {
		return true
	}
	field := bad.Field()
	x.Error(reasonOf(bad), field, "field "+strconv.Quote(field)+" "+bad.Message, 0)
	return false
}

// maxModelName bounds the name of a model, in bytes. The names of workers' models are no longer. A request's is
// kept in its records and written to logs and spans, which the memory budget does not count.
const maxModelName = 512

func (x *httpExchange) checkModelName() bool {
	n := len(x.Doc.String(jsonscan.KeyModel))
	if n > maxModelName {
		x.Error(BadField, "model", "field \"model\" has "+strconv.Itoa(n)+" bytes; want the name of a model, of at most "+strconv.Itoa(maxModelName), 0)
	}
	return n <= maxModelName
}

// reasonOf returns the reason of a refusal because of a member.
func reasonOf(bad *fieldrules.Refusal) Reason {
	if bad.Forbidden {
		return ForbiddenField
	}
	return BadField
}

func (x *httpExchange) rejectBadJSON(err error) bool {
	reason, field := BadJSON, ""
	var syntax *jsonscan.SyntaxError
	if errors.As(err, &syntax) && syntax.Field != "" {
		reason, field = BadField, syntax.Field
	}
	x.Error(reason, field, err.Error(), 0)
	return false
}

// LeaseMemory implements Exchange.
func (x *httpExchange) LeaseMemory(n int) (membudget.Lease, bool) {
	return membudget.Default.Lease(x.srv.budget, n)
}

// Budget implements Exchange.
func (x *httpExchange) Budget() *membudget.Budget {
	return x.srv.budget
}
