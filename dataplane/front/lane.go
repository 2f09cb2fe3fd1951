package front

import (
	"bytes"
	"io"
	"runtime/debug"
	"time"

	"sluice/dataplane/membudget"
)

// A connection is served in one of two lanes. The plain one, here, is for what nearly every
// request is: HTTP/1.1, a POST to an endpoint or the GET of a page, with a length that is
// told or in chunks. It reads the head once, by the guard's own reading, takes a short body
// where it lies, and writes the answer itself. All else is fasthttp's from its first byte
// on: TLS, other methods and paths, expectations, HTTP/1.0, what the guard refuses, what
// came too early. Chunks are read by the same reader in both. A connection that fasthttp
// has serves the rest of its requests there, until a stream.

// aheadSize is the read-ahead of a connection while a request is served: its head, and a
// short body behind it, or aheadLeast at least for the chunks that come, which else would
// take a read each.
const (
	aheadSize  = 16 << 10
	aheadLeast = 2 << 10
)

// next is what becomes of a connection.
type next uint8

const (
	nextEnd      next = iota
	nextStream        // conn.stream has it
	nextFasthttp      // what came lies in conn.ahead
	nextLobby         // the lobby has it: nobody else touches it any more
	nextHeir          // it was claimed for another process
)

// serveConn serves a connection until it ends or an event loop drives its stream.
func (s *Server) serveConn(c *conn) {
	c.takeServing()
	defer func() {
		if v := recover(); v != nil { // of no request: those have their own
			stack := debug.Stack()
			s.opt.Log.Error("panic while serving a connection", "value", v, "stack", string(stack))
			if o := s.opt.Observer; o != nil {
				o.Panicked("", v, stack)
			}
			c.shut()
		}
	}()
	for {
		switch c.serve() {
		case nextStream:
			if s.runStream(c, c.stream) {
				continue
			}
		case nextFasthttp:
			c.scan = headScan{}
			_ = s.fh.ServeConn(c) // closes it, or gives it to a stream; its errors concern one client and were answered
		case nextLobby:
		case nextHeir:
			if !s.passOn(c) {
				continue
			}
		default:
			c.shut()
			c.reportEnd()
		}
		return
	}
}

// serve serves plain requests, one after the other.
func (c *conn) serve() next {
	if !c.plain() {
		return nextFasthttp
	}
	live, begun := c.srv.live(), c.due != dueHead
	if c.headed {
		c.due = dueOther // the header's time is that of now
		if err := c.readHeader(); err != nil {
			return nextEnd
		}
	}
	wait := live.IdleTimeout
	if !begun {
		wait = live.HeadTimeout
	}
	for now := time.Now(); ; now = time.Now() {
		c.due = dueOther
		if c.guest.resumed {
			c.guest.resumed = false
		} else if c.SetReadDeadline(now.Add(wait)) != nil {
			return nextEnd
		} else if to, ok := c.awaitHead(begun); !ok {
			return to
		}
		c.wakeAt(1)
		x, found := c.plainRequest()
		if x == nil {
			c.due = dueHead
			return nextFasthttp
		}
		c.handle(x, found)
		if to, goesOn := c.answered(); !goesOn {
			return to
		}
		wait, begun = c.srv.live().IdleTimeout, true
	}
}

// awaitHead waits until the read-ahead holds a whole head, or as much as tells that it is
// not the plain lane's to judge; when it is not ok, the connection has ended instead, or
// waits in the lobby. What is held of the last answer goes out first. begun: the connection
// has had a request, and is not closed to make room while half of another one is there.
func (c *conn) awaitHead(begun bool) (to next, ok bool) {
	a := &c.ahead
	a.head = 0
	lobby := c.srv.lobby
	if c.spare {
		lobby = nil // it has less time
	}
	for {
		before := a.w
		var err error
		if lobby != nil && !begun {
			if !c.tryRead() && c.enter(lobby, begun) {
				return nextLobby, false
			}
			err = c.transfer.err
		} else {
			_, err = c.await(opTurn, nil)
		}
		if err != nil && c.input.claimed() {
			if !begun {
				c.due = dueHead
			}
			return nextHeir, false
		}
		if err != nil && a.w == before && c.tooEarly(err) {
			continue
		}
		if c.held.buf != nil {
			if err != nil || c.release() != nil {
				return nextEnd, false
			}
			c.active.Store(false)
		}
		if err != nil {
			c.readErr = err
			a.failed = err
			return nextEnd, a.w > 0 // half a head has its answer
		}
		if a.w == before {
			lobby = nil // it takes none
			continue    // what was held has been written by a wait of its own
		}
		if whole, ok := c.headCame(before); whole || !ok {
			return nextEnd, ok
		}
		if before == 0 {
			c.active.Store(begun)
			if lobby != nil {
				if c.rest(); !a.counted(c.srv.budget) {
					c.refuseHalf(BudgetSpent, headMemory)
					c.lingered = true // a reset could take the answer with it
					return nextEnd, false
				}
				if c.enter(lobby, begun) {
					return nextLobby, false
				}
				lobby = nil
			}
			if err := c.SetReadDeadline(time.Now().Add(c.srv.live().HeadTimeout)); err != nil {
				return nextEnd, false
			}
		}
		c.wakeAt(missing(a.buf.B[:a.w]))
	}
}

