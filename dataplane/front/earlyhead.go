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
	// keepAliveComment is a comment of an event stream, which clients' parsers skip;
	// keepAliveChunk is it in a chunk of its own.
	keepAliveComment = ": keep-alive\n\n"
	keepAliveChunk   = "e\r\n" + keepAliveComment + "\r\n"
	lastChunk        = "0\r\n\r\n"
)

// keepAliveWriter writes to a client that waits for the first byte of an engine's body: the head
// of a stream, where it is to go out before the engine's, and comments, so that no
// load balancer in front takes the connection for dead. It is the connection's only
// writer until stopped: fasthttp writes nothing while a handler runs, the relay
// nothing before the first byte.
type keepAliveWriter struct {
	c        *conn
	st       *stream       // through which comments go, framed and encoded as its events; nil behind a head that is not the engine's
	interval time.Duration // between two comments; 0: none

	mu          sync.Mutex
	timer       *time.Timer
	keepConn    bool   // the head says that the connection serves another request
	head        []byte // not out yet
	headSent    bool   // a head that is not the engine's is
	stopped     bool
	finalStatus int    // head is a whole answer, with this status (see Overdue); else 0
	onFinal     func() // called when that is out; nil: nothing is
}

// tick writes what is due. It runs on the timer's goroutine.
func (p *keepAliveWriter) tick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return
	}
	text, isHead := p.head, len(p.head) > 0
	if !isHead {
		text = []byte(keepAliveChunk)
	}
	err := p.c.Conn.SetWriteDeadline(time.Now().Add(p.c.srv.options().WriteTimeout))
	switch {
	case err != nil:
	case p.st != nil:
		_, err = p.st.writeComment()
	default:
		_, err = p.c.Conn.Write(text)
	}
	p.headSent, p.head = p.headSent || isHead, nil
	if p.finalStatus != 0 && err == nil {
		p.c.closeWrite()
		if p.onFinal != nil {
			p.onFinal()
		}
	}
	switch {
	case err != nil, p.finalStatus != 0:
		p.stopped = true
		p.c.clientWatch.markGone()
	case p.interval > 0:
		p.timer.Reset(p.interval)
	}
}

// stop ends it; nothing is being written any more when it returns. It says whether a
// head went out. Nil and stopped ones may be stopped.
func (p *keepAliveWriter) stop() (out bool) {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.timer.Stop()
	return p.headSent
}

// stopUnlessHeadSent says whether the head went out; when not, it is stopped, and the head goes out
// with the engine's.
func (p *keepAliveWriter) stopUnlessHeadSent() bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.headSent {
		p.stopped = true
		p.timer.Stop()
	}
	return p.headSent
}

// start makes the first beat come after so long.
func (p *keepAliveWriter) start(after time.Duration) {
	p.mu.Lock()
	p.scheduleLocked(after)
	p.mu.Unlock()
}

// scheduleLocked makes the next beat come after so long. Called with mu.
func (p *keepAliveWriter) scheduleLocked(after time.Duration) {
	if p.timer == nil {
		p.timer = time.AfterFunc(after, p.tick)
		return
	}
	p.timer.Reset(after)
}

// MarkDispatched tells that a streamed request is given to an engine now. Where
// Options.EarlyHeaders says so, its head goes out when EarlyHeadersAfter has passed, whether
// an engine has answered or not. The handler need not know: what it answers from then
// on becomes the rest of an event stream, a refusal an error event in the client's own
// protocol. It does nothing for other requests, and when called again.
func (x *Exchange) MarkDispatched() {
	if x.responder != nil || !x.srv.options().EarlyHeaders || x.responseState != responsePending || !x.head.http11 ||
		x.Converter != nil || x.Endpoint.Protocol == relay.Opaque || !x.Doc.Bool(jsonscan.KeyStream) {
		return
	}
	x.clearDrainTarget()
	defer x.setDrainTarget()
	if x.keepAlive != nil {
		return
	}
	head := append([]byte(nil), "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"...)
	head = appendLine(appendDate(head, time.Now()), "X-Request-Id", x.RequestID)
	for i := range x.responseHeaders {
		head = appendLine(head, x.responseHeaders[i].name, x.responseHeaders[i].value)
	}
	keep := x.connReusable()
	if !keep {
		head = append(head, "Connection: close\r\n"...)
	}
	x.keepAlive = &keepAliveWriter{c: x.c, keepConn: keep, interval: x.srv.options().KeepAlive, head: append(head, "\r\n"...)}
	x.keepAlive.start(x.srv.options().EarlyHeadersAfter)
}

