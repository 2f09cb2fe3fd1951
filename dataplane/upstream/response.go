package upstream

import (
	"fmt"
	"io"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
)

// The ContentLength of a response without one.
const (
	LengthChunked = -1 // chunk framing
	LengthToClose = -2 // the body ends with the connection
)

// Response is a response whose head has been read. Exactly one of ReadAll, ReadRaw (by relay), or
// Discard consumes the body; then Release is called. A Response is used by one goroutine at a time.
// Only Call.Cancel may come from another.
type Response struct {
	Status        int
	ContentLength int64 // -1: chunked; -2: ends with the connection

	c            *conn
	call         *Call
	deadline     time.Duration // of the whole call; 0: none
	readDeadline time.Duration // of SetReadDeadline; 0: none
	remaining    int64         // of ContentLength
	unbuffered   bool          // ReadRaw bypasses the connection's buffer
	finished     bool          // the body was consumed to its end
	broken       bool          // the connection must not be reused
	bodyErr      error         // the error of the body
}

// begin initialises the Response from the parsed head.
func (r *Response) begin(req *Request, call *Call, deadline time.Duration) {
	h := &r.c.head
	*r = Response{Status: h.status, c: r.c, call: call, deadline: deadline, broken: !h.persistent()}
	switch {
	case req.Method == "HEAD", h.status == 204, h.status == 304:
		r.ContentLength = 0
		// A body announced where none is allowed would be taken for the next response.
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

// PastDeadline reports whether the call's own deadline has passed (Request.Deadline, SetDeadline).
// It distinguishes a leg that took too long in all from an engine that went silent.
func (r *Response) PastDeadline() bool { return r.deadline != 0 && now() >= r.deadline }

// SetDeadline bounds the rest of the call, in addition to Request.Deadline; zero: no bound. Only
// the reading goroutine may call it.
func (r *Response) SetDeadline(t time.Time) {
	if t.IsZero() {
		return
	}
	if d := max(time.Duration(monotime.Of(t)), 1); r.deadline == 0 || d < r.deadline {
		r.deadline = d
	}
}

// Header returns the first value of a header, matched without case; nil: absent. It is borrowed
// until Release, Peek or the first ReadRaw.
func (r *Response) Header(name string) []byte {
	buf := r.c.buf
	for i := range r.c.head.fields {
		f := &r.c.head.fields[i]
		if ascii.EqualFold(buf[f.name.from:f.name.to], name) {
			return buf[f.value.from:f.value.to:f.value.to]
		}
	}
	return nil
}

// VisitHeaders calls f for every header line in order, except hop-by-hop ones (Connection and those
// it names, Keep-Alive, Transfer-Encoding, Content-Length, Upgrade, Trailer, TE, Proxy-*). The
// slices are borrowed until Release, Peek or the first ReadRaw.
func (r *Response) VisitHeaders(f func(name, value []byte)) {
	buf := r.c.buf
	for i := range r.c.head.fields {
		if h := &r.c.head.fields[i]; !h.hop {
			f(buf[h.name.from:h.name.to:h.name.to], buf[h.value.from:h.value.to:h.value.to])
		}
	}
}

// SetReadDeadline bounds the next reads, in addition to Request.Deadline; zero: no bound. It is
// cheap: the socket's timer is changed only if it would fire too late. Only the reading goroutine
// may call it.
func (r *Response) SetReadDeadline(t time.Time) error {
	r.readDeadline = 0
	if !t.IsZero() {
		r.readDeadline = max(time.Duration(monotime.Of(t)), 1)
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
		return r.bodyErr // counted once
	}
	r.broken = true
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	r.bodyErr = r.c.ep.fail(PhaseBody, err, r.call)
	return r.bodyErr
}

// endsBody reports whether a read error is the end of a body that ends with the connection. Over
// TLS it must end by a close_notify (RFC 9112, 9.8).
func (r *Response) endsBody(err error) bool {
	return err == io.EOF && r.ContentLength == LengthToClose && !r.call.ended() && !r.c.tlsTruncated()
}

// ReadRaw reads the next bytes after the head, including chunk framing, which relay parses. It
// returns io.EOF at the end of a body with Content-Length, or of one that ends with the connection.
// The end of a chunked body is found by the caller, who calls MarkBodyDone.
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

// Peek waits for the first bytes of the body and returns what has come, including chunk framing,
// without consuming it. The bytes are borrowed until the next read. It returns nothing if the body
// is empty or has been read from.
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

// PeekMore is Peek, except that it waits for more bytes than returned before. A body that exceeds
// limit is returned as it is.
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

// TryRead receives what has come of a chunked body since its head, without waiting. An engine that
// starts its response with the first token sends that right after the head, in a packet of its own.
func (r *Response) TryRead() {
	c := r.c
	if c.raw == nil || r.finished || r.unbuffered || r.ContentLength != LengthChunked || c.blk == nil || c.hasUnread() || c.w == len(c.buf) {
		return
	}
	if _ = c.raw.Control(c.tryReadStep); c.hasUnread() {
		c.graceUntil.Store(0)
	}
}

// Buffered returns how many bytes of the body came with the head and can be read without waiting.
func (r *Response) Buffered() int {
	if r.c.exchange == nil { // detached
		return 0
	}
	return r.c.w - r.c.r
}

// BodyDone reports whether the body was consumed to its end.
func (r *Response) BodyDone() bool { return r.finished }

// MarkBodyDone records that the raw body was consumed exactly to its end, so that Release may keep
// the connection.
func (r *Response) MarkBodyDone() { r.finished = true }

// Release returns the connection to the pool if the body was consumed to its end and the engine
// keeps it open; otherwise it closes it (see Request.Grace). It must be called exactly once. The
// Response and everything borrowed from it are invalid afterwards.
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

// ReadAll appends the decoded body to dst. A body over limit bytes is ErrTooLarge.
func (r *Response) ReadAll(dst []byte, limit int) ([]byte, error) {
	return r.ReadAllBudgeted(dst, limit, nil)
}

// unbudgetedRead is the size up to which a body's buffer is not counted.
const unbudgetedRead = 64 << 10

// ReadAllBudgeted is ReadAll, except that it acquires the growth of dst beyond unbudgetedRead from
// count. It fails with ErrMemory if the budget is exhausted.
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
	r.unbuffered = true // the buffer stays, because framing is read through it
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
		// A long chunk is read directly into dst, bypassing the buffer.
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

// Discard reads the rest of the body, up to limit bytes, so that the connection can be reused. A
// longer or malformed body is an error, and Release closes the connection.
func (r *Response) Discard(limit int) error {
	_, err := r.ReadAll(nil, limit)
	return err
}

// grow makes space for want more bytes. From 1 MiB on it trusts a declared length only up to twice
// what has come. counted is what count has acquired for dst.
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
	count.Return(*counted) // the old buffer is garbage
	if *counted = 0; size > unbudgetedRead {
		*counted = size
	}
	return grown, nil
}
