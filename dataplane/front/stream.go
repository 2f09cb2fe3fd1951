package front

import (
	"fmt"
	"net"
	"net/netip"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/objpool"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// joinBytes is the most of a first write that is copied behind the head, to
// leave in one packet with it.
const joinBytes = 16 << 10

// stream is an answer that was handed to Relay. There are thousands: it just fills a
// size class of 160 bytes.
type stream struct {
	id           string
	resp         *upstream.Response
	call         *upstream.Call
	handler      StreamHandler // nil: nobody's
	endpoint     *Endpoint
	receivedAt   time.Duration // since epoch
	setup        *streamSetup  // nil once a loop drives the stream
	status       int16
	keep         bool // the connection may serve another request
	hadPipelined bool // a request that came too early lay in the lane's reader, and was lost with it
	unchunk      bool // take the chunk framing out, for HTTP/1.0
	untilClose   bool // the body ends with the connection
	chunked      bool // put chunk framing around what the engine sends without
	// commented: comments may go out before the engine's first byte.
	mayComment bool
	keepAlive  *keepAliveWriter // the head went out before the engine's
	countedIP  *netip.Addr      // for connSet.leave; nil: nothing was

	c          *conn
	head       []byte // not yet written
	chunks     upstream.Chunks
	compressor *streamCompressor // nil until a coding is put on
}

// streamSetup is what a stream has until it runs.
type streamSetup struct {
	headBuf []byte // where its head is written
	hooks   RelayHooks
	convert relay.Converter
}

var streamSetups = objpool.Pool[streamSetup]{New: func() *streamSetup { return &streamSetup{headBuf: make([]byte, 0, 512)} }}

// epoch is what streams count time from.
var epoch = time.Now()

// acquireSetup gives the stream's beginning.
func (st *stream) acquireSetup() *streamSetup {
	if st.setup == nil {
		st.setup = streamSetups.Get()
	}
	return st.setup
}

// releaseSetup lets go of it: the head is out, and who relays has what it needs.
func (st *stream) releaseSetup() {
	if b := st.setup; b != nil {
		*b = streamSetup{headBuf: b.headBuf[:0]}
		if cap(b.headBuf) <= joinBytes { // a whole answer's events may be in it
			streamSetups.Put(b)
		}
		st.setup, st.head = nil, nil
	}
}

// setResponse is what the stream passes on, and whom it tells.
func (st *stream) setResponse(resp *upstream.Response, call *upstream.Call, hooks *RelayHooks) {
	st.resp, st.call, st.handler = resp, call, hooks.Handler
	st.acquireSetup().hooks = *hooks
}

// FirstToken implements relay.ClientConn.
func (st *stream) FirstToken() {
	if st.handler != nil {
		st.handler.FirstToken()
	}
}

// ResponseID implements relay.ClientConn.
func (st *stream) ResponseID(id string) {
	if s, ok := st.handler.(ResponseIDObserver); ok {
		s.ResponseID(id)
	}
}

// Done implements relay.ClientConn.
func (st *stream) Done(usage relay.Usage, failed bool) {
	if d, ok := st.handler.(Doner); ok {
		d.Done(usage, failed)
	}
}

// onClientGone implements goner.
func (st *stream) onClientGone() {
	if st.call != nil {
		st.call.Cancel()
	}
}

// Resume implements relay.ClientConn: the rest of a stream that a loop has detached runs on a
// goroutine.
func (st *stream) Resume(f func() (relay.Result, bool)) {
	c := st.c
	go func() {
		if c.srv.relayUntilEnd(c, st, f) {
			c.srv.serveConn(c)
		}
	}()
}

// notifyEnd tells the end of a stream that was not relayed.
func (h *RelayHooks) notifyEnd(res relay.Result) {
	if h.Handler != nil {
		h.Handler.Ended(res)
	}
}

// Relay answers by streaming resp: head now, body by package relay after the
// Handler has returned. It owns resp and call from here on: call is cut when
// the client leaves, resp is Released at the end.
func (x *Exchange) Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", resp.Status)
		call.Cancel()
		resp.Release()
		hooks.notifyEnd(relay.Result{Cause: relay.Cancelled, Err: upstream.ErrCancelled})
		return
	}
	if x.responder != nil {
		x.responseState = responseRelayed
		x.responder.Relay(resp, call, hooks)
		return
	}
	if x.clearDrainTarget(); x.keepAlive.stopUnlessHeadSent() {
		x.relayAfterHead(resp, call, hooks)
		return
	}
	st := x.newStream()
	st.setResponse(resp, call, &hooks)
	st.status = int16(resp.Status)
	if x.Converter != nil {
		st.setup.convert = x.Converter(resp.ContentLength == upstream.LengthChunked)
	}
	x.composeHead(st)
	x.startStream(st)
}

