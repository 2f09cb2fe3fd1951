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
	// maxWriteChunk is the most one write deadline covers, so that a large answer
	// to a slow but living client is not cut by the deadline of one flush.
	maxWriteChunk = 256 << 10
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
	*connState  // while it is served, and until a loop has its stream; else nil
	srv         *Server
	tlsConn     *tls.Conn       // Conn, where it is one; its bytes are not those of raw
	raw         syscall.RawConn // nil where there is no descriptor (tests in memory)
	ip          netip.Addr      // the client's, as far as the connection tells
	clientWatch clientWatch

	pipelined pipelineDetector
	probing   bool // Read must not touch the socket
	probe     [1]byte

	fromProxy         bool // the other end is a trusted proxy
	expectProxyHeader bool // a PROXY header may come first, and has not been looked for
	usesReservedFD    bool // of the reserve of descriptors: one page, and it is closed
	ipCounted         bool // ip, for connSet.leave

	deadlineKind  deadlineKind // what the next deadline that fasthttp sets is for
	needsLinger   bool         // unread bytes may be left: close with care
	handshakeDone bool         // the TLS handshake is done
	relaying      bool         // writes are a stream's, and persist

	active      atomic.Bool // bytes of a request have come, its answer has not left, or is the last one
	readState   readState   // whether a head is being read, and whether one may be read here at all
	closed      atomic.Bool
	hijackState atomic.Int32
	index       int32   // in connSet.all, whose lock guards it
	fd          int32   // once its send buffer is bounded, else 0
	stream      *stream // from Relay to its end

	drainTarget        drainTarget
	response           responseInfo
	writeDeadline      monoTime // the deadline now set for writes; of a stream, until when they may last, 0 for ever
	readDeadline       monoTime // until when reads may wait, 0 for ever
	socketReadDeadline monoTime // what the socket was told of it: no later than readDeadline, 0 for never
}

// deadlineKind is what a wait is for whose deadline fasthttp sets.
type deadlineKind uint8

const (
	deadlineAsSet       deadlineKind = iota // as it says
	deadlineHead                            // a head
	deadlineIdle                            // the next request
	deadlineAfterStream                     // likewise, but fasthttp takes the connection for a new one
)

// responseInfo is what the Observer is told once the answer has been written.
type responseInfo struct {
	endpoint *Endpoint
	status   int
	since    monoTime
}

// monoTime is a time since epoch; 0 for none. A connection has many.
type monoTime time.Duration

func monoTimeOf(t time.Time) monoTime {
	if t.IsZero() {
		return 0
	}
	return monoTime(max(t.Sub(epoch), 1))
}

func (m monoTime) time() time.Time {
	if m == 0 {
		return time.Time{}
	}
	return epoch.Add(time.Duration(m))
}

// The states of a hand-over, as bits of conn.hand.
const (
	hijackPending  = 1 << iota // Relay was called
	hijackReleased             // the hijack handler's goroutine is done
	hijackDone                 // the worker is done, the connection is hijacked
	hijackFailed               // the worker is done, the hijack did not happen

	hijackStart = hijackPending | hijackReleased | hijackDone
	hijackAbort = hijackPending | hijackReleased | hijackFailed
)

