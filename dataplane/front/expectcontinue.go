package front

import (
	"net/netip"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/ascii"
)

const expectContinue = "100-continue"

// normalizeExpect rewrites the Expect header for fasthttp as RFC 9110, 10.1.1, requires: its
// value is case-insensitive, and it is ignored in an HTTP/1.0 request, whose client would read
// the status 100 as the final response.
func normalizeExpect(h *fasthttp.RequestHeader) {
	switch v := h.Peek("Expect"); {
	case len(v) == 0:
	case !h.IsHTTP11():
		h.Del("Expect")
	case ascii.EqualFold(v, expectContinue):
		h.Set("Expect", expectContinue)
	}
}

// onExpectContinue is called by fasthttp when a client waits for "100 Continue" before it sends
// its body. It refuses a request that would be refused whatever its body is. A refusal ends
// the connection, because the client may already be sending the body.
func (s *Server) onExpectContinue(ctx *fasthttp.RequestCtx) (status int) {
	x := s.fasthttpExchanges.Get()
	x.ctx, x.Received, x.awaitsContinue = ctx, time.Now(), true
	x.c, _ = ctx.Conn().(*conn)
	x.body.length, x.body.atEOF, x.body.broken = 0, false, true // not to be drained
	if x.admitContinue() {
		return fasthttp.StatusContinue
	}
	return ctx.Response.StatusCode()
}

// continuedRequest identifies the request whose client has got "100 Continue". fasthttp discards
// the head if it then cannot read the body, and rejectContinuedBody needs these values.
type continuedRequest struct {
	endpoint *Endpoint // nil: no client has got "100 Continue"
	id       string
	holder   Principal
	ip       netip.Addr
}

// rejectContinuedBody answers a client that has got "100 Continue" and whose body fasthttp could
// not read.
func (s *Server) rejectContinuedBody(ctx *fasthttp.RequestCtx, c *conn, err error) {
	x := s.fasthttpExchanges.Get()
	x.ctx, x.c, x.Received = ctx, c, time.Now()
	x.body.length, x.body.atEOF, x.body.broken = 0, false, true // not to be drained
	defer x.finish()
	x.Endpoint, x.RequestID, x.Principal, x.ClientIP = c.continued.endpoint, c.continued.id, c.continued.holder, c.continued.ip
	c.continued = continuedRequest{}
	x.rejectBodyError(err)
}

// admitContinue reports whether the client may send the body. If not, it has answered.
func (x *fasthttpExchange) admitContinue() (ok bool) {
	defer x.finish()
	x.serve()
	if ok = x.mayContinue(); ok {
		x.c.continued = continuedRequest{x.Endpoint, x.RequestID, x.Principal, x.ClientIP}
	}
	return ok
}

// mayContinue reports whether the client waits for "100 Continue" and the request has not been
// refused.
func (x *httpExchange) mayContinue() bool {
	return x.awaitsContinue && x.responseState == responsePending
}
