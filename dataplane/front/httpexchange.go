package front

import (
	"log/slog"
	"net/netip"
	"runtime/debug"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/ascii"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/headerrules"
	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// httpExchange is the Exchange of an HTTP client's request. A request is served on one of two paths,
// as a fastExchange or as a fasthttpExchange; path is the one that this httpExchange belongs to.
type httpExchange struct {
	exchangeBase
	path httpPath
	srv  *Server

	c                *conn
	head             http1.Head
	body             body
	keepAlive        *keepAliveWriter // of a head that may be sent before the engine's; see MarkDispatched
	drainWriter      *keepAliveWriter // of a drain that responded; guarded by Server.drainMu
	closeConn        bool             // the start of the next request is unknown
	panickedHandler  bool             // the Handler panicked
	drainable        bool             // a drain may find it; see drainresponder.go
	awaitsContinue   bool             // the client waits for 100 Continue before it sends the body
	keepHTTP10       bool             // an HTTP/1.0 client asked to keep the connection open
	requestOverrides []setHeader      // from OverrideRequestHeader
	scratch          []byte
	responseCount    membudget.Count          // budget of a long non-streaming response
	visitHeader      func(name, value []byte) // x.forwardHeader, made once
	engineStatus     int                      // the status of the response whose headers forwardHeader passes
	streamHead       *[]byte                  // where forwardHeader writes a stream's head; nil: to a non-streaming response
	forwardedFor     []byte                   // the X-Forwarded-For for engines
	countedIP        netip.Addr               // for connSet.releaseIP
}

// httpPath is what the two paths of an HTTP request do differently: who has read the request, and
// who writes a non-streaming response. A response is writeStatus, any number of addHeader, then
// setBody. The strings and the body are borrowed until the call returns.
type httpPath interface {
	writeStatus(status int)
	addHeader(name, value string)
	setBody(body []byte)
	// discardResponse drops what has been written of a response.
	discardResponse()
	// finishResponse completes the response, or ends a request without one. keep: the
	// connection may serve another request.
	finishResponse(keep bool)
	// detachStream makes the connection's stream respond once this path has released the
	// connection.
	detachStream()
	// recycle returns the exchange, reset by httpExchange.reset, to its pool.
	recycle()
}

// init sets what an exchange keeps for all its requests.
func (x *httpExchange) init(s *Server, path httpPath) {
	x.srv, x.path = s, path
	x.visitHeader = x.forwardHeader
}

// Log implements Exchange. The logger is made at the first call, because most requests log nothing.
func (x *httpExchange) Log() *slog.Logger {
	if x.log == nil {
		x.log = x.srv.initial.Log.With("request", x.RequestID)
		if x.ClientIP.IsValid() {
			x.log = x.log.With("client", x.ClientIP)
		}
		if x.Principal != nil {
			x.log = x.log.With("key", x.Principal.Name())
		}
	}
	return x.log
}

// Header implements Exchange.
func (x *httpExchange) Header(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	return x.head.Find(name)
}

// OverrideRequestHeader implements Exchange.
func (x *httpExchange) OverrideRequestHeader(name, value string) {
	x.requestOverrides = append(x.requestOverrides, setHeader{name, value})
}

func (x *httpExchange) overriddenHeader(name string) []byte {
	for i := range x.requestOverrides {
		if ascii.EqualFold(x.requestOverrides[i].name, name) {
			return []byte(x.requestOverrides[i].value)
		}
	}
	return nil
}

// HeaderList implements Exchange.
func (x *httpExchange) HeaderList(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	return x.head.FindAll(name)
}

// OnClientGone implements Exchange.
func (x *httpExchange) OnClientGone(f func()) {
	if x.responseState == responseRelayed {
		return
	}
	if f != nil {
		x.c.watchClient()
	}
	x.c.clientWatch.SetFunc(f)
}

// watchClient starts to watch for the client's disconnect, if nothing does yet.
func (c *conn) watchClient() {
	if err := c.srv.clientWatcher.Add(&c.clientWatch, c.raw); err != nil {
		c.srv.initial.Log.Warn("cannot watch a connection", "error", err)
	}
}

// ClientGone implements Exchange. On a watched connection (see OnClientGone) it reads a flag that is
// a few milliseconds old; otherwise it makes a system call.
func (x *httpExchange) ClientGone() bool {
	c := x.c
	return c.clientWatch.Gone() || !c.clientWatch.Watched() && c.raw != nil && rawsocket.PeerGone(c.raw)
}

// SendsComments implements Exchange.
func (x *httpExchange) SendsComments() bool {
	return x.srv.options().KeepAlive > 0 && !x.srv.options().EarlyHeaders
}

// setRequestID uses the client's request id if it is valid, or makes one.
func (x *httpExchange) setRequestID() {
	if id := x.head.Find("X-Request-Id"); fieldrules.ValidRequestID(id) {
		x.RequestID = string(id)
		return
	}
	x.RequestID = x.srv.ids.next()
}

// closeAfterResponse closes the connection after the response: nothing behind this request is
// read.
func (x *httpExchange) closeAfterResponse() {
	x.closeConn = true
	x.RequestID = x.srv.ids.next()
}

// beginResponse begins a non-streaming response. If there is a response already it does
// nothing and returns false.
func (x *httpExchange) beginResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", status)
		return false
	}
	x.responseState = responseWhole
	x.c.response = responseInfo{x.Endpoint, status, monoTimeOf(x.Received)}
	x.path.writeStatus(status)
	// The response has none of these yet, so they are added without a search.
	x.path.addHeader("X-Request-Id", x.RequestID)
	for i := range x.responseHeaders {
		x.path.addHeader(x.responseHeaders[i].name, x.responseHeaders[i].value)
	}
	return true
}