func (c *conn) Read(p []byte) (int, error) {
	if !c.countHead() {
		return 0, errHeadSpent
	}
	n, err := c.read(p)
	if n > 0 {
		c.pipelined.onRead(p[:n])
		if !c.pipelined.found { // what came too early is refused for that
			c.scan.scan(p[:n])
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
	errBareLF    = errors.New("front: " + bareLFMessage)
	errHeadSpent = errors.New("front: " + headMemoryMessage)
)

func (c *conn) read(p []byte) (int, error) {
	if c.probing {
		return 0, errProbe
	}
	a := &c.readAhead
	if c.expectProxyHeader {
		if err := c.readProxyHeader(); err != nil {
			c.readErr = err
			return 0, io.EOF // which ends the connection without an answer
		}
	}
	switch {
	case a.buf != nil:
		return a.read(p), nil
	case a.readErr != nil:
		return 0, a.readErr
	case c.tlsConn != nil && !c.handshakeDone:
		if err := c.handshake(); err != nil {
			c.readErr = err
			return 0, io.EOF // which ends the connection without an answer
		}
	}
	return c.receiveUntilDeadline(p)
}

// receiveUntilDeadline is receive until the real deadline; it notes what fails.
func (c *conn) receiveUntilDeadline(p []byte) (int, error) {
	if c.chunkedDeadline != 0 {
		if err := c.setBodyReadDeadline(c.chunkedDeadline); err != nil {
			return 0, err
		}
	}
	n, err := c.receive(p)
	for err != nil && !c.readState.claimed() && c.retryRead(err) {
		n, err = c.receive(p)
	}
	if err != nil && c.readState.claimed() {
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
	if c.pipelined.responding {
		c.checkPipelined()
		c.needsLinger = c.needsLinger || c.pipelined.found
	}
	return c.writeAll(p)
}

// writeAll puts a deadline on every piece; moving the timer is put off while enough of
// the last deadline is left.
func (c *conn) writeAll(p []byte) (int, error) {
	limit := c.srv.options().WriteTimeout
	done := 0
	for {
		if now := time.Now(); c.writeDeadline < monoTimeOf(now.Add(limit-limit/4)) {
			c.writeDeadline = monoTimeOf(now.Add(limit))
			if err := c.Conn.SetWriteDeadline(now.Add(limit)); err != nil {
				return done, err
			}
		}
		piece := p[done:]
		if len(piece) > maxWriteChunk {
			piece = piece[:maxWriteChunk]
		}
		n, err := c.send(piece)
		done += n
		if err != nil {
			c.reportResponseCut(err, limit)
		}
		if err != nil || done >= len(p) {
			return done, err
		}
	}
}

// reportResponseCut tells of an answer that could not be written whole, as streams tell of theirs.
func (c *conn) reportResponseCut(err error, limit time.Duration) {
	path, cause := "", relay.ClientGone
	if e := c.response.endpoint; e != nil {
		path = e.Path
	}
	switch {
	case c.srv.drainExpired.Load():
		cause = relay.Drained
	case errors.Is(err, os.ErrDeadlineExceeded):
		cause = relay.ClientStalled
		c.srv.initial.Log.Warn("connection cut: the client does not take its answer", "client", c.ip, "endpoint", path, "cause", cause.String(), "after", limit)
	}
	if o := c.srv.initial.Observer; o != nil {
		o.ResponseCut(path, cause)
	}
}

// SetDeadline is called by fasthttp before a hijack, to clear both deadlines.
func (c *conn) SetDeadline(t time.Time) error {
	m := monoTimeOf(t)
	c.writeDeadline, c.readDeadline, c.socketReadDeadline = m, m, m
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline puts the times of now in the place of those that fasthttp was given at
// the start, and gives a connection that comes back from a stream the idle time: for
// fasthttp it is a new one, whose first byte is due within the time of a head.
//
// fasthttp moves the deadline three times a request, mostly to later ones. A socket
// that was told an earlier time is left alone: when that comes, retryRead tells it the
// real one, once in a head's time instead of at each request. Not so under TLS, where
// a handshake that ran into a deadline can not go on.
func (c *conn) SetReadDeadline(t time.Time) error {
	if c.deadlineKind != deadlineAsSet {
		first, live := &c.srv.initial, c.srv.options()
		switch c.deadlineKind {
		case deadlineHead:
			t = t.Add(live.HeadTimeout - first.HeadTimeout)
		case deadlineIdle:
			t = t.Add(live.IdleTimeout - first.IdleTimeout)
		case deadlineAfterStream:
			t = t.Add(live.IdleTimeout - first.HeadTimeout)
		}
		c.deadlineKind = deadlineAsSet
	}
	if c.usesReservedFD {
		if soon := time.Now().Add(reservedConnTimeout); t.IsZero() || soon.Before(t) {
			t = soon
		}
	}
	c.readDeadline = monoTimeOf(t)
	if c.tlsConn == nil && c.socketReadDeadline != 0 && (c.readDeadline == 0 || c.readDeadline >= c.socketReadDeadline) {
		return nil
	}
	c.socketReadDeadline = c.readDeadline
	return c.Conn.SetReadDeadline(t)
}

// setBodyReadDeadline gives the next read of a body its time: until by, and no more than
// BodyIdleTimeout from now. For a plain connection that is nearly always a note for
// retryRead, see SetReadDeadline. Under TLS it moves a timer, so it is done seldom there,
// and for a quarter of that time more.
func (c *conn) setBodyReadDeadline(deadline monoTime) error {
	now, idle := monoTimeOf(time.Now()), monoTime(c.srv.options().BodyIdleTimeout)
	if c.tlsConn != nil {
		if c.readDeadline != 0 && c.readDeadline <= deadline && (c.readDeadline == deadline || c.readDeadline >= now+idle) && c.readDeadline <= now+idle+idle/4 {
			return nil
		}
		idle += idle / 4
	}
	return c.SetReadDeadline(min(deadline, now+idle).time())
}

// retryRead says whether a read failed only because the socket was told an earlier
// deadline than the real one. It has been told that then, and is to be read again.
func (c *conn) retryRead(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) || c.socketReadDeadline == c.readDeadline || c.readDeadline != 0 && monoTimeOf(time.Now()) >= c.readDeadline {
		return false
	}
	c.socketReadDeadline = c.readDeadline
	return c.Conn.SetReadDeadline(c.readDeadline.time()) == nil
}

// Close ends the connection, or, during a hand-over, tells that fasthttp's
// hijack goroutine has let go of it.
func (c *conn) Close() error {
	if c.hijackState.Load()&hijackPending != 0 {
		c.hijackStep(hijackReleased)
		return nil
	}
	if c.handingOff() {
		return nil // onConnState sees to it
	}
	c.closeOnce()
	return nil
}

func (c *conn) hijackStep(bit int32) {
	switch now := c.hijackState.Or(bit) | bit; now {
	case hijackStart:
		c.hijackState.Store(0)
		go func() {
			if c.srv.runStream(c, c.stream) {
				c.srv.serveConn(c)
			}
		}()
	case hijackAbort:
		c.hijackState.Store(0)
		c.srv.abortStream(c, c.stream)
	}
}

// closeOnce closes the connection for good, once.
func (c *conn) closeOnce() {
	if !c.closed.CompareAndSwap(false, true) {
		return
	}
	if c.connState != nil {
		_ = c.flushPending()
	}
	if c.connState != nil {
		c.uncountHead()
	}
	if c.needsLinger && !c.srv.drainExpired.Load() {
		c.linger()
	}
	if c.connState != nil && c.readAhead.buf != nil {
		c.readAhead.release()
	}
	c.srv.clientWatcher.freeSlot(c)
	_ = c.Conn.Close()
	if c.usesReservedFD {
		c.srv.fdStats.reservedConns.Add(-1)
	}
	c.srv.conns.remove(c)
}

// shutdown ends the connection at once, from any goroutine: to its handler the client
// has left. Whoever serves it fails and calls shut. The descriptor stays open until
// then: a loop may be writing to it, and its number must not become another's. One that
// another process may have by now is left alone: to shut it down would end it there.
func (c *conn) shutdown() {
	if c.readState.claimed() {
		return
	}
	c.clientWatch.markGone()
	if c.raw != nil && c.raw.Control(shutdownFD) == nil {
		return
	}
	if c.tlsConn != nil {
		_ = c.tlsConn.NetConn().Close() // a TLS close waits to say good-bye
		return
	}
	_ = c.Conn.Close()
}

// streamSendBuffer is what the kernel may keep of a stream for its client, beside what the
// relay holds: left to itself it takes megabytes for one that does not read. The kernel
// counts twice as much, and lets the last piece of 64 KiB go beyond: 256 KiB at the most.
const streamSendBuffer = 96 << 10

// boundSendBuffer sets that, and notes the descriptor, at the connection's first stream, long answer
// or second answer: short answers to many requests fill a socket as well.
func (c *conn) boundSendBuffer() {
	if c.fd != 0 || c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.fd = int32(fd)
		_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, streamSendBuffer)
	})
}

