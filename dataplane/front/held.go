package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

// held is a plain request's whole answer. A short one leaves with the wait for the next
// request: one stay in the runtime's poller that reads, writes and then waits. The read
// comes first. What it finds came before the answer left, which is what early asks; and
// after it a wait begins without another: a connection waited for by itself must be read
// first, in vain.
//
// Nothing of an answer is held while anybody waits but its own goroutine, which goes
// from the handler's return to that wait without a stop.
type held struct {
	buf *membudget.Buffer
	n   int  // of buf
	out int  // of n: written
	ok  bool // the connection may serve another request
	// count is of buf, where that is long.
	count membudget.Count
}

// turn is run in the poller: it reads into the read-ahead, sends what is held, and says
// whether there is anything to look at.
func (c *conn) turn(fd int) bool {
	a, h, t := &c.ahead, &c.held, &c.transfer
	if !c.input.hear() {
		t.err = errPassedOn
		return true
	}
	if a.buf == nil || len(a.buf.B) < aheadSize {
		a.resize(aheadSize)
	}
	n, errno := sock.Recv(fd, a.buf.B[a.w:])
	if errno == 0 {
		a.w += int32(n)
	}
	if h.buf != nil {
		c.early.sees(a.buf.B[:a.w])
		sent, failed := sock.Send(fd, h.buf.B[h.out:h.n])
		h.out += sent
		switch failed {
		case 0:
			c.left()
			c.active.Store(false)
		case syscall.EAGAIN: // it is written by a wait of its own
			return true
		default:
			t.err = os.NewSyscallError("sendto", failed)
			return true
		}
	}
	switch {
	case errno == syscall.EAGAIN:
		switch {
		case a.w == 0:
			a.drop()
			c.input.rest()
		case a.w <= membudget.Page:
			a.resize(membudget.Page)
		}
		return false
	case errno != 0:
		t.err = os.NewSyscallError("recvfrom", errno)
	case n == 0:
		t.err = io.EOF
	}
	return true
}

// release writes what is held, and waits where it must.
func (c *conn) release() error {
	h := &c.held
	if h.buf == nil {
		return nil
	}
	_, err := c.writeOut(h.buf.B[h.out:h.n])
	c.left()
	return err
}

// left notes that the answer has left, or never will.
func (c *conn) left() {
	if h := &c.held; h.buf != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.count.Release()
	}
	c.reportEnd()
}
