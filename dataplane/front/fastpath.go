package front

import (
	"bytes"
	"runtime/debug"
	"time"

	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
)

// A connection is served on one of two paths. The fast path, in this file, serves nearly every
// request: HTTP/1.1 over TCP, POST to an endpoint or GET of a page, with Content-Length or
// chunked. It parses the head once (http1.Head), uses a short body in place, and writes the
// response itself. fasthttp serves everything else, from its first byte: TLS, other methods
// and paths, Expect, HTTP/1.0, pipelined requests, and heads that http1.Head refuses. Both
// read chunked bodies with http1.ChunkedReader. Once fasthttp serves a connection it serves all its
// later requests too, until one of them is answered with a stream.

const (
	// readAheadSize is the size of a connection's read-ahead while a request is served. It
	// has the head, and a short body behind it.
	readAheadSize = 16 << 10
	// minReadAhead is the room that a head must leave in the read-ahead for a chunked body,
	// so that not every chunk takes a read.
	minReadAhead = 2 << 10
)

// nextStep says who handles a connection next.
type nextStep uint8

const (
	nextEnd      nextStep = iota // nobody: the connection is closed
	nextStream                   // conn.stream answers on it
	nextFasthttp                 // fasthttp, which reads conn.readAhead first
	nextPending                  // the pending-header queue; nobody else touches it
	nextPass                     // another process, which has claimed it
)

// serveConn serves a connection until it ends or an event loop drives its stream.
func (s *Server) serveConn(c *conn) {
	c.acquireState()
	defer func() {
		if v := recover(); v != nil { // outside a request: requests recover their own panics
			stack := debug.Stack()
			s.initial.Log.Error("panic while serving a connection", "panic", v, "stack", string(stack))
			if o := s.initial.Observer; o != nil {
				o.Panicked("", v, stack)
			}
			c.closeOnce()
		}
	}()
	for {
		switch c.serve() {
		case nextStream:
			if s.runStream(c, c.stream) {
				continue
			}
		case nextFasthttp:
			c.scan, c.headBudget = http1.BareEndScanner{}, headBudget{}
			_ = s.fh.ServeConn(c) // closes c or hijacks it for a stream; it has answered its errors
		case nextPending:
		case nextPass:
			if !s.pass(c) {
				continue
			}
		default:
			c.closeOnce()
			c.reportResponseEnded()
		}
		return
	}
}

// serve serves requests on the fast path, one after the other, and returns who handles the
// connection next.
func (c *conn) serve() nextStep {
	if !c.isTCP() {
		return nextFasthttp
	}
	live, begun := c.srv.options(), c.deadlineKind != deadlineHead
	if c.expectProxyHeader {
		c.deadlineKind = deadlineAsSet // readProxyHeader uses the current timeouts
		if err := c.readProxyHeader(); err != nil {
			return nextEnd
		}
	}
	wait := live.IdleTimeout
	if !begun {
		wait = live.HeadTimeout
	}
	for now := time.Now(); ; now = time.Now() {
		c.deadlineKind = deadlineAsSet
		if c.pendingConn.resumed {
			c.pendingConn.resumed = false
		} else if c.SetReadDeadline(now.Add(wait)) != nil {
			return nextEnd
		} else if to, ok := c.waitHead(begun); !ok {
			return to
		}
		c.setWakeThreshold(1)
		x, found := c.fastPathRequest()
		if x == nil {
			c.deadlineKind = deadlineHead
			return nextFasthttp
		}
		c.serveFastPath(x, found)
		if to, again := c.afterResponse(); !again {
			return to
		}
		wait, begun = c.srv.options().IdleTimeout, true
	}
}

// waitHead waits until the read-ahead has a whole head, or enough of it to know that the fast
// path cannot serve it. If ok is false the connection has ended or is in the pending-header
// queue. A pending response is written first. begun says that the connection has had a
// request, so that it is not evicted while a part of another one has arrived.
func (c *conn) waitHead(begun bool) (to nextStep, ok bool) {
	a := &c.readAhead
	a.headLen = 0
	pendingHeads := c.srv.pendingHeads
	if c.usesReservedFD {
		pendingHeads = nil // its timeout is shorter
	}
	for {
		before := a.w
		var err error
		if pendingHeads != nil && !begun {
			if !c.tryRead() && c.enqueuePending(pendingHeads, begun) {
				return nextPending, false
			}
			err = c.io.err
		} else {
			_, err = c.doIO(opPoll, nil)
		}
		if err != nil && c.readState.claimed() {
			if !begun {
				c.deadlineKind = deadlineHead
			}
			return nextPass, false
		}
		if err != nil && a.w == before && c.retryRead(err) {
			continue
		}
		if c.pending.buf != nil {
			if err != nil || c.flushPending() != nil {
				return nextEnd, false
			}
			c.active.Store(false)
		}
		if err != nil {
			c.readErr = err
			a.readErr = err
			return nextEnd, a.w > 0 // an incomplete head gets a response
		}
		if a.w == before {
			pendingHeads = nil // the queue is full or closed
			continue           // the wait has written the pending response
		}
		if whole, ok := c.parseReadAhead(before); whole || !ok {
			return nextEnd, ok
		}
		if before == 0 {
			c.active.Store(begun)
			if pendingHeads != nil {
				if c.compactReadAhead(); !a.acquireBudget(c.srv.budget) {
					c.rejectPartialHead(BudgetExhausted, headMemoryMessage)
					c.needsLinger = true // a reset could discard the response
					return nextEnd, false
				}
				if c.enqueuePending(pendingHeads, begun) {
					return nextPending, false
				}
				pendingHeads = nil
			}
			if err := c.SetReadDeadline(time.Now().Add(c.srv.options().HeadTimeout)); err != nil {
				return nextEnd, false
			}
		}
		c.setWakeThreshold(missingForHeadEnd(a.buf.B[:a.w]))
	}
}