// newStream makes the stream of the exchange's answer.
func (x *Exchange) newStream() *stream {
	st := x.srv.streams.Get()
	st.id, st.c, st.endpoint, st.receivedAt, st.status = x.RequestID, x.c, x.Endpoint, x.Received.Sub(epoch), fasthttp.StatusOK
	if x.countedIP.IsValid() { // of a proxy's connection
		counted := x.countedIP
		st.countedIP, x.countedIP = &counted, netip.Addr{}
	}
	st.keep = x.connReusable()
	return st
}

// startStream has st answer once the lane, or fasthttp, has let go of the connection.
func (x *Exchange) startStream(st *stream) {
	x.responseState = responseRelayed
	c := x.c
	c.stream = st
	x.srv.clientWatcher.add(c)
	c.clientWatch.setStream(st)
	if x.ctx == nil {
		return // the lane sees it
	}
	c.hijackState.Store(hijackPending)
	x.ctx.HijackSetNoResponse(true)
	x.ctx.Hijack(onHijack)
}

// composeHead writes the response head into st: the engine's end-to-end lines,
// ours, and the framing in which the body will come.
func (x *Exchange) composeHead(st *stream) {
	resp := st.resp
	st.head = append(st.acquireSetup().headBuf, "HTTP/1.1 "...)
	st.head = strconv.AppendInt(st.head, int64(resp.Status), 10)
	st.head = append(st.head, ' ')
	st.head = append(st.head, reasonPhrase(resp.Status)...)
	st.head = append(st.head, "\r\n"...)
	x.streamHead, x.engineStatus = &st.head, resp.Status
	resp.VisitHeaders(x.visitHeader)
	x.streamHead = nil
	st.head = appendDate(st.head, time.Now()) // in the place of the engine's
	st.head = appendLine(st.head, "X-Request-Id", x.RequestID)
	for i := range x.responseHeaders {
		st.head = appendLine(st.head, x.responseHeaders[i].name, x.responseHeaders[i].value)
	}
	kind := resp.Header("Content-Type")
	switch {
	case resp.Status == 204 || resp.Status == 304:
	case x.compressRelayed(st, kind):
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
	case resp.ContentLength >= 0:
		st.head = append(st.head, "Content-Length: "...)
		st.head = strconv.AppendInt(st.head, resp.ContentLength, 10)
		st.head = append(st.head, "\r\n"...)
	case resp.ContentLength == upstream.LengthChunked && x.head.http11:
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
	case x.head.http11:
		// What ends with the engine's connection gets framing, so that a client can tell
		// a whole body from half of one, and keep its own.
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
		st.chunked = true
	default:
		// HTTP/1.0 knows no chunks: the framing is taken out and the
		// connection's end is the body's.
		st.unchunk = resp.ContentLength == upstream.LengthChunked
		st.keep, st.untilClose = false, true
	}
	st.keep = st.keep && (x.head.http11 || x.http10KeepAlive())
	switch {
	case !st.keep:
		st.head = append(st.head, "Connection: close\r\n"...)
	case !x.head.http11:
		st.head = append(st.head, "Connection: keep-alive\r\n"...)
	}
	st.head = append(st.head, "\r\n"...)
	st.setup.headBuf = st.head
	st.mayComment = resp.ContentLength < 0 && len(resp.Header("Content-Encoding")) == 0 &&
		x.Endpoint.Protocol != relay.Opaque && relay.IsEventStream(kind)
}

// http10KeepAlive says whether an HTTP/1.0 client asked to keep the connection.
func (x *Exchange) http10KeepAlive() bool { return !x.ctx.Request.Header.ConnectionClose() }

func appendLine[N, V []byte | string](dst []byte, name N, value V) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

// onHijack is fasthttp's hijack handler; it returns at once, and the stream
// starts when fasthttp has let go of the connection (see conn).
func onHijack(nc net.Conn) {
	under, ok := nc.(interface{ UnsafeConn() net.Conn })
	if !ok {
		return
	}
	if c, ok := under.UnsafeConn().(*conn); ok {
		c.stream.hadPipelined = c.hasBuffered(nc)
	}
}

