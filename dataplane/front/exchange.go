package front

import (
	"log/slog"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/ascii"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// Exchange is one admitted request and the way to respond to it. It is valid until the
// Handler has responded and returned. After Relay only RequestID and what the RelayHooks
// captured are valid. Its methods must be called on the Handler's goroutine.
type Exchange struct {
	Endpoint  *Endpoint
	RequestID string       // the client's X-Request-Id if valid (1 to 128 visible ASCII), or a new one
	Doc       jsonscan.Doc // scanned; Doc.Body is the complete decoded body
	Received  time.Time    // when the head had been read
	// Converter may be set by the Handler. It is called if the response is an event stream,
	// and returns the last conversion of that stream. chunked says that the stream has
	// chunk framing.
	Converter func(chunked bool) relay.Converter
	// Stored is the request of kind StoredResponse.
	Stored StoredRequest
	// Attached carries a value from one Handler to the next.
	Attached any

	keepAlive        *keepAliveWriter // of a head that may be sent before the engine's; see MarkDispatched
	drainWriter      *keepAliveWriter // of a drain that responded; guarded by Server.drainMu
	srv              *Server
	ctx              *fasthttp.RequestCtx // nil: on the fast path
	c                *conn
	head             requestHead
	body             body
	fixedBody        fixedBody      // of a body on the fast path
	response         responseWriter // of a non-streaming response on the fast path
	responseState    responseState
	principal        Principal // nil: requests need no key
	closeConn        bool      // the start of the next request is unknown
	panickedHandler  bool      // the Handler panicked
	drainable        bool      // a drain may find it; see drainresponder.go
	awaitsContinue   bool      // the client waits for 100 Continue before it sends the body
	responseHeaders  []setHeader
	requestOverrides []setHeader // from OverrideRequestHeader
	scratch          []byte
	log              *slog.Logger
	visitHeader      func(name, value []byte) // x.forwardHeader, made once
	engineStatus     int                      // the status of the response whose headers forwardHeader passes
	streamHead       *[]byte                  // where forwardHeader writes a stream's head; nil: to a non-streaming response
	ip               netip.Addr               // the client's
	forwardedFor     []byte                   // the X-Forwarded-For for engines
	countedIP        netip.Addr               // for connSet.releaseIP

	// Of an in-process exchange, which has no srv, ctx, c and head.
	responder   Responder
	leaseMemory func(n int) (membudget.Lease, bool)
	budget      *membudget.Budget
	fields      []upstream.Field
	unix        bool
}

type setHeader struct{ name, value string }

// responseState says how an Exchange was responded to.
type responseState uint8

const (
	responsePending responseState = iota
	responseWhole                 // non-streaming, in response or fasthttp's response
	responseRelayed               // the stream owns the connection
)

func newExchange(s *Server) *Exchange {
	x := &Exchange{srv: s}
	x.visitHeader = x.forwardHeader
	return x
}

// Log returns a logger whose lines carry request_id, client and key. It is made at the first
// call, because most requests log nothing.
func (x *Exchange) Log() *slog.Logger {
	if x.log == nil {
		x.log = x.srv.initial.Log.With("request", x.RequestID)
		if x.ip.IsValid() {
			x.log = x.log.With("client", x.ip)
		}
		if x.principal != nil {
			x.log = x.log.With("key", x.principal.Name())
		}
	}
	return x.log
}

// Header returns the first value of a request header, nil if there is none. The slice is
// borrowed until the Handler returns.
func (x *Exchange) Header(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	if x.responder != nil {
		return x.inProcessHeader(name, false)
	}
	return x.head.find(name)
}

// OverrideRequestHeader replaces the client's header lines called name. Engines see the new
// value too, unless requestHeaderTable withholds it.
func (x *Exchange) OverrideRequestHeader(name, value string) {
	x.requestOverrides = append(x.requestOverrides, setHeader{name, value})
}

func (x *Exchange) overriddenHeader(name string) []byte {
	for i := range x.requestOverrides {
		if ascii.EqualFold(x.requestOverrides[i].name, name) {
			return []byte(x.requestOverrides[i].value)
		}
	}
	return nil
}

// HeaderList returns the values of all lines called name, in order, joined by commas (RFC
// 9110, 5.3); nil if there is none. It allocates only if there are several lines.
func (x *Exchange) HeaderList(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	if x.responder != nil {
		return x.inProcessHeader(name, true)
	}
	return x.head.findAll(name)
}

// OnClientGone registers f, which runs once on another goroutine within a few milliseconds
// after the client closes or resets its connection. A later call replaces f, and nil removes
// it. f does not run after the exchange has ended or after OnClientGone(nil) has returned,
// which waits for a running f. Therefore f must neither block nor call OnClientGone.
func (x *Exchange) OnClientGone(f func()) {
	if x.responseState == responseRelayed {
		return
	}
	if x.responder != nil {
		x.responder.OnClientGone(f)
		return
	}
	if f != nil {
		x.srv.clientWatcher.add(x.c)
	}
	x.c.clientWatch.setFunc(f)
}

// ClientGone reports whether the client has disconnected. On a watched connection (see
// OnClientGone) it reads a flag that is a few milliseconds old; otherwise it makes a system
// call.
func (x *Exchange) ClientGone() bool {
	if x.responder != nil {
		return x.responder.ClientGone()
	}
	c := x.c
	return c.clientWatch.gone.Load() || c.clientWatch.id == 0 && c.raw != nil && isClientGone(c.raw)
}

// SendsComments reports whether comments follow the engine's head of a stream
// (Options.KeepAlive), so that the head must be sent as soon as the engine sends it.
func (x *Exchange) SendsComments() bool {
	return x.srv != nil && x.srv.options().KeepAlive > 0 && !x.srv.options().EarlyHeaders
}

// SetHeader sets a response header, such as X-Sluice-Worker, for the response that follows. A
// later call with the same name replaces the value. Control characters become spaces.
func (x *Exchange) SetHeader(name, value string) {
	if strings.ContainsFunc(value, isControl) {
		value = strings.Map(func(r rune) rune {
			if isControl(r) {
				return ' '
			}
			return r
		}, value)
	}
	for i := range x.responseHeaders {
		if ascii.EqualFold(x.responseHeaders[i].name, name) {
			x.responseHeaders[i].value = value
			return
		}
	}
	x.responseHeaders = append(x.responseHeaders, setHeader{name, value})
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// setRequestID uses the client's request id if it is valid, or makes one.
func (x *Exchange) setRequestID() {
	if id := x.head.find("X-Request-Id"); validRequestID(id) {
		x.RequestID = string(id)
		return
	}
	x.RequestID = x.srv.ids.next()
}

// closeAfterResponse closes the connection after the response: nothing behind this request is
// read.
func (x *Exchange) closeAfterResponse() {
	x.closeConn = true
	x.RequestID = x.srv.ids.next()
}

// beginResponse begins a non-streaming response. If there is a response already it does
// nothing and returns false.
func (x *Exchange) beginResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler responded twice", "status", status)
		return false
	}
	x.responseState = responseWhole
	x.c.response = responseInfo{x.Endpoint, status, monoTimeOf(x.Received)}
	if x.ctx != nil {
		x.ctx.Response.SetStatusCode(status)
		if status == 499 {
			x.ctx.Response.Header.SetStatusMessage([]byte(reasonPhrase(status)))
		}
		x.ctx.Response.Header.DisableNormalizing()
	} else {
		x.response.writeStatus(status)
	}
	// The response has none of these yet, so they are added without a search.
	addHeaderLine(x, "X-Request-Id", x.RequestID)
	for i := range x.responseHeaders {
		addHeaderLine(x, x.responseHeaders[i].name, x.responseHeaders[i].value)
	}
	return true
}

