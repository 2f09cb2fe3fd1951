package front

import (
	"fmt"
	"net"
	"net/netip"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/relay"
	"sluice/dataplane/reuse"
	"sluice/dataplane/upstream"
)

// joinBytes is the most of a first write that is copied behind the head, to
// leave in one packet with it.
const joinBytes = 16 << 10

// stream is an answer that was handed to Relay. There are thousands: it just fills a
// size class of 160 bytes.
type stream struct {
	id       string
	resp     *upstream.Response
	call     *upstream.Call
	of       Relayed // nil: nobody's
	endpoint *Endpoint
	since    time.Duration // since epoch
	first    *beginning    // nil once a loop drives the stream
	status   int16
	keep     bool // the connection may serve another request
	behind   bool // a request that came too early lay in the lane's reader, and was lost with it
	plain    bool // take the chunk framing out, for HTTP/1.0
	toClose  bool // the body ends with the connection
	chunked  bool // put chunk framing around what the engine sends without
	// commented: comments may go out before the engine's first byte.
	commented bool
	early     *pulse      // the head went out before the engine's
	counted   *netip.Addr // for connSet.leave; nil: nothing was

	c      *conn
	head   []byte // not yet written
	chunks upstream.Chunks
	coder  *coder // nil until a coding is put on
}

// beginning is what a stream has until it runs.
type beginning struct {
	room    []byte // where its head is written
	hooks   RelayHooks
	convert relay.Converter
}

var beginnings = reuse.Pool[beginning]{New: func() *beginning { return &beginning{room: make([]byte, 0, 512)} }}

// epoch is what streams count time from.
var epoch = time.Now()

// begin gives the stream's beginning.
func (st *stream) begin() *beginning {
	if st.first == nil {
		st.first = beginnings.Get()
	}
	return st.first
}

// begun lets go of it: the head is out, and who relays has what it needs.
func (st *stream) begun() {
	if b := st.first; b != nil {
		*b = beginning{room: b.room[:0]}
		if cap(b.room) <= joinBytes { // a whole answer's events may be in it
			beginnings.Put(b)
		}
		st.first, st.head = nil, nil
	}
}

// answers is what the stream passes on, and whom it tells.
func (st *stream) answers(resp *upstream.Response, call *upstream.Call, hooks *RelayHooks) {
	st.resp, st.call, st.of = resp, call, hooks.Of
	st.begin().hooks = *hooks
}

// FirstToken implements relay.ClientConn.
func (st *stream) FirstToken() {
	if st.of != nil {
		st.of.FirstToken()
	}
}

// Stored implements relay.StoredTold.
func (st *stream) Stored(id string) {
	if s, ok := st.of.(Storer); ok {
		s.Stored(id)
	}
}

// Done implements relay.DoneTold.
func (st *stream) Done(usage relay.Usage, failed bool) {
	if d, ok := st.of.(Doner); ok {
		d.Done(usage, failed)
	}
}

// clientGone implements goner.
func (st *stream) clientGone() {
	if st.call != nil {
		st.call.Cut()
	}
}

// Resume implements relay.Resumer: it goes on with a stream that a loop has let go of.
func (st *stream) Resume(f func() (relay.Result, bool)) {
	c := st.c
	go func() {
		if c.srv.relayOn(c, st, f) {
			c.srv.serveConn(c)
		}
	}()
}

// end tells the end of a stream that was not relayed.
func (h *RelayHooks) end(res relay.Result) {
	if h.Of != nil {
		h.Of.End(res)
	}
}

// Relay answers by streaming resp: head now, body by package relay after the
// Handler has returned. It owns resp and call from here on: call is cut when
// the client leaves, resp is Released at the end.
func (x *Exchange) Relay(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.answer != unanswered {
		x.Log().Error("the handler answered twice", "status", resp.Status)
		call.Cut()
		resp.Release()
		hooks.end(relay.Result{Cause: relay.Cut, Err: upstream.ErrCut})
		return
	}
	if x.party != nil {
		x.answer = relayed
		x.party.Relay(resp, call, hooks)
		return
	}
	if x.settle(); x.early.goesOn() {
		x.relayBegun(resp, call, hooks)
		return
	}
	st := x.newStream()
	st.answers(resp, call, &hooks)
	st.status = int16(resp.Status)
	if x.Converter != nil {
		st.first.convert = x.Converter(resp.ContentLength == upstream.LengthChunked)
	}
	x.composeHead(st)
	x.handOver(st)
}

