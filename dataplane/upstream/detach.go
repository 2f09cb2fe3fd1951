package upstream

import (
	"io"
	"time"

	"sluice/dataplane/monotime"
)

// Detachment is the place of one Detach in its Call. It is used once, so that a late Cancel notices
// that the connection has changed owners.
type Detachment struct{ leg callLeg }

// Detach passes the connection's descriptor to the caller's poller while the body of a chunked
// response arrives. The descriptor is non-blocking and in no poller. The connection still owns it
// and keeps it open until Release, before which the caller must stop using it.
//
// From then on a Cancel calls by, on any goroutine. That must end the reading, and not close the
// descriptor. l belongs to this detachment until Release or the next Detach. deadline is the end of
// the call's time; zero: none. The head is no longer valid, and of the response's methods only
// MarkBodyDone, DetachedError and Release may be called.
//
// A detached connection may be detached again, with another l. That fails after a Cancel.
//
// If ok is false nothing has changed: there is no descriptor (TLS), bytes that came with the head
// are unread, or the call was cancelled or failed.
func (r *Response) Detach(l *Detachment, by Canceller) (fd int, deadline time.Time, ok bool) {
	c, newLeg := r.c, &l.leg
	newLeg.canceller = by
	if c.fd < 0 {
		if c.raw == nil || c.hasUnread() || r.finished || r.bodyErr != nil || r.ContentLength != LengthChunked {
			return 0, deadline, false
		}
		dup, err := c.dupDescriptor()
		if err != nil {
			return 0, deadline, false
		}
		if !r.call.swap(&c.leg, newLeg) {
			closeDescriptor(dup)
			return 0, deadline, false
		}
		abort(c.nc) // its own descriptor, and its place in Go's poller
		c.nc, c.raw, c.fd, c.deadlineSet = nil, nil, int32(dup), 0
		c.releaseExchange()
	} else if !r.call.swap(c.detachedLeg, newLeg) {
		return 0, deadline, false
	}
	c.detachedLeg = newLeg
	if r.deadline != 0 {
		deadline = monotime.Time(r.deadline).Time()
	}
	return int(c.fd), deadline, true
}

// CanDetach reports whether there is a descriptor to detach. A TLS connection has none.
func (r *Response) CanDetach() bool { return r.c.fd >= 0 || r.c.raw != nil }

// DetachedError records the error with which reading a detached connection ended (an error of the
// read, io.EOF, ErrTimeout, ErrCancelled) and returns the error that ReadRaw would have returned.
// It is called before Release. If the body came to its end MarkBodyDone is called instead.
func (r *Response) DetachedError(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return r.fail(err)
}