// Reply implements Exchange.
func (x *httpExchange) Reply(resp *upstream.Response, body []byte) {
	if x.headSent() {
		if resp.Status == fasthttp.StatusOK && sse.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
			x.finishEventStream(body) // events that came with a Content-Length
			return
		}
		retry := x.ResponseHeader("Retry-After")
		if len(retry) == 0 {
			retry = string(resp.Header("Retry-After"))
		}
		x.finishEventStream(x.responseAsEvents(resp.Status, retry, body))
		return
	}
	if !x.acquireResponseBudget(len(body)) || !x.beginResponse(resp.Status) {
		return
	}
	x.engineStatus = resp.Status
	resp.VisitHeaders(x.visitHeader)
	if len(resp.Header("Content-Encoding")) > 0 {
		x.path.setBody(body) // the engine encoded it although the router did not ask for it
		return
	}
	x.setCompressedBody(body)
}

// ReplyJSON implements Exchange.
func (x *httpExchange) ReplyJSON(status int, body []byte) {
	if x.headSent() {
		x.finishEventStream(x.responseAsEvents(status, x.ResponseHeader("Retry-After"), body))
		return
	}
	if !x.acquireResponseBudget(len(body)) || !x.beginResponse(status) {
		return
	}
	x.path.addHeader("Content-Type", "application/json")
	x.setCompressedBody(body)
}

// ReplyRefusal implements Exchange.
func (x *httpExchange) ReplyRefusal(reason Reason, body []byte) {
	x.SetHeader("X-Sluice-Reason", string(reason))
	x.ReplyJSON(reason.Status(), body)
	x.reportRefused(reason, "")
}

// ReplyEvents implements Exchange.
func (x *httpExchange) ReplyEvents(body []byte) {
	if x.headSent() {
		x.finishEventStream(body)
		return
	}
	if !x.acquireResponseBudget(len(body)) || !x.beginResponse(200) {
		return
	}
	x.path.addHeader("Content-Type", "text/event-stream; charset=utf-8")
	if x.Converter != nil {
		body, _ = x.Converter(false).Convert(body)
	}
	x.path.setBody(body)
}

// forwardHeader forwards a header line of the engine, unless headerrules.ResponseTable withholds it
// or SetHeader has set one of that name.
func (x *httpExchange) forwardHeader(name, value []byte) {
	if !headerrules.ReachesClient(name, x.engineStatus) {
		return
	}
	for i := range x.responseHeaders {
		if ascii.EqualFold(name, x.responseHeaders[i].name) && !ascii.EqualFold(name, "Vary") {
			return
		}
	}
	if x.streamHead != nil {
		*x.streamHead = appendLine(*x.streamHead, name, value)
		return
	}
	x.path.addHeader(unsafeString(name), unsafeString(value))
}

// finish ends a request: it recovers from a panic, reads the rest of the request from a
// connection that is kept open, and recycles x.
func (x *httpExchange) finish() {
	if v := recover(); v != nil {
		x.panicked(v, debug.Stack())
	}
	x.srv.conns.releaseIP(x.countedIP)
	if x.responseState != responseRelayed && !x.mayContinue() {
		x.c.clientWatch.SetFunc(nil)
		x.closeConn = x.closeConn || !x.body.drain(x.c)
		x.c.needsLinger = x.c.needsLinger || x.closeConn
		x.path.finishResponse(x.connReusable())
	}
	x.reset()
	x.path.recycle()
}

// connReusable reports whether the connection may serve another request.
func (x *httpExchange) connReusable() bool {
	return !x.closeConn && !x.panickedHandler && !x.head.Close && x.body.atEOF && !x.srv.closeAfterResponse.Load() && !x.c.usesReservedFD
}

func (x *httpExchange) panicked(v any, stack []byte) {
	x.panickedHandler = true
	x.Log().Error("panic while serving a request", "panic", v, "stack", string(stack))
	if o := x.srv.initial.Observer; o != nil {
		o.Panicked(x.RequestID, v, stack)
	}
	if x.responseState == responseRelayed {
		return
	}
	if x.responseState == responseWhole {
		x.path.discardResponse()
		x.responseState = responsePending
	}
	x.Error(Internal, "", "the router failed on this request", 0)
}

// reset releases what the request has used.
func (x *httpExchange) reset() {
	x.body.release()
	x.responseCount.Release() // of a response that fasthttp has copied
	if x.responseState != responseRelayed {
		x.keepAlive.stop()
	}
	x.exchangeBase.reset()
	x.c, x.streamHead, x.keepAlive, x.drainWriter = nil, nil, nil, nil
	x.countedIP = netip.Addr{}
	x.head.Release()
	x.closeConn, x.panickedHandler, x.awaitsContinue, x.keepHTTP10 = false, false, false, false
	clear(x.requestOverrides)
	x.requestOverrides = x.requestOverrides[:0]
}

// unbudgetedResponse is the longest response that is not counted against the memory budget.
const unbudgetedResponse = 64 << 10

// acquireResponseBudget counts a response of n bytes against the memory budget until it is
// written. If the budget is exhausted it answers with an error and returns false. A response
// through fasthttp is counted until fasthttp has it.
func (x *httpExchange) acquireResponseBudget(n int) bool {
	if n <= unbudgetedResponse || x.responseState != responsePending {
		return true
	}
	x.responseCount = x.Budget().Count()
	if x.responseCount.Acquire(membudget.SizeOf(n + membudget.Page)) {
		return true
	}
	x.Error(BudgetExhausted, "", "limits.memory_budget is exhausted: the response cannot be buffered; try again", budgetRetry)
	return false
}