// Reply responds with an engine's status, its end-to-end headers and its body, byte for byte.
// Only Date is the router's. Reply copies body, and the caller may release resp afterwards.
func (x *Exchange) Reply(resp *upstream.Response, body []byte) {
	if x.responder != nil {
		x.respondInProcess(resp.Status, body)
		return
	}
	if x.headSent() {
		if resp.Status == fasthttp.StatusOK && sse.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
			x.finishEventStream(body) // events that came with a Content-Length
			return
		}
		retry := x.responseHeader("Retry-After")
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
		x.setIdentityBody(body) // the engine encoded it although the router did not ask for it
		return
	}
	x.setCompressedBody(body)
}

// responseHeader returns the value of a header that SetHeader set, "" if it is not set.
func (x *Exchange) responseHeader(name string) string {
	for i := range x.responseHeaders {
		if x.responseHeaders[i].name == name {
			return x.responseHeaders[i].value
		}
	}
	return ""
}

// ReplyJSON responds with a JSON body of the router. It copies body.
func (x *Exchange) ReplyJSON(status int, body []byte) {
	if x.responder != nil {
		x.respondInProcess(status, body)
		return
	}
	if x.headSent() {
		x.finishEventStream(x.responseAsEvents(status, x.responseHeader("Retry-After"), body))
		return
	}
	if !x.acquireResponseBudget(len(body)) || !x.beginResponse(status) {
		return
	}
	addHeaderLine(x, "Content-Type", "application/json")
	x.setCompressedBody(body)
}

