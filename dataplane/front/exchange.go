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

	early     *pulse // of a head that may go out before an engine's; see Dispatched
	parting   *pulse // of a drain that answered; guarded by Server.telling
	srv       *Server
	ctx       *fasthttp.RequestCtx // nil: a plain request
	c         *conn
	head      head
	body      body
	rest      rest // of a plain request's body
	room      room // of a plain request's whole answer
	answer    answer
	holder    Pass // nil: no keys are asked for
	untrusted bool // where the next request begins cannot be known
	failed    bool // the handler panicked
	opened    bool // a drain may find it; see parting.go
	expects   bool // the body has not been sent: the client waits for leave to do so
	set       []setHeader
	says      []setHeader // by Say
	scratch   []byte
	log       *slog.Logger
	pass      func(name, value []byte) // x.passHeader, made once
	passing   int                      // the status of the answer that passHeader passes
	passed    *[]byte                  // where passHeader writes a stream's head; nil: to a whole answer
	ip        netip.Addr               // the client's
	ipText    []byte                   // as engines are told it
	counted   netip.Addr               // for connSet.leave

	// Of a detached exchange, which has no srv, ctx, c and head.
	party  Party
	lend   func(n int) (membudget.Lease, bool)
	budget *membudget.Budget
	fields []upstream.Field
	unix   bool
}

type setHeader struct{ name, value string }

// answer says how an Exchange was answered.
type answer uint8

const (
	unanswered answer = iota
	short             // whole, in room or fasthttp's response
	relayed           // the stream owns the connection now
)

func newExchange(s *Server) *Exchange {
	x := &Exchange{srv: s}
	x.pass = x.passHeader
	return x
}

// Log is a logger whose lines carry request_id. It is made at the first call:
// most requests log nothing.
func (x *Exchange) Log() *slog.Logger {
	if x.log == nil {
		x.log = x.srv.opt.Log.With("request_id", x.RequestID)
		if x.ip.IsValid() {
			x.log = x.log.With("client", x.ip)
		}
		if x.holder != nil {
			x.log = x.log.With("key", x.holder.Name())
		}
	}
	return x.log
}

// Header gives a request header; nil when absent. Borrowed until return.
func (x *Exchange) Header(name string) []byte {
	if v := x.said(name); v != nil {
		return v
	}
	if x.party != nil {
		return x.detachedHeader(name, false)
	}
	return x.head.find(name)
}

// Say puts a request header in the place of the client's of that name,
// for engines too, where they may see such a one.
func (x *Exchange) Say(name, value string) { x.says = append(x.says, setHeader{name, value}) }

func (x *Exchange) said(name string) []byte {
	for i := range x.says {
		if equalFold([]byte(x.says[i].name), name) {
			return []byte(x.says[i].value)
		}
	}
	return nil
}

// HeaderList is Header for a header that holds a list: the values of all lines of
// that name, in their order, joined by commas (RFC 9110, 5.3). It allocates only
// where there are several.
func (x *Exchange) HeaderList(name string) []byte {
	if v := x.said(name); v != nil {
		return v
	}
	if x.party != nil {
		return x.detachedHeader(name, true)
	}
	return x.head.findAll(name)
}

// OnGone arranges that f runs once, on another goroutine, within a few
// milliseconds of the client's closing or resetting its connection; at most
// one f at a time, a later call replaces it, nil removes it. f never runs after
// the exchange has ended, nor concurrently with the return of OnGone(nil), which
// waits for it: f must neither block nor call OnGone.
func (x *Exchange) OnGone(f func()) {
	if x.answer == relayed {
		return
	}
	if x.party != nil {
		x.party.OnGone(f)
		return
	}
	if f != nil {
		x.srv.watch.add(x.c)
	}
	x.c.gone.set(f)
}

// Gone says whether the client has left. Where the connection is watched (see OnGone),
// that is a look at memory, and some milliseconds late; else the kernel is asked.
func (x *Exchange) Gone() bool {
	if x.party != nil {
		return x.party.Gone()
	}
	c := x.c
	return c.gone.left.Load() || c.gone.id == 0 && c.raw != nil && hasLeft(c.raw)
}

// Comments says that a stream's head is to go out with the engine's, for comments begin
// behind it (Options.KeepAlive).
func (x *Exchange) Comments() bool {
	return x.srv != nil && x.srv.live().KeepAlive > 0 && !x.srv.live().EarlyHead
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
	for i := range x.set {
		if equalFold([]byte(x.set[i].name), name) {
			x.set[i].value = value
			return
		}
	}
	x.set = append(x.set, setHeader{name, value})
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }

// identify takes the client's request id or makes one.
func (x *Exchange) identify() {
	if id := x.head.find("X-Request-Id"); validRequestID(id) {
		x.RequestID = string(id)
		return
	}
	x.RequestID = x.srv.ids.make()
}

// distrust gives up the connection: nothing after this request is read.
func (x *Exchange) distrust() {
	x.untrusted = true
	x.RequestID = x.srv.ids.make()
}

// begin opens a short answer; false, and nothing done, when there is one.
func (x *Exchange) begin(status int) bool {
	if x.answer != unanswered {
		x.Log().Error("the handler answered twice", "status", status)
		return false
	}
	x.answer = short
	x.c.ended = ending{x.Endpoint, status, momentOf(x.Received)}
	if x.ctx != nil {
		x.ctx.Response.SetStatusCode(status)
		if status == 499 {
			x.ctx.Response.Header.SetStatusMessage([]byte(phrase(status)))
		}
		x.ctx.Response.Header.DisableNormalizing()
	} else {
		x.room.status(status)
	}
	// None of these is there yet, so nothing need be looked for.
	addLine(x, "X-Request-Id", x.RequestID)
	for i := range x.set {
		addLine(x, x.set[i].name, x.set[i].value)
	}
	return true
}

