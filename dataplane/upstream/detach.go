package upstream

import (
	"io"
	"time"
)

// Detachment is one Lend's place in its Call. It is used once: a late Cut knows by it that
// the connection is not what it was any more.
type Detachment struct{ leg callLeg }

// Detach gives the connection's descriptor to a poller of the caller's own, while the
// body of a chunked response comes. It is non-blocking and in no poller; it stays the
// connection's, and open, until Release, before which nobody must use it any more.
// A Cut cuts by from here on, on any goroutine: that must end the reading, and
// not close. l is this lending's own, until Release or the next. until is when the call's time is over, zero for never. What was read of
// the head is void afterwards, and the response has no other methods than Finish,
// Return and Release.
//
// A connection that is lent may be lent again, with another l; it is not ok after a
// Cut then.
//
// It is not ok, and nothing has changed, where the descriptor is not to be had (TLS),
// where bytes that came with the head are not read yet, and after a Cut or a read that
// failed.
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
		deadline = epoch.Add(r.deadline)
	}
	return int(c.fd), deadline, true
}

// CanDetach says whether there is a descriptor to be lent: there is none of a connection
// over TLS.
func (r *Response) CanDetach() bool { return r.c.fd >= 0 || r.c.raw != nil }

// DetachedError tells what the reading of a lent connection failed with (an error of the read,
// io.EOF, ErrTimeout, ErrCancelled), before Release, and gives the error that ReadRaw would
// have given. Where the body came to its end, Finish is called instead.
func (r *Response) DetachedError(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return r.fail(err)
}
