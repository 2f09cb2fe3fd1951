package front

import (
	"container/heap"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

const (
	// lateAtOnce connections whose time is over are dealt with in one go, and then
	// everybody else, for lateEvery: ten thousand that were opened together are cut
	// within a second or two, and a request that comes meanwhile does not wait for all.
	lateAtOnce = 16
	lateEvery  = 2 * time.Millisecond
	// lateTurns is for how many of these are made up at most.
	lateTurns = 32
)

// lobby has the connections of which half a head has come, or nothing since they were
// made: each with its descriptor, a small buffer and a place here, and no goroutine. Slow
// clients come by thousands. With a goroutine each was woken for every byte, had a stack
// that the collector went through, and woke up with all others when their time was over:
// time that was taken from requests. A head that has come whole leaves with a goroutine,
// the rest is cut here.
//
// One goroutine does it all. From take on a connection is its own: who else wants it gone
// shuts its descriptor down (conn.cut), which is seen here as its end. mu guards by, due
// and next, since goroutines bring connections in.
type lobby struct {
	srv  *Server
	poll *poller
	way  courtesy
	done chan struct{}

	mu     sync.Mutex
	by     map[int32]*conn
	due    lobbyQueue
	next   moment // when the poller's wait ends; 0: never
	look   bool   // for connections that were claimed for another process
	closed bool
}

// guest is a connection's part in the lobby, which is its goroutine's but for place.
type guest struct {
	until   moment // then its time is over
	place   int    // in lobby.due
	fd      int32
	told    bool // it was too late and has its answer: its end is waited for
	resumed bool // it comes from here, with what the plain lane waits for
}

// newLobby makes one; nil where the system has no poller of ours.
func newLobby(s *Server) (*lobby, error) {
	p, err := newPoller()
	if err != nil || p == nil {
		return nil, err
	}
	l := &lobby{srv: s, poll: p, done: make(chan struct{}), by: make(map[int32]*conn)}
	l.way.bell.hang()
	go l.run()
	return l, nil
}

// take brings c in, and is the last thing that its goroutine does with it; false where it
// must go on with it.
func (l *lobby) take(c *conn, until time.Time) (taken bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.guest = guest{fd: int32(fd), until: momentOf(until)}
		taken = l.poll.await(int(fd)) == nil
	})
	if !taken {
		return false
	}
	l.by[c.guest.fd] = c
	heap.Push(&l.due, c)
	l.wakeBy(l.due[0].guest.until)
	return true
}

// wakeBy has the goroutine's wait end at m at the latest. Called with mu.
func (l *lobby) wakeBy(m moment) {
	if l.next == 0 || m < l.next {
		l.next = m
		l.poll.until(m.time())
	}
}

// leave takes c out.
func (l *lobby) leave(c *conn) {
	_ = c.raw.Control(func(fd uintptr) { l.poll.forget(int(fd)) })
	l.mu.Lock()
	delete(l.by, c.guest.fd)
	heap.Remove(&l.due, c.guest.place)
	l.mu.Unlock()
}

// stay gives c, which is in, another time.
func (l *lobby) stay(c *conn, until time.Time) {
	l.mu.Lock()
	c.guest.until = momentOf(until)
	heap.Fix(&l.due, c.guest.place)
	l.wakeBy(l.due[0].guest.until) // a reload may have made times shorter
	l.mu.Unlock()
}

// run deals with what comes until close.
func (l *lobby) run() {
	defer close(l.done)
	defer l.way.bell.close()
	for {
		err := l.poll.turn(l.came)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		l.passClaimed()
		l.late()
	}
}

// lookForClaimed has the goroutine let go of the connections that were claimed for another
// process; none of them is told of by the poller. Nil may be asked.
func (l *lobby) lookForClaimed() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.due) > 0 {
		l.look = true
		l.wakeBy(1)
	}
}

// passClaimed lets go of them.
func (l *lobby) passClaimed() {
	l.mu.Lock()
	var claimed []*conn
	if l.look {
		for _, c := range l.due {
			if c.input.claimed() {
				claimed = append(claimed, c)
			}
		}
		l.look = false
	}
	l.mu.Unlock()
	for _, c := range claimed {
		l.passOn(c)
	}
}

// passOn has a goroutine pass c on.
func (l *lobby) passOn(c *conn) {
	c.transfer.err = nil
	l.leave(c)
	go l.srv.passOrServe(c)
}

// came reads what has come on a connection. What cannot be read any more may have been
// half a head, which has an answer.
func (l *lobby) came(fd int32) {
	l.mu.Lock()
	c := l.by[fd]
	l.mu.Unlock()
	switch {
	case c == nil:
	case c.guest.told:
		if c.readOut() {
			l.end(c)
		}
	default:
		before := c.ahead.w
		if !c.tryRead() {
			return
		}
		if c.input.claimed() {
			l.passOn(c)
			return
		}
		if err := c.transfer.err; err != nil {
			l.fail(c, err)
			return
		}
		switch whole, ok := c.headCame(before); {
		case !ok:
			l.end(c)
		case whole:
			l.resume(c)
		default:
			if before == 0 {
				l.stay(c, time.Now().Add(l.srv.live().HeadTimeout))
			}
			if c.rest(); !c.ahead.counted(l.srv.budget) {
				c.refuseHalf(BudgetSpent, headMemory)
				l.stay(c, time.Now().Add(lingerIdle))
			}
		}
	}
}

