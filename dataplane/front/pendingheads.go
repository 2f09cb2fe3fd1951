package front

import (
	"container/heap"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

const (
	// expireBatch connections whose time is over are dealt with in one go, and then
	// everybody else, for expireInterval: ten thousand that were opened together are cut
	// within a second or two, and a request that comes meanwhile does not wait for all.
	expireBatch    = 16
	expireInterval = 2 * time.Millisecond
	// maxExpireBatches is for how many of these are made up at most.
	maxExpireBatches = 32
)

// pendingQueue has the connections of which half a head has come, or nothing since they were
// made: each with its descriptor, a small buffer and a place here, and no goroutine. Slow
// clients come by thousands. With a goroutine each was woken for every byte, had a stack
// that the collector went through, and woke up with all others when their time was over:
// time that was taken from requests. A head that has come whole leaves with a goroutine,
// the rest is cut here.
//
// One goroutine does it all. From take on a connection is its own: who else wants it gone
// shuts its descriptor down (conn.cut), which is seen here as its end. mu guards by, due
// and next, since goroutines bring connections in.
type pendingQueue struct {
	srv     *Server
	poll    *poller
	yielder yielder
	done    chan struct{}

	mu          sync.Mutex
	byFD        map[int32]*conn
	deadlines   deadlineHeap
	wakeTime    monoTime // when the poller's wait ends; 0: never
	checkClaims bool     // for connections that were claimed for another process
	closed      bool
}

// pendingConn is a connection's part in the lobby, which is its goroutine's but for place.
type pendingConn struct {
	deadline  monoTime // then its time is over
	index     int      // in lobby.due
	fd        int32
	responded bool // it was too late and has its answer: its end is waited for
	resumed   bool // it comes from here, with what the plain lane waits for
}

// newPendingQueue makes one; nil where the system has no poller of ours.
func newPendingQueue(s *Server) (*pendingQueue, error) {
	p, err := newPoller()
	if err != nil || p == nil {
		return nil, err
	}
	l := &pendingQueue{srv: s, poll: p, done: make(chan struct{}), byFD: make(map[int32]*conn)}
	l.yielder.pollYielder.open()
	go l.run()
	return l, nil
}

// add brings c in, and is the last thing that its goroutine does with it; false where it
// must go on with it.
func (l *pendingQueue) add(c *conn, deadline time.Time) (added bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.pendingConn = pendingConn{fd: int32(fd), deadline: monoTimeOf(deadline)}
		added = l.poll.addInput(int(fd)) == nil
	})
	if !added {
		return false
	}
	l.byFD[c.pendingConn.fd] = c
	heap.Push(&l.deadlines, c)
	l.wakeBy(l.deadlines[0].pendingConn.deadline)
	return true
}

// wakeBy has the goroutine's wait end at m at the latest. Called with mu.
func (l *pendingQueue) wakeBy(m monoTime) {
	if l.wakeTime == 0 || m < l.wakeTime {
		l.wakeTime = m
		l.poll.setDeadline(m.time())
	}
}

// remove takes c out.
func (l *pendingQueue) remove(c *conn) {
	_ = c.raw.Control(func(fd uintptr) { l.poll.remove(int(fd)) })
	l.mu.Lock()
	delete(l.byFD, c.pendingConn.fd)
	heap.Remove(&l.deadlines, c.pendingConn.index)
	l.mu.Unlock()
}

// setDeadline gives c, which is in, another time.
func (l *pendingQueue) setDeadline(c *conn, deadline time.Time) {
	l.mu.Lock()
	c.pendingConn.deadline = monoTimeOf(deadline)
	heap.Fix(&l.deadlines, c.pendingConn.index)
	l.wakeBy(l.deadlines[0].pendingConn.deadline) // a reload may have made times shorter
	l.mu.Unlock()
}

// run deals with what comes until close.
func (l *pendingQueue) run() {
	defer close(l.done)
	defer l.yielder.pollYielder.close()
	for {
		err := l.poll.wait(l.onReadable)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		l.handOffClaimed()
		l.expire()
	}
}

