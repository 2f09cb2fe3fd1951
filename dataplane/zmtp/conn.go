package zmtp

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
)

// writeTimeout bounds a write. The few small writes fit into the buffer of any socket whose peer
// reads.
const writeTimeout = 2 * time.Second

// conn is the connection of one peer. It belongs to the goroutine that serves it.
type conn struct {
	session
	pull               *Pull
	tcp                *net.TCPConn
	host               netip.Addr
	consumedAtDeadline int  // frames consumed when the read deadline was set
	deadlineSet        bool // a read deadline is set
	err                error
}

// serve reads until the connection ends and returns why; nil: the peer closed it.
func (c *conn) serve() error {
	c.deadline(c.pull.opt.Handshake)
	if err := c.write(ourGreeting[:]); err != nil {
		return err
	}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return err
	}
	// This call bypasses the scheduler, which would wake the runtime's monitor as well
	// (docs/nixl.md, "What was measured").
	err = raw.Read(func(fd uintptr) bool { return c.drain(int(fd)) })
	switch {
	case c.err != nil && c.err != io.EOF:
		return c.err
	case errors.Is(err, os.ErrDeadlineExceeded) && c.stage != open:
		return errSlow
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errStuck
	}
	return nil
}

var (
	errSlow  = errors.New("the peer's handshake takes too long")
	errStuck = errors.New("the peer does not complete a frame")
)

// drain reads everything that the socket has; true: the connection has ended. It stops after a
// while, because Close does not interrupt a read that never finds the socket empty.
func (c *conn) drain(fd int) bool {
	for {
		if c.pull.closing.Load() {
			return true
		}
		n, errno := recv(fd, c.free())
		switch {
		case errno == syscall.EAGAIN:
			c.armReadDeadline()
			return false
		case errno == syscall.ECONNRESET || errno == 0 && n == 0:
			c.err = io.EOF
		case errno != 0:
			c.err = errno
		default:
			c.err = c.advance(n)
		}
		if c.err != nil {
			return true
		}
	}
}

// armReadDeadline sets the deadline for the next wait. Between frames a peer may be silent for any
// time, inside a frame it may not.
func (c *conn) armReadDeadline() {
	switch partial := c.inFrame(); {
	case c.stage != open:
	case partial && (!c.deadlineSet || c.consumedAtDeadline != c.consumed):
		c.deadline(c.pull.opt.Frame)
	case !partial && c.deadlineSet:
		c.deadlineSet = false
		c.tcp.SetReadDeadline(time.Time{})
	}
}

func (c *conn) deadline(d time.Duration) {
	c.deadlineSet, c.consumedAtDeadline = true, c.consumed
	c.tcp.SetReadDeadline(time.Now().Add(d))
}

func (c *conn) write(p []byte) error {
	c.tcp.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := c.tcp.Write(p)
	return err
}
