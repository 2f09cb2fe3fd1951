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

	"sluice/dataplane/clientwatch"
	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/relay"
)

const (
	// maxWriteChunk is the most bytes under one write deadline, so that a large response to a
	// slow client is not cut by the deadline of one flush.
	maxWriteChunk = 256 << 10
	// The kernel resets a connection that is closed with unread bytes, and the client may
	// lose the response. Therefore the server discards input before the close, within these
	// bounds: bytes, total time, time without input.
	lingerBytes = 4 << 20
	lingerTime  = 2 * time.Second
	lingerIdle  = 500 * time.Millisecond
)

// conn is a client's connection, on the fast path (fastpath.go) and for fasthttp. It sets a
// deadline for every write, is counted in connSet, and takes part in fasthttp's hijack of a
// stream. fasthttp releases a hijacked connection on two goroutines: that of ServeConn,
// reported by ConnState, and that of the hijack handler, reported by Close. Only after both
// does the server own the connection. This makes it safe to pass the same conn to ServeConn
// again, and lets fasthttp reuse its 16 KiB reader, which it would discard if it kept
// hijacked connections.
//
// Memory order: hijackState orders everything between Relay and the stream's start. readState is
// set before the socket is read, and a drain loads it after it has examined the socket: bytes
// that the drain no longer finds there have been recorded, see idle. Fields without atomics
// belong to the goroutine that serves the connection, or to the event loop that drives its
// stream. There are thousands of conns, most with a stream: a conn fits a size class of 240
// bytes exactly, and connState has what it needs only while no event loop drives it.
type conn struct {
	net.Conn
	*connState  // while it is served, and until a loop drives its stream; else nil
	srv         *Server
	tlsConn     *tls.Conn       // Conn with TLS, else nil; raw has its encrypted bytes
	raw         syscall.RawConn // nil: there is no descriptor (tests in memory)
	ip          netip.Addr      // the client's, as far as the connection shows
	clientWatch clientwatch.Watch

	pipelined pipelineDetector
	probing   bool // Read must not touch the socket
	probe     [1]byte

	fromProxy         bool // the peer is a trusted proxy
	expectProxyHeader bool // a PROXY header may come first and has not been read
	usesReservedFD    bool // its descriptor is reserved: it gets one page and is closed
	ipCounted         bool // ip is counted in connSet

	deadlineKind  deadlineKind // purpose of the next deadline that fasthttp sets
	needsLinger   bool         // there may be unread bytes: linger before the close
	handshakeDone bool         // the TLS handshake is done
	relaying      bool         // writes are a stream's and wait for a slow client

	active      atomic.Bool // a request has begun and its response is not written, or the response is the last one
	readState   readState   // whether a head is being read, and whether this process may read one
	closed      atomic.Bool
	hijackState atomic.Int32
	index       int32   // in connSet.conns, whose lock guards it
	fd          int32   // once its send buffer is bounded, else 0
	stream      *stream // from Relay to its end

	drainTarget        drainTarget
	response           responseInfo
	writeDeadline      monotime.Time // of writes; for a stream their last time; 0: none
	readDeadline       monotime.Time // of reads; 0: none
	socketReadDeadline monotime.Time // set on the socket, no later than readDeadline; 0: none
}

// deadlineKind is the purpose of a deadline that fasthttp sets.
type deadlineKind uint8

const (
	deadlineAsSet       deadlineKind = iota // use it unchanged
	deadlineHead                            // waiting for a head
	deadlineIdle                            // waiting for the next request
	deadlineAfterStream                     // likewise after a stream, when fasthttp sees a new connection
)

// responseInfo is what the Observer gets when the response has been written.
type responseInfo struct {
	endpoint *Endpoint
	status   int
	since    monotime.Time
}

// monoTimeOf returns t in the form in which connections keep times; the zero time is 0, for none.
func monoTimeOf(t time.Time) monotime.Time {
	if t.IsZero() {
		return 0
	}
	return max(monotime.Of(t), 1)
}

