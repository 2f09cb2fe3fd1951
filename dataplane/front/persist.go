package front

import (
	"errors"
	"net"
	"os"
	"time"

	"sluice/dataplane/relay"
)

// persist writes p to nc, below all that changes bytes. A write there that has failed can
// not be gone on with above it: a coding and a chunk have been made, and crypto/tls breaks
// the connection for good. So it is here that a client who reads slowly is waited for,
// from one look to the next, until writeBy. Only a stream is: who tells a client that
// nothing more comes, or that the connection ends, does not wait for it.
func (c *conn) persist(nc net.Conn, p []byte) (done int, err error) {
	for {
		n, err := nc.Write(p[done:])
		done += n
		if !c.relaying {
			return done, err
		}
		if c.serving != nil { // else nothing was looked at yet
			c.patience.Took(n)
		}
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return done, err
		}
		by, lasts := c.look(time.Now())
		if !lasts {
			return done, relay.ErrStalled
		}
		if err := nc.SetWriteDeadline(by); err != nil {
			return done, err
		}
	}
}

// look says whether the stream's client, which takes no more for now, is to be waited for,
// and until when before the next look.
func (c *conn) look(now time.Time) (by time.Time, lasts bool) {
	last := c.writeBy.time()
	if !last.IsZero() && !now.Before(last) {
		return now, false
	}
	unsent := c.unsent()
	if by, lasts = c.patience.Lasts(unsent, now, c.srv.live().WriteTimeout); !last.IsZero() && by.After(last) {
		by = last
	}
	return by, lasts
}

// unsent is how many bytes that were written the client has not taken yet, -1 where that
// is not known. c has its serving behind it.
func (c *conn) unsent() int {
	c.takeServing()
	if c.raw == nil || c.raw.Control(c.ask) != nil {
		return -1
	}
	return c.backlog
}

// causeOf says why a write to a client has failed.
func causeOf(err error) relay.Cause {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return relay.ClientStalled
	}
	return relay.ClientGone
}
