package front

import (
	"errors"
	"net"
	"os"
	"time"

	"sluice/dataplane/relay"
)

// writeWithStallCheck writes p to nc, below compression, chunk framing and TLS. The layers above
// cannot repeat a write that fails here: compressed data and chunks are already made, and
// crypto/tls breaks the connection for good. Therefore the wait for a client that reads slowly
// is here. It looks at the client's progress at each write deadline, until the client stalls
// or writeDeadline passes. Only a stream waits in this way. Other writes, such as the end of a
// connection, fail at their first deadline.
func (c *conn) writeWithStallCheck(nc net.Conn, p []byte) (done int, err error) {
	for {
		n, err := nc.Write(p[done:])
		done += n
		if !c.relaying {
			return done, err
		}
		if c.connState != nil { // else there was no stall check yet
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

// checkStall decides whether to wait for a stream's client whose socket accepts no more bytes. by
// is the time of the next check. ok is false if the client has stalled or writeDeadline has
// passed.
func (c *conn) checkStall(now time.Time) (by time.Time, ok bool) {
	last := c.writeDeadline.Time()
	if !last.IsZero() && !now.Before(last) {
		return now, false
	}
	unsent := c.unsent()
	if by, ok = c.stall.Check(unsent, now, c.srv.options().WriteTimeout); !last.IsZero() && by.After(last) {
		by = last
	}
	return by, ok
}

// unsent returns how many written bytes the client has not acknowledged yet, -1 if that is not
// known. It gives c a connState.
func (c *conn) unsent() int {
	c.acquireState()
	if c.raw == nil || c.raw.Control(c.queryUnsent) != nil {
		return -1
	}
	return c.unsentBytes
}

// writeErrorCause returns the cause of a failed write to a client.
func writeErrorCause(err error) relay.Cause {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return relay.ClientStalled
	}
	return relay.ClientGone
}