// newStream makes the stream of the exchange's answer.
func (x *Exchange) newStream() *stream {
	st := x.srv.streams.Get()
	st.id, st.c, st.endpoint, st.since, st.status = x.RequestID, x.c, x.Endpoint, x.Received.Sub(epoch), fasthttp.StatusOK
	if x.counted.IsValid() { // of a proxy's connection
		counted := x.counted
		st.counted, x.counted = &counted, netip.Addr{}
	}
	st.keep = x.reusable()
	return st
}

// handOver has st answer once the lane, or fasthttp, has let go of the connection.
func (x *Exchange) handOver(st *stream) {
	x.answer = relayed
	c := x.c
	c.stream = st
	x.srv.watch.add(c)
	c.gone.setStream(st)
	if x.ctx == nil {
		return // the lane sees it
	}
	c.hand.Store(handPending)
	x.ctx.HijackSetNoResponse(true)
	x.ctx.Hijack(hijacked)
}

// composeHead writes the response head into st: the engine's end-to-end lines,
// ours, and the framing in which the body will come.
func (x *Exchange) composeHead(st *stream) {
	resp := st.resp
	st.head = append(st.begin().room, "HTTP/1.1 "...)
	st.head = strconv.AppendInt(st.head, int64(resp.Status), 10)
	st.head = append(st.head, ' ')
	st.head = append(st.head, phrase(resp.Status)...)
	st.head = append(st.head, "\r\n"...)
	x.passed, x.passing = &st.head, resp.Status
	resp.VisitHeaders(x.pass)
	x.passed = nil
	st.head = appendDate(st.head, time.Now()) // in the place of the engine's
	st.head = appendLine(st.head, "X-Request-Id", x.RequestID)
	for i := range x.set {
		st.head = appendLine(st.head, x.set[i].name, x.set[i].value)
	}
	kind := resp.Header("Content-Type")
	switch {
	case resp.Status == 204 || resp.Status == 304:
	case x.encodeRelayed(st, kind):
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
	case resp.ContentLength >= 0:
		st.head = append(st.head, "Content-Length: "...)
		st.head = strconv.AppendInt(st.head, resp.ContentLength, 10)
		st.head = append(st.head, "\r\n"...)
	case resp.ContentLength == upstream.LengthChunked && x.head.http11:
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
	case x.head.http11:
		// What ends with the engine's connection gets framing, so that a client can tell
		// a whole body from half of one, and keep its own.
		st.head = append(st.head, "Transfer-Encoding: chunked\r\n"...)
		st.chunked = true
	default:
		// HTTP/1.0 knows no chunks: the framing is taken out and the
		// connection's end is the body's.
		st.plain = resp.ContentLength == upstream.LengthChunked
		st.keep, st.toClose = false, true
	}
	st.keep = st.keep && (x.head.http11 || x.keptAlive())
	switch {
	case !st.keep:
		st.head = append(st.head, "Connection: close\r\n"...)
	case !x.head.http11:
		st.head = append(st.head, "Connection: keep-alive\r\n"...)
	}
	st.head = append(st.head, "\r\n"...)
	st.first.room = st.head
	st.commented = resp.ContentLength < 0 && len(resp.Header("Content-Encoding")) == 0 &&
		x.Endpoint.Protocol != relay.Opaque && relay.IsEventStream(kind)
}

// keptAlive says whether an HTTP/1.0 client asked to keep the connection.
func (x *Exchange) keptAlive() bool { return !x.ctx.Request.Header.ConnectionClose() }

func appendLine[N, V []byte | string](dst []byte, name N, value V) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	dst = append(dst, value...)
	return append(dst, "\r\n"...)
}

// hijacked is fasthttp's hijack handler; it returns at once, and the stream
// starts when fasthttp has let go of the connection (see conn).
func hijacked(nc net.Conn) {
	under, ok := nc.(interface{ UnsafeConn() net.Conn })
	if !ok {
		return
	}
	if c, ok := under.UnsafeConn().(*conn); ok {
		c.stream.behind = c.leftover(nc)
	}
}

