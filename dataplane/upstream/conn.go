package upstream

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/dataplane/rawsocket"
)

// blockSize holds a request head with a small body, then the response head with a small body.
// Nearly every JSON leg is one write and one read.
const blockSize = 16 << 10

type block [blockSize]byte

// blocks are used by a connection while bytes of a request or response are in them. With many
// connections, one that waits for a response, an idle one and a stream whose head has been passed
// on have none. An unused exchange keeps its block.
var blocks = objpool.Pool[block]{New: func() *block { return new(block) }}

// headBlock holds the response head while the body is awaited.
type headBlock [1 << 10]byte

var headBlocks = objpool.Pool[headBlock]{New: func() *headBlock { return new(headBlock) }}

// engineConn is the connection below a conn: a net.Conn, or an *os.File for a descriptor that was
// dialled directly (see dialRaw) or comes back from a loop (see Response.Detach).
type engineConn interface {
	io.ReadWriteCloser
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// conn is one connection to an engine. It belongs to one goroutine at a time; the idle list passes
// it on under its lock. Only leg is seen by others. There are thousands, most of them detached
// (Response.Detach), so it fills a size class of 192 bytes exactly, and state needed before the
// detach is in its exchange.
type conn struct {
	*exchange            // from a request's first byte until its response has ended or is detached; else nil
	leg         callLeg  // of its legs, except the detached one
	detachedLeg *callLeg // in place of leg while fd is detached, a new one each time
	ep          *Endpoint
	nc          engineConn      // nil while detached, like raw
	raw         syscall.RawConn // nil for TLS
	graceUntil  atomic.Int64    // until when, by the package's clock, the engine must not see the connection closed; 0: no bound
	idleSince   time.Duration
	dialedAt    time.Duration
	// deadlineSet is the read deadline set on the socket. It may be earlier than the wanted one
	// (see read).
	deadlineSet time.Duration
	ageJitter   float32 // see setAgeLimit
	fd          int32   // detached, else -1

	resp Response
}

// exchange is the state of a connection while a request is written and its response read. It is
// reused by other connections, so that its functions are allocated once.
type exchange struct {
	c           *conn
	stepFunc    func(fd uintptr) bool
	peekStep    func(fd uintptr)
	tryReadStep func(fd uintptr)

	// buf holds the request, then the response. Of the response buf[0:w) has been received and
	// buf[r:w) not yet consumed. With many connections it is nil while a response is awaited and
	// nothing has been received.
	buf     []byte
	blk     *block
	headBlk *headBlock
	r, w    int

	// The state of step: what to send, and the result.
	out            net.Buffers // the unsent part of vecSpare
	vecSpare       [][]byte
	call           *Call
	sent           bool
	waitedInPoller bool // for the response, in the poller
	writeErr       error
	readErr        error

	dead bool // the result of peek
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
	if t, ok := nc.(syscall.Conn); ok { // not TLS
		if raw, err := t.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	return c
}

// Cancel closes the connection for a Call that had it as its leg.
func (c *conn) Cancel() {
	lingering := c.linger()
	abort(c.nc)
	lingering.start()
}

// close closes the connection. Only the owner calls it, once.
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

// acquireExchange gives c an exchange for a request.
func (c *conn) acquireExchange() {
	if c.exchange == nil {
		c.exchange = exchanges.Get()
		c.exchange.c = c
	}
}

// releaseExchange returns the exchange with its memory.
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

// hasUnread reports whether received bytes of the response have not been consumed.
func (c *conn) hasUnread() bool { return c.exchange != nil && c.r < c.w }

func (x *exchange) releaseBlock() {
	if x.blk != nil {
		blocks.Put(x.blk)
		x.blk = nil
	}
}

// shrink keeps only the head, in a small buffer if it fits. It is called when everything after the
// head has been consumed.
func (x *exchange) shrink() {
	if n := x.head.pos; x.blk != nil && n <= len(headBlock{}) {
		x.r, x.w = n, n
		x.shrinkBlock()
	}
}

// manyConnections is the number of connections to an engine from which on waiting ones have no
// block. Fewer take 4 MiB at most, and the time of a short request matters more.
const manyConnections = 256

// beforeWait is called before the poller waits for the response.
func (c *conn) beforeWait() {
	c.waitedInPoller = true
	if c.ep.open.Load() >= manyConnections {
		c.shrinkBlock()
	}
}

// shrinkBlock releases the block if what was received fits into less.
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

// acquireBlock acquires a block and restores what shrinkBlock has saved.
func (x *exchange) acquireBlock() {
	if x.buf != nil && x.headBlk == nil { // there is one, or it has grown
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

// grow makes space after w for a head that exceeds the block.
func (x *exchange) grow() {
	bigger := make([]byte, 2*len(x.buf))
	copy(bigger, x.buf[:x.w])
	x.releaseBlock()
	x.buf = bigger
}

// setDeadlineBy sets the socket's read deadline to t or earlier (0: never). A deadline that is
// already earlier stays. When it fires, extendDeadline distinguishes a real timeout from a
// leftover one. So requests with the same long bound cost one timer update per bound, not per
// request.
func (c *conn) setDeadlineBy(t time.Duration) {
	if t != 0 && (c.deadlineSet == 0 || c.deadlineSet > t) {
		c.setReadDeadline(t)
	}
}

// extendDeadline is called after the socket's deadline has fired; false: t has passed.
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
		at = monotime.Time(t).Time()
	}
	c.deadlineSet = t
	_ = c.nc.SetReadDeadline(at) // fails only on a closed connection, which the read reports
}

// read reads bytes into p, until t.
func (c *conn) read(p []byte, t time.Duration) (int, error) {
	c.setDeadlineBy(t)
	for {
		n, err := c.nc.Read(p)
		if n > 0 {
			return n, nil // TLS may return the error that follows; it comes again
		}
		if err == nil || !isTimeout(err) {
			return 0, err
		}
		if !c.extendDeadline(t) {
			return 0, ErrTimeout
		}
	}
}

// send writes the request and waits for the first bytes of the response in one visit to the network
// poller: write(2), wait, read(2). Package net would try read(2) before it waits, which always
// comes too early here.
//
// RawConn.Read forgets readiness signalled before it begins, then runs step until it returns true,
// waiting for readiness in between. The first run of step writes, so a response can only be
// signalled after that. After a timeout and a second RawConn.Read, step tries to read first. An
// engine that closed the connection just before answers the write by a reset.
//
// With many connections the buffer is released meanwhile, because thousands may wait for a head
// until a prompt is computed.
func (c *conn) send(t time.Duration) {
	c.sent, c.writeErr = false, nil
	c.poll(t)
}

// fill receives more of the response into buf, until t. With many connections the block is released
// during the wait if it contains at most a head.
func (c *conn) fill(t time.Duration) error {
	had := c.w
	if c.raw == nil { // TLS: the bytes read may contain no payload
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

// finalRead receives what arrived before the deadline though nobody read it in time, because the
// process was stopped or had no CPU. It applies only if the read was waiting; otherwise the
// deadline had passed before.
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

// tryRead receives what has arrived, without waiting.
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

// releaseOut drops the references to the request's body, which is borrowed until Do returns.
func (c *conn) releaseOut() {
	clear(c.vecSpare)
	c.out, c.call = nil, nil
}

// consume removes n bytes from v.
func consume(v *net.Buffers, n int) {
	for len(*v) > 0 && n >= len((*v)[0]) {
		n -= len((*v)[0])
		*v = (*v)[1:]
	}
	if n > 0 {
		(*v)[0] = (*v)[0][n:]
	}
}

// earlyRefusalCheck is the interval at which a write that does not progress checks whether the
// engine has refused the request: an engine that stops reading would never accept the rest (RFC
// 9112, section 9.5).
const earlyRefusalCheck = 250 * time.Millisecond

// errEarlyRefusal: a write was abandoned because the response has come.
var errEarlyRefusal = errors.New("the engine rejected the request before reading it")

// hasEarlyRefusal reports whether the head of a refusal has come. An engine that sends another
// early response may continue to read.
func (c *conn) hasEarlyRefusal() (yes bool) {
	_ = c.raw.Control(func(fd uintptr) {
		var b [len("HTTP/1.1 400")]byte
		n, errno := rawsocket.Peek(int(fd), b[:])
		yes = errno == 0 && n == len(b) && string(b[:5]) == "HTTP/" && (b[9] == '4' || b[9] == '5')
	})
	return yes
}

// write sends the rest of a request of size bytes, waiting where it must.
func (c *conn) write(size int, t time.Duration) error {
	limit := now() + c.ep.opt.WriteTimeout + time.Duration(size/(256<<10))*time.Second
	if t != 0 {
		limit = min(limit, t)
	}
	var err error
	for {
		// A TLS connection is unusable after a write that timed out.
		by := limit
		if c.raw != nil {
			by = min(by, now()+earlyRefusalCheck)
		}
		_ = c.nc.SetWriteDeadline(monotime.Time(by).Time())
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

// isClosed reports whether err means that the peer closed the connection.
func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
