package upstream

import (
	"os"
	"time"

	"sluice/dataplane/monotime"
)

// lingeringConn keeps a closed connection open by a descriptor of its own. The zero value keeps
// none.
type lingeringConn struct {
	ep       *Endpoint
	fd       int
	deadline time.Duration
}

// linger is called before the connection is closed. It returns what keeps the connection open if
// the engine must not notice yet (Request.Grace). A Cancel and the owner may both be here at once.
// Each has a descriptor of its own before it determines who applies the grace, so whichever closes
// first, one stays open.
func (c *conn) linger() (l lingeringConn) {
	if c.graceUntil.Load() == 0 {
		return l
	}
	fd, err := c.duplicate()
	if err != nil { // closed by the other, or there is no descriptor
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

// active reports whether the connection is kept open.
func (l lingeringConn) active() bool { return l.ep != nil }

// start ends the connection in the background. It is called when the connection's own descriptor
// has been closed, because a second reader would take bytes away.
func (l lingeringConn) start() {
	if l.active() {
		go l.run()
	}
}

// run closes the connection after the first byte that comes, which is not needed, or at the end of
// the grace time.
func (l lingeringConn) run() {
	defer l.ep.open.Add(-1)
	file := os.NewFile(uintptr(l.fd), "engine")
	defer file.Close()
	deadline := monotime.Time(l.deadline).Time()
	if file.SetReadDeadline(deadline) != nil { // Go's poller refused it
		time.Sleep(time.Until(deadline))
		return
	}
	var b [1]byte
	_, _ = file.Read(b[:])
}

// beginGrace starts the grace time when the head has come without any byte of the body.
func (r *Response) beginGrace(req *Request) {
	if req.Grace > 0 && !r.finished && !r.c.hasUnread() {
		r.c.graceUntil.Store(int64(now() + req.Grace))
	}
}

// NoteBodyStarted records that a byte of the body was read from a detached connection. The engine
// works on the request, and notices its end at once (Request.Grace).
func (r *Response) NoteBodyStarted() { r.c.graceUntil.Store(0) }

// readBody is read for the body.
func (c *conn) readBody(p []byte, t time.Duration) (int, error) {
	n, err := c.read(p, t)
	if n > 0 && c.graceUntil.Load() != 0 {
		c.graceUntil.Store(0)
	}
	return n, err
}
