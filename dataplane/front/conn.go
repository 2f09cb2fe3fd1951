package front

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
)

const (
	// writePiece is the most one write deadline covers, so that a large answer
	// to a slow but living client is not cut by the deadline of one flush.
	writePiece = 256 << 10
	// A connection closed with unread bytes is reset by the kernel, and the
	// client may lose the answer that told it why. So the rest is read away for
	// a moment before the close, within these bounds: bytes, time in all, time without
	// any.
	lingerBytes = 4 << 20
	lingerTime  = 2 * time.Second
	lingerIdle  = 500 * time.Millisecond
)

// conn is a client's connection, for the plain lane (see lane.go) and as fasthttp sees
// it. It puts a deadline on every write, counts itself in and out, and takes part in
// fasthttp's hand-over of a stream: fasthttp lets go of a hijacked connection on two
// goroutines (that of ServeConn, told by ConnState, and that of the hijack handler, told
// by Close), and only when both have the connection is ours. That makes it safe to give
// the same conn to ServeConn again, and lets fasthttp recycle the 16 KiB reader which it
// would drop if it were told to keep hijacked connections.
//
// Memory order: hand orders everything between Relay and the stream's start. input is marked
// before the socket is read, and loaded by a drain behind its look at the socket: bytes that
// it no longer finds there have been heard, see idle. The fields without atomics belong to
// whoever serves the connection: one goroutine at a time, or the loop that drives its
// stream. There are thousands, most of them with a stream: it just fills a size class of
// 240 bytes, and what it needs only while no loop drives one stands in its serving.
type conn struct {
	net.Conn
	*serving // while it is served, and until a loop has its stream; else nil
	srv      *Server
	secure   *tls.Conn       // Conn, where it is one; its bytes are not those of raw
	raw      syscall.RawConn // nil where there is no descriptor (tests in memory)
	ip       netip.Addr      // the client's, as far as the connection tells
	gone     watch

	early   early
	probing bool // Read must not touch the socket
	probe   [1]byte

	proxy   bool // the other end is a trusted proxy
	headed  bool // a PROXY header may come first, and has not been looked for
	spare   bool // of the reserve of descriptors: one page, and it is closed
	counted bool // ip, for connSet.leave

	due      due  // what the next deadline that fasthttp sets is for
	lingered bool // unread bytes may be left: close with care
	shaken   bool // the TLS handshake is done
	relaying bool // writes are a stream's, and persist

	active atomic.Bool // bytes of a request have come, its answer has not left, or is the last one
	input  input       // whether a head is being read, and whether one may be read here at all
	closed atomic.Bool
	hand   atomic.Int32
	place  int32   // in connSet.all, whose lock guards it
	fd     int32   // once its send buffer is bounded, else 0
	stream *stream // from Relay to its end

	open    openTo
	ended   ending
	writeBy moment // the deadline now set for writes; of a stream, until when they may last, 0 for ever
	readBy  moment // until when reads may wait, 0 for ever
	readSet moment // what the socket was told of it: no later than readBy, 0 for never
}

// due is what a wait is for whose deadline fasthttp sets.
type due uint8

const (
	dueOther due = iota // as it says
	dueHead             // a head
	dueIdle             // the next request
	dueBack             // likewise, but fasthttp takes the connection for a new one
)

// ending is what the Observer is told once the answer has been written.
type ending struct {
	endpoint *Endpoint
	status   int
	since    moment
}

// moment is a time since epoch; 0 for none. A connection has many.
type moment time.Duration

func momentOf(t time.Time) moment {
	if t.IsZero() {
		return 0
	}
	return moment(max(t.Sub(epoch), 1))
}

func (m moment) time() time.Time {
	if m == 0 {
		return time.Time{}
	}
	return epoch.Add(time.Duration(m))
}

