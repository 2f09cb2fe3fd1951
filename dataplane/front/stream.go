package front

import (
	"fmt"
	"net"
	"net/netip"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/clientwatch"
	"sluice/dataplane/eventloop"
	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// joinBytes bounds the bytes of a first write that are copied behind the head, so that both
// leave in one packet.
const joinBytes = 16 << 10

// stream is a response that package relay sends. There are thousands: a stream fills a size class
// of 160 bytes exactly.
type stream struct {
	id           string
	resp         *upstream.Response // nil: the whole response is in head, or has been sent
	call         *upstream.Call
	handler      StreamHandler // from RelayHooks; may be nil
	endpoint     *Endpoint
	receivedAt   monotime.Time
	setup        *streamSetup // nil once an event loop drives the stream
	status       int16
	keep         bool             // the connection may serve another request
	hadPipelined bool             // a pipelined request was in a reader's buffer, and is lost
	unchunk      bool             // remove the engine's chunk framing, for an HTTP/1.0 client
	untilClose   bool             // the body ends with the connection
	chunked      bool             // add chunk framing, which the engine's body does not have
	mayComment   bool             // comments may be sent before the engine's first byte
	keepAlive    *keepAliveWriter // the writer that sent the head before the engine's; else nil
	countedIP    *netip.Addr      // address for connSet.releaseIP; nil: none was counted

	c          *conn
	head       []byte // not yet written
	chunks     upstream.Chunks
	compressor *streamCompressor // nil until the stream is first compressed
}

// streamSetup is the part of a stream that it needs only until an event loop drives it.
type streamSetup struct {
	headBuf []byte // buffer of stream.head
	hooks   RelayHooks
	convert relay.Converter
}

var streamSetups = objpool.Pool[streamSetup]{New: func() *streamSetup { return &streamSetup{headBuf: make([]byte, 0, 512)} }}

// acquireSetup returns the stream's setup, and takes one from the pool if there is none.
func (st *stream) acquireSetup() *streamSetup {
	if st.setup == nil {
		st.setup = streamSetups.Get()
	}
	return st.setup
}

// releaseSetup returns the setup to the pool. The head must have been sent, and package relay must
// have copied what it needs.
func (st *stream) releaseSetup() {
	if b := st.setup; b != nil {
		*b = streamSetup{headBuf: b.headBuf[:0]}
		if cap(b.headBuf) <= joinBytes { // finishEventStream may have made it large
			streamSetups.Put(b)
		}
		st.setup, st.head = nil, nil
	}
}

// setResponse sets the engine's response and the hooks to call.
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

// OnClientGone implements clientwatch.Handler: it cancels the engine call.
func (st *stream) OnClientGone() {
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

// notifyEnd calls Ended for a stream that was not relayed.
func (h *RelayHooks) notifyEnd(res relay.Result) {
	if h.Handler != nil {
		h.Handler.Ended(res)
	}
}

// Relay implements Exchange.
func (x *httpExchange) Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", resp.Status)
		discardSecondRelay(resp, call, hooks)
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

// discardSecondRelay ends a stream of a Handler that has responded already.
func discardSecondRelay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	call.Cancel()
	resp.Release()
	hooks.notifyEnd(relay.Result{Cause: relay.Cancelled, Err: upstream.ErrCancelled})
}

// newStream returns a stream for the exchange's response.
func (x *httpExchange) newStream() *stream {
	st := x.srv.streams.Get()
	st.id, st.c, st.endpoint, st.receivedAt, st.status = x.RequestID, x.c, x.Endpoint, monotime.Of(x.Received), fasthttp.StatusOK
	if x.countedIP.IsValid() { // the request came through a trusted proxy
		counted := x.countedIP
		st.countedIP, x.countedIP = &counted, netip.Addr{}
	}
	st.keep = x.connReusable()
	return st
}

// startStream makes st answer as soon as the fast path or fasthttp has released the connection.
func (x *httpExchange) startStream(st *stream) {
	x.responseState = responseRelayed
	c := x.c
	c.stream = st
	c.watchClient()
	c.clientWatch.SetStream(st)
	x.path.detachStream()
}

// composeHead composes the response head in st: the engine's end-to-end header lines, those of
// the router, and the framing of the body.
func (x *httpExchange) composeHead(st *stream) {
	resp := st.resp
	st.head = append(st.acquireSetup().headBuf, "HTTP/1.1 "...)
	st.head = strconv.AppendInt(st.head, int64(resp.Status), 10)
	st.head = append(st.head, ' ')
	st.head = append(st.head, reasonPhrase(resp.Status)...)
	st.head = append(st.head, "\r\n"...)
	x.streamHead, x.engineStatus = &st.head, resp.Status
	resp.VisitHeaders(x.visitHeader)
	x.streamHead = nil
	st.head = appendDate(st.head, time.Now()) // instead of the engine's
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
	case resp.ContentLength == upstream.LengthChunked && x.head.HTTP11:
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
	case x.head.HTTP11:
		// A body that ends with the engine's connection gets chunk framing. Thus the client
		// can recognise a truncated body, and can keep its own connection.
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
		st.chunked = true
	default:
		// HTTP/1.0 has no chunks: the stream removes the framing, and the end of the
		// connection is the end of the body.
		st.unchunk = resp.ContentLength == upstream.LengthChunked
		st.keep, st.untilClose = false, true
	}
	st.keep = st.keep && (x.head.HTTP11 || x.keepHTTP10)
	switch {
	case !st.keep:
		st.head = append(st.head, "Connection: close\r\n"...)
	case !x.head.HTTP11:
		st.head = append(st.head, "Connection: keep-alive\r\n"...)
	}
	st.head = append(st.head, "\r\n"...)
	st.setup.headBuf = st.head
	st.mayComment = resp.ContentLength < 0 && len(resp.Header("Content-Encoding")) == 0 &&
		x.Endpoint.Protocol != sse.Opaque && sse.IsEventStream(kind)
}