// parseReadAhead examines the bytes behind offset before, of which there is at least one.
// whole says that the head is complete or that the fast path cannot serve it. ok is false if
// the bytes are not HTTP.
func (c *conn) parseReadAhead(before int32) (whole, ok bool) {
	a := &c.readAhead
	head := a.buf.B[:a.w]
	if head[0] == tlsHandshakeByte {
		c.rejectTLS()
		return false, false
	}
	if at := bytes.Index(head[max(before-3, 0):], headEnd); at >= 0 {
		a.headLen = max(before-3, 0) + int32(at+len(headEnd))
		return true, true
	}
	if c.pipelined.found || http1.HasBareEnd(head, int(before)) || a.w == readAheadSize || int(a.w) > c.srv.initial.MaxHeadBytes || !isRequestStart(head[0]) {
		return true, true
	}
	c.markIncompleteRequest()
	return false, true
}

// enqueuePending adds the connection to the pending-header queue, which waits for the rest of
// its head. If it returns true, c's goroutine must not touch c any more; otherwise the
// goroutine must wait itself.
func (c *conn) enqueuePending(l *pendingQueue, begun bool) bool {
	if !begun {
		c.deadlineKind = deadlineHead
	}
	return l.add(c, time.Now().Add(c.srv.options().HeadTimeout))
}

// missingForHeadEnd returns the least number of bytes that are missing from head.
func missingForHeadEnd(head []byte) int {
	for n := len(headEnd) - 1; n > 0; n-- {
		if bytes.HasSuffix(head, headEnd[:n]) {
			return len(headEnd) - n
		}
	}
	return len(headEnd)
}

// setWakeThreshold makes the kernel report input only when n bytes have arrived. Otherwise
// thousands of heads that trickle in would wake a goroutine for each byte and take time from
// complete requests.
func (c *conn) setWakeThreshold(n int) {
	if s := c.connState; s.wakeBytes != n && (n > 1 || s.wakeBytes > 1) {
		s.wakeBytes = n
		_ = c.raw.Control(s.applyWake)
	}
}

var (
	headEnd      = []byte("\r\n\r\n")
	postPrefix   = []byte("POST ")
	getPrefix    = []byte("GET ")
	http11Suffix = []byte("HTTP/1.1")
)

// fastPathRequest parses the head that has arrived and returns the request and its route, nil
// if the fast path cannot serve it.
func (c *conn) fastPathRequest() (*fastExchange, route) {
	a, s := &c.readAhead, c.srv
	if a.headLen == 0 || int(a.headLen) > s.initial.MaxHeadBytes || c.pipelined.found {
		return nil, route{}
	}
	head := a.buf.B[:a.headLen]
	eol := bytes.IndexByte(head, '\n')
	line, method := bytes.TrimSuffix(head[:eol], []byte{'\r'}), postPrefix
	if !bytes.HasPrefix(line, postPrefix) {
		method = getPrefix
	}
	if len(line) == eol || !bytes.HasPrefix(line, method) || !bytes.HasSuffix(line, http11Suffix) || len(line) < len(method)+len(http11Suffix)+1 {
		return nil, route{}
	}
	target := line[len(method) : len(line)-len(http11Suffix)-1]
	rt, ok := s.routes.byPath[string(target)]
	if !ok || line[len(method)+len(target)] != ' ' || (rt.endpoint != nil) != (len(method) == len(postPrefix)) {
		return nil, route{}
	}
	x := s.fastExchanges.Get()
	refused := x.head.Parse(method[:len(method)-1], target, http11Suffix, head[eol+1:])
	h := &x.head
	chunks := h.Length == http1.LengthChunked
	if refused != "" || h.HasExpect || rt.endpoint == nil && (h.Length > 0 || chunks) ||
		chunks && a.headLen > readAheadSize-minReadAhead {
		h.Release()
		s.fastExchanges.Put(x)
		return nil, route{}
	}
	a.r = a.headLen
	return x, rt
}

// serveFastPath serves a request on the fast path. The response is in c.pending or c.stream
// afterwards.
func (c *conn) serveFastPath(x *fastExchange, rt route) {
	x.c, x.Received = c, time.Now()
	c.active.Store(true)
	c.clearIncompleteRequest()
	defer x.finish()
	x.setRequestID()
	x.resolveClientIP()
	if !x.openBody() {
		x.closeAfterResponse()
		x.Error(ClientGone, "", "the connection was closed", 0)
		return
	}
	if !x.cors(nil, true) {
		x.dispatch(rt)
	}
}

// afterResponse decides what follows a request. If the connection serves another request, the
// pending response may be written by the wait for it.
func (c *conn) afterResponse() (to nextStep, again bool) {
	a := &c.readAhead
	isPipelined := len(bytes.Trim(a.buf.B[a.r:a.w], http1.LineEnds)) > 0
	if isPipelined {
		c.pipelined.found = true
	} else {
		a.r, a.w = 0, 0
	}
	if c.stream != nil {
		c.stream.hadPipelined = isPipelined
		a.release()
		return nextStream, false
	}
	keep := c.pending.keepConn && c.pending.buf != nil // else this client cannot get a response
	if keep && !isPipelined && c.pending.n <= membudget.Page {
		return 0, true
	}
	c.checkPipelined()
	if err := c.flushPending(); err != nil || !keep {
		c.needsLinger = c.needsLinger || c.pipelined.found
		return nextEnd, false // still active: what the client sends is discarded first
	}
	c.active.Store(false)
	if isPipelined {
		c.deadlineKind = deadlineHead
		return nextFasthttp, false
	}
	return 0, true
}