// The states of a hand-over, as bits of conn.hand.
const (
	handPending  = 1 << iota // Relay was called
	handReleased             // the hijack handler's goroutine is done
	handHijacked             // the worker is done, the connection is hijacked
	handFailed               // the worker is done, the hijack did not happen

	handStart = handPending | handReleased | handHijacked
	handAbort = handPending | handReleased | handFailed
)

func (c *conn) Read(p []byte) (int, error) {
	if !c.countHead() {
		return 0, errHeadSpent
	}
	n, err := c.read(p)
	if n > 0 {
		c.early.took(p[:n])
		if !c.early.came { // what came too early is refused for that
			c.scan.see(p[:n])
		}
		switch {
		case c.scan.ended:
			c.uncountHead()
		case c.scan.begun && c.scan.reads < shortReads:
			c.scan.reads++
		}
	}
	if c.scan.bare && err == nil {
		err = errBareLF // what else comes is not waited for
	}
	return n, err
}

var (
	errBareLF    = errors.New("front: " + bareLF)
	errHeadSpent = errors.New("front: " + headMemory)
)

func (c *conn) read(p []byte) (int, error) {
	if c.probing {
		return 0, errProbe
	}
	a := &c.ahead
	if c.headed {
		if err := c.readHeader(); err != nil {
			c.readErr = err
			return 0, io.EOF // which ends the connection without an answer
		}
	}
	switch {
	case a.buf != nil:
		return a.take(p), nil
	case a.failed != nil:
		return 0, a.failed
	case c.secure != nil && !c.shaken:
		if err := c.handshake(); err != nil {
			c.readErr = err
			return 0, io.EOF // which ends the connection without an answer
		}
	}
	return c.receiveOn(p)
}

// receiveOn is receive until the real deadline; it notes what fails.
func (c *conn) receiveOn(p []byte) (int, error) {
	if c.pace != 0 {
		if err := c.awaitBody(c.pace); err != nil {
			return 0, err
		}
	}
	n, err := c.receive(p)
	for err != nil && !c.input.claimed() && c.tooEarly(err) {
		n, err = c.receive(p)
	}
	if err != nil && c.input.claimed() {
		return n, io.EOF // which ends a wait for the next request without an answer
	}
	if err != nil {
		c.readErr = err
	}
	return n, err
}

// readFailure says what made reading fail: RequestTimeout, ClientGone, or ""
// when the connection is well and what came was wrong. fasthttp hides the
// cause behind errors that do not unwrap.
func (c *conn) readFailure() Reason {
	switch {
	case c.readErr == nil:
		return ""
	case errors.Is(c.readErr, os.ErrDeadlineExceeded):
		return RequestTimeout
	}
	return ClientGone
}

// Write writes what fasthttp has of an answer.
func (c *conn) Write(p []byte) (int, error) {
	if c.early.asks {
		c.lookAhead()
		c.lingered = c.lingered || c.early.came
	}
	return c.writeOut(p)
}

// writeOut puts a deadline on every piece; moving the timer is put off while enough of
// the last deadline is left.
func (c *conn) writeOut(p []byte) (int, error) {
	limit := c.srv.live().WriteTimeout
	done := 0
	for {
		if now := time.Now(); c.writeBy < momentOf(now.Add(limit-limit/4)) {
			c.writeBy = momentOf(now.Add(limit))
			if err := c.Conn.SetWriteDeadline(now.Add(limit)); err != nil {
				return done, err
			}
		}
		piece := p[done:]
		if len(piece) > writePiece {
			piece = piece[:writePiece]
		}
		n, err := c.transmit(piece)
		done += n
		if err != nil {
			c.answerCut(err, limit)
		}
		if err != nil || done >= len(p) {
			return done, err
		}
	}
}