// ReplyEvents responds with status 200 and a complete event stream. It copies body.
func (x *Exchange) ReplyEvents(body []byte) {
	if x.responder != nil {
		x.respondInProcess(200, body)
		return
	}
	if x.headSent() {
		x.finishEventStream(body)
		return
	}
	if !x.acquireResponseBudget(len(body)) || !x.beginResponse(200) {
		return
	}
	addHeaderLine(x, "Content-Type", "text/event-stream; charset=utf-8")
	if x.Converter != nil {
		body, _ = x.Converter(false).Convert(body)
	}
	x.setIdentityBody(body)
}

// forwardHeader forwards a header line of the engine, unless responseHeaderTable withholds it
// or SetHeader has set one of that name.
func (x *Exchange) forwardHeader(name, value []byte) {
	if !reachesClient(name, x.engineStatus) {
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
	addHeaderLine(x, name, value)
}

// finish ends a request: it recovers from a panic, reads the rest of the request from a
// connection that is kept open, and recycles x.
func (x *Exchange) finish() {
	if v := recover(); v != nil {
		x.panicked(v, debug.Stack())
	}
	x.srv.conns.releaseIP(x.countedIP)
	if x.responseState != responseRelayed && !x.mayContinue() {
		x.c.clientWatch.setFunc(nil)
		x.closeConn = x.closeConn || !x.body.drain(x.c)
		x.c.needsLinger = x.c.needsLinger || x.closeConn
		keep := x.connReusable()
		switch {
		case x.ctx == nil:
			x.finishResponse(keep)
		case keep:
			x.c.pipelined.responding = true
		default:
			x.c.pipelined.responding = true
			x.ctx.Response.Header.SetConnectionClose()
		}
	}
	x.recycle()
}

// connReusable reports whether the connection may serve another request.
func (x *Exchange) connReusable() bool {
	return !x.closeConn && !x.panickedHandler && !x.head.close && x.body.atEOF && !x.srv.closeAfterResponse.Load() && !x.c.usesReservedFD
}

func (x *Exchange) panicked(v any, stack []byte) {
	x.panickedHandler = true
	x.Log().Error("panic while serving a request", "panic", v, "stack", string(stack))
	if o := x.srv.initial.Observer; o != nil {
		o.Panicked(x.RequestID, v, stack)
	}
	if x.responseState == responseRelayed {
		return
	}
	if x.responseState == responseWhole {
		x.response.release()
		if x.ctx != nil {
			x.ctx.Response.Reset()
		}
		x.responseState = responsePending
	}
	x.Error(Internal, "", "the router failed on this request", 0)
}

func (x *Exchange) recycle() {
	s := x.srv
	x.body.release()
	x.response.count.Release() // of a response that fasthttp has copied
	x.Endpoint, x.RequestID, x.ctx, x.c = nil, "", nil, nil
	x.Doc.Body, x.log, x.streamHead, x.principal = nil, nil, nil, nil
	if x.responseState != responseRelayed {
		x.keepAlive.stop()
	}
	x.Stored = StoredRequest{}
	x.Converter, x.Attached, x.keepAlive, x.drainWriter, x.fixedBody = nil, nil, nil, nil, fixedBody{}
	x.ip, x.countedIP = netip.Addr{}, netip.Addr{}
	x.head.raw, x.head.path = nil, nil
	x.responseState, x.closeConn, x.panickedHandler, x.awaitsContinue = responsePending, false, false, false
	clear(x.responseHeaders)
	x.responseHeaders = x.responseHeaders[:0]
	clear(x.requestOverrides)
	x.requestOverrides = x.requestOverrides[:0]
	s.exchanges.Put(x)
}
