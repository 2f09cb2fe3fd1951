package front

import (
	"container/heap"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/epoll"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
)

const (
	// The queue expires at most expireBatch connections at once, and then only serves input
	// for expireInterval. Thus ten thousand connections that were opened together are closed
	// within one or two seconds, and a request that arrives meanwhile does not wait for all
	// of them.
	expireBatch    = 16
	expireInterval = 2 * time.Millisecond
	// maxExpireBatches bounds how many batches a late goroutine expires at once.
	maxExpireBatches = 32
)

// pendingQueue is the pending-header queue. It has the connections that have sent an incomplete
// head, or nothing since they were accepted. Each costs a descriptor, a small buffer and an
// entry here, but no goroutine, because slow clients come by the thousand. With a goroutine
// each, every byte woke one, the garbage collector scanned all their stacks, and all woke up
// together at their deadline, which delayed complete requests. When a head is complete the
// connection leaves the queue with a goroutine of its own; the queue closes the others at
// their deadline.
//
// One goroutine, run, serves all connections of the queue. From add on only that goroutine
// touches a connection. Others that want to close it shut its socket down (conn.shutdown),
// and run sees the end of the connection. mu guards the fields below it, because other
// goroutines add connections.
type pendingQueue struct {
	srv     *Server
	poll    *epoll.Poller
	yielder yielder
	done    chan struct{}

	mu          sync.Mutex
	byFD        map[int32]*conn
	deadlines   deadlineHeap
	wakeTime    monotime.Time // when the poller's wait ends; 0: never
	checkClaims bool          // some connections may be claimed for another process
	closed      bool
}

// pendingConn is the state of a connection in the queue.
type pendingConn struct {
	deadline  monotime.Time // when the queue refuses or closes the connection
	index     int           // in pendingQueue.deadlines; guarded by mu
	fd        int32
	responded bool // it has been refused; the queue waits for the client to close it
	resumed   bool // it has left the queue, and the fast path need not wait for its head
}

// newPendingQueue makes a pendingQueue and starts its goroutine. It returns nil on systems
// without a poller.
func newPendingQueue(s *Server) (*pendingQueue, error) {
	p, err := epoll.New()
	if err != nil || p == nil {
		return nil, err
	}
	l := &pendingQueue{srv: s, poll: p, done: make(chan struct{}), byFD: make(map[int32]*conn)}
	l.yielder.poll.Open()
	go l.run()
	return l, nil
}

// add adds c to the queue. If it returns true, the caller must not touch c any more. If it
// returns false the caller keeps c.
func (l *pendingQueue) add(c *conn, deadline time.Time) (added bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.pendingConn = pendingConn{fd: int32(fd), deadline: monoTimeOf(deadline)}
		added = l.poll.AddInput(int(fd)) == nil
	})
	if !added {
		return false
	}
	l.byFD[c.pendingConn.fd] = c
	heap.Push(&l.deadlines, c)
	l.wakeBy(l.deadlines[0].pendingConn.deadline)
	return true
}

// wakeBy makes the wait of run end at m at the latest. The caller holds mu.
func (l *pendingQueue) wakeBy(m monotime.Time) {
	if l.wakeTime == 0 || m < l.wakeTime {
		l.wakeTime = m
		l.poll.SetDeadline(m.Time())
	}
}

// remove removes c from the queue and the poller.
func (l *pendingQueue) remove(c *conn) {
	_ = c.raw.Control(func(fd uintptr) { l.poll.Remove(int(fd)) })
	l.mu.Lock()
	delete(l.byFD, c.pendingConn.fd)
	heap.Remove(&l.deadlines, c.pendingConn.index)
	l.mu.Unlock()
}

// setDeadline changes the deadline of c, which is in the queue.
func (l *pendingQueue) setDeadline(c *conn, deadline time.Time) {
	l.mu.Lock()
	c.pendingConn.deadline = monoTimeOf(deadline)
	heap.Fix(&l.deadlines, c.pendingConn.index)
	l.wakeBy(l.deadlines[0].pendingConn.deadline) // a reload may have shortened the timeouts
	l.mu.Unlock()
}