// The states of a hijack, as bits of conn.hijackState.
const (
	hijackPending  = 1 << iota // Relay was called
	hijackReleased             // the hijack handler's goroutine has ended
	hijackDone                 // ServeConn has ended with a hijacked connection
	hijackFailed               // ServeConn has ended without a hijack

	hijackStart = hijackPending | hijackReleased | hijackDone
	hijackAbort = hijackPending | hijackReleased | hijackFailed
)

// Read implements net.Conn for fasthttp's server and looks for pipelined requests and the end of the
// head in what was read.
func (c *conn) Read(p []byte) (int, error) {
	if !c.countHead() {
		return 0, errHeadSpent
	}
	n, err := c.read(p)
	if n > 0 {
		c.pipelined.onRead(p[:n])
		if !c.pipelined.found { // pipelined bytes are refused anyway
			c.scan.Scan(p[:n])
		}
		switch {
		case c.scan.Ended:
			c.uncountHead()
		case c.scan.Begun && c.headBudget.reads < shortReads:
			c.headBudget.reads++
		}
	}
	if c.scan.Bare && err == nil {
		err = errBareEnd // do not wait for more
	}
	return n, err
}

var (
	errBareEnd   = errors.New("front: " + http1.BareEndMessage)
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

// receiveUntilDeadline is receive until readDeadline. It records an error in readErr.
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
		return n, io.EOF // which ends a wait for the next request without a response
	}
	if err != nil {
		c.readErr = err
	}
	return n, err
}

// readFailure returns why reading failed: RequestTimeout, ClientGone, or "" if the connection
// works and the input was malformed. fasthttp hides the cause behind errors that do not
// unwrap.
func (c *conn) readFailure() Reason {
	switch {
	case c.readErr == nil:
		return ""
	case errors.Is(c.readErr, os.ErrDeadlineExceeded):
		return RequestTimeout
	}
	return ClientGone
}

// Write writes bytes of a response for fasthttp.
func (c *conn) Write(p []byte) (int, error) {
	if c.pipelined.responding {
		c.checkPipelined()
		c.needsLinger = c.needsLinger || c.pipelined.found
	}
	return c.writeAll(p)
}

// writeAll writes p in pieces with a deadline for each. It does not move the timer while three
// quarters of the last deadline remain.
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
			c.reportIncomplete(err, limit)
		}
		if err != nil || done >= len(p) {
			return done, err
		}
	}
}

// reportIncomplete reports a response that could not be written completely.
func (c *conn) reportIncomplete(err error, limit time.Duration) {
	path, cause := "", relay.ClientGone
	if e := c.response.endpoint; e != nil {
		path = e.Path
	}
	switch {
	case c.srv.drainExpired.Load():
		cause = relay.Drained
	case errors.Is(err, os.ErrDeadlineExceeded):
		cause = relay.ClientStalled
		c.srv.initial.Log.Warn("connection closed: the client does not read its response", "client", c.ip, "endpoint", path, "cause", cause.String(), "duration", limit)
	}
	if o := c.srv.initial.Observer; o != nil {
		o.ResponseIncomplete(path, cause)
	}
}

