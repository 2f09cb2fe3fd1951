package front

import (
	"sluice/dataplane/objpool"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/relay"
)

// connState is what a connection has while requests are read from it and answered. It is
// lent to one after the other, so that its functions are made once.
type connState struct {
	c               *conn
	readAhead       readAhead
	io              rawIO
	pending         pendingResponse
	readErr         error // of the last failed read
	scan            bareLFScanner
	chunkedDeadline monoTime // by when all of the chunked body must have come that is being read; 0: none is
	continued       continuedRequest
	stall           relay.StallDetector // with the client of a stream that no loop drives
	unsentBytes     int                 // what ask found the socket to hold
	queryUnsent     func(fd uintptr)
	wakeBytes       int // bytes the poller is told of, see setWakeThreshold; 0: one, as at first
	applyWake       func(fd uintptr)
	pendingConn     pendingConn // in the lobby
	tryReadReady    bool        // try found something
	hadResponse     bool        // the connection has had a whole answer
	tryReadFunc     func(fd uintptr)
	peekFunc        func(fd uintptr) // early.peekSocket
}

var connStates = objpool.Pool[connState]{New: func() *connState {
	s := new(connState)
	s.io.step = func(fd uintptr) bool { return s.c.ioStep(fd) }
	s.queryUnsent = func(fd uintptr) { s.unsentBytes = rawsocket.Unsent(int(fd)) }
	s.applyWake = func(fd uintptr) { rawsocket.SetReceiveLowWater(int(fd), s.wakeBytes) }
	s.tryReadFunc = func(fd uintptr) { s.tryReadReady = s.c.pollOnce(int(fd)) }
	s.peekFunc = func(fd uintptr) { s.c.pipelined.peekSocket(fd) }
	return s
}}

// acquireState lends c what it is served with, where it has none.
func (c *conn) acquireState() {
	if c.connState == nil {
		c.connState = connStates.Get()
		c.connState.c = c
	}
}

// releaseState gives it back before a loop drives c's stream. What it says of c's own
// bytes, or of their end, c keeps.
func (c *conn) releaseState() {
	s := c.connState
	if s == nil || s.readAhead.buf != nil || s.readAhead.readErr != nil || s.pending.buf != nil || s.readErr != nil {
		return
	}
	*s = connState{io: rawIO{step: s.io.step}, queryUnsent: s.queryUnsent, peekFunc: s.peekFunc, applyWake: s.applyWake, tryReadFunc: s.tryReadFunc}
	c.connState = nil
	connStates.Put(s)
}
