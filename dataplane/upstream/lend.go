package upstream

import (
	"io"
	"time"
)

// Lending is one Lend's place in its Call. It is used once: a late Cut knows by it that
// the connection is not what it was any more.
type Lending struct{ leg leg }

// Lend gives the connection's descriptor to a poller of the caller's own, while the
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
func (r *Response) Lend(l *Lending, by Cutter) (fd int, until time.Time, ok bool) {
	c, lent := r.c, &l.leg
	lent.end = by
	if c.fd < 0 {
		if c.raw == nil || c.unread() || r.finished || r.failed != nil || r.ContentLength != LengthChunked {
			return 0, until, false
		}
		own, err := c.takeOut()
		if err != nil {
			return 0, until, false
		}
		if !r.call.swap(&c.leg, lent) {
			closeDescriptor(own)
			return 0, until, false
		}
		abort(c.nc) // its own descriptor, and its place in Go's poller
		c.nc, c.raw, c.fd, c.armed = nil, nil, int32(own), 0
		c.giveBuffers()
	} else if !r.call.swap(c.lent, lent) {
		return 0, until, false
	}
	c.lent = lent
	if r.deadline != 0 {
		until = epoch.Add(r.deadline)
	}
	return int(c.fd), until, true
}

// Lendable says whether there is a descriptor to be lent: there is none of a connection
// over TLS.
func (r *Response) Lendable() bool { return r.c.fd >= 0 || r.c.raw != nil }

// Return tells what the reading of a lent connection failed with (an error of the read,
// io.EOF, ErrTimeout, ErrCut), before Release, and gives the error that ReadRaw would
// have given. Where the body came to its end, Finish is called instead.
func (r *Response) Return(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return r.fail(err)
}
