package wire

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"runtime/debug"
	"sync/atomic"
	"time"

	"sluice/dataplane/membudget"
)

// maxInlineFrame bounds a client's frames other than REQUEST, in bytes.
const maxInlineFrame = 4 << 10

// maxWindow bounds the credit of a stream, in bytes.
const maxWindow = 1 << 30

// Conn is one connection at the server. One goroutine reads its frames: that of an event loop, or
// the connection's own. Fields without a comment belong to it.
type Conn struct {
	srv          *Server
	out          outbox
	peer         netip.Addr
	unix         bool        // accepted on a unix socket
	agent        string      // set by HELLO, before the first stream
	key          []byte      // set by HELLO, before the first stream
	open         atomic.Bool // HELLO has been received
	window       int64
	lastStreamID uint32 // highest stream id so far

	pendingHeader header // a REQUEST whose payload is incomplete
	pendingLen    int
	pendingLease  membudget.Lease
	skip          int // bytes left of a payload that is skipped

	streams map[uint32]*Stream // guarded by out.mu
	serving atomic.Int64       // running handlers; more than streams after kills

	// By the server's process clock.
	opened          time.Duration
	lastReceived    atomic.Int64  // when bytes last came
	payloadDeadline atomic.Int64  // deadline of the incomplete payload; 0: there is none
	pingSent        time.Duration // when a PING was last sent; used by tick
}

func newConn(srv *Server, l transport, remote net.Addr) *Conn {
	c := &Conn{srv: srv, peer: peerOf(remote), unix: remote.Network() == "unix", streams: make(map[uint32]*Stream), opened: srv.clock.now()}
	c.out.transport, c.out.maxPending = l, srv.opt.QueueBytes
	c.lastReceived.Store(int64(c.opened))
	return c
}

// feed handles the frames in p and returns how many bytes it consumed. The rest is the beginning of
// a small frame, and is passed again with more bytes. An error is sent to the peer before the
// connection is closed.
func (c *Conn) feed(p []byte) (consumed int, bad *Error) {
	c.lastReceived.Store(int64(c.srv.clock.now()))
	for {
		rest := p[consumed:]
		switch {
		case c.skip > 0:
			n := min(c.skip, len(rest))
			c.skip -= n
			consumed += n
			if c.skip > 0 {
				return consumed, nil
			}
			continue
		case c.pendingHeader.kind != 0:
			n := copy(c.pendingLease.Bytes()[c.pendingLen:c.pendingHeader.size], rest)
			c.pendingLen += n
			consumed += n
			if c.pendingLen < c.pendingHeader.size {
				return consumed, nil
			}
			c.startStream()
			continue
		}
		h, ok := readHeader(rest)
		if !ok {
			return consumed, nil
		}
		if bad := c.handleHeader(h); bad != nil {
			return consumed, bad
		}
		if h.kind == Request {
			consumed += headerSize
			if bad := c.beginRequest(h); bad != nil {
				return consumed, bad
			}
			continue
		}
		if len(rest) < headerSize+h.size {
			return consumed, nil
		}
		consumed += headerSize + h.size
		if bad := c.handleFrame(h, rest[headerSize:headerSize+h.size]); bad != nil {
			return consumed, bad
		}
	}
}

// handleHeader checks the header of a frame.
func (c *Conn) handleHeader(h header) *Error {
	if !c.open.Load() {
		if h.kind != Hello {
			return &Error{CodeProtocol, fmt.Sprintf("the first frame is %s; want HELLO", h.kind)}
		}
		if h.size > maxHello {
			return &Error{CodeTooLarge, fmt.Sprintf("HELLO has %d bytes; want at most %d", h.size, maxHello)}
		}
	}
	maxFrame := maxInlineFrame
	if h.kind == Request {
		maxFrame = c.srv.opt.MaxFrame
	}
	if h.size > maxFrame {
		return &Error{CodeTooLarge, fmt.Sprintf("%s has %d bytes; want at most %d", h.kind, h.size, maxFrame)}
	}
	switch h.kind {
	case Hello, Ping, Pong, Fail:
		if h.stream != 0 {
			return &Error{CodeProtocol, fmt.Sprintf("%s on stream %d; want 0", h.kind, h.stream)}
		}
	case Request, Credit, Stop, Kill:
		if h.stream == 0 {
			return &Error{CodeProtocol, h.kind.String() + " on stream 0; want the id of a stream, 1 or greater"}
		}
	default:
		return &Error{CodeProtocol, "a client must not send " + h.kind.String()}
	}
	return nil
}

