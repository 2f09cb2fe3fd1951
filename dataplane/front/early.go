package front

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

const (
	// keepAlive is a comment of an event stream, which clients' parsers skip;
	// keepAliveChunk is it in a chunk of its own.
	keepAlive      = ": keep-alive\n\n"
	keepAliveChunk = "e\r\n" + keepAlive + "\r\n"
	lastChunk      = "0\r\n\r\n"
)

// pulse writes to a client that waits for the first byte of an engine's body: the head
// of a stream, where it is to go out before the engine's, and comments, so that no
// load balancer in front takes the connection for dead. It is the connection's only
// writer until stopped: fasthttp writes nothing while a handler runs, the relay
// nothing before the first byte.
type pulse struct {
	c     *conn
	st    *stream       // through which comments go, framed and encoded as its events; nil behind a head that is not the engine's
	every time.Duration // between two comments; 0: none

	mu    sync.Mutex
	timer *time.Timer
	keep  bool   // the head says that the connection serves another request
	head  []byte // not out yet
	out   bool   // a head that is not the engine's is
	over  bool
	last  int    // head is a whole answer, with this status (see Overdue); else 0
	wrote func() // called when that is out; nil: nothing is
}

// beat writes what is due. It runs on the timer's goroutine.
func (p *pulse) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	text, early := p.head, len(p.head) > 0
	if !early {
		text = []byte(keepAliveChunk)
	}
	err := p.c.Conn.SetWriteDeadline(time.Now().Add(p.c.srv.live().WriteTimeout))
	switch {
	case err != nil:
	case p.st != nil:
		_, err = p.st.comment()
	default:
		_, err = p.c.Conn.Write(text)
	}
	p.out, p.head = p.out || early, nil
	if p.last != 0 && err == nil {
		p.c.endWrites()
		if p.wrote != nil {
			p.wrote()
		}
	}
	switch {
	case err != nil, p.last != 0:
		p.over = true
		p.c.gone.leave()
	case p.every > 0:
		p.timer.Reset(p.every)
	}
}

// stop ends it; nothing is being written any more when it returns. It says whether a
// head went out. Nil and stopped ones may be stopped.
func (p *pulse) stop() (out bool) {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	p.timer.Stop()
	return p.out
}

// goesOn says whether the head went out; when not, it is stopped, and the head goes out
// with the engine's.
func (p *pulse) goesOn() bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.out {
		p.over = true
		p.timer.Stop()
	}
	return p.out
}

// start makes the first beat come after so long.
func (p *pulse) start(after time.Duration) {
	p.mu.Lock()
	p.at(after)
	p.mu.Unlock()
}

// at makes the next beat come after so long. Called with mu.
func (p *pulse) at(after time.Duration) {
	if p.timer == nil {
		p.timer = time.AfterFunc(after, p.beat)
		return
	}
	p.timer.Reset(after)
}

// Dispatched tells that a streamed request is given to an engine now. Where
// Options.EarlyHead says so, its head goes out when EarlyHeadAfter has passed, whether
// an engine has answered or not. The handler need not know: what it answers from then
// on becomes the rest of an event stream, a refusal an error event in the client's own
// protocol. It does nothing for other requests, and when called again.
func (x *Exchange) Dispatched() {
	if x.party != nil || !x.srv.live().EarlyHead || x.answer != unanswered || !x.head.http11 ||
		x.Converter != nil || x.Endpoint.Protocol == relay.Opaque || !x.Doc.Bool(jsonscan.KeyStream) {
		return
	}
	x.settle()
	defer x.opens()
	if x.early != nil {
		return
	}
	head := append([]byte(nil), "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"...)
	head = appendLine(appendDate(head, time.Now()), "X-Request-Id", x.RequestID)
	for i := range x.set {
		head = appendLine(head, x.set[i].name, x.set[i].value)
	}
	keep := x.reusable()
	if !keep {
		head = append(head, "Connection: close\r\n"...)
	}
	x.early = &pulse{c: x.c, keep: keep, every: x.srv.live().KeepAlive, head: append(head, "\r\n"...)}
	x.early.start(x.srv.live().EarlyHeadAfter)
}

// begun says whether the head of an event stream is out, so that an answer can only be
// the rest of one; then nothing else writes any more.
func (x *Exchange) begun() bool {
	x.settle()
	return x.answer == unanswered && x.early.stop()
}

// endEvents answers with the last events of a stream whose head is out.
func (x *Exchange) endEvents(events []byte) {
	st := x.newStream()
	st.keep = x.early.keep && !x.failed
	if status := x.early.last; status != 0 { // the client has its answer
		st.status, st.keep = int16(status), false
		x.handOver(st)
		return
	}
	st.head = st.begin().room
	if len(events) > 0 {
		st.head = relay.AppendChunk(st.head, events)
	}
	st.head = append(st.head, lastChunk...)
	st.first.room = st.head
	x.handOver(st)
}

// relayBegun is Relay behind a head that is out.
func (x *Exchange) relayBegun(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.early.last == 0 && resp.Status == fasthttp.StatusOK && relay.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
		st := x.newStream()
		st.answers(resp, call, &hooks)
		st.early, st.keep = x.early, x.early.keep // a server that leaves since then keeps the head's word
		st.chunked = resp.ContentLength != upstream.LengthChunked
		x.handOver(st)
		return
	}
	x.begun()
	if x.early.last != 0 {
		x.relayOverdue(resp, call, hooks)
		return
	}
	message := noEvents(resp.Status)
	call.Cut()
	resp.Release()
	x.refuseLate(UpstreamGarbage, "", message)
	hooks.end(relay.Result{Cause: relay.EngineBroke, Err: errors.New("front: " + message)})
}