// headSent says whether the head of an event stream is out, so that an answer can only be
// the rest of one; then nothing else writes any more.
func (x *Exchange) headSent() bool {
	x.clearDrainTarget()
	return x.responseState == responsePending && x.keepAlive.stop()
}

// finishEventStream answers with the last events of a stream whose head is out.
func (x *Exchange) finishEventStream(events []byte) {
	st := x.newStream()
	st.keep = x.keepAlive.keepConn && !x.panickedHandler
	if status := x.keepAlive.finalStatus; status != 0 { // the client has its answer
		st.status, st.keep = int16(status), false
		x.startStream(st)
		return
	}
	st.head = st.acquireSetup().headBuf
	if len(events) > 0 {
		st.head = relay.AppendChunk(st.head, events)
	}
	st.head = append(st.head, lastChunk...)
	st.setup.headBuf = st.head
	x.startStream(st)
}

// relayAfterHead is Relay behind a head that is out.
func (x *Exchange) relayAfterHead(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.keepAlive.finalStatus == 0 && resp.Status == fasthttp.StatusOK && relay.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
		st := x.newStream()
		st.setResponse(resp, call, &hooks)
		st.keepAlive, st.keep = x.keepAlive, x.keepAlive.keepConn // a server that leaves since then keeps the head's word
		st.chunked = resp.ContentLength != upstream.LengthChunked
		x.startStream(st)
		return
	}
	x.headSent()
	if x.keepAlive.finalStatus != 0 {
		x.discardRelay(resp, call, hooks)
		return
	}
	message := notEventStreamMessage(resp.Status)
	call.Cancel()
	resp.Release()
	x.errorAfterHead(UpstreamInvalid, "", message)
	hooks.notifyEnd(relay.Result{Cause: relay.EngineMalformed, Err: errors.New("front: " + message)})
}

// notEventStreamMessage says what is wrong with an engine's answer to a request for a stream.
func notEventStreamMessage(status int) string {
	return fmt.Sprintf("the engine answered with status %d and no event stream", status)
}

// errorAfterHead is Error behind a head that is out.
func (x *Exchange) errorAfterHead(reason Reason, param, message string) {
	drained := x.keepAlive.onFinal != nil // by the drain, and counted
	x.finishEventStream(appendErrorEvent(nil, x.Endpoint.Protocol, reason, reason.Status(), param, message, x.RequestID))
	if !drained {
		x.reportRefused(reason, param)
	}
}

// responseAsEvents makes of a whole answer what follows the head of an event stream: of an
// engine's refusal an error event, with its own words where they are of the protocol and
// no header that is lost says when to try again (retry, else "").
func (x *Exchange) responseAsEvents(status int, retry string, body []byte) []byte {
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
		return append(append([]byte("data: "), line...), "\n\n"+lastEvent(protocol)...)
	case protocol == relay.Responses, retry != "":
	case whole && failed && failure.Kind > jsonscan.Null && (protocol != relay.Anthropic || isAnthropicError(line)):
		return append(append([]byte(errorEventLine(protocol)+"data: "), line...), "\n\n"+lastEvent(protocol)...)
	}
	reason, message := UpstreamFailed, errorMessageOf(line, status)
	switch {
	case status == 429:
		reason = PoolOverloaded
	case status == 504:
		reason = UpstreamTimeout
	case status < 400: // no fault of the client's: an engine that does not know its part
		reason, status, message = UpstreamInvalid, UpstreamInvalid.Status(), notEventStreamMessage(status)
	case status < 500:
		reason = BadField
	}
	if retry != "" {
		message += retryAfterText(retry)
	}
	return appendErrorEvent(nil, protocol, reason, status, "", message, x.RequestID)
}

