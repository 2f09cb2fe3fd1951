package front

import (
	"bytes"
	"net"
	"strings"

	"sluice/dataplane/http1"

	"github.com/valyala/fasthttp"
)

// fasthttpExchange is a request that fasthttp has read, and whose response fasthttp writes.
type fasthttpExchange struct {
	httpExchange
	ctx *fasthttp.RequestCtx
}

func newFasthttpExchange(s *Server) *fasthttpExchange {
	x := new(fasthttpExchange)
	x.init(s, x)
	return x
}

// serve handles a request that fasthttp has read: it checks the head, finds the route and makes
// the response.
func (x *fasthttpExchange) serve() {
	h := &x.ctx.Request.Header
	refused := x.head.Parse(h.Method(), h.RequestURI(), h.Protocol(), h.RawHeaders())
	if x.c.scan.Bare {
		refused = http1.BareEndMessage
	}
	if refused != "" {
		x.closeAfterResponse()
		x.Error(BadHTTP, "", refused, 0)
		return
	}
	x.keepHTTP10 = !x.head.HTTP11 && !h.ConnectionClose()
	x.setRequestID()
	x.resolveClientIP()
	if x.c.pipelined.isPipelined(h.Method()) {
		x.closeConn = true
		x.Error(Pipelined, "", pipelinedMessage, 0)
		return
	}
	if !x.awaitsContinue && !x.openBody() {
		x.closeAfterResponse()
		x.Error(BadHTTP, "", "the length of the request body is ambiguous", 0)
		return
	}
	method, path := h.Method(), x.head.Path
	found, ok := x.srv.routes.find(path)
	if x.cors(method, ok) {
		return
	}
	switch {
	case !ok:
		x.Error(UnknownRoute, "", "unknown path "+quotedForError(path)+"; known are: "+x.srv.routes.known, 0)
	case !found.allows(method):
		x.Endpoint = found.endpoint
		x.SetHeader("Allow", found.methods)
		x.Error(WrongMethod, "", "method "+quotedForError(method)+" is not allowed here; use "+strings.TrimSuffix(found.methods, ", HEAD"), 0)
	default:
		if found.endpoint == &StoredEndpoint {
			_, query, _ := bytes.Cut(h.RequestURI(), []byte{'?'})
			found.stored.Method, found.stored.Query = string(method), string(query)
		}
		x.dispatch(found)
	}
}

// openBody compares the framing that fasthttp has parsed with http1.Head's. It returns false if
// they differ; then nothing more on the connection can be trusted. For a chunked body
// onHeadRead has given fasthttp another framing.
func (x *fasthttpExchange) openBody() bool {
	b := &x.body
	b.stream = x.ctx.RequestBodyStream()
	b.length, b.read, b.arrived, b.broken = x.head.Length, 0, 0, false
	seen := int64(x.ctx.Request.Header.ContentLength())
	if b.length == http1.LengthNone {
		b.atEOF = true
		return b.stream == nil && (seen == http1.LengthNone || seen == 0)
	}
	b.atEOF = false
	b.setDeadline(&x.httpExchange, max(b.length, 0))
	if b.stream == nil || b.length != http1.LengthChunked {
		return b.stream != nil && seen == b.length
	}
	b.openChunked(&x.httpExchange, b.stream)
	return seen == unknownLength
}

// writeStatus implements httpPath.
func (x *fasthttpExchange) writeStatus(status int) {
	x.ctx.Response.SetStatusCode(status)
	if status == 499 {
		x.ctx.Response.Header.SetStatusMessage([]byte(reasonPhrase(status)))
	}
	x.ctx.Response.Header.DisableNormalizing()
}

// addHeader implements httpPath.
func (x *fasthttpExchange) addHeader(name, value string) { x.ctx.Response.Header.Add(name, value) }

// setBody implements httpPath.
func (x *fasthttpExchange) setBody(body []byte) {
	x.c.boundFor(len(body))
	x.ctx.Response.SetBody(body)
}

// discardResponse implements httpPath.
func (x *fasthttpExchange) discardResponse() {
	x.responseCount.Release()
	x.ctx.Response.Reset()
}

// finishResponse implements httpPath: fasthttp writes the response.
func (x *fasthttpExchange) finishResponse(keep bool) {
	x.c.pipelined.responding = true
	if !keep {
		x.ctx.Response.Header.SetConnectionClose()
	}
}

// detachStream implements httpPath: fasthttp hands the connection over when the Handler has returned.
func (x *fasthttpExchange) detachStream() {
	x.c.hijackState.Store(hijackPending)
	x.ctx.HijackSetNoResponse(true)
	x.ctx.Hijack(onHijack)
}

// onHijack is fasthttp's hijack handler. It returns at once; the stream starts when fasthttp has
// released the connection (see conn).
func onHijack(nc net.Conn) {
	under, ok := nc.(interface{ UnsafeConn() net.Conn })
	if !ok {
		return
	}
	if c, ok := under.UnsafeConn().(*conn); ok {
		c.stream.hadPipelined = c.hasBuffered(nc)
	}
}

// recycle implements httpPath.
func (x *fasthttpExchange) recycle() {
	x.ctx = nil
	x.srv.fasthttpExchanges.Put(x)
}
