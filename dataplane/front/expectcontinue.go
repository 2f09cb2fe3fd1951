package front

import (
	"net/netip"
	"time"

	"github.com/valyala/fasthttp"
)

const expectContinue = "100-continue"

// normalizeExpect has fasthttp see the expectation as RFC 9110 10.1.1 says: in any case, and
// not in an HTTP/1.0 request, whose client would take the 100 for its answer.
func normalizeExpect(h *fasthttp.RequestHeader) {
	switch v := h.Peek("Expect"); {
	case len(v) == 0:
	case !h.IsHTTP11():
		h.Del("Expect")
	case equalFold(v, expectContinue):
		h.Set("Expect", expectContinue)
	}
}

// onExpectContinue is asked about a client that waits for leave to send its body: what would be
// refused whatever the body holds is refused now. The connection ends with that, for the
// body may be on its way.
func (s *Server) onExpectContinue(ctx *fasthttp.RequestCtx) (status int) {
	x := s.exchanges.Get()
	x.ctx, x.Received, x.awaitsContinue = ctx, time.Now(), true
	x.c, _ = ctx.Conn().(*conn)
	x.body.length, x.body.atEOF, x.body.broken = 0, false, true // not to be drained
	if x.admitContinue() {
		return fasthttp.StatusContinue
	}
	return ctx.Response.StatusCode()
}

// continuedRequest is whose body a client has leave to send; fasthttp forgets the head where it
// then cannot read the body.
type continuedRequest struct {
	endpoint *Endpoint // nil: nobody's
	id       string
	holder   Principal
	ip       netip.Addr
}

// rejectContinuedBody answers a client that had leave to send its body, of which nothing came
// that fasthttp could read.
func (s *Server) rejectContinuedBody(ctx *fasthttp.RequestCtx, c *conn, err error) {
	x := s.exchanges.Get()
	x.ctx, x.c, x.Received = ctx, c, time.Now()
	x.body.length, x.body.atEOF, x.body.broken = 0, false, true // not to be drained
	defer x.finish()
	x.Endpoint, x.RequestID, x.principal, x.ip = c.continued.endpoint, c.continued.id, c.continued.holder, c.continued.ip
	c.continued = continuedRequest{}
	x.rejectBodyError(err)
}

// admitContinue says whether the body may come; when not, it has answered.
func (x *Exchange) admitContinue() (ok bool) {
	defer x.finish()
	x.serve()
	if ok = x.mayContinue(); ok {
		x.c.continued = continuedRequest{x.Endpoint, x.RequestID, x.principal, x.ip}
	}
	return ok
}

// mayContinue says whether a client that waits for leave has it.
func (x *Exchange) mayContinue() bool { return x.awaitsContinue && x.responseState == responsePending }
