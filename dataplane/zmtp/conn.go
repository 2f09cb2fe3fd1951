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

// writeTimeout bounds our few writes, which fit into any socket's buffer: who has so many
// of them waiting that one does not, does not read.
const writeTimeout = 2 * time.Second

// conn is one peer's connection. All of it belongs to the goroutine that serves it.
type conn struct {
	session
	pull               *Pull
	tcp                *net.TCPConn
	host               netip.Addr
	consumedAtDeadline int  // frames that had ended when the deadline for reading was set
	deadlineSet        bool // it is set
	err                error
}

// serve reads until the connection ends, and says why; nil where the peer has closed it.
func (c *conn) serve() error {
	c.deadline(c.pull.opt.Handshake)
	if err := c.write(ourGreeting[:]); err != nil {
		return err
	}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return err
	}
	// Without a call that the scheduler is told of, which would wake the runtime's watch
	// as well (docs/nixl.md, "What was measured").
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
	errSlow  = errors.New("its handshake takes too long")
	errStuck = errors.New("it began a frame and does not end it")
)

// drain takes all that the socket has; true when the connection is over. A socket that
// never runs dry would keep Close waiting, which ends no read that is under way.
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

// armReadDeadline sees to the deadline before the next wait: a peer that is between frames may be
// silent for as long as it likes, one in the midst of a frame may not.
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
