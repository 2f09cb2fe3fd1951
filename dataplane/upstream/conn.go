package upstream

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/objpool"
	"sluice/dataplane/rawsocket"
)

// blockSize holds a request head with a small body, then the response head
// with a small body: nearly every JSON leg is one write and one read.
const blockSize = 16 << 10

type block [blockSize]byte

// blocks are lent to a connection while bytes of a request or of an answer are in them:
// of a crowd one that waits for an answer, an idle one, and a stream once its head was
// passed on hold none. An exchange that nobody has keeps the one it had.
var blocks = objpool.Pool[block]{New: func() *block { return new(block) }}

// headBlock is what a connection keeps of its response head while it waits for the body.
type headBlock [1 << 10]byte

var headBlocks = objpool.Pool[headBlock]{New: func() *headBlock { return new(headBlock) }}

// engineConn is what a conn needs of its connection: a net.Conn, or the *os.File that a
// descriptor is that was made by hand (see directly), or comes back from a loop (see
// Response.Lend).
type engineConn interface {
	io.ReadWriteCloser
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// conn is one connection to an engine. It belongs to one goroutine at a time:
// the idle list hands it over under its lock. Only leg is seen by others. There are
// thousands, most of them lent (Response.Lend): it just fills a size class of 192 bytes,
// and what it needs until then only stands in its exchange.
type conn struct {
	*exchange            // from a request's first byte until its answer is over, or lent; else nil
	leg         callLeg  // its legs' but the lent one
	detachedLeg *callLeg // in the place of leg while fd is lent, a new one each time
	ep          *Endpoint
	nc          engineConn      // nil while lent, as raw is
	raw         syscall.RawConn // nil for TLS
	graceUntil  atomic.Int64    // until when (on the package's clock) the engine must not learn of the connection's end; 0: it may
	idleSince   time.Duration
	dialedAt    time.Duration
	// armed is the read deadline set on the socket; it may be earlier than
	// the wanted one (see read).
	deadlineSet time.Duration
	ageJitter   float32 // see born
	fd          int32   // lent, else -1

	resp Response
}

// exchange is what a connection has only while a request is written and its answer read.
// It is lent to one after the other, so that its functions are made once.
type exchange struct {
	c           *conn
	stepFunc    func(fd uintptr) bool
	peekStep    func(fd uintptr)
	tryReadStep func(fd uintptr)

	// buf is the exchange's buffer: request out, then response in. In it,
	// [0:w) has been received, [r:w) not yet consumed. It is nil while nothing was
	// received and the answer is waited for, of a crowd.
	buf     []byte
	blk     *block
	headBlk *headBlock
	r, w    int

	// step's state: what to send, how it went.
	out            net.Buffers // what is left of vecSpare
	vecSpare       [][]byte
	call           *Call
	sent           bool
	waitedInPoller bool // for the answer, in the poller
	writeErr       error
	readErr        error

	dead bool // peek's answer
	one  [1]byte

	head headParser
}

var exchanges = objpool.Pool[exchange]{New: func() *exchange {
	x := new(exchange)
	x.stepFunc = func(fd uintptr) bool { return x.c.step(fd) }
	x.peekStep = x.peek
	x.tryReadStep = x.tryRead
	return x
}}

func newConn(e *Endpoint, nc engineConn) *conn {
	c := &conn{ep: e, fd: -1, nc: nc}
	c.setAgeLimit()
	c.leg.canceller, c.resp.c = c, c
	if t, ok := nc.(syscall.Conn); ok { // not so TLS
		if raw, err := t.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	return c
}

// Cancel ends the connection for a Call, whose leg it was.
func (c *conn) Cancel() {
	lingering := c.linger()
	abort(c.nc)
	lingering.start()
}

// close ends the connection for good; only the owner calls it, once.
func (c *conn) close() {
	c.releaseExchange()
	lingering := c.linger()
	if c.fd >= 0 {
		_ = syscall.Close(int(c.fd))
		c.fd = -1
	} else {
		abort(c.nc)
	}
	lingering.start()
	c.ep.open.Add(-1)
}

// acquireExchange lends c what a request needs.
func (c *conn) acquireExchange() {
	if c.exchange == nil {
		c.exchange = exchanges.Get()
		c.exchange.c = c
	}
}

// releaseExchange gives it back, with what it holds.
func (c *conn) releaseExchange() {
	x := c.exchange
	if x == nil {
		return
	}
	if x.headBlk != nil {
		headBlocks.Put(x.headBlk)
		x.headBlk = nil
	}
	x.c, x.buf, x.out, x.call = nil, nil, nil, nil
	x.writeErr, x.readErr = nil, nil
	x.r, x.w = 0, 0
	c.exchange = nil
	exchanges.Put(x)
}

// hasUnread says whether bytes of the answer were received that nobody has taken.
func (c *conn) hasUnread() bool { return c.exchange != nil && c.r < c.w }

func (x *exchange) releaseBlock() {
	if x.blk != nil {
		blocks.Put(x.blk)
		x.blk = nil
	}
}

// shrink leaves only the head, in a small buffer, where it fits; called when
// everything behind the head was consumed.
func (x *exchange) shrink() {
	if n := x.head.pos; x.blk != nil && n <= len(headBlock{}) {
		x.r, x.w = n, n
		x.shrinkBlock()
	}
}

// manyConnections is how many connections to an engine make it worth while that those that wait
// have no block: for fewer it is 4 MiB at the most, and a short request's time is more.
const manyConnections = 256

// beforeWait is called before the poller waits for the answer.
func (c *conn) beforeWait() {
	c.waitedInPoller = true
	if c.ep.open.Load() >= manyConnections {
		c.shrinkBlock()
	}
}

// shrinkBlock gives the block back where what was received fits in less.
func (x *exchange) shrinkBlock() {
	if x.blk == nil || x.w > len(headBlock{}) {
		return
	}
	var rest []byte
	if x.w > 0 {
		x.headBlk = headBlocks.Get()
		copy(x.headBlk[:], x.buf[:x.w])
		rest = x.headBlk[:]
	}
	x.releaseBlock()
	x.buf = rest
}

// acquireBlock takes a block, with what was put aside of one.
func (x *exchange) acquireBlock() {
	if x.buf != nil && x.headBlk == nil { // it has one, or has grown
		return
	}
	if x.blk == nil {
		x.blk = blocks.Get()
	}
	if x.headBlk != nil {
		copy(x.blk[:], x.buf[:x.w])
		headBlocks.Put(x.headBlk)
		x.headBlk = nil
	}
	x.buf = x.blk[:]
}

// grow makes room behind w, for a head beyond the block.
func (x *exchange) grow() {
	bigger := make([]byte, 2*len(x.buf))
	copy(bigger, x.buf[:x.w])
	x.releaseBlock()
	x.buf = bigger
}

// setDeadlineBy arms the socket's read deadline so that it fires no later than t
// (0: never). A socket already armed for an earlier time is left alone: when
// that fires, rearm tells a real time-out from a leftover one. Thus requests
// with the same long bound cost one timer update per bound, not per request.
func (c *conn) setDeadlineBy(t time.Duration) {
	if t != 0 && (c.deadlineSet == 0 || c.deadlineSet > t) {
		c.setReadDeadline(t)
	}
}

// extendDeadline is called after the socket's deadline fired; false when t has come.
func (c *conn) extendDeadline(t time.Duration) bool {
	if t != 0 && now() >= t {
		return false
	}
	c.setReadDeadline(t)
	return true
}

func (c *conn) setReadDeadline(t time.Duration) {
	var at time.Time
	if t != 0 {
		at = epoch.Add(t)
	}
	c.deadlineSet = t
	_ = c.nc.SetReadDeadline(at) // fails on a closed connection only: the read will say so
}

// read reads some bytes into p, until t.
func (c *conn) read(p []byte, t time.Duration) (int, error) {
	c.setDeadlineBy(t)
	for {
		n, err := c.nc.Read(p)
		if n > 0 {
			return n, nil // TLS may add the error that follows; it will come again
		}
		if err == nil || !isTimeout(err) {
			return 0, err
		}
		if !c.extendDeadline(t) {
			return 0, ErrTimeout
		}
	}
}

// send writes out and waits for the first bytes of the answer in one stay
// in the network poller: write(2), wait, read(2). The net package would try
// read(2) before it waits, a system call that always comes too early here.
//
// RawConn.Read forgets readiness signalled before it begins, then runs step
// until it says true, waiting for readiness in between. step's first run
// writes, so an answer can only be signalled after the forgetting; after a
// time-out and a second RawConn.Read, step tries to read first. An engine that
// closed the connection a moment before shows by the reset our write provokes.
//
// Of a crowd the buffer goes back meanwhile: thousands may wait for a head until a prompt
// is computed.
func (c *conn) send(t time.Duration) {
	c.sent, c.writeErr = false, nil
	c.poll(t)
}

// fill receives some more of the answer into buf, until t. Where all that is in it is a
// head, or nothing, its block goes back while that is waited for, of a crowd.
func (c *conn) fill(t time.Duration) error {
	had := c.w
	if c.raw == nil { // TLS: what it reads may be no byte of ours
		c.acquireBlock()
	}
	if c.w > 0 && c.w == len(c.buf) && c.headBlk == nil {
		c.grow()
	}
	if c.raw == nil {
		n, err := c.readBody(c.buf[c.w:], t)
		c.w += n
		return err
	}
	c.poll(t)
	if c.w > had {
		c.graceUntil.Store(0)
	}
	return c.readErr
}

// poll runs step in the network poller until it is done, or t.
func (c *conn) poll(t time.Duration) {
	c.readErr, c.waitedInPoller = nil, false
	c.setDeadlineBy(t)
	for {
		err := c.raw.Read(c.stepFunc)
		if err == nil {
			return
		}
		if !isTimeout(err) {
			c.readErr = err
			return
		}
		if !c.extendDeadline(t) {
			c.finalRead()
			return
		}
	}
}

// finalRead receives what came in time though nobody looked before the time was over: the
// process was stopped, or its cores were others'. Only where it was waited for: else the
// time was over before.
func (c *conn) finalRead() {
	received := false
	if c.waitedInPoller {
		_ = c.raw.Control(func(fd uintptr) { received = c.step(fd) })
	}
	if !received {
		c.readErr = ErrTimeout
	}
}

func (c *conn) step(fd uintptr) bool {
	if !c.sent {
		c.sent = true
		n, errno := c.sendOut(int(fd))
		consume(&c.out, n)
		if errno != 0 {
			if errno != syscall.EAGAIN {
				c.writeErr = os.NewSyscallError("sendto", errno)
			}
			return true
		}
		c.call.markSent()
		c.beforeWait()
		return false
	}
	c.acquireBlock()
	n, errno := rawsocket.Recv(int(fd), c.buf[c.w:])
	switch {
	case errno == syscall.EAGAIN:
		c.beforeWait()
		return false
	case errno != 0:
		c.readErr = os.NewSyscallError("recvfrom", errno)
	case n == 0:
		c.readErr = io.EOF
	default:
		c.w += n
	}
	return true
}

// tryRead receives what has come, and waits for nothing.
func (x *exchange) tryRead(fd uintptr) {
	if n, errno := rawsocket.Recv(int(fd), x.buf[x.w:]); errno == 0 {
		x.w += n
	}
}

func (c *conn) sendOut(fd int) (int, syscall.Errno) {
	if len(c.out) == 1 {
		return rawsocket.Send(fd, c.out[0])
	}
	return rawsocket.SendVector(fd, c.out)
}

// releaseOut lets go of the request's body, which is borrowed until Do returns, and no
// longer.
func (c *conn) releaseOut() {
	clear(c.vecSpare)
	c.out, c.call = nil, nil
}

// consume takes n bytes off v.
func consume(v *net.Buffers, n int) {
	for len(*v) > 0 && n >= len((*v)[0]) {
		n -= len((*v)[0])
		*v = (*v)[1:]
	}
	if n > 0 {
		(*v)[0] = (*v)[0][n:]
	}
}

// earlyRefusalCheck is how often it is looked, while the socket takes no more of a request,
// whether the engine has refused it meanwhile: one that reads no more would never take the
// rest. RFC 9112, section 9.5.
const earlyRefusalCheck = 250 * time.Millisecond

// errEarlyRefusal is a write given up because its answer is here.
var errEarlyRefusal = errors.New("the engine refused the request before it had read it")

// hasEarlyRefusal says whether the head of a refusal has come. Any other early answer may be
// of an engine that reads on.
func (c *conn) hasEarlyRefusal() (yes bool) {
	_ = c.raw.Control(func(fd uintptr) {
		var b [len("HTTP/1.1 400")]byte
		n, errno := rawsocket.Peek(int(fd), b[:])
		yes = errno == 0 && n == len(b) && string(b[:5]) == "HTTP/" && (b[9] == '4' || b[9] == '5')
	})
	return yes
}

// write sends what is left in out, of a request of size bytes, and waits where it must.
func (c *conn) write(size int, t time.Duration) error {
	limit := now() + c.ep.opt.WriteTimeout + time.Duration(size/(256<<10))*time.Second
	if t != 0 {
		limit = min(limit, t)
	}
	var err error
	for {
		// A TLS connection does not outlive a write that timed out.
		by := limit
		if c.raw != nil {
			by = min(by, now()+earlyRefusalCheck)
		}
		_ = c.nc.SetWriteDeadline(epoch.Add(by))
		if _, ok := c.nc.(*os.File); ok && len(c.out) > 1 {
			err = writeVector(c.raw, &c.out)
		} else {
			_, err = c.out.WriteTo(c.nc)
		}
		if err == nil || !isTimeout(err) || now() >= limit || c.raw == nil {
			break
		}
		if c.hasEarlyRefusal() {
			err = errEarlyRefusal
			break
		}
	}
	_ = c.nc.SetWriteDeadline(time.Time{})
	if err != nil && isTimeout(err) {
		err = ErrTimeout
	}
	return err
}

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

// isClosed says whether err is what a connection closed by its peer gives.
func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