// runStream writes the head and passes the body on; true when the connection is to be
// served on, as of relayOn.
func (s *Server) runStream(c *conn, st *stream) bool {
	return s.relayOn(c, st, func() (relay.Result, bool) {
		if st.resp == nil {
			return relay.Result{Reusable: true}, true // it has its end in its head
		}
		c.bound()
		if st.resp.Buffered() == 0 {
			if st.resp.Ended() {
				st.Ending()
			}
			if err := st.flushHead(s.live().WriteTimeout); err != nil {
				st.call.Cut()
				return relay.Result{Cause: causeOf(err), Err: err}, true
			}
			st.resp.Glance() // what a loop would find is passed on at once
			st.awaitFirst()
		}
		st.early.stop()
		hooks := &st.first.hooks
		c.writeBy, c.relaying = momentOf(hooks.By), true
		var carry relay.Carry
		if t := hooks.Transcript; t != nil {
			carry = relay.Carry{Transcript: t, Usage: hooks.Usage, Next: (*another)(st)}
		}
		return relay.Begin(st, st.resp, relay.Options{
			Protocol:     st.endpoint.Protocol,
			Choices:      hooks.Choices,
			WriteTimeout: s.live().WriteTimeout,
			IdleTimeout:  s.live().StreamIdleTimeout,
			Rewrite:      hooks.Rewrite,
			Carry:        carry,
			Convert:      st.first.convert,
			By:           hooks.By,
			Loops:        s.loops,
			Budget:       s.parts,
			Ends:         &s.cutting,
		})
	})
}

// relayOn relays with f until the stream ends, or until a loop has taken it, which
// goes on by another relayOn. True when the stream has ended and its connection is to be
// served on.
func (s *Server) relayOn(c *conn, st *stream, f func() (relay.Result, bool)) bool {
	res, ended := s.guarded(st, f)
	if !ended {
		return false // not ours any more
	}
	c.takeServing()
	if res.Reusable && st.chunked {
		if err := st.endChunks(); err != nil {
			res.Reusable, res.Cause, res.Err = false, relay.Cut, err
		}
	}
	if res.Reusable && len(st.head) > 0 {
		// No body came to carry the head, or what ends it is left.
		st.Ending()
		if err := st.flushHead(s.live().WriteTimeout); err != nil {
			if res.Reusable = false; res.Err == nil {
				res.Cause, res.Err = causeOf(err), err
			}
		}
	}
	if res.Err != nil && res.Cause != relay.EngineErred && c.gone.left.Load() {
		res.Cause = relay.ClientGone
		if s.cutting.Load() { // who was cut by us has not gone
			res.Cause = relay.Drained
		}
	}
	c.writeBy, c.relaying, c.patience = 0, false, relay.Patience{}
	reuse, early := res.Reusable && st.keep && !s.draining.Load(), st.behind || c.early.came
	c.lingered = c.lingered || early
	if st.toClose && !res.Reusable {
		c.breakOff()
	}
	s.endStream(c, st, res)
	if reuse && early {
		s.refuseEarly(c)
		reuse = false
	}
	if !reuse || c.SetDeadline(time.Time{}) != nil {
		c.shut()
		return false
	}
	c.due = dueBack
	c.rests()
	return true
}

// guarded runs f; a panic ends the stream and nothing else.
func (s *Server) guarded(st *stream, f func() (relay.Result, bool)) (res relay.Result, ended bool) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.opt.Log.Error("panic while relaying", "request_id", st.id, "value", v, "stack", string(stack))
			if o := s.opt.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
			st.clientGone()
			res, ended = relay.Result{Cause: relay.Cut, Err: fmt.Errorf("front: panic while relaying: %v", v)}, true
		}
	}()
	return f()
}

// abortStream ends a stream whose connection failed before the hijack.
func (s *Server) abortStream(c *conn, st *stream) {
	st.clientGone()
	s.endStream(c, st, relay.Result{Cause: relay.ClientGone, Err: net.ErrClosed})
	c.shut()
}

// another is a stream as its relay.Mover.
type another stream

// Next takes the answer of another engine in the place of the one that failed.
// While it is waited for, a client that leaves cuts the new call.
func (a *another) Next(b relay.Break) *upstream.Response {
	st := (*stream)(a)
	gone := &st.c.gone
	gone.set(nil) // a cut of the old call under way has ended behind this
	defer gone.setStream(st)
	if gone.left.Load() || st.c.srv.cutting.Load() {
		return nil
	}
	resp, call := st.of.Next(b, (*leaver)(gone))
	gone.set(nil)
	if resp == nil {
		return nil
	}
	st.resp.Release()
	st.resp, st.call = resp, call
	return resp
}

