//go:build unix

package front

import (
	"syscall"

	"golang.org/x/sys/unix"

	"sluice/dataplane/membudget"
)

// tryRead reads what is there into the read-ahead; false when nothing is, and
// then no buffer is held while the connection waits.
func (c *conn) tryRead(fd uintptr) bool {
	a := &c.ahead
	if a.buf == nil {
		a.buf = membudget.Default.Get(membudget.MinBuffer)
	}
	for {
		a.n, a.err = unix.Read(int(fd), a.buf.B[a.w:])
		switch {
		case a.err == nil:
			return true
		case a.err == syscall.EINTR:
		case a.err == syscall.EAGAIN:
			a.n, a.err = 0, nil
			if a.w == 0 {
				a.drop()
			}
			return false
		default:
			a.n = 0
			return true
		}
	}
}
