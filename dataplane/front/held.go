package front

import (
	"os"
	"syscall"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

// held is a short answer that leaves with the wait for the next request: one stay in the
// runtime's poller that reads, writes and then waits. The read comes first. What it finds
// came before the answer left, which is what early asks; and after it a wait begins
// without another: a connection waited for by itself must be read first, in vain.
//
// Nothing of an answer is held while anybody waits but its own goroutine, which goes
// from fasthttp's write to its next read without a stop. Where the next step is another
// (a request that lies in fasthttp's reader, a close) the answer is written before it.
type held struct {
	buf *membudget.Buffer
	n   int32 // of buf
	out int32 // of n: written
	ok  bool  // the answer that is written now may be held
}

// hold keeps p until the next read; false where it must be written now.
func (c *conn) hold(p []byte) bool {
	h := &c.held
	if !h.ok || h.buf != nil || len(p) > membudget.MinBuffer || c.transfer.do == nil {
		return false
	}
	h.buf = membudget.Default.Get(membudget.MinBuffer)
	h.n, h.out = int32(copy(h.buf.B, p)), 0
	return true
}

// exchange is what receive does in the poller while an answer is held.
func (c *conn) exchange(fd int) bool {
	h, t := &c.held, &c.transfer
	came := t.read(fd)
	if h.buf == nil {
		return came
	}
	if came {
		c.early.sees(t.p[:t.n])
	}
	n, errno := sock.Send(fd, h.buf.B[h.out:h.n])
	switch h.out += int32(n); errno {
	case 0:
		c.left()
	case syscall.EAGAIN: // it is written by a wait of its own
		return true
	default:
		t.err = os.NewSyscallError("sendto", errno)
		return true
	}
	return came
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
	}
	c.active.Store(false)
	c.reportEnd()
}