// headCame looks at what has come since before, which is something: whether it is a whole
// head, or enough to tell that it is not the plain lane's. Not ok: it is none of HTTP.
func (c *conn) headCame(before int32) (whole, ok bool) {
	a := &c.ahead
	head := a.buf.B[:a.w]
	if head[0] == tlsHandshake {
		c.refuseTLS()
		return false, false
	}
	if at := bytes.Index(head[max(before-3, 0):], headEnd); at >= 0 {
		a.head = max(before-3, 0) + int32(at+len(headEnd))
		return true, true
	}
	if c.early.came || hasBareLF(head, int(before)) || a.w == aheadSize || int(a.w) > c.srv.opt.MaxHeadBytes || !beginsRequest(head[0]) {
		return true, true
	}
	c.asks()
	return false, true
}

// enter has the lobby wait for a head, of which half has come or nothing. It is the last
// that c's goroutine does with it; unless it is false, then it must wait by itself.
func (c *conn) enter(l *lobby, begun bool) bool {
	if !begun {
		c.due = dueHead
	}
	return l.take(c, time.Now().Add(c.srv.live().HeadTimeout))
}

// missing is how many bytes must come at the least before head has its end.
func missing(head []byte) int {
	for n := len(headEnd) - 1; n > 0; n-- {
		if bytes.HasSuffix(head, headEnd[:n]) {
			return len(headEnd) - n
		}
	}
	return len(headEnd)
}

// wakeAt has the poller told once so many bytes have come: a goroutine woken for each byte
// of a head that trickles, of thousands, takes time from requests that are whole.
func (c *conn) wakeAt(n int) {
	if s := c.serving; s.wakes != n && (n > 1 || s.wakes > 1) {
		s.wakes = n
		_ = c.raw.Control(s.wake)
	}
}

var (
	headEnd  = []byte("\r\n\r\n")
	postWord = []byte("POST ")
	getWord  = []byte("GET ")
	protocol = []byte("HTTP/1.1")
)

// plainRequest is the request whose head has come, and where it leads; nil when it is not
// plain.
func (c *conn) plainRequest() (*Exchange, route) {
	a, s := &c.ahead, c.srv
	if a.head == 0 || int(a.head) > s.opt.MaxHeadBytes || c.early.came {
		return nil, route{}
	}
	head := a.buf.B[:a.head]
	eol := bytes.IndexByte(head, '\n')
	line, method := bytes.TrimSuffix(head[:eol], []byte{'\r'}), postWord
	if !bytes.HasPrefix(line, postWord) {
		method = getWord
	}
	if len(line) == eol || !bytes.HasPrefix(line, method) || !bytes.HasSuffix(line, protocol) || len(line) < len(method)+len(protocol)+1 {
		return nil, route{}
	}
	target := line[len(method) : len(line)-len(protocol)-1]
	found, ok := s.routes.byPath[string(target)]
	if !ok || line[len(method)+len(target)] != ' ' || (found.endpoint != nil) != (len(method) == len(postWord)) {
		return nil, route{}
	}
	x := s.exchanges.Get()
	refused := x.head.read(method[:len(method)-1], target, protocol, head[eol+1:])
	h := &x.head
	chunks := h.length == framingChunked
	if refused != "" || h.expects || found.endpoint == nil && (h.length > 0 || chunks) ||
		chunks && a.head > aheadSize-aheadLeast {
		h.raw, h.path = nil, nil
		s.exchanges.Put(x)
		return nil, route{}
	}
	a.r = a.head
	return x, found
}

// handle runs a plain request to its answer, which lies in c.held then, or in c.stream.
func (c *conn) handle(x *Exchange, found route) {
	x.c, x.Received = c, time.Now()
	c.active.Store(true)
	c.asked()
	defer x.finish()
	x.identify()
	x.locate()
	if !x.body.here(x) {
		x.distrust()
		x.Error(ClientGone, "", "the connection was closed", 0)
		return
	}
	if !x.cors(nil, true) {
		x.lead(found)
	}
}

// answered goes on behind a request: where the connection serves another one, what is held
// may leave with the wait for it.
func (c *conn) answered() (to next, goesOn bool) {
	a := &c.ahead
	early := len(bytes.Trim(a.buf.B[a.r:a.w], lineEnds)) > 0
	if early {
		c.early.came = true
	} else {
		a.r, a.w = 0, 0
	}
	if c.stream != nil {
		c.stream.behind = early
		a.drop()
		return nextStream, false
	}
	keep := c.held.ok && c.held.buf != nil // else nothing can be said to this client
	if keep && !early && c.held.n <= membudget.Page {
		return 0, true
	}
	c.lookAhead()
	if err := c.release(); err != nil || !keep {
		c.lingered = c.lingered || c.early.came
		return nextEnd, false // active yet: what the client still sends is read away first
	}
	c.active.Store(false)
	if early {
		c.due = dueHead
		return nextFasthttp, false
	}
	return 0, true
}

// rest is the body of a plain request: what came with the head, and then the connection's.
type rest struct {
	c    *conn
	left int64
}

func (r *rest) Read(p []byte) (n int, err error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), r.left)]
	if a := &r.c.ahead; a.r < a.w {
		// The head lies in the read-ahead, which stays.
		n = copy(p, a.buf.B[a.r:a.w])
		a.r += int32(n)
	} else {
		n, err = r.c.receiveOn(p)
	}
	if r.left -= int64(n); r.left == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// onward is what comes behind the head of a plain request without a bound: by way of the
// read-ahead, where what is not taken stays for the next request.
type onward struct{ c *conn }

func (o onward) Read(p []byte) (n int, err error) {
	a := &o.c.ahead
	if a.r == a.w {
		room := a.buf.B[a.head:]
		if len(p) >= len(room) {
			return o.c.receiveOn(p)
		}
		n, err = o.c.receiveOn(room)
		a.r, a.w = a.head, a.head+int32(n)
	}
	n = copy(p, a.buf.B[a.r:a.w])
	a.r += int32(n)
	return n, err
}