// leaver is the Leaver of a stream's client.
type leaver watch

func (l *leaver) OnGone(f func()) { (*watch)(l).set(f) }
func (l *leaver) Gone() bool      { return (*watch)(l).left.Load() }

// endStream tells the end once and recycles st.
func (s *Server) endStream(c *conn, st *stream, res relay.Result) {
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			s.opt.Log.Error("panic after a stream", "request_id", st.id, "value", v, "stack", string(stack))
			if o := s.opt.Observer; o != nil {
				o.Panicked(st.id, v, stack)
			}
		}
	}()
	c.gone.set(nil)
	c.stream = nil
	if st.counted != nil {
		s.conns.leave(*st.counted)
	}
	st.early.stop()
	st.coder.end()
	if st.resp != nil {
		st.resp.Release()
	}
	if o := s.opt.Observer; o != nil {
		o.Ended(st.endpoint.Path, int(st.status), time.Since(epoch)-st.since)
	}
	if st.of != nil {
		st.of.End(res)
	}
	st.begun()
	*st = stream{coder: st.coder}
	s.streams.Put(st)
}

func (st *stream) flushHead(limit time.Duration) error {
	if len(st.head) == 0 {
		return nil // it is out
	}
	if st.c.relaying {
		limit = relay.LookAfter(limit)
	}
	if err := st.c.Conn.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	n, err := st.put(st.head)
	st.head = st.head[n:]
	return err
}

// Write passes p to the client, behind what is left of the head. It implements
// relay.ClientConn and counts p's bytes only.
func (st *stream) Write(p []byte) (int, error) {
	switch {
	case st.plain:
		return st.writePayload(p)
	case st.coder.works():
		return st.writeCoded(p)
	case st.chunked:
		return st.writeChunk(p)
	}
	return st.send(p)
}

func (st *stream) send(p []byte) (int, error) {
	head := len(st.head)
	if head == 0 {
		return st.put(p)
	}
	joined := append(st.head, p[:min(len(p), joinBytes)]...)
	n, err := st.put(joined)
	if n < head {
		st.head = joined[n:head]
		return 0, err
	}
	st.head = nil
	n -= head
	if err != nil || n == len(p) {
		return n, err
	}
	more, err := st.put(p[n:])
	return n + more, err
}

// put writes p, and waits for a client that reads slowly; below TLS, underTLS does.
func (st *stream) put(p []byte) (int, error) {
	if st.c.secure == nil {
		return st.c.persist(st.c.Conn, p)
	}
	return st.c.Conn.Write(p)
}

// changed says whether the client gets other bytes than the relay writes.
func (st *stream) changed() bool { return st.plain || st.chunked || st.coder.works() }

// writePayload takes the chunk framing out of p.
func (st *stream) writePayload(p []byte) (int, error) {
	for at := 0; at < len(p); {
		n, payload, err := st.chunks.Next(p[at:])
		if err != nil {
			return at, err
		}
		at += n
		if len(payload) > 0 {
			if _, err := st.send(payload); err != nil {
				// The framing's state has gone on: nothing can be sent again.
				return at, fmt.Errorf("front: cannot write to an HTTP/1.0 client: %w", err)
			}
		}
		if st.chunks.Done() {
			break
		}
	}
	return len(p), nil
}

// Left implements relay.Leaver.
func (st *stream) Left() bool { return st.c.gone.left.Load() }

// Frames implements relay.Framer.
func (st *stream) Frames() bool { return st.chunked }

// Descriptor implements relay.Descriptor: none while the head is not out, where the
// framing must be taken out or the body encoded, where TLS is spoken, and where there
// is none.
func (st *stream) Descriptor() (fd int, ok bool) {
	if st.changed() || len(st.head) > 0 || st.c.fd == 0 || st.c.secure != nil {
		return 0, false
	}
	st.begun()
	st.c.giveServing()
	return int(st.c.fd), true
}

// Patient implements relay.Patient: put waits.
func (st *stream) Patient() {}

// SetWriteDeadline implements relay.ClientConn.
func (st *stream) SetWriteDeadline(t time.Time) error {
	if c := st.c; c.relaying && !t.IsZero() {
		unsent := c.unsent()
		c.patience.Look(unsent, time.Now())
	}
	return st.c.Conn.SetWriteDeadline(t)
}
