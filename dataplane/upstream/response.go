package upstream

import (
	"fmt"
	"io"
	"time"

	"sluice/dataplane/membudget"
)

// Lengths a Response has when the engine did not say one.
const (
	LengthChunked = -1 // chunk framing
	LengthToClose = -2 // the body ends with the connection
)

// Response is a response whose head has been read. Exactly one of ReadAll,
// relay's use of ReadRaw, or Discard consumes the body; then Release. It is
// used by one goroutine at a time; only Call.Cut may come from another.
type Response struct {
	Status        int
	ContentLength int64 // -1: chunked; -2: ends with the connection

	c            *conn
	call         *Call
	deadline     time.Duration // of the whole call, 0: none
	readDeadline time.Duration // SetReadDeadline's, 0: none
	remaining    int64         // of ContentLength
	unbuffered   bool          // ReadRaw reads around the connection's buffer
	finished     bool          // the body was consumed to its end
	broken       bool          // the connection must not be used again
	bodyErr      error         // what the body failed with
}

// begin takes over from the parsed head.
func (r *Response) begin(req *Request, call *Call, deadline time.Duration) {
	h := &r.c.head
	*r = Response{Status: h.status, c: r.c, call: call, deadline: deadline, broken: !h.persistent()}
	switch {
	case req.Method == "HEAD", h.status == 204, h.status == 304:
		r.ContentLength = 0
		// A body announced where none may be would be the next answer.
		r.broken = r.broken || (req.Method != "HEAD" && (h.chunked || h.status == 204 && h.length > 0))
	case h.chunked:
		r.ContentLength = LengthChunked
	case h.length >= 0:
		r.ContentLength = h.length
	default:
		r.ContentLength = LengthToClose
		r.broken = true
	}
	r.remaining = max(r.ContentLength, 0)
	r.finished = r.ContentLength == 0
	r.beginGrace(req)
}

// PastDeadline says whether the call's own time is over, as Request.Deadline and SetDeadline bound it:
// what tells a leg that took too long in all from an engine that went silent.
func (r *Response) PastDeadline() bool { return r.deadline != 0 && now() >= r.deadline }

// SetDeadline bounds what is left of the call, beside Request.Deadline; zero bounds nothing.
// Only the goroutine that reads may call it.
func (r *Response) SetDeadline(t time.Time) {
	if t.IsZero() {
		return
	}
	if d := max(t.Sub(epoch), 1); r.deadline == 0 || d < r.deadline {
		r.deadline = d
	}
}

// Header gives the first value of a header, matched without case; nil when
// absent. Borrowed until Release, Peek or the first ReadRaw.
func (r *Response) Header(name string) []byte {
	buf := r.c.buf
	for i := range r.c.head.fields {
		f := &r.c.head.fields[i]
		if equalFold(buf[f.name.from:f.name.to], name) {
			return buf[f.value.from:f.value.to:f.value.to]
		}
	}
	return nil
}

// VisitHeaders calls f for every header line in order, hop-by-hop ones
// (Connection and those it names, Keep-Alive, Transfer-Encoding, Content-Length,
// Upgrade, Trailer, TE, Proxy-*) left out. Slices are borrowed until Release, Peek
// or the first ReadRaw.
func (r *Response) VisitHeaders(f func(name, value []byte)) {
	buf := r.c.buf
	for i := range r.c.head.fields {
		if h := &r.c.head.fields[i]; !h.hop {
			f(buf[h.name.from:h.name.to:h.name.to], buf[h.value.from:h.value.to:h.value.to])
		}
	}
}

// SetReadDeadline bounds the next reads, beside Request.Deadline; zero takes
// the bound away. It is cheap: the socket's own timer is moved only when it
// would fire too late. Only the goroutine that reads may call it.
func (r *Response) SetReadDeadline(t time.Time) error {
	r.readDeadline = 0
	if !t.IsZero() {
		r.readDeadline = max(t.Sub(epoch), 1)
	}
	return nil
}

func (r *Response) effectiveDeadline() time.Duration {
	if r.readDeadline != 0 && (r.deadline == 0 || r.readDeadline < r.deadline) {
		return r.readDeadline
	}
	return r.deadline
}

func (r *Response) fail(err error) error {
	if r.bodyErr != nil {
		return r.bodyErr // and counted once
	}
	r.broken = true
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	r.bodyErr = r.c.ep.fail(PhaseBody, err, r.call)
	return r.bodyErr
}

// endsBody says whether what a read failed with is the end of a body that ends with the
// connection. One over TLS has to end by a close_notify (RFC 9112, 9.8).
func (r *Response) endsBody(err error) bool {
	return err == io.EOF && r.ContentLength == LengthToClose && !r.call.ended() && !r.c.tlsTruncated()
}

