package front

import (
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/sse"
)

// At the end of a drain's time the drain responds to requests without a response in place of
// their Handlers, because a Handler may wait for its legs longer than the process still runs.
//
// One swap on conn.drainTarget decides which of the two responds. The drain takes the exchange
// out, makes a keepAliveWriter write the response, and stores that in
// httpExchange.drainWriter. A
// Handler that responds later finds its exchange taken out and continues with that writer, as
// after FailAt: if the writer has written, nothing else is written.
//
// A request without an exchange (its head is incomplete, or fasthttp waits for the first byte
// of its body) gets its response from its reader: the drain shuts down the receiving side of
// the connection, and onParseError responds.

// drainTarget is the exchange of a connection that a drain may respond to. It is nil if there is
// none, and incompleteRequest while a request is read that has no exchange yet.
type drainTarget = atomic.Pointer[httpExchange]

// incompleteRequest stands for a request without an exchange.
var incompleteRequest = new(httpExchange)

const drainedMessage = "the router is shutting down and had sent no response to this request; send it again, another router will serve it"

// setDrainTarget allows a drain to respond to this exchange from now on.
func (x *httpExchange) setDrainTarget() {
	x.drainable = true
	x.c.drainTarget.Store(x)
}

// clearDrainTarget ends what setDrainTarget allows. Afterwards only the Handler's goroutine
// changes x.keepAlive.
func (x *httpExchange) clearDrainTarget() {
	if !x.drainable {
		return
	}
	x.drainable = false
	if x.c.drainTarget.CompareAndSwap(x, nil) {
		return
	}
	x.srv.drainMu.Lock()
	x.keepAlive, x.drainWriter = x.drainWriter, nil
	x.srv.drainMu.Unlock()
}

// respondDrained responds to every request without a response and returns their number.
func (s *Server) respondDrained() (n int) {
	for _, c := range s.conns.snapshot() {
		s.drainMu.Lock()
		switch x := c.drainTarget.Swap(nil); x {
		case nil:
		case incompleteRequest:
			c.shutdownRead()
			n++
		default:
			x.drainWriter = x.startDrainResponse()
			n++
		}
		s.drainMu.Unlock()
	}
	return n
}

// markIncompleteRequest records that a request is read which has no exchange yet.
func (c *conn) markIncompleteRequest() {
	c.drainTarget.Store(incompleteRequest)
	if c.srv.drainExpired.Load() { // after the store, so that a drain that missed it is seen here
		c.shutdownRead()
	}
}

// clearIncompleteRequest records that the request has an exchange or gets one now.
func (c *conn) clearIncompleteRequest() {
	if c.drainTarget.Load() == incompleteRequest {
		c.drainTarget.CompareAndSwap(incompleteRequest, nil)
	}
}

// shutdownRead ends the receiving side of the connection: its reader finds the end behind the
// bytes that have arrived.
func (c *conn) shutdownRead() {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RD) })
	}
}

// endedByDrain reports whether reading a request failed because the drain's time was over.
func (c *conn) endedByDrain() bool { return c.readFailure() == ClientGone && c.srv.drainExpired.Load() }

// startDrainResponse makes a keepAliveWriter respond to x, or lets the existing one do so. The
// Handler runs concurrently, so it reads only those fields of x that were set before the
// Handler began.
func (x *httpExchange) startDrainResponse() *keepAliveWriter {
	p := x.keepAlive
	if p == nil {
		p = &keepAliveWriter{c: x.c}
	}
	path, id, ip, log, o := x.Endpoint.Path, x.RequestID, x.ClientIP, x.srv.initial.Log, x.srv.initial.Observer
	if !p.mu.TryLock() {
		return p // it is writing to a client that may not read; do not wait for it
	}
	defer p.mu.Unlock()
	if p.stopped || p.headSent && p.finalStatus != 0 {
		return p // the client has its response or has disconnected
	}
	if p.headSent {
		events := appendErrorEvent(nil, x.Endpoint.Protocol, Drained, Drained.Status(), "", drainedMessage, id)
		p.head, p.finalStatus = append(sse.AppendChunk(nil, events), lastChunk...), fasthttp.StatusOK
	} else {
		p.head, p.finalStatus = x.rawErrorResponse(Drained, drainedMessage, drainRetry, nil), Drained.Status()
	}
	p.onFinal = func() {
		if o != nil {
			o.Refused(path, Drained)
		}
		log.Warn("request ended at the drain deadline before its response began", "request", id, "client", ip, "endpoint", path, "reason", string(Drained))
	}
	p.scheduleLocked(0)
	return p
}

// rawErrorResponse returns the bytes of an error response that is the last one of its
// connection, with the header lines set. retryAfter > 0 adds Retry-After.
func (x *httpExchange) rawErrorResponse(reason Reason, message string, retryAfter time.Duration, set []setHeader) []byte {
	body := appendError(nil, x.Endpoint.Protocol, reason, "", message, x.RequestID)
	status := reason.Status()
	text := append(strconv.AppendInt([]byte("HTTP/1.1 "), int64(status), 10), ' ')
	text = append(append(text, reasonPhrase(status)...), "\r\nContent-Type: application/json\r\n"...)
	text = appendLine(text, "Content-Length", strconv.Itoa(len(body)))
	text = appendLine(appendDate(text, time.Now()), "X-Request-Id", x.RequestID)
	text = appendLine(text, "X-Sluice-Reason", string(reason))
	if retryAfter > 0 {
		text = appendLine(text, "Retry-After", retryAfterSeconds(retryAfter))
	}
	for i := range set {
		text = appendLine(text, set[i].name, set[i].value)
	}
	return append(append(text, "Connection: close\r\n\r\n"...), body...)
}

// retryAfterSeconds returns the value of a Retry-After header: whole seconds, rounded up.
func retryAfterSeconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}