// handleFrame handles a frame that is not a REQUEST.
func (c *Conn) handleFrame(h header, payload []byte) *Error {
	switch h.kind {
	case Hello:
		return c.handleHello(payload)
	case Ping:
		if h.size > maxPing {
			return &Error{CodeProtocol, fmt.Sprintf("PING has %d bytes; want at most %d", h.size, maxPing)}
		}
		if !c.out.postFrame(Pong, 0, payload) {
			return errFlood
		}
	case Fail:
		return &Error{Code: "", Message: "the client sent ERROR"}
	case Credit:
		if h.size != 4 {
			return &Error{CodeProtocol, fmt.Sprintf("CREDIT has %d bytes; want 4", h.size)}
		}
		return c.addCredit(h.stream, int64(binary.BigEndian.Uint32(payload)))
	case Stop, Kill:
		s := c.stream(h.stream)
		switch {
		case s == nil: // the stream has just ended
		case h.kind == Stop:
			s.stop()
		default:
			s.kill(ErrKilled)
			s.finish(&Error{CodeKilled, "the caller sent KILL"}, ErrKilled)
		}
	}
	return nil
}

func (c *Conn) stream(id uint32) *Stream {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	return c.streams[id]
}

// addCredit adds credit to a stream. Credit for a stream that has ended is valid; for one that was
// never opened it is an error.
func (c *Conn) addCredit(id uint32, n int64) *Error {
	if id > c.lastStreamID {
		return &Error{CodeProtocol, fmt.Sprintf("CREDIT for stream %d, which was never opened; the last opened is %d", id, c.lastStreamID)}
	}
	if n > maxWindow { // also if the stream has just ended
		return &Error{CodeProtocol, fmt.Sprintf("CREDIT of %d bytes for stream %d; want at most %d", n, id, maxWindow)}
	}
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	s := c.streams[id]
	if s == nil {
		return nil
	}
	if s.credit += n; s.credit > maxWindow {
		return &Error{CodeProtocol, fmt.Sprintf("stream %d has a credit of %d bytes with this CREDIT; want at most %d", id, s.credit, maxWindow)}
	}
	s.signal()
	return nil
}

func (c *Conn) handleHello(payload []byte) *Error {
	if c.open.Load() {
		return &Error{CodeProtocol, "HELLO was sent twice; want it once, as the first frame"}
	}
	var g greeting
	if err := g.read(payload); err != nil {
		return &Error{CodeProtocol, "HELLO: " + err.Error()}
	}
	switch {
	case g.protocol != protocolName:
		return &Error{CodeProtocol, fmt.Sprintf("HELLO: protocol %.40q; want %q", g.protocol, protocolName)}
	case g.version < Version || g.oldest > Version:
		return &Error{CodeVersion, fmt.Sprintf("HELLO: versions %d to %d; this router supports version %d", max(g.oldest, 1), g.version, Version)}
	case !sameToken(g.token, c.srv.opt.Token):
		return &Error{CodeUnauthorize, "HELLO: the token is missing or wrong; want the router's engine_api.token"}
	case g.window == 0 || g.window > maxWindow:
		return &Error{CodeProtocol, fmt.Sprintf("HELLO: window %d; want 1 to %d bytes", g.window, maxWindow)}
	case len(g.agent) > 128:
		return &Error{CodeProtocol, "HELLO: agent has more than 128 bytes"}
	}
	o := &c.srv.opt
	if o.Admit != nil {
		if bad := o.Admit([]byte(g.key), c.unix); bad != nil {
			return bad
		}
	}
	c.window, c.agent, c.key = int64(g.window), g.agent, []byte(g.key)
	c.open.Store(true)
	welcome := greeting{protocol: protocolName, version: Version, agent: o.Agent, maxFrame: uint64(o.MaxFrame), maxStreams: uint64(o.MaxStreams), heartbeatMS: uint64(o.Heartbeat.Milliseconds())}
	c.out.postFrame(Welcome, 0, welcome.append(nil))
	if c.srv.draining.Load() {
		c.out.postFrame(Goaway, 0, drainingError)
	}
	return nil
}

var drainingError = appendError(nil, &Error{CodeDraining, "the router is shutting down"})

// sameToken compares tokens, including their lengths, in constant time by comparing digests.
func sameToken(got, want string) bool {
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1 || want == ""
}