// boundFor bounds the send buffer for a whole answer of n bytes, where it is long or not the
// connection's first.
func (c *conn) boundFor(n int) {
	if n > unboundedResponse || c.hadResponse {
		c.boundSendBuffer()
	}
	c.hadResponse = true
}

// resetOnClose has the connection end by a reset, over TLS without a good-bye: its regular end
// would tell that half a body is a whole one (RFC 9112, 8).
func (c *conn) resetOnClose() {
	c.needsLinger = false
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) {
			_ = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
		})
	}
	if c.tlsConn != nil {
		_ = c.tlsConn.NetConn().Close()
	}
}

func shutdownFD(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) }

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

// onConnState is fasthttp's hook for the state of a connection.
func onConnState(nc net.Conn, state fasthttp.ConnState) {
	c, ok := nc.(*conn)
	if !ok {
		return
	}
	switch state {
	case fasthttp.StateActive:
		c.active.Store(true)
		c.deadlineKind = deadlineHead
		c.pipelined.onRequest()
		c.markIncompleteRequest()
	case fasthttp.StateIdle:
		c.deadlineKind = deadlineIdle
		c.pipelined.onIdle()
		c.uncountHead()
		c.scan = bareLFScanner{}
		c.markIdle()
		c.reportResponseEnded()
	case fasthttp.StateHijacked:
		c.hijackStep(hijackDone)
	case fasthttp.StateClosed:
		if c.hijackState.Load()&hijackPending != 0 {
			c.hijackStep(hijackFailed)
			return
		}
		c.reportResponseEnded()
		if c.handingOff() {
			c.deadlineKind = deadlineAsSet
			go c.srv.handOffOrServe(c)
		}
	}
}

func (c *conn) reportResponseEnded() {
	e := &c.response
	if e.endpoint == nil {
		return
	}
	if o := c.srv.initial.Observer; o != nil {
		o.ResponseEnded(e.endpoint.Path, e.status, time.Since(e.since.time()))
	}
	e.endpoint = nil
}
