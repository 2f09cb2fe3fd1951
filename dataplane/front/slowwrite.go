package front

import (
	"errors"
	"net"
	"os"
	"time"

	"sluice/dataplane/relay"
)

// writeWithStallCheck writes p to nc, below all that changes bytes. A write there that has failed can
// not be gone on with above it: a coding and a chunk have been made, and crypto/tls breaks
// the connection for good. So it is here that a client who reads slowly is waited for,
// from one look to the next, until writeDeadline. Only a stream is: who tells a client that
// nothing more comes, or that the connection ends, does not wait for it.
func (c *conn) writeWithStallCheck(nc net.Conn, p []byte) (done int, err error) {
	for {
		n, err := nc.Write(p[done:])
		done += n
		if !c.relaying {
			return done, err
		}
		if c.connState != nil { // else nothing was looked at yet
			c.stall.Wrote(n)
		}
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return done, err
		}
		by, ok := c.checkStall(time.Now())
		if !ok {
			return done, relay.ErrStalled
		}
		if err := nc.SetWriteDeadline(by); err != nil {
			return done, err
		}
	}
}

// checkStall says whether the stream's client, which takes no more for now, is to be waited for,
// and until when before the next look.
func (c *conn) checkStall(now time.Time) (by time.Time, ok bool) {
	last := c.writeDeadline.time()
	if !last.IsZero() && !now.Before(last) {
		return now, false
	}
	unsent := c.unsent()
	if by, ok = c.stall.Check(unsent, now, c.srv.options().WriteTimeout); !last.IsZero() && by.After(last) {
		by = last
	}
	return by, ok
}

// unsent is how many bytes that were written the client has not taken yet, -1 where that
// is not known. c has its serving behind it.
func (c *conn) unsent() int {
	c.acquireState()
	if c.raw == nil || c.raw.Control(c.queryUnsent) != nil {
		return -1
	}
	return c.unsentBytes
}

// writeErrorCause says why a write to a client has failed.
func writeErrorCause(err error) relay.Cause {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return relay.ClientStalled
	}
	return relay.ClientGone
}