// appendLine appends a header line.
func appendLine[N, V []byte | string](dst []byte, name N, value V) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

// runStream sends the head and starts the relay of the body. Its result is that of
// relayUntilEnd.
func (s *Server) runStream(c *conn, st *stream) bool {
	return s.relayUntilEnd(c, st, func() (relay.Result, bool) {
		if st.resp == nil {
			return relay.Result{Reusable: true}, true // the whole response is in st.head or has been sent
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
			st.resp.TryRead() // bytes that have arrived are relayed at once, without an event loop
			st.waitFirstByte()
		}
		st.keepAlive.stop()
		hooks := &st.setup.hooks
		c.writeDeadline, c.relaying = monoTimeOf(hooks.ClientDeadline), true
		var migration relay.Migration
		if t := hooks.Transcript; t != nil {
			migration = relay.Migration{Transcript: t, IncludeUsage: hooks.Usage, Next: (*streamMigrator)(st)}
		}
		return relay.Start(st, st.resp, relay.Options{
			Protocol:        st.endpoint.Protocol,
			Choices:         hooks.Choices,
			EndsWithChoices: hooks.EndsWithChoices,
			Usage:           hooks.Usage,
			Intervals:       hooks.Intervals,
			WriteTimeout:    s.options().WriteTimeout,
			IdleTimeout:     s.options().StreamIdleTimeout,
			Rewrite:         hooks.Rewrite,
			Migration:       migration,
			Convert:         st.setup.convert,
			ClientDeadline:  hooks.ClientDeadline,
			Loops:           s.loops,
			Budget:          s.partialEvents,
			ShuttingDown:    &s.drainExpired,
		})
	})
}

// relayUntilEnd calls f, which relays until the stream ends or an event loop drives it. In the
// latter case Resume calls relayUntilEnd again for the rest. It returns true if the stream has
// ended and the caller must serve the connection's next request.
func (s *Server) relayUntilEnd(c *conn, st *stream, f func() (relay.Result, bool)) bool {
	res, ended := s.recoverPanic(st, f)
	if !ended {
		return false // an event loop drives the stream
	}
	c.acquireState()
	if res.Reusable && st.chunked {
		if err := st.appendBodyEnd(); err != nil {
			res.Reusable, res.Cause, res.Err = false, relay.Cancelled, err
		}
	}
	if res.Reusable && len(st.head) > 0 {
		// No body was written together with the head, or the end of the body is unsent.
		st.BeforeEnd()
		if err := st.flushHead(s.options().WriteTimeout); err != nil {
			if res.Reusable = false; res.Err == nil {
				res.Cause, res.Err = writeErrorCause(err), err
			}
		}
	}
	if res.Err != nil && res.Cause != relay.EngineReportedError && c.clientWatch.Gone() {
		res.Cause = relay.ClientGone
		if s.drainExpired.Load() { // the drain has cut the connection, not the client
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

// recoverPanic calls f. If f panics only this stream ends.
func (s *Server) recoverPanic(st *stream, f func() (relay.Result, bool)) (res relay.Result, ended bool) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.initial.Log.Error("panic while relaying", "request", st.id, "panic", v, "stack", string(stack))
			if o := s.initial.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
			st.OnClientGone()
			res, ended = relay.Result{Cause: relay.Cancelled, Err: fmt.Errorf("front: panic while relaying: %v", v)}, true
		}
	}()
	return f()
}

