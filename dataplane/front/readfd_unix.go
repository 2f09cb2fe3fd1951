//go:build unix

package front

import (
	"syscall"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

// tryRead reads what is there into the read-ahead; false when nothing is, and
// then no buffer is held while the connection waits.
func (c *conn) tryRead(fd uintptr) bool {
	a := &c.ahead
	if a.buf == nil {
		a.buf = membudget.Default.Get(membudget.MinBuffer)
	}
	n, errno := sock.Recv(int(fd), a.buf.B[a.w:])
	switch errno {
	case 0:
		a.n = n
	case syscall.EAGAIN:
		if a.w == 0 {
			a.drop()
		}
		return false
	default:
		a.err = errno
	}
	return true
}
