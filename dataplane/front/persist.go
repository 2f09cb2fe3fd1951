package front

import (
	"errors"
	"net"
	"os"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/sock"
)

// persist writes p to nc, below all that changes bytes. A write there that has failed can
// not be gone on with above it: a coding and a chunk have been made, and crypto/tls breaks
// the connection for good. So it is here that a client who reads slowly is waited for,
// from one deadline to the next, until writeBy. Only a stream is: who tells a client that
// nothing more comes, or that the connection ends, does not wait for it.
func (c *conn) persist(nc net.Conn, p []byte) (done int, err error) {
	patience := relay.NewPatience(time.Now())
	for {
		n, err := nc.Write(p[done:])
		done += n
		if err == nil || !c.relaying || !errors.Is(err, os.ErrDeadlineExceeded) {
			return done, err
		}
		now, limit, last := time.Now(), c.srv.live().WriteTimeout, c.writeBy
		unsent, known := c.unsent()
		if !known {
			unsent = -1
		}
		part := limit / relay.Looks
		if last != 0 && momentOf(now) >= last || !patience.Lasts(n, unsent, now, limit-part/4) {
			return done, relay.ErrStalled
		}
		by := now.Add(part)
		if last != 0 && by.After(last.time()) {
			by = last.time()
		}
		if err := nc.SetWriteDeadline(by); err != nil {
			return done, err
		}
	}
}

// unsent is how many bytes that were written the client has not taken yet.
func (c *conn) unsent() (n int, ok bool) {
	if c.raw == nil {
		return 0, false
	}
	err := c.raw.Control(func(fd uintptr) { n = sock.Unsent(int(fd)) })
	return n, err == nil
}

// causeOf says why a write to a client has failed.
func causeOf(err error) relay.Cause {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return relay.ClientStalled
	}
	return relay.ClientGone
}