// ReadRaw reads the next bytes of the response as they came after the head,
// chunk framing included (relay parses it). It gives io.EOF at the end of a
// body with Content-Length, or of one that ends with the connection; for a
// chunked body the caller finds the end, and calls Finish.
func (r *Response) ReadRaw(p []byte) (int, error) {
	if r.finished {
		return 0, io.EOF
	}
	if r.bodyErr != nil {
		return 0, r.bodyErr
	}
	if r.ContentLength >= 0 && int64(len(p)) > r.remaining {
		p = p[:r.remaining]
	}
	if len(p) == 0 {
		return 0, nil
	}
	c := r.c
	var n int
	if c.r < c.w {
		n = copy(p, c.buf[c.r:c.w])
		c.r += n
	} else {
		if !r.unbuffered {
			r.unbuffered = true
			c.shrink()
		}
		var err error
		if n, err = c.readBody(p, r.effectiveDeadline()); err != nil {
			if r.endsBody(err) {
				r.finished = true
				return n, io.EOF
			}
			return n, r.fail(err)
		}
	}
	if r.ContentLength >= 0 {
		r.remaining -= int64(n)
		r.finished = r.remaining == 0
	}
	return n, nil
}

// Peek waits for the first bytes of the body and gives what has come of it,
// chunk framing included, without taking it: ReadRaw gives it again. It borrows
// until the next read, and gives nothing when the body is empty or no longer at
// its beginning.
func (r *Response) Peek() ([]byte, error) {
	c := r.c
	if r.finished || r.unbuffered {
		return nil, nil
	}
	if c.r == c.w {
		err := c.fill(r.effectiveDeadline())
		if r.endsBody(err) {
			r.finished = true
			return nil, nil
		}
		if err != nil {
			return nil, r.fail(err)
		}
	}
	return c.buf[c.r:c.w], nil
}

// PeekMore is Peek that waits for bytes beyond those it gave; a body that is
// longer than limit before it satisfies the caller is given as it is.
func (r *Response) PeekMore(limit int) ([]byte, error) {
	c := r.c
	have := c.w - c.r
	if r.finished || r.unbuffered || have >= limit || r.ContentLength >= 0 && int64(have) >= r.remaining {
		return c.buf[c.r:c.w], nil
	}
	if c.w == len(c.buf) {
		c.grow()
	}
	n, err := c.readBody(c.buf[c.w:], r.effectiveDeadline())
	if r.endsBody(err) {
		return c.buf[c.r:c.w], nil // there is no more
	}
	if err != nil {
		return c.buf[c.r:c.w], r.fail(err)
	}
	c.w += n
	return c.buf[c.r:c.w], nil
}

// TryRead receives what has come of a chunked body since its head, and waits for nothing.
// An engine that begins to answer when it has the first token sends that right behind its
// head, and so in a packet of its own.
func (r *Response) TryRead() {
	c := r.c
	if c.raw == nil || r.finished || r.unbuffered || r.ContentLength != LengthChunked || c.blk == nil || c.hasUnread() || c.w == len(c.buf) {
		return
	}
	if _ = c.raw.Control(c.tryReadStep); c.hasUnread() {
		c.graceUntil.Store(0)
	}
}

// Buffered is how many bytes of the body came together with the head, and can
// be had without waiting for the engine.
func (r *Response) Buffered() int {
	if r.c.exchange == nil { // lent
		return 0
	}
	return r.c.w - r.c.r
}

// BodyDone says whether the body was consumed to its end.
func (r *Response) BodyDone() bool { return r.finished }

// MarkBodyDone tells that the raw body was consumed to its very end and not beyond,
// so that Release may keep the connection.
func (r *Response) MarkBodyDone() { r.finished = true }

// Release gives the connection back to the pool when the body was consumed to
// its end and the engine keeps it alive, else closes it (see Request.Grace). Call exactly
// once; the Response and all that was borrowed from it are void afterwards.
func (r *Response) Release() {
	c, call := r.c, r.call
	r.call = nil
	call.leave()
	keep := r.finished && !r.broken && !c.hasUnread()
	at := &c.leg
	if c.fd >= 0 {
		at = c.detachedLeg
	}
	if !call.detach(at) || !keep || !c.reattach() {
		c.close()
		return
	}
	c.releaseExchange()
	c.ep.releaseIdle(c)
}

// ReadAll appends the decoded body to dst; a body over limit bytes is an
// ErrTooLarge.
func (r *Response) ReadAll(dst []byte, limit int) ([]byte, error) {
	return r.ReadAllBudgeted(dst, limit, nil)
}

// unbudgetedRead is how large a buffer for a body may become without being counted.
const unbudgetedRead = 64 << 10