// retryAfterText says in an error's message what Retry-After would have, where the head is out.
func retryAfterText(seconds string) string { return "; try again after " + seconds + " s" }

// isAnthropicError says whether an error's body is of Anthropic's form; engines refuse what fails
// their validation in OpenAI's on every path.
func isAnthropicError(body []byte) bool {
	kind, ok, _ := jsonscan.Find(body, "type")
	return ok && string(body[kind.Start:kind.End]) == `"error"`
}

// errorMessageOf is what an engine said in an error's body, or what its status says.
func errorMessageOf(body []byte, status int) string {
	var parsed struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	if json.Unmarshal(body, &parsed) == nil {
		if len(parsed.Error) > 0 && parsed.Error[0] == '{' {
			_ = json.Unmarshal(parsed.Error, &parsed)
		}
		if parsed.Message != "" {
			return parsed.Message
		}
	}
	return "the engine answered with status " + strconv.Itoa(status)
}

// appendErrorEvent appends a refusal as the last event of a stream.
func appendErrorEvent(dst []byte, protocol relay.Protocol, reason Reason, status int, param, message, requestID string) []byte {
	dst = append(append(dst, errorEventLine(protocol)...), "data: "...)
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
	return append(append(dst, "\n\n"...), lastEvent(protocol)...)
}

// errorEventLine is the line that names an error's event, lastEvent the last event of all.
func errorEventLine(p relay.Protocol) string {
	if p == relay.OpenAI {
		return ""
	}
	return "event: error\n"
}

func lastEvent(p relay.Protocol) string {
	if p == relay.OpenAI {
		return "data: [DONE]\n\n"
	}
	return ""
}

// waitFirstByte waits on the stream's goroutine for the first bytes of the engine's body
// while comments go out. What it fails with, the relay's first read gives again.
func (st *stream) waitFirstByte() {
	opt := st.c.srv.options()
	p := st.keepAlive
	if p == nil && opt.KeepAlive > 0 && st.mayComment {
		p = &keepAliveWriter{c: st.c, st: st, interval: opt.KeepAlive}
		p.start(opt.KeepAlive)
	}
	if p == nil || p.interval == 0 {
		return
	}
	defer p.stop()
	if opt.StreamIdleTimeout > 0 {
		_ = st.resp.SetReadDeadline(time.Now().Add(opt.StreamIdleTimeout))
	}
	_, _ = st.resp.Peek()
}

// writeComment writes one as the engine would have.
func (st *stream) writeComment() (int, error) {
	if st.resp.ContentLength == upstream.LengthChunked {
		return st.Write([]byte(keepAliveChunk))
	}
	return st.Write([]byte(keepAliveComment))
}

// writeChunk sends p, of a body without chunk framing, as one chunk.
func (st *stream) writeChunk(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil // which would be the last one
	}
	buf := membudget.Default.Get(relay.ChunkHeaderSize + len(p) + len("\r\n"))
	defer membudget.Default.Put(buf)
	copy(buf.B[relay.ChunkHeaderSize:], p)
	framed, from := relay.FrameChunk(buf.B[:relay.ChunkHeaderSize+len(p)])
	if _, err := st.send(framed[from:]); err != nil {
		// A part of the chunk may be out: nothing can be sent again.
		return 0, fmt.Errorf("front: cannot write a chunk: %w", err)
	}
	return len(p), nil
}
