package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

// pendingResponse is a plain request's whole answer. A short one leaves with the wait for the next
// request: one stay in the runtime's poller that reads, writes and then waits. The read
// comes first. What it finds came before the answer left, which is what early asks; and
// after it a wait begins without another: a connection waited for by itself must be read
// first, in vain.
//
// Nothing of an answer is held while anybody waits but its own goroutine, which goes
// from the handler's return to that wait without a stop.
type pendingResponse struct {
	buf      *membudget.Buffer
	n        int  // of buf
	sent     int  // of n: written
	keepConn bool // the connection may serve another request
	// count is of buf, where that is long.
	count membudget.Count
}

// pollOnce is run in the poller: it reads into the read-ahead, sends what is held, and says
// whether there is anything to look at.
func (c *conn) pollOnce(fd int) bool {
	a, h, t := &c.readAhead, &c.pending, &c.io
	if !c.readState.startRead() {
		t.err = errHandedOff
		return true
	}
	if a.buf == nil || len(a.buf.B) < readAheadSize {
		a.resize(readAheadSize)
	}
	n, errno := rawsocket.Recv(fd, a.buf.B[a.w:])
	if errno == 0 {
		a.w += int32(n)
	}
	if h.buf != nil {
		c.pipelined.onBytes(a.buf.B[:a.w])
		sent, failed := rawsocket.Send(fd, h.buf.B[h.sent:h.n])
		h.sent += sent
		switch failed {
		case 0:
			c.releasePending()
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
			a.release()
			c.readState.endRead()
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

// flushPending writes what is held, and waits where it must.
func (c *conn) flushPending() error {
	h := &c.pending
	if h.buf == nil {
		return nil
	}
	_, err := c.writeAll(h.buf.B[h.sent:h.n])
	c.releasePending()
	return err
}

// releasePending notes that the answer has left, or never will.
func (c *conn) releasePending() {
	if h := &c.pending; h.buf != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.count.Release()
	}
	c.reportResponseEnded()
}
