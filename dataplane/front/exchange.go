package front

import (
	"log/slog"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// Exchange is one admitted request. It is valid until the Handler has answered
// and returned; after Relay, only RequestID and what RelayHooks captured.
type Exchange struct {
	Endpoint  *Endpoint
	RequestID string       // the client's X-Request-Id (checked, at most 128 visible ASCII), or made
	Doc       jsonscan.Doc // scanned; Doc.Body is the body, decoded and whole
	Received  time.Time    // when the head had been read
	// Converter, when the Handler has set it, is called when an event stream is the
	// answer, and gives what is done to it last; chunked: it is in chunk framing.
	Converter func(chunked bool) relay.Converter
	// Stored is what a request of kind StoredResponse asks for.
	Stored StoredRequest
	// Attached is what one Handler tells the next one of the request.
	Attached any

	keepAlive        *keepAliveWriter // of a head that may go out before an engine's; see Dispatched
	drainWriter      *keepAliveWriter // of a drain that answered; guarded by Server.telling
	srv              *Server
	ctx              *fasthttp.RequestCtx // nil: a plain request
	c                *conn
	head             requestHead
	body             body
	fixedBody        fixedBody      // of a plain request's body
	response         responseWriter // of a plain request's whole answer
	responseState    responseState
	principal        Principal // nil: no keys are asked for
	closeConn        bool      // where the next request begins cannot be known
	panickedHandler  bool      // the handler panicked
	drainable        bool      // a drain may find it; see parting.go
	awaitsContinue   bool      // the body has not been sent: the client waits for leave to do so
	responseHeaders  []setHeader
	requestOverrides []setHeader // by Say
	scratch          []byte
	log              *slog.Logger
	visitHeader      func(name, value []byte) // x.forwardHeader, made once
	engineStatus     int                      // the status of the answer that forwardHeader passes
	streamHead       *[]byte                  // where forwardHeader writes a stream's head; nil: to a whole answer
	ip               netip.Addr               // the client's
	forwardedFor     []byte                   // as engines are told it
	countedIP        netip.Addr               // for connSet.leave

	// Of a detached exchange, which has no srv, ctx, c and head.
	responder   Responder
	leaseMemory func(n int) (membudget.Lease, bool)
	budget      *membudget.Budget
	fields      []upstream.Field
	unix        bool
}

type setHeader struct{ name, value string }

// responseState says how an Exchange was answered.
type responseState uint8

const (
	responsePending responseState = iota
	responseWhole                 // whole, in room or fasthttp's response
	responseRelayed               // the stream owns the connection now
)

func newExchange(s *Server) *Exchange {
	x := &Exchange{srv: s}
	x.visitHeader = x.forwardHeader
	return x
}

// Log is a logger whose lines carry request_id. It is made at the first call:
// most requests log nothing.
func (x *Exchange) Log() *slog.Logger {
	if x.log == nil {
		x.log = x.srv.initial.Log.With("request_id", x.RequestID)
		if x.ip.IsValid() {
			x.log = x.log.With("client", x.ip)
		}
		if x.principal != nil {
			x.log = x.log.With("key", x.principal.Name())
		}
	}
	return x.log
}

// Header gives a request header; nil when absent. Borrowed until return.
func (x *Exchange) Header(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	if x.responder != nil {
		return x.inProcessHeader(name, false)
	}
	return x.head.find(name)
}

// OverrideRequestHeader puts a request header in the place of the client's of that name,
// for engines too, where they may see such a one.
func (x *Exchange) OverrideRequestHeader(name, value string) {
	x.requestOverrides = append(x.requestOverrides, setHeader{name, value})
}

func (x *Exchange) overriddenHeader(name string) []byte {
	for i := range x.requestOverrides {
		if equalFold([]byte(x.requestOverrides[i].name), name) {
			return []byte(x.requestOverrides[i].value)
		}
	}
	return nil
}

// HeaderList is Header for a header that holds a list: the values of all lines of
// that name, in their order, joined by commas (RFC 9110, 5.3). It allocates only
// where there are several.
func (x *Exchange) HeaderList(name string) []byte {
	if v := x.overriddenHeader(name); v != nil {
		return v
	}
	if x.responder != nil {
		return x.inProcessHeader(name, true)
	}
	return x.head.findAll(name)
}

// OnClientGone arranges that f runs once, on another goroutine, within a few
// milliseconds of the client's closing or resetting its connection; at most
// one f at a time, a later call replaces it, nil removes it. f never runs after
// the exchange has ended, nor concurrently with the return of OnClientGone(nil), which
// waits for it: f must neither block nor call OnClientGone.
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

// ClientGone says whether the client has left. Where the connection is watched (see OnClientGone),
// that is a look at memory, and some milliseconds late; else the kernel is asked.
func (x *Exchange) ClientGone() bool {
	if x.responder != nil {
		return x.responder.ClientGone()
	}
	c := x.c
	return c.clientWatch.gone.Load() || c.clientWatch.id == 0 && c.raw != nil && isClientGone(c.raw)
}

// SendsComments says that a stream's head is to go out with the engine's, for comments begin
// behind it (Options.KeepAlive).
func (x *Exchange) SendsComments() bool {
	return x.srv != nil && x.srv.options().KeepAlive > 0 && !x.srv.options().EarlyHeaders
}

// SetHeader adds a response header (X-Sluice-Worker, …) to whatever answer
// follows; a later call with the same name replaces the value.
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
		if equalFold([]byte(x.responseHeaders[i].name), name) {
			x.responseHeaders[i].value = value
			return
		}
	}
	x.responseHeaders = append(x.responseHeaders, setHeader{name, value})
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// setRequestID takes the client's request id or makes one.
func (x *Exchange) setRequestID() {
	if id := x.head.find("X-Request-Id"); validRequestID(id) {
		x.RequestID = string(id)
		return
	}
	x.RequestID = x.srv.ids.next()
}

