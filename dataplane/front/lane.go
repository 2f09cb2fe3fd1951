package front

import (
	"bytes"
	"io"
	"runtime/debug"
	"time"

	"sluice/dataplane/membudget"
)

// A connection is served in one of two lanes. The plain one, here, is for what nearly every
// request is: HTTP/1.1, a POST to an endpoint or the GET of a page, a length that is told.
// It reads the head once, by the guard's own reading, takes a short body where it lies, and
// writes the answer itself. All else is fasthttp's from its first byte on: TLS, other
// methods and paths, chunked bodies, expectations, HTTP/1.0, what the guard refuses, what
// came too early. A connection that fasthttp has serves the rest of its requests there,
// until a stream.

// aheadSize is the read-ahead of a connection while a request is served: its head, and a
// short body behind it.
const aheadSize = 16 << 10

// next is what becomes of a connection.
type next uint8

const (
	nextEnd      next = iota
	nextStream        // conn.stream has it
	nextFasthttp      // what came lies in conn.ahead
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
			_ = s.fh.ServeConn(c) // closes it, or gives it to a stream; its errors concern one client and were answered
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
	if c.headed {
		if err := c.readHeader(); err != nil {
			return nextEnd
		}
	}
	live, begun := c.srv.live(), c.due != dueHead
	wait := live.IdleTimeout
	if !begun {
		wait = live.HeadTimeout
	}
	for now := time.Now(); ; now = time.Now() {
		c.due = dueOther
		if c.SetReadDeadline(now.Add(wait)) != nil || !c.awaitHead(begun) {
			return nextEnd
		}
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
// not the plain lane's to judge; false when the connection has ended instead. What is held
// of the last answer goes out first. begun: the connection has had a request, and is not
// closed to make room while half of another one is there.
func (c *conn) awaitHead(begun bool) bool {
	a := &c.ahead
	a.head = 0
	for {
		before := a.w
		_, err := c.await(opTurn, nil)
		if err != nil && a.w == before && c.tooEarly(err) {
			continue
		}
		if c.held.buf != nil {
			if err != nil || c.release() != nil {
				return false
			}
			c.active.Store(false)
		}
		if err != nil {
			c.readErr = err
			a.failed = err
			return a.w > 0 // half a head has its answer
		}
		if a.w == before {
			continue // what was held has been written by a wait of its own
		}
		head := a.buf.B[:a.w]
		if head[0] == tlsHandshake {
			c.refuseTLS()
			return false
		}
		if at := bytes.Index(head[max(before-3, 0):], headEnd); at >= 0 {
			a.head = max(before-3, 0) + int32(at+len(headEnd))
			return true
		}
		if c.early.came || a.w == aheadSize || !beginsRequest(head[0]) {
			return true
		}
		if before == 0 {
			c.active.Store(begun)
			if err := c.SetReadDeadline(time.Now().Add(c.srv.live().HeadTimeout)); err != nil {
				return false
			}
		}
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
	x, _ := s.exchanges.Get().(*Exchange)
	refused := x.head.read(method[:len(method)-1], target, protocol, head[eol+1:])
	if h := &x.head; refused != "" || h.length == framingChunked || h.expects || found.endpoint == nil && h.length > 0 {
		h.raw = nil
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
