package front

import (
	"sluice/dataplane/http1"
	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/relay"
)

// connState is the state of a connection while requests are read and responded to. It is
// pooled, so that its function values are made once.
type connState struct {
	c               *conn
	readAhead       readAhead
	io              rawIO
	pending         pendingResponse
	readErr         error // of the last failed read
	scan            http1.BareEndScanner
	headBudget      headBudget
	chunkedDeadline monotime.Time // of the chunked body that is being read; 0: none is
	continued       continuedRequest
	stall           relay.StallDetector // with the client of a stream that no loop drives
	unsentBytes     int                 // result of queryUnsent
	queryUnsent     func(fd uintptr)
	wakeBytes       int // see setWakeThreshold; 0: one byte, the default
	applyWake       func(fd uintptr)
	pendingConn     pendingConn // in the pending-header queue
	tryReadReady    bool        // result of tryReadFunc: there is input
	hadResponse     bool        // the connection has had a non-streaming response
	tryReadFunc     func(fd uintptr)
	peekFunc        func(fd uintptr) // pipelined.peekSocket
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

// acquireState gives c a connState if it has none.
func (c *conn) acquireState() {
	if c.connState == nil {
		c.connState = connStates.Get()
		c.connState.c = c
	}
}

// releaseState returns the connState to the pool before an event loop drives c's stream. c
// keeps it if it has unread or unwritten bytes or a read error.
func (c *conn) releaseState() {
	s := c.connState
	if s == nil || s.readAhead.buf != nil || s.readAhead.readErr != nil || s.pending.buf != nil || s.readErr != nil {
		return
	}
	*s = connState{io: rawIO{step: s.io.step}, queryUnsent: s.queryUnsent, peekFunc: s.peekFunc, applyWake: s.applyWake, tryReadFunc: s.tryReadFunc}
	c.connState = nil
	connStates.Put(s)
}