// notifyClaims has the goroutine let go of the connections that were claimed for another
// process; none of them is told of by the poller. Nil may be asked.
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

// handOffClaimed lets go of them.
func (l *pendingQueue) handOffClaimed() {
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
		l.handOff(c)
	}
}

// handOff has a goroutine pass c on.
func (l *pendingQueue) handOff(c *conn) {
	c.io.err = nil
	l.remove(c)
	go l.srv.handOffOrServe(c)
}

// onReadable reads what has come on a connection. What cannot be read any more may have been
// half a head, which has an answer.
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
			l.handOff(c)
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

// tryRead reads once, if there is anything to read.
func (c *conn) tryRead() (ready bool) {
	c.io.err, c.tryReadReady = nil, true
	if err := c.raw.Control(c.tryReadFunc); err != nil {
		c.io.err = err
	}
	return c.tryReadReady
}

// compactReadAhead makes c a good guest: with little memory, and not woken before it can matter.
func (c *conn) compactReadAhead() {
	a := &c.readAhead
	c.setWakeThreshold(missingForHeadEnd(a.buf.B[:a.w]))
	if size := max(membudget.MinBuffer, 2*int(a.w)); size < len(a.buf.B) {
		a.resize(size)
	}
}

// resume has a goroutine go on with c.
func (l *pendingQueue) resume(c *conn) {
	l.remove(c)
	c.pendingConn.resumed = true
	go l.srv.serveConn(c)
}

// fail is for a connection that ended, or whose time is over with line ends at the most.
func (l *pendingQueue) fail(c *conn, err error) {
	c.io.err, c.readErr = nil, err
	if c.readAhead.w == 0 {
		l.closeConn(c)
		return
	}
	c.readAhead.readErr = err
	l.resume(c)
}

// evict cuts up to n connections on which nothing has come that was not read, those with the
// least time first, or nearly, and says how many.
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
	c.needsLinger = false // nobody may wait here
	c.closeOnce()
	c.reportResponseEnded()
}

// expire deals with some connections whose time is over, and notes when the next one's is.
func (l *pendingQueue) expire() {
	now := monoTimeOf(time.Now())
	l.mu.Lock()
	next := l.wakeTime
	l.mu.Unlock()
	if next == 0 || next > now {
		return
	}
	// Where the processors are busy this comes late, and has more to make up for.
	turns := 1 + (now-next)/monoTime(expireInterval)
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
			l.handOff(c)
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
		l.poll.setDeadline(time.Time{})
		return
	}
	l.wakeBy(max(l.deadlines[0].pendingConn.deadline, monoTimeOf(time.Now().Add(expireInterval))))
}

// hasPartialHead says whether something of a head has come.
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

const headMemoryMessage = "the memory for request bodies and long heads (limits.memory_budget) is spent; try again"

// rejectPartialHead answers half a head whose time is over, or that may not be held, as far as the
// socket takes that at once, and ends what is written.
func (c *conn) rejectPartialHead(reason Reason, message string) {
	s := c.srv
	c.pendingConn.responded = true
	c.active.Store(true)
	id := s.ids.next()
	s.reportRefused("", reason, refusal{id: id, client: c.ip})
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

// discardUntilEOF reads away what a client sends that was told off; true when it has ended.
func (c *conn) discardUntilEOF() (ended bool) {
	sink := membudget.Default.Get(membudget.Page)
	defer membudget.Default.Put(sink)
	_ = c.raw.Control(func(fd uintptr) {
		n, errno := rawsocket.Recv(int(fd), sink.B)
		ended = errno == 0 && n == 0 || errno != 0 && errno != syscall.EAGAIN
	})
	return ended
}

// close ends it; what is in it then is nobody's. Nil may be closed.
func (l *pendingQueue) close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.poll.close()
	<-l.done
}

// deadlineHeap is a heap (container/heap) of connections, the one that is due first on top.
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
