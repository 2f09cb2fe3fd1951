package front

import (
	"net/netip"
	"time"

	"github.com/valyala/fasthttp"
)

const expectContinue = "100-continue"

// judgeExpect has fasthttp see the expectation as RFC 9110 10.1.1 says: in any case, and
// not in an HTTP/1.0 request, whose client would take the 100 for its answer.
func judgeExpect(h *fasthttp.RequestHeader) {
	switch v := h.Peek("Expect"); {
	case len(v) == 0:
	case !h.IsHTTP11():
		h.Del("Expect")
	case equalFold(v, expectContinue):
		h.Set("Expect", expectContinue)
	}
}

// expected is asked about a client that waits for leave to send its body: what would be
// refused whatever the body holds is refused now. The connection ends with that, for the
// body may be on its way.
func (s *Server) expected(ctx *fasthttp.RequestCtx) (status int) {
	x := s.exchanges.Get()
	x.ctx, x.Received, x.expects = ctx, time.Now(), true
	x.c, _ = ctx.Conn().(*conn)
	x.body.length, x.body.ended, x.body.broken = 0, false, true // not to be drained
	if x.weigh() {
		return fasthttp.StatusContinue
	}
	return ctx.Response.StatusCode()
}

// awaited is whose body a client has leave to send; fasthttp forgets the head where it
// then cannot read the body.
type awaited struct {
	endpoint *Endpoint // nil: nobody's
	id       string
	holder   Pass
	ip       netip.Addr
}

// awaitedFailed answers a client that had leave to send its body, of which nothing came
// that fasthttp could read.
func (s *Server) awaitedFailed(ctx *fasthttp.RequestCtx, c *conn, err error) {
	x := s.exchanges.Get()
	x.ctx, x.c, x.Received = ctx, c, time.Now()
	x.body.length, x.body.ended, x.body.broken = 0, false, true // not to be drained
	defer x.finish()
	x.Endpoint, x.RequestID, x.holder, x.ip = c.awaited.endpoint, c.awaited.id, c.awaited.holder, c.awaited.ip
	c.awaited = awaited{}
	x.bodyFailed(err)
}

// weigh says whether the body may come; when not, it has answered.
func (x *Exchange) weigh() (ok bool) {
	defer x.finish()
	x.serve()
	if ok = x.goesOn(); ok {
		x.c.awaited = awaited{x.Endpoint, x.RequestID, x.holder, x.ip}
	}
	return ok
}

// goesOn says whether a client that waits for leave has it.
func (x *Exchange) goesOn() bool { return x.expects && x.answer == unanswered }