// tryRead reads once, if there is anything to read.
func (c *conn) tryRead() (came bool) {
	c.transfer.err, c.came = nil, true
	if err := c.raw.Control(c.try); err != nil {
		c.transfer.err = err
	}
	return c.came
}

// rest makes c a good guest: with little memory, and not woken before it can matter.
func (c *conn) rest() {
	a := &c.ahead
	c.wakeAt(missing(a.buf.B[:a.w]))
	if size := max(membudget.MinBuffer, 2*int(a.w)); size < len(a.buf.B) {
		a.resize(size)
	}
}

// resume has a goroutine go on with c.
func (l *lobby) resume(c *conn) {
	l.leave(c)
	c.guest.resumed = true
	go l.srv.serveConn(c)
}

// fail is for a connection that ended, or whose time is over with line ends at the most.
func (l *lobby) fail(c *conn, err error) {
	c.transfer.err, c.readErr = nil, err
	if c.ahead.w == 0 {
		l.end(c)
		return
	}
	c.ahead.failed = err
	l.resume(c)
}

// shed cuts up to n connections on which nothing has come that was not read, those with the
// least time first, or nearly, and says how many.
func (l *lobby) shed(n int) (shed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.due {
		if shed == n {
			break
		}
		if !c.unread() {
			c.cut()
			shed++
		}
	}
	return shed
}

func (l *lobby) end(c *conn) {
	l.leave(c)
	c.lingered = false // nobody may wait here
	c.shut()
	c.reportEnd()
}

// late deals with some connections whose time is over, and notes when the next one's is.
func (l *lobby) late() {
	now := momentOf(time.Now())
	l.mu.Lock()
	next := l.next
	l.mu.Unlock()
	if next == 0 || next > now {
		return
	}
	// Where the processors are busy this comes late, and has more to make up for.
	turns := 1 + (now-next)/moment(lateEvery)
	for range lateAtOnce * min(turns, lateTurns) {
		l.mu.Lock()
		if len(l.due) == 0 || l.due[0].guest.until > now {
			l.mu.Unlock()
			break
		}
		c := l.due[0]
		l.mu.Unlock()
		switch {
		case c.guest.told:
			l.end(c)
		case c.input.claimed():
			l.passOn(c)
		case c.halfCame():
			c.refuseHalf(RequestTimeout, lateRequest)
			l.stay(c, time.Now().Add(lingerIdle))
		default:
			l.fail(c, os.ErrDeadlineExceeded)
		}
		l.way.giveWay()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = 0
	if len(l.due) == 0 {
		l.poll.until(time.Time{})
		return
	}
	l.wakeBy(max(l.due[0].guest.until, momentOf(time.Now().Add(lateEvery))))
}

// halfCame says whether something of a head has come.
func (c *conn) halfCame() bool {
	a := &c.ahead
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

const headMemory = "the memory for request bodies and long heads (limits.body_budget) is spent; try again"

// refuseHalf answers half a head whose time is over, or that may not be held, as far as the
// socket takes that at once, and ends what is written.
func (c *conn) refuseHalf(reason Reason, message string) {
	s := c.srv
	c.guest.told = true
	c.active.Store(true)
	id := s.ids.make()
	s.refused("", reason, refusal{id: id, client: c.ip})
	var lines []string
	if reason == BudgetSpent {
		lines = append(lines, "Retry-After: 1\r\n")
	}
	answer := refusalOf(reason, message, id, lines...)
	_ = c.raw.Control(func(fd uintptr) {
		_, _ = sock.Send(int(fd), answer)
		_ = syscall.Shutdown(int(fd), syscall.SHUT_WR)
	})
	c.ahead.drop()
}

// readOut reads away what a client sends that was told off; true when it has ended.
func (c *conn) readOut() (ended bool) {
	sink := membudget.Default.Get(membudget.Page)
	defer membudget.Default.Put(sink)
	_ = c.raw.Control(func(fd uintptr) {
		n, errno := sock.Recv(int(fd), sink.B)
		ended = errno == 0 && n == 0 || errno != 0 && errno != syscall.EAGAIN
	})
	return ended
}

// close ends it; what is in it then is nobody's. Nil may be closed.
func (l *lobby) close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.poll.close()
	<-l.done
}

// lobbyQueue is a heap (container/heap) of connections, the one that is due first on top.
type lobbyQueue []*conn

func (q lobbyQueue) Len() int           { return len(q) }
func (q lobbyQueue) Less(i, j int) bool { return q[i].guest.until < q[j].guest.until }
func (q lobbyQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].guest.place, q[j].guest.place = i, j
}
func (q *lobbyQueue) Push(x any) {
	c, _ := x.(*conn)
	c.guest.place = len(*q)
	*q = append(*q, c)
}
func (q *lobbyQueue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return c
}
