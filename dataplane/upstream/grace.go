package upstream

import (
	"os"
	"time"
)

// lingering keeps a connection open that was closed, by a descriptor of its own; the zero
// value keeps none.
type lingering struct {
	ep    *Endpoint
	fd    int
	until time.Duration
}

// linger is called where the connection is about to be closed. Where its engine is not
// to learn of that yet (Request.Grace) it gives what keeps it open. A Cut and the owner
// may both be here at once: each has a descriptor of its own before it asks whose the
// grace is, so whichever of them closes, one is open.
func (c *conn) linger() (l lingering) {
	if c.grace.Load() == 0 {
		return l
	}
	fd, err := c.duplicate()
	if err != nil { // closed by the other, or no descriptor is to be had
		return l
	}
	until := time.Duration(c.grace.Swap(0))
	if until <= now() {
		closeDescriptor(fd)
		return l
	}
	c.ep.open.Add(1)
	return lingering{c.ep, fd, until}
}

// on says whether the connection is kept.
func (l lingering) on() bool { return l.ep != nil }

// start lets it end by itself. It is called when the connection's own descriptor is
// closed: nobody else must read, or would find a byte missing.
func (l lingering) start() {
	if l.on() {
		go l.run()
	}
}

// run closes the connection behind the first byte that comes, which nobody wants, or
// when the time is over.
func (l lingering) run() {
	defer l.ep.open.Add(-1)
	file := os.NewFile(uintptr(l.fd), "engine")
	defer file.Close()
	until := epoch.Add(l.until)
	if file.SetReadDeadline(until) != nil { // Go's poller refused it
		time.Sleep(time.Until(until))
		return
	}
	var b [1]byte
	_, _ = file.Read(b[:])
}

// beginGrace begins it when the head has come with nothing of the body behind it.
func (r *Response) beginGrace(req *Request) {
	if req.Grace > 0 && !r.finished && !r.c.unread() {
		r.c.grace.Store(int64(now() + req.Grace))
	}
}

// Began tells that a byte of the body was read from a connection that is lent: the
// engine is at work on the request, and hears at once of its end (Request.Grace).
func (r *Response) Began() { r.c.grace.Store(0) }

// readBody is read of the body.
func (c *conn) readBody(p []byte, t time.Duration) (int, error) {
	n, err := c.read(p, t)
	if n > 0 && c.grace.Load() != 0 {
		c.grace.Store(0)
	}
	return n, err
}