// ReadAllBudgeted is ReadAll that counts what dst grows by, beyond uncounted bytes; where the
// budget is spent it fails with ErrMemory.
func (r *Response) ReadAllBudgeted(dst []byte, limit int, count *membudget.Count) ([]byte, error) {
	if r.finished {
		return dst, nil
	}
	if r.ContentLength > int64(limit) {
		return dst, r.tooLarge(limit)
	}
	if r.ContentLength >= 0 {
		return r.readSized(dst, count)
	}
	if r.ContentLength == LengthChunked {
		return r.readChunked(dst, limit, count)
	}
	return r.readToClose(dst, limit, count)
}

func (r *Response) tooLarge(limit int) error {
	return r.fail(fmt.Errorf("%w: more than %d bytes", ErrTooLarge, limit))
}

func (r *Response) readSized(dst []byte, count *membudget.Count) (_ []byte, err error) {
	counted := 0
	for r.remaining > 0 {
		if dst, err = r.grow(dst, r.remaining, count, &counted); err != nil {
			return dst, err
		}
		n, err := r.ReadRaw(dst[len(dst):min(int64(cap(dst)), int64(len(dst))+r.remaining)])
		dst = dst[:len(dst)+n]
		if err != nil {
			return dst, err
		}
	}
	return dst, nil
}

func (r *Response) readToClose(dst []byte, limit int, count *membudget.Count) (_ []byte, err error) {
	start, counted := len(dst), 0
	for {
		if dst, err = r.grow(dst, int64(max(4<<10, len(dst)-start)), count, &counted); err != nil {
			return dst, err
		}
		n, err := r.ReadRaw(dst[len(dst):cap(dst)])
		dst = dst[:len(dst)+n]
		switch {
		case err == io.EOF:
			return dst, nil
		case err != nil:
			return dst, err
		case len(dst)-start > limit:
			return dst, r.tooLarge(limit)
		}
	}
}

func (r *Response) readChunked(dst []byte, limit int, count *membudget.Count) ([]byte, error) {
	c, start, counted := r.c, len(dst), 0
	r.unbuffered = true // the buffer stays: framing is read through it
	var chunks Chunks
	for {
		for c.r < c.w {
			n, payload, err := chunks.Next(c.buf[c.r:c.w])
			c.r += n
			if err != nil {
				return dst, r.fail(err)
			}
			if len(dst)-start+len(payload) > limit {
				return dst, r.tooLarge(limit)
			}
			if len(payload) > cap(dst)-len(dst) {
				if dst, err = r.grow(dst, int64(max(len(payload), len(dst))), count, &counted); err != nil {
					return dst, err
				}
			}
			dst = append(dst, payload...)
			if chunks.Done() {
				r.finished = true
				return dst, nil
			}
		}
		// A long chunk goes straight to dst, around the buffer.
		if ahead := chunks.Remaining(); ahead > int64(len(c.buf)-c.head.pos) {
			if int64(len(dst)-start)+ahead > int64(limit) {
				return dst, r.tooLarge(limit)
			}
			var err error
			if dst, err = r.grow(dst, ahead, count, &counted); err != nil {
				return dst, err
			}
			n, err := c.readBody(dst[len(dst):min(int64(cap(dst)), int64(len(dst))+ahead)], r.effectiveDeadline())
			if err != nil {
				return dst, r.fail(err)
			}
			dst = dst[:len(dst)+n]
			chunks.consumed(n)
			continue
		}
		c.r, c.w = c.head.pos, c.head.pos // the head stays borrowed
		if len(c.buf)-c.w < 2<<10 {
			c.grow()
		}
		n, err := c.readBody(c.buf[c.w:], r.effectiveDeadline())
		c.w += n
		if err != nil {
			return dst, r.fail(err)
		}
	}
}

// Discard reads the rest of the body, up to limit bytes, so that the
// connection can be kept; a longer or broken one is an error and Release will
// close it.
func (r *Response) Discard(limit int) error {
	_, err := r.ReadAll(nil, limit)
	return err
}

// grow makes room for want more bytes, but never trusts a declared length
// with more than twice what has come, from 1 MiB on. counted is what count has of dst.
func (r *Response) grow(dst []byte, want int64, count *membudget.Count, counted *int) ([]byte, error) {
	free := int64(cap(dst) - len(dst))
	if free >= want || free >= 64<<10 {
		return dst, nil
	}
	size := len(dst) + int(min(want, max(1<<20, int64(len(dst)))))
	if size > unbudgetedRead && !count.Acquire(size) {
		return dst, r.fail(ErrMemory)
	}
	grown := make([]byte, len(dst), size)
	copy(grown, dst)
	count.Return(*counted) // the buffer before is the collector's
	if *counted = 0; size > unbudgetedRead {
		*counted = size
	}
	return grown, nil
}

func equalFold(name []byte, want string) bool {
	if len(name) != len(want) {
		return false
	}
	for i, b := range name {
		w := want[i]
		if b != w && (b|0x20 != w|0x20 || b|0x20 < 'a' || b|0x20 > 'z') {
			return false
		}
	}
	return true
}