// beginRequest allocates memory for a request's payload. A request that cannot be accepted is
// rejected by an END, and its payload skipped.
func (c *Conn) beginRequest(h header) *Error {
	if h.stream <= c.lastStreamID {
		return &Error{CodeProtocol, fmt.Sprintf("REQUEST on stream %d after stream %d; want increasing ids", h.stream, c.lastStreamID)}
	}
	c.lastStreamID = h.stream
	var refused *Error
	c.out.mu.Lock()
	live, flooded := len(c.streams), c.out.overOwnLimit()
	c.out.mu.Unlock()
	switch {
	case flooded:
		return errFlood
	case c.srv.draining.Load():
		refused = &Error{CodeDraining, "the router is shutting down"}
	case live >= c.srv.opt.MaxStreams || c.serving.Load() >= int64(2*c.srv.opt.MaxStreams):
		// The second limit is for a client that opens and kills streams in turn.
		refused = &Error{CodeStreams, fmt.Sprintf("too many streams on this connection: %d are open, the limit is %d (engine_api.max_streams); try again, or open another connection", live, c.srv.opt.MaxStreams)}
	default:
		var ok bool
		if c.pendingLease, ok = membudget.Default.Lease(c.srv.budget, max(h.size, 1)); !ok {
			refused = &Error{CodeMemory, "the memory budget for requests is exhausted (limits.memory_budget); try again later"}
		}
	}
	if refused != nil {
		c.srv.refused.Add(1)
		c.skip = h.size
		if !c.out.postFrame(End, h.stream, appendError(nil, refused)) {
			return errFlood
		}
		return nil
	}
	c.pendingHeader, c.pendingLen = h, 0
	if h.size == 0 {
		c.startStream()
		return nil
	}
	limit := c.srv.opt.ReadTimeout + time.Duration(h.size)*time.Second/minPayloadRate
	c.payloadDeadline.Store(int64(c.srv.clock.now() + limit))
	return nil
}

// minPayloadRate is the rate in bytes per second at which a payload must come after the first
// ReadTimeout.
const minPayloadRate = 256 << 10

// errFlood closes a connection whose client sends requests but reads nothing.
var errFlood = &Error{CodeStalled, "the client sends frames but does not read the answers to them"}

// startStream starts the stream whose payload is complete.
func (c *Conn) startStream() {
	s := &Stream{ID: c.pendingHeader.stream, conn: c, lease: c.pendingLease, credit: c.window}
	s.Payload = s.lease.Bytes()[:c.pendingHeader.size]
	c.pendingHeader, c.pendingLease = header{}, membudget.Lease{}
	c.payloadDeadline.Store(0)
	c.out.mu.Lock()
	if c.out.closed {
		c.out.mu.Unlock()
		s.lease.Release()
		return
	}
	c.streams[s.ID] = s
	c.out.streams.Add(1)
	c.out.mu.Unlock()
	c.srv.live.Add(1)
	c.serving.Add(1)
	go c.runHandler(s)
}

// runHandler runs the handler.
func (c *Conn) runHandler(s *Stream) {
	defer func() {
		if v := recover(); v != nil {
			c.srv.opt.Log.Error("panic while serving a stream", "panic", v, "stack", string(debug.Stack()))
			s.End(&Error{CodeInternal, "the router failed on this request"})
		}
		s.End(nil)
		s.Payload = nil
		s.lease.Release()
		c.serving.Add(-1)
		c.srv.live.Add(-1)
	}()
	c.srv.opt.Handler.ServeStream(s)
}

// tick is called at every tick of the server's clock. It keeps the connection alive, or returns why
// it must be closed.
func (c *Conn) tick(now time.Duration) *Error {
	beat, step := c.srv.opt.Heartbeat, c.srv.clock.step
	quiet, by := now-time.Duration(c.lastReceived.Load()), time.Duration(c.payloadDeadline.Load())
	switch { // times are rounded up by a tick, in the peer's favour
	case !c.open.Load() && now-c.opened > c.srv.opt.HelloTimeout+step:
		return &Error{CodeProtocol, "no HELLO within " + c.srv.opt.HelloTimeout.String()}
	case by != 0 && now > by+step:
		return &Error{CodeProtocol, "a REQUEST was not complete after " + c.srv.opt.ReadTimeout.String() + " and one second for each 256 KiB"}
	case quiet > 3*beat+step:
		return &Error{CodeHeartbeat, fmt.Sprintf("no frame was received for %s", quiet.Round(time.Millisecond))}
	case quiet > beat && now-c.pingSent > beat:
		c.pingSent = now
		c.out.postFrame(Ping, 0, nil)
	}
	return nil
}

// endStreams ends every stream of a closed connection. The reader calls it once.
func (c *Conn) endStreams(err error) {
	if err == nil {
		err = errClosed
	}
	c.out.close(err)
	c.out.mu.Lock()
	all := make([]*Stream, 0, len(c.streams))
	for _, s := range c.streams {
		all = append(all, s)
	}
	clear(c.streams)
	c.out.mu.Unlock()
	for _, s := range all {
		s.kill(ErrConnClosed)
	}
	c.pendingLease.Release()
	c.pendingHeader = header{}
	c.lastStreamID = math.MaxUint32
}

// errorFrame returns the ERROR frame for bad; nil if there is nothing to send.
func errorFrame(bad *Error) []byte {
	if bad.Code == "" {
		return nil
	}
	return appendFrame(nil, Fail, 0, appendError(nil, bad))
}
