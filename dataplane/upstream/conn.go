package upstream

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/sock"
)

// blockSize holds a request head with a small body, then the response head
// with a small body: nearly every JSON leg is one write and one read.
const blockSize = 16 << 10

type block struct {
	b      []byte      // blockSize, by itself: with fields it would not fill its size class
	fields []headField // room for those of the head in b, lent with it
}

// blocks are lent to a connection for one exchange; an idle connection, and a
// stream once its head was passed on, hold none.
var blocks = sync.Pool{New: func() any { return &block{b: make([]byte, blockSize)} }}

// smallHead is what a streaming connection keeps of its response head.
type smallHead [1 << 10]byte

var smallHeads = sync.Pool{New: func() any { return new(smallHead) }}

// link is what a conn needs of its connection: a net.Conn, or the *os.File that a
// descriptor is after a stream was lent (see Response.Lend).
type link interface {
	io.ReadWriteCloser
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// conn is one connection to an engine. It belongs to one goroutine at a time:
// the idle list hands it over under its lock. Only leg is seen by others.
type conn struct {
	leg
	lent         *leg // in the place of leg while fd is lent, a new one each time
	fd           int  // lent, else -1
	ep           *Endpoint
	raw          syscall.RawConn // nil for TLS
	grace        atomic.Int64    // until when (on the package's clock) the engine must not learn of the connection's end; 0: it may
	stepFunc     func(fd uintptr) bool
	peekFunc     func(fd uintptr)
	newer, older *conn // idle list
	idleSince    time.Duration
	made         time.Duration
	spread       float32 // see born

	dead bool // peek's answer
	one  [1]byte

	// buf is the exchange's buffer: request out, then response in. In it,
	// [0:w) has been received, [r:w) not yet consumed.
	buf   []byte
	blk   *block
	small *smallHead
	r, w  int

	// step's state: what to send, how it went.
	out      net.Buffers // what is left of vecSpare
	vecSpare [][]byte
	call     *Call
	sent     bool
	writeErr error
	readErr  error

	// armed is the read deadline set on the socket; it may be earlier than
	// the wanted one (see read).
	armed time.Duration

	head headParser
	resp Response
}

func newConn(e *Endpoint, nc net.Conn) *conn {
	c := &conn{ep: e, fd: -1}
	c.born()
	c.nc, c.leg.c = nc, c
	if t, ok := nc.(*net.TCPConn); ok {
		if raw, err := t.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	c.stepFunc, c.peekFunc = c.step, c.peek
	c.resp.c = c
	return c
}

// close ends the connection for good; only the owner calls it, once.
func (c *conn) close() {
	c.giveBuffers()
	kept := c.linger()
	if c.fd >= 0 {
		_ = syscall.Close(c.fd)
		c.fd = -1
	} else {
		abort(c.nc)
	}
	kept.start()
	c.ep.open.Add(-1)
}

func (c *conn) takeBlock() {
	if c.blk == nil {
		c.blk = blocks.Get().(*block)
	}
	if c.head.fields == nil {
		c.head.fields, c.blk.fields = c.blk.fields, nil
	}
	c.buf = c.blk.b
	c.r, c.w = 0, 0
}

func (c *conn) giveBuffers() {
	if c.blk != nil {
		c.blk.fields, c.head.fields = c.head.fields[:0], nil
		blocks.Put(c.blk)
		c.blk = nil
	}
	if c.small != nil {
		smallHeads.Put(c.small)
		c.small = nil
	}
	c.buf, c.out = nil, nil
	c.r, c.w = 0, 0
}

// shrink leaves only the head, in a small buffer, where it fits; called when
// everything behind the head was consumed and the rest goes around buf.
func (c *conn) shrink() {
	n := c.head.pos
	if c.blk == nil || n > len(smallHead{}) {
		return
	}
	c.small = smallHeads.Get().(*smallHead)
	copy(c.small[:], c.buf[:n])
	blocks.Put(c.blk)
	c.blk = nil
	c.buf = c.small[:]
	c.r, c.w = n, n
}

// grow makes room behind w, for a head beyond the block.
func (c *conn) grow() {
	bigger := make([]byte, 2*len(c.buf))
	copy(bigger, c.buf[:c.w])
	if c.blk != nil {
		blocks.Put(c.blk)
		c.blk = nil
	}
	c.buf = bigger
}

// until arms the socket's read deadline so that it fires no later than t
// (0: never). A socket already armed for an earlier time is left alone: when
// that fires, rearm tells a real time-out from a leftover one. Thus requests
// with the same long bound cost one timer update per bound, not per request.
func (c *conn) until(t time.Duration) {
	if t != 0 && (c.armed == 0 || c.armed > t) {
		c.setReadDeadline(t)
	}
}

// rearm is called after the socket's deadline fired; false when t has come.
func (c *conn) rearm(t time.Duration) bool {
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
	c.armed = t
	_ = c.nc.SetReadDeadline(at) // fails on a closed connection only: the read will say so
}

// read reads some bytes into p, until t.
func (c *conn) read(p []byte, t time.Duration) (int, error) {
	c.until(t)
	for {
		n, err := c.nc.Read(p)
		if n > 0 {
			return n, nil // TLS may add the error that follows; it will come again
		}
		if err == nil || !isTimeout(err) {
			return 0, err
		}
		if !c.rearm(t) {
			return 0, ErrTimeout
		}
	}
}

// exchange writes out and waits for the first bytes of the answer in one stay
// in the network poller: write(2), wait, read(2). The net package would try
// read(2) before it waits, a system call that always comes too early here.
//
// RawConn.Read forgets readiness signalled before it begins, then runs step
// until it says true, waiting for readiness in between. step's first run
// writes, so an answer can only be signalled after the forgetting; after a
// time-out and a second RawConn.Read, step tries to read first. An engine that
// closed the connection a moment before shows by the reset our write provokes.
func (c *conn) exchange(t time.Duration) {
	c.sent, c.writeErr, c.readErr = false, nil, nil
	c.until(t)
	for {
		err := c.raw.Read(c.stepFunc)
		if err == nil {
			return
		}
		if !isTimeout(err) {
			c.readErr = err
			return
		}
		if !c.rearm(t) {
			c.readErr = ErrTimeout
			return
		}
	}
}

func (c *conn) step(fd uintptr) bool {
	if !c.sent {
		c.sent = true
		n, errno := c.send(int(fd))
		consume(&c.out, n)
		if errno != 0 {
			if errno != syscall.EAGAIN {
				c.writeErr = os.NewSyscallError("sendto", errno)
			}
			return true
		}
		c.call.markSent()
		return false
	}
	n, errno := sock.Recv(int(fd), c.buf[c.w:])
	switch {
	case errno == syscall.EAGAIN:
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

func (c *conn) send(fd int) (int, syscall.Errno) {
	if len(c.out) == 1 {
		return sock.Send(fd, c.out[0])
	}
	return sock.SendVector(fd, c.out)
}

// forgetOut lets go of the request's body, which is borrowed until Do returns, and no
// longer.
func (c *conn) forgetOut() {
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

// write sends what is left in out, of a request of size bytes, and waits where it must.
func (c *conn) write(size int, t time.Duration) error {
	limit := now() + c.ep.opt.WriteTimeout + time.Duration(size/(256<<10))*time.Second
	if t != 0 {
		limit = min(limit, t)
	}
	_ = c.nc.SetWriteDeadline(epoch.Add(limit))
	var err error
	if _, ok := c.nc.(*os.File); ok && len(c.out) > 1 {
		err = writeVector(c.raw, &c.out)
	} else {
		_, err = c.out.WriteTo(c.nc)
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