// SetDeadline is called by fasthttp before a hijack, to clear both deadlines.
func (c *conn) SetDeadline(t time.Time) error {
	m := monoTimeOf(t)
	c.writeDeadline, c.readDeadline, c.socketReadDeadline = m, m, m
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline replaces the timeouts that fasthttp got at the start by the current ones. A
// connection after a stream gets the idle timeout: for fasthttp it is a new connection,
// whose first byte is due within the head timeout.
//
// fasthttp moves the deadline three times a request, mostly to a later time. If the socket has
// an earlier deadline it is not changed: when it expires, retryRead sets the real one, once
// per head timeout instead of at each request. With TLS the deadline is always set, because
// a handshake that hits a deadline cannot continue.
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

// setBodyReadDeadline sets the deadline of the next read of a body: deadline, but at most
// BodyIdleTimeout from now. Without TLS this nearly always only changes readDeadline, see
// SetReadDeadline. With TLS it moves a timer, so it is done rarely and with a quarter of
// BodyIdleTimeout more.
func (c *conn) setBodyReadDeadline(deadline monotime.Time) error {
	now, idle := monoTimeOf(time.Now()), monotime.Time(c.srv.options().BodyIdleTimeout)
	if c.tlsConn != nil {
		if c.readDeadline != 0 && c.readDeadline <= deadline && (c.readDeadline == deadline || c.readDeadline >= now+idle) && c.readDeadline <= now+idle+idle/4 {
			return nil
		}
		idle += idle / 4
	}
	return c.SetReadDeadline(min(deadline, now+idle).Time())
}

// retryRead reports whether a read failed only because the socket's deadline was earlier than
// readDeadline. It has then set readDeadline on the socket, and the caller must read again.
func (c *conn) retryRead(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) || c.socketReadDeadline == c.readDeadline || c.readDeadline != 0 && monoTimeOf(time.Now()) >= c.readDeadline {
		return false
	}
	c.socketReadDeadline = c.readDeadline
	return c.Conn.SetReadDeadline(c.readDeadline.Time()) == nil
}

// Close closes the connection. During a hijack it only records that fasthttp's hijack goroutine
// has released it.
func (c *conn) Close() error {
	if c.hijackState.Load()&hijackPending != 0 {
		c.hijackStep(hijackReleased)
		return nil
	}
	if c.isBeingPassed() {
		return nil // onConnState passes it to the successor
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

// closeOnce closes the connection. Further calls do nothing.
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
	c.srv.clientWatcher.Forget(&c.clientWatch)
	_ = c.Conn.Close()
	if c.usesReservedFD {
		c.srv.fdStats.reservedConns.Add(-1)
	}
	c.srv.conns.remove(c)
}

// shutdown ends the connection at once, from any goroutine. Its Handler sees a disconnected
// client. The goroutine that serves it gets an error and calls closeOnce. The descriptor stays
// open until then, because an event loop may be writing to it and its number must not be
// reused. A connection that another process may own is not touched, because a shutdown would
// end it there.
func (c *conn) shutdown() {
	if c.readState.claimed() {
		return
	}
	c.clientWatch.MarkGone()
	if c.raw != nil && c.raw.Control(shutdownFD) == nil {
		return
	}
	if c.tlsConn != nil {
		_ = c.tlsConn.NetConn().Close() // a TLS close would wait to send its alert
		return
	}
	_ = c.Conn.Close()
}

// streamSendBuffer is the size of the kernel's send buffer for a stream. By default the kernel
// takes megabytes for a client that does not read. The kernel counts twice this size and lets
// the last piece of 64 KiB exceed it: at most 256 KiB.
const streamSendBuffer = 96 << 10

// boundSendBuffer bounds the send buffer and records the descriptor. It is called at the
// connection's first stream, long response or second response: short responses to many
// requests fill a socket as well.
func (c *conn) boundSendBuffer() {
	if c.fd != 0 || c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) {
		c.fd = int32(fd)
		_ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, streamSendBuffer)
	})
}

// boundFor bounds the send buffer for a non-streaming response of n bytes, if it is long or not
// the connection's first.
func (c *conn) boundFor(n int) {
	if n > unboundedResponse || c.hadResponse {
		c.boundSendBuffer()
	}
	c.hadResponse = true
}

// resetOnClose makes the connection end by a reset, with TLS without an alert: a regular end
// would mark a truncated body as complete (RFC 9112, 8).
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

// onConnState is fasthttp's ConnState hook.
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
		c.scan, c.headBudget = http1.BareEndScanner{}, headBudget{}
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
		if c.isBeingPassed() {
			c.deadlineKind = deadlineAsSet
			go c.srv.passOrServe(c)
		}
	}
}

func (c *conn) reportResponseEnded() {
	e := &c.response
	if e.endpoint == nil {
		return
	}
	if o := c.srv.initial.Observer; o != nil {
		o.ResponseEnded(e.endpoint.Path, e.status, e.since.Since())
	}
	e.endpoint = nil
}