// abortStream ends a stream whose connection failed before the hijack.
func (s *Server) abortStream(c *conn, st *stream) {
	st.OnClientGone()
	s.endStream(c, st, relay.Result{Cause: relay.ClientGone, Err: net.ErrClosed})
	c.closeOnce()
}

// streamMigrator is a stream as a relay.Migrator.
type streamMigrator stream

// NextEngine implements relay.Migrator: it gets the response of another engine from the
// StreamHandler, in place of that of the engine that failed. If the client disconnects
// meanwhile, the new call is cancelled.
func (a *streamMigrator) NextEngine(b relay.Interruption) *upstream.Response {
	st := (*stream)(a)
	clientWatch := &st.c.clientWatch
	clientWatch.SetFunc(nil) // waits for a cancellation of the old call that is in progress
	defer clientWatch.SetStream(st)
	if clientWatch.Gone() || st.c.srv.drainExpired.Load() {
		return nil
	}
	var comments *keepAliveWriter
	if leave := b.Leave; leave != nil {
		b.Leave = func() {
			st.call.Cancel()
			leave()
			comments = st.startComments()
		}
	}
	resp, call := st.handler.NextEngine(b, (*streamClientWatch)(clientWatch))
	comments.stop()
	clientWatch.SetFunc(nil)
	if resp == nil {
		return nil
	}
	st.resp.Release()
	st.resp, st.call = resp, call
	return resp
}

// streamClientWatch is the ClientGoneNotifier of a stream.
type streamClientWatch clientwatch.Watch

// OnClientGone implements ClientGoneNotifier.
func (l *streamClientWatch) OnClientGone(f func()) { (*clientwatch.Watch)(l).SetFunc(f) }

// ClientGone implements ClientGoneNotifier.
func (l *streamClientWatch) ClientGone() bool { return (*clientwatch.Watch)(l).Gone() }

// endStream reports the end of a stream, releases what it has, and returns st to the pool.
func (s *Server) endStream(c *conn, st *stream, res relay.Result) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.initial.Log.Error("panic after a stream", "request", st.id, "panic", v, "stack", string(stack))
			if o := s.initial.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
		}
	}()
	c.clientWatch.SetFunc(nil)
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
		o.ResponseEnded(st.endpoint.Path, int(st.status), st.receivedAt.Since())
	}
	if st.handler != nil {
		st.handler.Ended(res)
	}
	st.releaseSetup()
	*st = stream{compressor: st.compressor}
	s.streams.Put(st)
}

// flushHead writes what is unsent of the head, with a write deadline limit from now.
func (st *stream) flushHead(limit time.Duration) error {
	if len(st.head) == 0 {
		return nil
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

// Write implements relay.ClientConn: it sends the unsent part of the head and then p, with the
// framing and the compression of the response. Its result counts only bytes of p.
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

// send writes the unsent part of the head and then p.
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

// writeRaw writes p and waits for a client that reads slowly. With TLS tlsTransport waits.
func (st *stream) writeRaw(p []byte) (int, error) {
	if st.c.tlsConn == nil {
		return st.c.writeWithStallCheck(st.c.Conn, p)
	}
	return st.c.Conn.Write(p)
}

// transformed reports whether the client gets other bytes than package relay writes.
func (st *stream) transformed() bool { return st.unchunk || st.chunked || st.compressor.enabled() }

// writePayload sends the payload in p, without its chunk framing.
func (st *stream) writePayload(p []byte) (int, error) {
	for at := 0; at < len(p); {
		n, payload, err := st.chunks.Next(p[at:])
		if err != nil {
			return at, err
		}
		at += n
		if len(payload) > 0 {
			if _, err := st.send(payload); err != nil {
				// st.chunks has advanced, so the caller cannot send p again.
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
func (st *stream) ClientGone() bool { return st.c.clientWatch.Gone() }

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
