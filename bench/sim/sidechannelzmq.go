package sim

import (
	"context"
	"io"
	"net"
	"time"
)

// zmtpGreeting is the first byte of every ZMTP 3 connection; no HTTP request starts
// with it.
const zmtpGreeting = 0xff

// forwardZMQ forwards a connection that speaks ZMTP to Options.SideZMQ, until either
// side or the incarnation ends. It returns false if the connection is for the engine
// itself.
func (c *conn) forwardZMQ() bool {
	first, err := c.Peek()
	if err != nil || first != zmtpGreeting {
		return false
	}
	in, nc := c.Hijack()
	to := c.incarnation.e.o.SideZMQ
	if to == "" {
		return true
	}
	d := net.Dialer{Timeout: 5 * time.Second}
	out, err := d.DialContext(c.incarnation.Context, "tcp", to)
	if err != nil {
		return true
	}
	c.incarnation.wg.Go(func() {
		io.Copy(nc, out)
		nc.Close()
		out.Close()
	})
	defer context.AfterFunc(c.incarnation.Context, func() {
		nc.Close()
		out.Close()
	})()
	io.Copy(out, in)
	out.Close()
	return true
}