// run serves the connections of the queue until close.
func (l *pendingQueue) run() {
	defer close(l.done)
	defer l.yielder.poll.Close()
	for {
		err := l.poll.Wait(l.onReadable)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		l.passClaimed()
		l.expire()
	}
}

// notifyClaims makes run pass the connections that are claimed for another process. The
// poller does not report them. l may be nil.
func (l *pendingQueue) notifyClaims() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.deadlines) > 0 {
		l.checkClaims = true
		l.wakeBy(1)
	}
}

// passClaimed passes the claimed connections if notifyClaims was called.
func (l *pendingQueue) passClaimed() {
	l.mu.Lock()
	var claimed []*conn
	if l.checkClaims {
		for _, c := range l.deadlines {
			if c.readState.claimed() {
				claimed = append(claimed, c)
			}
		}
		l.checkClaims = false
	}
	l.mu.Unlock()
	for _, c := range claimed {
		l.pass(c)
	}
}

// pass removes c from the queue and passes it on a goroutine.
func (l *pendingQueue) pass(c *conn) {
	c.io.err = nil
	l.remove(c)
	go l.srv.passOrServe(c)
}

// onReadable reads the input of a connection that the poller has reported. A connection that
// ends within a head still gets a response.
func (l *pendingQueue) onReadable(fd int32) {
	l.mu.Lock()
	c := l.byFD[fd]
	l.mu.Unlock()
	switch {
	case c == nil:
	case c.pendingConn.responded:
		if c.discardUntilEOF() {
			l.closeConn(c)
		}
	default:
		before := c.readAhead.w
		if !c.tryRead() {
			return
		}
		if c.readState.claimed() {
			l.pass(c)
			return
		}
		if err := c.io.err; err != nil {
			l.fail(c, err)
			return
		}
		switch whole, ok := c.parseReadAhead(before); {
		case !ok:
			l.closeConn(c)
		case whole:
			l.resume(c)
		default:
			if before == 0 {
				l.setDeadline(c, time.Now().Add(l.srv.options().HeadTimeout))
			}
			if c.compactReadAhead(); !c.readAhead.acquireBudget(l.srv.budget) {
				c.rejectPartialHead(BudgetExhausted, headMemoryMessage)
				l.setDeadline(c, time.Now().Add(lingerIdle))
			}
		}
	}
}

// tryRead reads once into the read-ahead without waiting. ready is false if there is no input.
// It stores an error in c.io.err.
func (c *conn) tryRead() (ready bool) {
	c.io.err, c.tryReadReady = nil, true
	if err := c.raw.Control(c.tryReadFunc); err != nil {
		c.io.err = err
	}
	return c.tryReadReady
}

// compactReadAhead shrinks the read-ahead of c, and makes the kernel report input only when the
// head can be complete.
func (c *conn) compactReadAhead() {
	a := &c.readAhead
	c.setWakeThreshold(missingForHeadEnd(a.buf.B[:a.w]))
	if size := max(membudget.MinBuffer, 2*int(a.w)); size < len(a.buf.B) {
		a.resize(size)
	}
}

// resume removes c from the queue and serves it on a goroutine.
func (l *pendingQueue) resume(c *conn) {
	l.remove(c)
	c.pendingConn.resumed = true
	go l.srv.serveConn(c)
}

// fail ends a connection whose read has failed with err, or that has sent at most line ends by
// its deadline. If it has sent anything, the fast path handles the error.
func (l *pendingQueue) fail(c *conn, err error) {
	c.io.err, c.readErr = nil, err
	if c.readAhead.w == 0 {
		l.closeConn(c)
		return
	}
	c.readAhead.readErr = err
	l.resume(c)
}

// evict shuts down up to n connections without unread input and returns their number. It goes
// through the heap in slice order, so the earliest deadlines come roughly first.
func (l *pendingQueue) evict(n int) (evicted int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.deadlines {
		if evicted == n {
			break
		}
		if !c.hasUnread() {
			c.shutdown()
			evicted++
		}
	}
	return evicted
}

func (l *pendingQueue) closeConn(c *conn) {
	l.remove(c)
	c.needsLinger = false // a linger would block the queue's goroutine
	c.closeOnce()
	c.reportResponseEnded()
}

