package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

// pendingResponse is a non-streaming response on the fast path that has not been written. A
// short one is written during the wait for the next request: one call into the runtime's
// poller reads, writes and then waits. The read comes first. Bytes that it finds arrived
// before the response was written, which pipelineDetector needs to know, and the wait then
// needs no second read without effect.
//
// The response is not delayed: the connection's goroutine goes from the Handler's return to
// that wait without blocking.
type pendingResponse struct {
	buf      *membudget.Buffer
	n        int  // bytes in buf
	sent     int  // of n, that have been written
	keepConn bool // the connection may serve another request
	// count counts buf if it is long.
	count membudget.Count
}

// pollOnce runs in the poller. It reads into the read-ahead, sends the pending response, and
// returns whether there is input or an error.
func (c *conn) pollOnce(fd int) bool {
	a, h, t := &c.readAhead, &c.pending, &c.io
	if !c.readState.startRead() {
		t.err = errPassed
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
		case syscall.EAGAIN: // another wait writes the rest
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

// flushPending writes the pending response. It may block.
func (c *conn) flushPending() error {
	h := &c.pending
	if h.buf == nil {
		return nil
	}
	_, err := c.writeAll(h.buf.B[h.sent:h.n])
	c.releasePending()
	return err
}

// releasePending frees the pending response, which has been written or never will be.
func (c *conn) releasePending() {
	if h := &c.pending; h.buf != nil {
		membudget.Default.Put(h.buf)
		h.buf = nil
		h.count.Release()
	}
	c.reportResponseEnded()
}