// Reply answers with an engine's status, its end-to-end headers and body, byte
// for byte; only Date is our own. resp may be Released after it returns; body is
// copied.
func (x *Exchange) Reply(resp *upstream.Response, body []byte) {
	if x.party != nil {
		x.tell(resp.Status, body)
		return
	}
	if x.begun() {
		if resp.Status == fasthttp.StatusOK && relay.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
			x.endEvents(body) // they came with their length
			return
		}
		retry := x.setHeader("Retry-After")
		if len(retry) == 0 {
			retry = string(resp.Header("Retry-After"))
		}
		x.endEvents(x.eventsOf(resp.Status, retry, body))
		return
	}
	if !x.countAnswer(len(body)) || !x.begin(resp.Status) {
		return
	}
	x.passing = resp.Status
	resp.VisitHeaders(x.pass)
	if len(resp.Header("Content-Encoding")) > 0 {
		x.putBody(body) // an engine's own, although it was not asked for one
		return
	}
	x.setBody(body)
}

// setHeader is what a Handler has set a header to, "" for none.
func (x *Exchange) setHeader(name string) string {
	for i := range x.set {
		if x.set[i].name == name {
			return x.set[i].value
		}
	}
	return ""
}

// ReplyJSON answers with a body of the router's own.
func (x *Exchange) ReplyJSON(status int, body []byte) {
	if x.party != nil {
		x.tell(status, body)
		return
	}
	if x.begun() {
		x.endEvents(x.eventsOf(status, x.setHeader("Retry-After"), body))
		return
	}
	if !x.countAnswer(len(body)) || !x.begin(status) {
		return
	}
	addLine(x, "Content-Type", "application/json")
	x.setBody(body)
}

// ReplyEvents answers 200 with an event stream that is whole already.
func (x *Exchange) ReplyEvents(body []byte) {
	if x.party != nil {
		x.tell(200, body)
		return
	}
	if x.begun() {
		x.endEvents(body)
		return
	}
	if !x.countAnswer(len(body)) || !x.begin(200) {
		return
	}
	addLine(x, "Content-Type", "text/event-stream; charset=utf-8")
	if x.Converter != nil {
		body, _ = x.Converter(false).Convert(body)
	}
	x.putBody(body)
}

// passHeader passes one of the engine's header lines on, unless answerTable withholds it or
// ours takes its place.
func (x *Exchange) passHeader(name, value []byte) {
	if !reachesClient(name, x.passing) {
		return
	}
	for i := range x.set {
		if equalFold(name, x.set[i].name) && !equalFold(name, "Vary") {
			return
		}
	}
	if x.passed != nil {
		*x.passed = appendLine(*x.passed, name, value)
		return
	}
	addLine(x, name, value)
}

// finish ends what serve began: it recovers, sees to it that nothing of the
// request is left on a connection that will be kept, and recycles x.
func (x *Exchange) finish() {
	if v := recover(); v != nil {
		x.panicked(v, debug.Stack())
	}
	x.srv.conns.leave(x.counted)
	if x.answer != relayed && !x.goesOn() {
		x.c.gone.set(nil)
		x.untrusted = x.untrusted || !x.body.drain(x.c)
		x.c.lingered = x.c.lingered || x.untrusted
		keep := x.reusable()
		switch {
		case x.ctx == nil:
			x.seal(keep)
		case keep:
			x.c.early.asks = true
		default:
			x.c.early.asks = true
			x.ctx.Response.Header.SetConnectionClose()
		}
	}
	x.recycle()
}

// reusable says whether the connection may serve another request.
func (x *Exchange) reusable() bool {
	return !x.untrusted && !x.failed && !x.head.close && x.body.ended && !x.srv.leaving.Load() && !x.c.spare
}

func (x *Exchange) panicked(v any, stack []byte) {
	x.failed = true
	x.Log().Error("panic while serving a request", "value", v, "stack", string(stack))
	if o := x.srv.opt.Observer; o != nil {
		o.Panicked(x.RequestID, v, stack)
	}
	if x.answer == relayed {
		return
	}
	if x.answer == short {
		x.room.drop()
		if x.ctx != nil {
			x.ctx.Response.Reset()
		}
		x.answer = unanswered
	}
	x.Error(Internal, "", "the router failed on this request", 0)
}

func (x *Exchange) recycle() {
	s := x.srv
	x.body.release()
	x.room.count.Release() // of an answer that fasthttp has
	x.Endpoint, x.RequestID, x.ctx, x.c = nil, "", nil, nil
	x.Doc.Body, x.log, x.passed, x.holder = nil, nil, nil, nil
	if x.answer != relayed {
		x.early.stop()
	}
	x.Stored = StoredRequest{}
	x.Converter, x.Attached, x.early, x.parting, x.rest = nil, nil, nil, nil, rest{}
	x.ip, x.counted = netip.Addr{}, netip.Addr{}
	x.head.raw, x.head.path = nil, nil
	x.answer, x.untrusted, x.failed, x.expects = unanswered, false, false, false
	clear(x.set)
	x.set = x.set[:0]
	clear(x.says)
	x.says = x.says[:0]
	s.exchanges.Put(x)
}