// expire refuses or closes connections whose deadline has passed, in batches, and sets the next
// wake-up.
func (l *pendingQueue) expire() {
	now := monoTimeOf(time.Now())
	l.mu.Lock()
	next := l.wakeTime
	l.mu.Unlock()
	if next == 0 || next > now {
		return
	}
	// On busy processors this goroutine runs late, and expires one batch for each interval that
	// it has missed.
	turns := 1 + (now-next)/monotime.Time(expireInterval)
	for range expireBatch * min(turns, maxExpireBatches) {
		l.mu.Lock()
		if len(l.deadlines) == 0 || l.deadlines[0].pendingConn.deadline > now {
			l.mu.Unlock()
			break
		}
		c := l.deadlines[0]
		l.mu.Unlock()
		switch {
		case c.pendingConn.responded:
			l.closeConn(c)
		case c.readState.claimed():
			l.pass(c)
		case c.hasPartialHead():
			c.rejectPartialHead(RequestTimeout, headTimeoutMessage)
			l.setDeadline(c, time.Now().Add(lingerIdle))
		default:
			l.fail(c, os.ErrDeadlineExceeded)
		}
		l.yielder.yield()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wakeTime = 0
	if len(l.deadlines) == 0 {
		l.poll.SetDeadline(time.Time{})
		return
	}
	l.wakeBy(max(l.deadlines[0].pendingConn.deadline, monoTimeOf(time.Now().Add(expireInterval))))
}

// hasPartialHead reports whether a byte of a head has arrived, other than line ends.
func (c *conn) hasPartialHead() bool {
	a := &c.readAhead
	if a.buf == nil {
		return false
	}
	for _, b := range a.buf.B[:a.w] {
		if b != '\r' && b != '\n' {
			return true
		}
	}
	return false
}

const headMemoryMessage = "limits.memory_budget is exhausted by bodies and long heads; try again"

// rejectPartialHead answers a client whose head is incomplete at its deadline or exceeds the
// memory budget. It sends as much as the socket accepts without waiting, and shuts down the
// sending side.
func (c *conn) rejectPartialHead(reason Reason, message string) {
	s := c.srv
	c.pendingConn.responded = true
	c.active.Store(true)
	id := s.ids.next()
	s.reportRefused(Refusal{Reason: reason, RequestID: id, Client: c.ip})
	var lines []string
	if reason == BudgetExhausted {
		lines = append(lines, "Retry-After: 1\r\n")
	}
	answer := rawRefusal(reason, message, id, lines...)
	_ = c.raw.Control(func(fd uintptr) {
		_, _ = rawsocket.Send(int(fd), answer)
		_ = syscall.Shutdown(int(fd), syscall.SHUT_WR)
	})
	c.readAhead.release()
}

// discardUntilEOF discards input of a client that has been refused. ended reports whether the
// connection has ended.
func (c *conn) discardUntilEOF() (ended bool) {
	sink := membudget.Default.Get(membudget.Page)
	defer membudget.Default.Put(sink)
	_ = c.raw.Control(func(fd uintptr) {
		n, errno := rawsocket.Recv(int(fd), sink.B)
		ended = errno == 0 && n == 0 || errno != 0 && errno != syscall.EAGAIN
	})
	return ended
}

// close stops the goroutine. The queue's connections stay open, and nothing reads them any more.
// l may be nil.
func (l *pendingQueue) close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.poll.Close()
	<-l.done
}

// deadlineHeap is a heap (container/heap) of connections, with the earliest deadline on top.
type deadlineHeap []*conn

func (q deadlineHeap) Len() int { return len(q) }
func (q deadlineHeap) Less(i, j int) bool {
	return q[i].pendingConn.deadline < q[j].pendingConn.deadline
}
func (q deadlineHeap) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].pendingConn.index, q[j].pendingConn.index = i, j
}
func (q *deadlineHeap) Push(x any) {
	c, _ := x.(*conn)
	c.pendingConn.index = len(*q)
	*q = append(*q, c)
}
func (q *deadlineHeap) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return c
}
