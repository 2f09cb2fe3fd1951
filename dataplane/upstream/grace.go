package upstream

import (
	"os"
	"time"
)

// linger is called where the connection is about to be closed. Where its engine is not
// to learn of that yet (Request.Grace), a second descriptor keeps it open until a byte
// of the body comes or the time is over; true says so. A Cut and the owner may both be
// here at once: each has a descriptor of its own before it asks whose the grace is, so
// whichever of them closes, one is open.
func (c *conn) linger() bool {
	if c.grace.Load() == 0 {
		return false
	}
	fd, err := c.duplicate()
	if err != nil { // closed by the other, or no descriptor is to be had
		return false
	}
	until := c.grace.Swap(0)
	if until <= int64(now()) {
		closeDescriptor(fd)
		return false
	}
	c.ep.open.Add(1)
	go c.ep.awaitByte(fd, epoch.Add(time.Duration(until)))
	return true
}

// awaitByte closes the connection behind the first byte that comes, which nobody wants,
// or at the given time.
func (e *Endpoint) awaitByte(fd int, until time.Time) {
	defer e.open.Add(-1)
	file := os.NewFile(uintptr(fd), "engine")
	defer file.Close()
	if file.SetReadDeadline(until) != nil { // Go's poller refused it
		time.Sleep(time.Until(until))
		return
	}
	var b [1]byte
	_, _ = file.Read(b[:])
}

// beginGrace begins it when the head has come with nothing of the body behind it.
func (r *Response) beginGrace(req *Request) {
	if req.Grace > 0 && !r.finished && r.c.r == r.c.w {
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