// runStream writes the head and passes the body on; true when the connection is to be
// served on, as of relayUntilEnd.
func (s *Server) runStream(c *conn, st *stream) bool {
	return s.relayUntilEnd(c, st, func() (relay.Result, bool) {
		if st.resp == nil {
			return relay.Result{Reusable: true}, true // it has its end in its head
		}
		c.boundSendBuffer()
		if st.resp.Buffered() == 0 {
			if st.resp.BodyDone() {
				st.BeforeEnd()
			}
			if err := st.flushHead(s.options().WriteTimeout); err != nil {
				st.call.Cancel()
				return relay.Result{Cause: writeErrorCause(err), Err: err}, true
			}
			st.resp.TryRead() // what a loop would find is passed on at once
			st.waitFirstByte()
		}
		st.keepAlive.stop()
		hooks := &st.setup.hooks
		c.writeDeadline, c.relaying = monoTimeOf(hooks.ClientDeadline), true
		var carry relay.Migration
		if t := hooks.Transcript; t != nil {
			carry = relay.Migration{Transcript: t, IncludeUsage: hooks.Usage, Next: (*streamMigrator)(st)}
		}
		return relay.Start(st, st.resp, relay.Options{
			Protocol:       st.endpoint.Protocol,
			Choices:        hooks.Choices,
			WriteTimeout:   s.options().WriteTimeout,
			IdleTimeout:    s.options().StreamIdleTimeout,
			Rewrite:        hooks.Rewrite,
			Migration:      carry,
			Convert:        st.setup.convert,
			ClientDeadline: hooks.ClientDeadline,
			Loops:          s.loops,
			Budget:         s.partialEvents,
			ShuttingDown:   &s.drainExpired,
		})
	})
}

// relayUntilEnd relays with f until the stream ends, or until a loop has taken it, which
// goes on by another relayUntilEnd. True when the stream has ended and its connection is to be
// served on.
func (s *Server) relayUntilEnd(c *conn, st *stream, f func() (relay.Result, bool)) bool {
	res, ended := s.recoverPanic(st, f)
	if !ended {
		return false // not ours any more
	}
	c.acquireState()
	if res.Reusable && st.chunked {
		if err := st.appendBodyEnd(); err != nil {
			res.Reusable, res.Cause, res.Err = false, relay.Cancelled, err
		}
	}
	if res.Reusable && len(st.head) > 0 {
		// No body came to carry the head, or what ends it is left.
		st.BeforeEnd()
		if err := st.flushHead(s.options().WriteTimeout); err != nil {
			if res.Reusable = false; res.Err == nil {
				res.Cause, res.Err = writeErrorCause(err), err
			}
		}
	}
	if res.Err != nil && res.Cause != relay.EngineReportedError && c.clientWatch.gone.Load() {
		res.Cause = relay.ClientGone
		if s.drainExpired.Load() { // who was cut by us has not gone
			res.Cause = relay.Drained
		}
	}
	c.writeDeadline, c.relaying, c.stall = 0, false, relay.StallDetector{}
	reuse, hadPipelined := res.Reusable && st.keep && !s.draining.Load(), st.hadPipelined || c.pipelined.found
	c.needsLinger = c.needsLinger || hadPipelined
	if st.untilClose && !res.Reusable {
		c.resetOnClose()
	}
	s.endStream(c, st, res)
	if reuse && hadPipelined {
		s.rejectPipelined(c)
		reuse = false
	}
	if !reuse || c.SetDeadline(time.Time{}) != nil {
		c.closeOnce()
		return false
	}
	c.deadlineKind = deadlineAfterStream
	c.markIdle()
	return true
}

// recoverPanic runs f; a panic ends the stream and nothing else.
func (s *Server) recoverPanic(st *stream, f func() (relay.Result, bool)) (res relay.Result, ended bool) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.initial.Log.Error("panic while relaying", "request_id", st.id, "value", v, "stack", string(stack))
			if o := s.initial.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
			st.onClientGone()
			res, ended = relay.Result{Cause: relay.Cancelled, Err: fmt.Errorf("front: panic while relaying: %v", v)}, true
		}
	}()
	return f()
}

// abortStream ends a stream whose connection failed before the hijack.
func (s *Server) abortStream(c *conn, st *stream) {
	st.onClientGone()
	s.endStream(c, st, relay.Result{Cause: relay.ClientGone, Err: net.ErrClosed})
	c.closeOnce()
}

// streamMigrator is a stream as its relay.Mover.
type streamMigrator stream

// NextEngine takes the answer of another engine in the place of the one that failed.
// While it is waited for, a client that leaves cuts the new call.
func (a *streamMigrator) NextEngine(b relay.Interruption) *upstream.Response {
	st := (*stream)(a)
	clientWatch := &st.c.clientWatch
	clientWatch.setFunc(nil) // a cut of the old call under way has ended behind this
	defer clientWatch.setStream(st)
	if clientWatch.gone.Load() || st.c.srv.drainExpired.Load() {
		return nil
	}
	resp, call := st.handler.NextEngine(b, (*streamClientWatch)(clientWatch))
	clientWatch.setFunc(nil)
	if resp == nil {
		return nil
	}
	st.resp.Release()
	st.resp, st.call = resp, call
	return resp
}

