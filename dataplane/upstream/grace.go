package upstream

import (
	"os"
	"time"
)

// lingeringConn keeps a connection open that was closed, by a descriptor of its own; the zero
// value keeps none.
type lingeringConn struct {
	ep       *Endpoint
	fd       int
	deadline time.Duration
}

// linger is called where the connection is about to be closed. Where its engine is not
// to learn of that yet (Request.Grace) it gives what keeps it open. A Cut and the owner
// may both be here at once: each has a descriptor of its own before it asks whose the
// grace is, so whichever of them closes, one is open.
func (c *conn) linger() (l lingeringConn) {
	if c.graceUntil.Load() == 0 {
		return l
	}
	fd, err := c.duplicate()
	if err != nil { // closed by the other, or no descriptor is to be had
		return l
	}
	deadline := time.Duration(c.graceUntil.Swap(0))
	if deadline <= now() {
		closeDescriptor(fd)
		return l
	}
	c.ep.open.Add(1)
	return lingeringConn{c.ep, fd, deadline}
}

// active says whether the connection is kept.
func (l lingeringConn) active() bool { return l.ep != nil }

// start lets it end by itself. It is called when the connection's own descriptor is
// closed: nobody else must read, or would find a byte missing.
func (l lingeringConn) start() {
	if l.active() {
		go l.run()
	}
}

// run closes the connection behind the first byte that comes, which nobody wants, or
// when the time is over.
func (l lingeringConn) run() {
	defer l.ep.open.Add(-1)
	file := os.NewFile(uintptr(l.fd), "engine")
	defer file.Close()
	deadline := epoch.Add(l.deadline)
	if file.SetReadDeadline(deadline) != nil { // Go's poller refused it
		time.Sleep(time.Until(deadline))
		return
	}
	var b [1]byte
	_, _ = file.Read(b[:])
}

// beginGrace begins it when the head has come with nothing of the body behind it.
func (r *Response) beginGrace(req *Request) {
	if req.Grace > 0 && !r.finished && !r.c.hasUnread() {
		r.c.graceUntil.Store(int64(now() + req.Grace))
	}
}

// NoteBodyStarted tells that a byte of the body was read from a connection that is lent: the
// engine is at work on the request, and hears at once of its end (Request.Grace).
func (r *Response) NoteBodyStarted() { r.c.graceUntil.Store(0) }

// readBody is read of the body.
func (c *conn) readBody(p []byte, t time.Duration) (int, error) {
	n, err := c.read(p, t)
	if n > 0 && c.graceUntil.Load() != 0 {
		c.graceUntil.Store(0)
	}
	return n, err
}