// noEvents says what is wrong with an engine's answer to a request for a stream.
func noEvents(status int) string {
	return fmt.Sprintf("the engine answered with status %d and no event stream", status)
}

// refuseLate is Error behind a head that is out.
func (x *Exchange) refuseLate(reason Reason, param, message string) {
	told := x.early.wrote != nil // by the drain, and counted
	x.endEvents(appendErrorEvent(nil, x.Endpoint.Protocol, reason, reason.Status(), param, message, x.RequestID))
	if !told {
		x.refused(reason, param)
	}
}

// eventsOf makes of a whole answer what follows the head of an event stream: of an
// engine's refusal an error event, with its own words where they are of the protocol and
// no header that is lost says when to try again (retry, else "").
func (x *Exchange) eventsOf(status int, retry string, body []byte) []byte {
	protocol := x.Endpoint.Protocol
	line := bytes.TrimSpace(body)
	if bytes.ContainsAny(line, "\r\n") { // in JSON they stand between tokens only
		line = bytes.Map(func(r rune) rune {
			if r == '\r' || r == '\n' {
				return ' '
			}
			return r
		}, line)
	}
	failure, failed, _ := jsonscan.Find(line, "error")
	switch whole := len(line) > 0 && line[0] == '{'; {
	case status < 300 && whole:
		return append(append([]byte("data: "), line...), "\n\n"+eventsEnd(protocol)...)
	case protocol == relay.Responses, retry != "":
	case whole && failed && failure.Kind > jsonscan.Null && (protocol != relay.Anthropic || isError(line)):
		return append(append([]byte(errorName(protocol)+"data: "), line...), "\n\n"+eventsEnd(protocol)...)
	}
	reason, message := UpstreamFailed, messageOf(line, status)
	switch {
	case status == 429:
		reason = PoolOverloaded
	case status == 504:
		reason = UpstreamTimeout
	case status < 400: // no fault of the client's: an engine that does not know its part
		reason, status, message = UpstreamGarbage, UpstreamGarbage.Status(), noEvents(status)
	case status < 500:
		reason = BadField
	}
	if retry != "" {
		message += retryText(retry)
	}
	return appendErrorEvent(nil, protocol, reason, status, "", message, x.RequestID)
}

// retryText says in an error's message what Retry-After would have, where the head is out.
func retryText(seconds string) string { return "; try again after " + seconds + " s" }

// isError says whether an error's body is of Anthropic's form; engines refuse what fails
// their validation in OpenAI's on every path.
func isError(body []byte) bool {
	kind, ok, _ := jsonscan.Find(body, "type")
	return ok && string(body[kind.Start:kind.End]) == `"error"`
}

// messageOf is what an engine said in an error's body, or what its status says.
func messageOf(body []byte, status int) string {
	var said struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	if json.Unmarshal(body, &said) == nil {
		if len(said.Error) > 0 && said.Error[0] == '{' {
			_ = json.Unmarshal(said.Error, &said)
		}
		if said.Message != "" {
			return said.Message
		}
	}
	return "the engine answered with status " + strconv.Itoa(status)
}

// appendErrorEvent appends a refusal as the last event of a stream.
func appendErrorEvent(dst []byte, protocol relay.Protocol, reason Reason, status int, param, message, requestID string) []byte {
	dst = append(append(dst, errorName(protocol)...), "data: "...)
	if protocol == relay.Responses {
		dst = append(dst, `{"type":"error","code":`...)
		dst = appendJSONString(dst, reason.Type())
		dst = append(dst, `,"message":`...)
		dst = appendJSONString(dst, message)
		dst = append(dst, `,"param":`...)
		dst = append(appendJSONOrNull(dst, param), `,"sequence_number":0}`...) // no event came before it
	} else {
		dst = appendErrorOf(dst, protocol, reason, status, param, message, requestID)
	}
	return append(append(dst, "\n\n"...), eventsEnd(protocol)...)
}

// errorName is the line that names an error's event, eventsEnd the last event of all.
func errorName(p relay.Protocol) string {
	if p == relay.OpenAI {
		return ""
	}
	return "event: error\n"
}

func eventsEnd(p relay.Protocol) string {
	if p == relay.OpenAI {
		return "data: [DONE]\n\n"
	}
	return ""
}

// awaitFirst waits on the stream's goroutine for the first bytes of the engine's body
// while comments go out. What it fails with, the relay's first read gives again.
func (st *stream) awaitFirst() {
	opt := st.c.srv.live()
	p := st.early
	if p == nil && opt.KeepAlive > 0 && st.commented {
		p = &pulse{c: st.c, st: st, every: opt.KeepAlive}
		p.start(opt.KeepAlive)
	}
	if p == nil || p.every == 0 {
		return
	}
	defer p.stop()
	if opt.StreamIdleTimeout > 0 {
		_ = st.resp.SetReadDeadline(time.Now().Add(opt.StreamIdleTimeout))
	}
	_, _ = st.resp.Peek()
}

// comment writes one as the engine would have.
func (st *stream) comment() (int, error) {
	if st.resp.ContentLength == upstream.LengthChunked {
		return st.Write([]byte(keepAliveChunk))
	}
	return st.Write([]byte(keepAlive))
}

// writeChunk sends p, of a body without chunk framing, as one chunk.
func (st *stream) writeChunk(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil // which would be the last one
	}
	room := membudget.Default.Get(relay.ChunkHead + len(p) + len("\r\n"))
	defer membudget.Default.Put(room)
	copy(room.B[relay.ChunkHead:], p)
	framed, from := relay.FrameChunk(room.B[:relay.ChunkHead+len(p)])
	if _, err := st.send(framed[from:]); err != nil {
		// A part of the chunk may be out: nothing can be sent again.
		return 0, fmt.Errorf("front: cannot write a chunk: %w", err)
	}
	return len(p), nil
}