// closeAfterResponse gives up the connection: nothing after this request is read.
func (x *Exchange) closeAfterResponse() {
	x.closeConn = true
	x.RequestID = x.srv.ids.next()
}

// beginResponse opens a short answer; false, and nothing done, when there is one.
func (x *Exchange) beginResponse(status int) bool {
	if x.responseState != responsePending {
		x.Log().Error("the handler answered twice", "status", status)
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
	// None of these is there yet, so nothing need be looked for.
	addHeaderLine(x, "X-Request-Id", x.RequestID)
	for i := range x.responseHeaders {
		addHeaderLine(x, x.responseHeaders[i].name, x.responseHeaders[i].value)
	}
	return true
}

// Reply answers with an engine's status, its end-to-end headers and body, byte
// for byte; only Date is our own. resp may be Released after it returns; body is
// copied.
func (x *Exchange) Reply(resp *upstream.Response, body []byte) {
	if x.responder != nil {
		x.respondInProcess(resp.Status, body)
		return
	}
	if x.headSent() {
		if resp.Status == fasthttp.StatusOK && relay.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
			x.finishEventStream(body) // they came with their length
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
		x.setIdentityBody(body) // an engine's own, although it was not asked for one
		return
	}
	x.setCompressedBody(body)
}

// responseHeader is what a Handler has set a header to, "" for none.
func (x *Exchange) responseHeader(name string) string {
	for i := range x.responseHeaders {
		if x.responseHeaders[i].name == name {
			return x.responseHeaders[i].value
		}
	}
	return ""
}

// ReplyJSON answers with a body of the router's own.
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

// ReplyEvents answers 200 with an event stream that is whole already.
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

// forwardHeader passes one of the engine's header lines on, unless responseHeaderTable withholds it or
// ours takes its place.
func (x *Exchange) forwardHeader(name, value []byte) {
	if !reachesClient(name, x.engineStatus) {
		return
	}
	for i := range x.responseHeaders {
		if equalFold(name, x.responseHeaders[i].name) && !equalFold(name, "Vary") {
			return
		}
	}
	if x.streamHead != nil {
		*x.streamHead = appendLine(*x.streamHead, name, value)
		return
	}
	addHeaderLine(x, name, value)
}

// finish ends what serve began: it recovers, sees to it that nothing of the
// request is left on a connection that will be kept, and recycles x.
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

// connReusable says whether the connection may serve another request.
func (x *Exchange) connReusable() bool {
	return !x.closeConn && !x.panickedHandler && !x.head.close && x.body.atEOF && !x.srv.closeAfterResponse.Load() && !x.c.usesReservedFD
}

func (x *Exchange) panicked(v any, stack []byte) {
	x.panickedHandler = true
	x.Log().Error("panic while serving a request", "value", v, "stack", string(stack))
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
	x.response.count.Release() // of an answer that fasthttp has
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