// answerCut tells of an answer that could not be written whole, as streams tell of theirs.
func (c *conn) answerCut(err error, limit time.Duration) {
	path, cause := "", relay.ClientGone
	if e := c.ended.endpoint; e != nil {
		path = e.Path
	}
	switch {
	case c.srv.cutting.Load():
		cause = relay.Drained
	case errors.Is(err, os.ErrDeadlineExceeded):
		cause = relay.ClientStalled
		c.srv.opt.Log.Warn("connection cut: the client does not take its answer", "client", c.ip, "endpoint", path, "cause", cause.String(), "after", limit)
	}
	if o := c.srv.opt.Observer; o != nil {
		o.AnswerCut(path, cause)
	}
}

// SetDeadline is called by fasthttp before a hijack, to clear both deadlines.
func (c *conn) SetDeadline(t time.Time) error {
	m := momentOf(t)
	c.writeBy, c.readBy, c.readSet = m, m, m
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline puts the times of now in the place of those that fasthttp was given at
// the start, and gives a connection that comes back from a stream the idle time: for
// fasthttp it is a new one, whose first byte is due within the time of a head.
//
// fasthttp moves the deadline three times a request, mostly to later ones. A socket
// that was told an earlier time is left alone: when that comes, tooEarly tells it the
// real one, once in a head's time instead of at each request. Not so under TLS, where
// a handshake that ran into a deadline can not go on.
func (c *conn) SetReadDeadline(t time.Time) error {
	if c.due != dueOther {
		first, live := &c.srv.opt, c.srv.live()
		switch c.due {
		case dueHead:
			t = t.Add(live.HeadTimeout - first.HeadTimeout)
		case dueIdle:
			t = t.Add(live.IdleTimeout - first.IdleTimeout)
		case dueBack:
			t = t.Add(live.IdleTimeout - first.HeadTimeout)
		}
		c.due = dueOther
	}
	if c.spare {
		if soon := time.Now().Add(spareTime); t.IsZero() || soon.Before(t) {
			t = soon
		}
	}
	c.readBy = momentOf(t)
	if c.secure == nil && c.readSet != 0 && (c.readBy == 0 || c.readBy >= c.readSet) {
		return nil
	}
	c.readSet = c.readBy
	return c.Conn.SetReadDeadline(t)
}

// awaitBody gives the next read of a body its time: until by, and no more than
// BodyIdleTimeout from now. For a plain connection that is nearly always a note for
// tooEarly, see SetReadDeadline. Under TLS it moves a timer, so it is done seldom there,
// and for a quarter of that time more.
func (c *conn) awaitBody(by moment) error {
	now, idle := momentOf(time.Now()), moment(c.srv.live().BodyIdleTimeout)
	if c.secure != nil {
		if c.readBy != 0 && c.readBy <= by && (c.readBy == by || c.readBy >= now+idle) && c.readBy <= now+idle+idle/4 {
			return nil
		}
		idle += idle / 4
	}
	return c.SetReadDeadline(min(by, now+idle).time())
}

// tooEarly says whether a read failed only because the socket was told an earlier
// deadline than the real one. It has been told that then, and is to be read again.
func (c *conn) tooEarly(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) || c.readSet == c.readBy || c.readBy != 0 && momentOf(time.Now()) >= c.readBy {
		return false
	}
	c.readSet = c.readBy
	return c.Conn.SetReadDeadline(c.readBy.time()) == nil
}

// Close ends the connection, or, during a hand-over, tells that fasthttp's
// hijack goroutine has let go of it.
func (c *conn) Close() error {
	if c.hand.Load()&handPending != 0 {
		c.letGo(handReleased)
		return nil
	}
	if c.passes() {
		return nil // connState sees to it
	}
	c.shut()
	return nil
}

func (c *conn) letGo(bit int32) {
	switch now := c.hand.Or(bit) | bit; now {
	case handStart:
		c.hand.Store(0)
		go func() {
			if c.srv.runStream(c, c.stream) {
				c.srv.serveConn(c)
			}
		}()
	case handAbort:
		c.hand.Store(0)
		c.srv.abortStream(c, c.stream)
	}
}

