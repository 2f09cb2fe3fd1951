package front

import (
	"sluice/dataplane/relay"
	"sluice/dataplane/reuse"
	"sluice/dataplane/sock"
)

// serving is what a connection has while requests are read from it and answered. It is
// lent to one after the other, so that its functions are made once.
type serving struct {
	c         *conn
	ahead     ahead
	transfer  transfer
	held      held
	readErr   error // of the last failed read
	scan      headScan
	pace      moment // by when all of the chunked body must have come that is being read; 0: none is
	awaited   awaited
	patience  relay.Patience // with the client of a stream that no loop drives
	backlog   int            // what ask found the socket to hold
	ask       func(fd uintptr)
	wakes     int // bytes the poller is told of, see wakeAt; 0: one, as at first
	wake      func(fd uintptr)
	guest     guest // in the lobby
	came      bool  // try found something
	hadAnswer bool  // the connection has had a whole answer
	try       func(fd uintptr)
	look      func(fd uintptr) // early.atSocket
}

var servings = reuse.Pool[serving]{New: func() *serving {
	s := new(serving)
	s.transfer.do = func(fd uintptr) bool { return s.c.transferSome(fd) }
	s.ask = func(fd uintptr) { s.backlog = sock.Unsent(int(fd)) }
	s.wake = func(fd uintptr) { sock.WakeAt(int(fd), s.wakes) }
	s.try = func(fd uintptr) { s.came = s.c.turn(int(fd)) }
	s.look = func(fd uintptr) { s.c.early.atSocket(fd) }
	return s
}}

// takeServing lends c what it is served with, where it has none.
func (c *conn) takeServing() {
	if c.serving == nil {
		c.serving = servings.Get()
		c.serving.c = c
	}
}

// giveServing gives it back before a loop drives c's stream. What it says of c's own
// bytes, or of their end, c keeps.
func (c *conn) giveServing() {
	s := c.serving
	if s == nil || s.ahead.buf != nil || s.ahead.failed != nil || s.held.buf != nil || s.readErr != nil {
		return
	}
	*s = serving{transfer: transfer{do: s.transfer.do}, ask: s.ask, look: s.look, wake: s.wake, try: s.try}
	c.serving = nil
	servings.Put(s)
}
