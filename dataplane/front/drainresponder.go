package front

import (
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/relay"
)

// Requests whose answer has not begun when a drain's time is over are answered by the
// drain in their handlers' place: a handler may have to wait for what must still be done
// for its legs, longer than the process has left.
//
// Which of the two answers is settled by one swap on the connection. The drain takes the
// exchange out of conn.open, has a pulse write what it has to say, and leaves that in
// Exchange.parting; a handler that comes to answer and finds its exchange taken out goes
// on with that pulse, as with one of Overdue: if it has written, nothing else is.

// A request that has no exchange yet, for half of its head has come or fasthttp waits for
// the first byte of its body, is answered by who reads it: the drain lets nothing more be
// read from the connection, which can still be written to, and onParseError says why.

// drainTarget is where a drain finds the exchange of a connection; nil while there is none
// whose answer is still to begin, and half where a request is being read that has none yet.
type drainTarget = atomic.Pointer[Exchange]

// incompleteRequest stands for the exchange of a request that has none yet.
var incompleteRequest = new(Exchange)

const drainedMessage = "the router is shutting down, and the answer to this request had not begun; send it again, another will answer"

// setDrainTarget lets a drain answer this exchange from now on.
func (x *Exchange) setDrainTarget() {
	x.drainable = true
	x.c.drainTarget.Store(x)
}

// clearDrainTarget ends that: what x.early is from here on is no one else's to change.
func (x *Exchange) clearDrainTarget() {
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

// respondDrained has every request told whose answer has not begun, and gives their number.
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

// markIncompleteRequest notes that a request is being read which has no exchange yet.
func (c *conn) markIncompleteRequest() {
	c.drainTarget.Store(incompleteRequest)
	if c.srv.drainExpired.Load() { // behind the store: a drain that has not found it is seen here
		c.shutdownRead()
	}
}

// clearIncompleteRequest notes that it has one, or is about to. Most never were without.
func (c *conn) clearIncompleteRequest() {
	if c.drainTarget.Load() == incompleteRequest {
		c.drainTarget.CompareAndSwap(incompleteRequest, nil)
	}
}

// shutdownRead has whoever reads from the connection find its end behind what has come.
func (c *conn) shutdownRead() {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RD) })
	}
}

// endedByDrain says whether reading a request failed by the drain's end.
func (c *conn) endedByDrain() bool { return c.readFailure() == ClientGone && c.srv.drainExpired.Load() }

// startDrainResponse makes the pulse that tells the client of x, or has the one there is do so. The
// handler runs meanwhile: of x only what was there before it began is looked at.
func (x *Exchange) startDrainResponse() *keepAliveWriter {
	p := x.keepAlive
	if p == nil {
		p = &keepAliveWriter{c: x.c}
	}
	path, id, ip, log, o := x.Endpoint.Path, x.RequestID, x.ip, x.srv.initial.Log, x.srv.initial.Observer
	if !p.mu.TryLock() {
		return p // it writes to a client that may take nothing: not to be waited for
	}
	defer p.mu.Unlock()
	if p.stopped || p.headSent && p.finalStatus != 0 {
		return p // the client has its answer, or has left
	}
	if p.headSent {
		events := appendErrorEvent(nil, x.Endpoint.Protocol, Drained, Drained.Status(), "", drainedMessage, id)
		p.head, p.finalStatus = append(relay.AppendChunk(nil, events), lastChunk...), fasthttp.StatusOK
	} else {
		p.head, p.finalStatus = x.rawErrorResponse(Drained, drainedMessage, drainRetry, nil), Drained.Status()
	}
	p.onFinal = func() {
		if o != nil {
			o.Refused(path, Drained)
		}
		log.Warn("request ended by the end of the drain: its answer had not begun", "request_id", id, "client", ip, "endpoint", path, "reason", string(Drained))
	}
	p.scheduleLocked(0)
	return p
}

// rawErrorResponse is a refusal as the last answer of its connection, written by whom no
// fasthttp helps, with the header lines set. retryAfter > 0 adds Retry-After.
func (x *Exchange) rawErrorResponse(reason Reason, message string, retryAfter time.Duration, set []setHeader) []byte {
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

// retryAfterSeconds is a Retry-After: whole seconds, rounded up.
func retryAfterSeconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)
}