// shut closes the connection for good, once.
func (c *conn) shut() {
	if !c.closed.CompareAndSwap(false, true) {
		return
	}
	if c.serving != nil {
		_ = c.release()
	}
	if c.serving != nil {
		c.uncountHead()
	}
	if c.lingered && !c.srv.cutting.Load() {
		c.linger()
	}
	if c.serving != nil && c.ahead.buf != nil {
		c.ahead.drop()
	}
	c.srv.watch.remove(c)
	_ = c.Conn.Close()
	if c.spare {
		c.srv.scarce.spares.Add(-1)
	}
	c.srv.conns.remove(c)
}

// cut ends the connection at once, from any goroutine: to its handler the client
// has left. Whoever serves it fails and calls shut. The descriptor stays open until
// then: a loop may be writing to it, and its number must not become another's. One that
// another process may have by now is left alone: to shut it down would end it there.
func (c *conn) cut() {
	if c.input.claimed() {
		return
	}
	c.gone.leave()
	if c.raw != nil && c.raw.Control(shutBoth) == nil {
		return
	}
	if c.secure != nil {
		_ = c.secure.NetConn().Close() // a TLS close waits to say good-bye
		return
	}
	_ = c.Conn.Close()
}

// streamBuffer is what the kernel may keep of a stream for its client, beside what the
// relay holds: left to itself it takes megabytes for one that does not read. The kernel
// counts twice as much, and lets the last piece of 64 KiB go beyond: 256 KiB at the most.
const streamBuffer = 96 << 10

// bound sets that, and notes the descriptor, at the connection's first stream, long answer
// or second answer: short answers to many requests fill a socket as well.
func (c *conn) bound() {
	if c.fd != 0 || c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.fd = int32(fd)
		_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, streamBuffer)
	})
}

// boundFor bounds the send buffer for a whole answer of n bytes, where it is long or not the
// connection's first.
func (c *conn) boundFor(n int) {
	if n > unboundAnswer || c.hadAnswer {
		c.bound()
	}
	c.hadAnswer = true
}

// breakOff has the connection end by a reset, over TLS without a good-bye: its regular end
// would tell that half a body is a whole one (RFC 9112, 8).
func (c *conn) breakOff() {
	c.lingered = false
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) {
			_ = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
		})
	}
	if c.secure != nil {
		_ = c.secure.NetConn().Close()
	}
}

func shutBoth(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) }

func (c *conn) linger() {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	began := time.Now()
	sink := membudget.Default.Get(membudget.Page)
	defer membudget.Default.Put(sink)
	for left := lingerBytes; left > 0; {
		by := began.Add(lingerTime)
		if soon := time.Now().Add(lingerIdle); soon.Before(by) {
			by = soon
		}
		if c.Conn.SetReadDeadline(by) != nil {
			return
		}
		n, err := c.Conn.Read(sink.B)
		if left -= n; err != nil {
			return
		}
	}
}

// connState is fasthttp's hook for the state of a connection.
func connState(nc net.Conn, state fasthttp.ConnState) {
	c, ok := nc.(*conn)
	if !ok {
		return
	}
	switch state {
	case fasthttp.StateActive:
		c.active.Store(true)
		c.due = dueHead
		c.early.active()
		c.asks()
	case fasthttp.StateIdle:
		c.due = dueIdle
		c.early.idle()
		c.uncountHead()
		c.scan = headScan{}
		c.rests()
		c.reportEnd()
	case fasthttp.StateHijacked:
		c.letGo(handHijacked)
	case fasthttp.StateClosed:
		if c.hand.Load()&handPending != 0 {
			c.letGo(handFailed)
			return
		}
		c.reportEnd()
		if c.passes() {
			c.due = dueOther
			go c.srv.passOrServe(c)
		}
	}
}

func (c *conn) reportEnd() {
	e := &c.ended
	if e.endpoint == nil {
		return
	}
	if o := c.srv.opt.Observer; o != nil {
		o.Ended(e.endpoint.Path, e.status, time.Since(e.since.time()))
	}
	e.endpoint = nil
}