// streamClientWatch is the Leaver of a stream's client.
type streamClientWatch clientWatch

func (l *streamClientWatch) OnClientGone(f func()) { (*clientWatch)(l).setFunc(f) }
func (l *streamClientWatch) ClientGone() bool      { return (*clientWatch)(l).gone.Load() }

// cancelStream tells the end once and recycles st.
func (s *Server) endStream(c *conn, st *stream, res relay.Result) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.initial.Log.Error("panic after a stream", "request_id", st.id, "value", v, "stack", string(stack))
			if o := s.initial.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
		}
	}()
	c.clientWatch.setFunc(nil)
	c.stream = nil
	if st.countedIP != nil {
		s.conns.releaseIP(*st.countedIP)
	}
	st.keepAlive.stop()
	st.compressor.release()
	if st.resp != nil {
		st.resp.Release()
	}
	if o := s.initial.Observer; o != nil {
		o.ResponseEnded(st.endpoint.Path, int(st.status), time.Since(epoch)-st.receivedAt)
	}
	if st.handler != nil {
		st.handler.Ended(res)
	}
	st.releaseSetup()
	*st = stream{compressor: st.compressor}
	s.streams.Put(st)
}

func (st *stream) flushHead(limit time.Duration) error {
	if len(st.head) == 0 {
		return nil // it is out
	}
	if st.c.relaying {
		limit = relay.StallCheckInterval(limit)
	}
	if err := st.c.Conn.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	n, err := st.writeRaw(st.head)
	st.head = st.head[n:]
	return err
}

// Write passes p to the client, behind what is left of the head. It implements
// relay.ClientConn and counts p's bytes only.
func (st *stream) Write(p []byte) (int, error) {
	switch {
	case st.unchunk:
		return st.writePayload(p)
	case st.compressor.enabled():
		return st.writeCompressed(p)
	case st.chunked:
		return st.writeChunk(p)
	}
	return st.send(p)
}

func (st *stream) send(p []byte) (int, error) {
	head := len(st.head)
	if head == 0 {
		return st.writeRaw(p)
	}
	joined := append(st.head, p[:min(len(p), joinBytes)]...)
	n, err := st.writeRaw(joined)
	if n < head {
		st.head = joined[n:head]
		return 0, err
	}
	st.head = nil
	n -= head
	if err != nil || n == len(p) {
		return n, err
	}
	more, err := st.writeRaw(p[n:])
	return n + more, err
}

// writeRaw writes p, and waits for a client that reads slowly; below TLS, tlsTransport does.
func (st *stream) writeRaw(p []byte) (int, error) {
	if st.c.tlsConn == nil {
		return st.c.writeWithStallCheck(st.c.Conn, p)
	}
	return st.c.Conn.Write(p)
}

// transformed says whether the client gets other bytes than the relay writes.
func (st *stream) transformed() bool { return st.unchunk || st.chunked || st.compressor.enabled() }

// writePayload takes the chunk framing out of p.
func (st *stream) writePayload(p []byte) (int, error) {
	for at := 0; at < len(p); {
		n, payload, err := st.chunks.Next(p[at:])
		if err != nil {
			return at, err
		}
		at += n
		if len(payload) > 0 {
			if _, err := st.send(payload); err != nil {
				// The framing's state has gone on: nothing can be sent again.
				return at, fmt.Errorf("front: cannot write to an HTTP/1.0 client: %w", err)
			}
		}
		if st.chunks.Done() {
			break
		}
	}
	return len(p), nil
}

// ClientGone implements relay.ClientConn.
func (st *stream) ClientGone() bool { return st.c.clientWatch.gone.Load() }

// Reframes implements relay.ClientConn.
func (st *stream) Reframes() bool { return st.chunked }

// LoopOutput implements relay.ClientConn. There is no descriptor for a loop while the response head
// is unsent, where the body is reframed or compressed, and on a TLS connection.
func (st *stream) LoopOutput() (fd int, sink eventloop.Sink, ok bool) {
	if st.transformed() || len(st.head) > 0 || st.c.fd == 0 || st.c.tlsConn != nil {
		return 0, nil, false
	}
	st.releaseSetup()
	st.c.releaseState()
	return int(st.c.fd), nil, true
}

// DetectsStalls implements relay.ClientConn: Write waits for slow clients itself.
func (st *stream) DetectsStalls() bool { return true }

// SetWriteDeadline implements relay.ClientConn.
func (st *stream) SetWriteDeadline(t time.Time) error {
	if c := st.c; c.relaying && !t.IsZero() {
		unsent := c.unsent()
		c.stall.Observe(unsent, time.Now())
	}
	return st.c.Conn.SetWriteDeadline(t)
}
