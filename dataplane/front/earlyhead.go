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
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

const (
	// keepAliveComment is a comment of an event stream, which clients' parsers skip.
	// keepAliveChunk is that comment as a chunk.
	keepAliveComment = ": keep-alive\n\n"
	keepAliveChunk   = "e\r\n" + keepAliveComment + "\r\n"
	lastChunk        = "0\r\n\r\n"
)

// keepAliveWriter writes to a client that waits for the first byte of an engine's body. It
// writes the response head, if the head is due before the engine's, and then comments, so that
// no load balancer in front closes the connection as idle. FailAt uses it to write an error
// response at a deadline.
//
// Until it is stopped it is the connection's only writer: fasthttp writes nothing while a
// handler runs, and the relay writes nothing before the first byte.
type keepAliveWriter struct {
	c        *conn
	st       *stream       // frames and compresses comments like its events; nil if the head was sent before the engine's
	interval time.Duration // between two comments; 0: no comments

	mu          sync.Mutex
	timer       *time.Timer
	keepConn    bool   // head allows another request on the connection
	head        []byte // head to write; empty once it is written
	headSent    bool   // head has been written
	stopped     bool
	finalStatus int    // status, if head is a whole response (see FailAt); else 0
	onFinal     func() // called when that response has been written; may be nil
}

// tick writes the head if it is not written yet, otherwise a comment. It runs on the timer's
// goroutine.
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
		p.c.clientWatch.MarkGone()
	case p.interval > 0:
		p.timer.Reset(p.interval)
	}
}

// stop ends the writer. When it returns no write is in progress. out reports whether the head
// has been written. p may be nil or stopped already.
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

// stopUnlessHeadSent reports whether the head has been written. If not, it stops the writer, and
// the client gets the engine's head instead. p may be nil.
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

// start schedules the first tick.
func (p *keepAliveWriter) start(after time.Duration) {
	p.mu.Lock()
	p.scheduleLocked(after)
	p.mu.Unlock()
}

// scheduleLocked schedules the next tick. The caller holds mu.
func (p *keepAliveWriter) scheduleLocked(after time.Duration) {
	if p.timer == nil {
		p.timer = time.AfterFunc(after, p.tick)
		return
	}
	p.timer.Reset(after)
}

// MarkDispatched implements Exchange.
func (x *httpExchange) MarkDispatched() {
	if !x.srv.options().EarlyHeaders || x.responseState != responsePending || !x.head.HTTP11 ||
		x.Converter != nil || x.Endpoint.Protocol == sse.Opaque || !x.Doc.Bool(jsonscan.KeyStream) {
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

// headSent reports whether the head of an event stream has been sent, so that the response can
// only be the rest of that stream. It stops the keep-alive writer.
func (x *httpExchange) headSent() bool {
	x.clearDrainTarget()
	return x.responseState == responsePending && x.keepAlive.stop()
}

// finishEventStream sends the last events of a stream whose head has been sent.
func (x *httpExchange) finishEventStream(events []byte) {
	st := x.newStream()
	st.keep = x.keepAlive.keepConn && !x.panickedHandler
	if status := x.keepAlive.finalStatus; status != 0 { // the client has its whole response
		st.status, st.keep = int16(status), false
		x.startStream(st)
		return
	}
	st.head = st.acquireSetup().headBuf
	if len(events) > 0 {
		st.head = sse.AppendChunk(st.head, events)
	}
	st.head = append(st.head, lastChunk...)
	st.setup.headBuf = st.head
	x.startStream(st)
}

// relayAfterHead is Relay for a client that has the head of an event stream already.
func (x *httpExchange) relayAfterHead(resp *upstream.Response, call *upstream.Call, hooks RelayHooks) {
	if x.keepAlive.finalStatus == 0 && resp.Status == fasthttp.StatusOK && sse.IsEventStream(resp.Header("Content-Type")) && len(resp.Header("Content-Encoding")) == 0 {
		st := x.newStream()
		st.setResponse(resp, call, &hooks)
		st.keepAlive, st.keep = x.keepAlive, x.keepAlive.keepConn // as the head promised, even if a drain has begun since
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

// notEventStreamMessage is the error message for an engine that did not answer a streaming
// request with an event stream.
func notEventStreamMessage(status int) string {
	return fmt.Sprintf("the engine answered with status %d and no event stream", status)
}

// errorAfterHead is Error for a client that has the head of an event stream already.
func (x *httpExchange) errorAfterHead(reason Reason, param, message string) {
	drained := x.keepAlive.onFinal != nil // the drain has answered and reported the refusal
	x.finishEventStream(appendErrorEvent(nil, x.Endpoint.Protocol, reason, reason.Status(), param, message, x.RequestID))
	if !drained {
		x.reportRefused(reason, param)
	}
}

// responseAsEvents converts a non-streaming response to the events that follow the head of an
// event stream. An engine's refusal becomes an error event. The event has the engine's own
// error body if that fits the protocol and retry is empty. retry is the response's
// Retry-After, which can no longer be sent as a header line, or "".
func (x *httpExchange) responseAsEvents(status int, retry string, body []byte) []byte {
	protocol := x.Endpoint.Protocol
	line := bytes.TrimSpace(body)
	if bytes.ContainsAny(line, "\r\n") { // JSON has line ends only between tokens
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
	case protocol == sse.Responses, retry != "":
	case whole && failed && failure.Kind > jsonscan.Null && (protocol != sse.Anthropic || isAnthropicError(line)):
		return append(append([]byte(errorEventLine(protocol)+"data: "), line...), "\n\n"+lastEvent(protocol)...)
	}
	reason, message := UpstreamFailed, errorMessageOf(line, status)
	switch {
	case status == 429:
		reason = PoolOverloaded
	case status == 504:
		reason = UpstreamTimeout
	case status < 400: // not the client's fault: the engine did not stream
		reason, status, message = UpstreamInvalid, UpstreamInvalid.Status(), notEventStreamMessage(status)
	case status < 500:
		reason = BadField
	}
	if retry != "" {
		message += retryAfterText(retry)
	}
	return appendErrorEvent(nil, protocol, reason, status, "", message, x.RequestID)
}

// retryAfterText is added to an error message instead of a Retry-After line, once the head has
// been sent.
func retryAfterText(seconds string) string { return "; try again after " + seconds + " s" }

// isAnthropicError reports whether an error body has Anthropic's form. Engines report requests
// that fail their validation in OpenAI's form on every path.
func isAnthropicError(body []byte) bool {
	kind, ok, _ := jsonscan.Find(body, "type")
	return ok && string(body[kind.Start:kind.End]) == `"error"`
}

// errorMessageOf returns the message in an engine's error body. If there is none it returns a
// text with the status.
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
func appendErrorEvent(dst []byte, protocol sse.Protocol, reason Reason, status int, param, message, requestID string) []byte {
	dst = append(append(dst, errorEventLine(protocol)...), "data: "...)
	if protocol == sse.Responses {
		dst = append(dst, `{"type":"error","code":`...)
		dst = appendJSONString(dst, reason.Type())
		dst = append(dst, `,"message":`...)
		dst = appendJSONString(dst, message)
		dst = append(dst, `,"param":`...)
		dst = append(appendJSONOrNull(dst, param), `,"sequence_number":0}`...) // it is the first event
	} else {
		dst = appendErrorOf(dst, protocol, reason, status, param, message, requestID)
	}
	return append(append(dst, "\n\n"...), lastEvent(protocol)...)
}

// errorEventLine is the line that names an error event, "" if the protocol names none.
func errorEventLine(p sse.Protocol) string {
	if p == sse.OpenAI {
		return ""
	}
	return "event: error\n"
}

// lastEvent is the event that ends every stream of the protocol, "" if there is none.
func lastEvent(p sse.Protocol) string {
	if p == sse.OpenAI {
		return "data: [DONE]\n\n"
	}
	return ""
}

// waitFirstByte waits on the stream's goroutine for the first bytes of the engine's body, while
// the keep-alive writer sends comments. It ignores errors, because the relay's first read
// returns them again.
func (st *stream) waitFirstByte() {
	opt := st.c.srv.options()
	p := st.keepAlive
	if p == nil {
		p = st.startComments()
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

// startComments starts a keep-alive writer for a stream whose head has been sent. It returns nil if the
// stream gets no comments.
func (st *stream) startComments() *keepAliveWriter {
	every := st.c.srv.options().KeepAlive
	if every <= 0 || !st.mayComment {
		return nil
	}
	p := &keepAliveWriter{c: st.c, st: st, interval: every}
	p.start(every)
	return p
}

// writeComment writes a comment in the engine's framing.
func (st *stream) writeComment() (int, error) {
	if st.resp.ContentLength == upstream.LengthChunked {
		return st.Write([]byte(keepAliveChunk))
	}
	return st.Write([]byte(keepAliveComment))
}

// writeChunk sends p, of a body without chunk framing, as one chunk.
func (st *stream) writeChunk(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil // an empty chunk would end the body
	}
	buf := membudget.Default.Get(sse.ChunkHeaderSize + len(p) + len("\r\n"))
	defer membudget.Default.Put(buf)
	copy(buf.B[sse.ChunkHeaderSize:], p)
	framed, from := sse.FrameChunk(buf.B[:sse.ChunkHeaderSize+len(p)])
	if _, err := st.send(framed[from:]); err != nil {
		// A part of the chunk may have been sent, so the caller cannot send p again.
		return 0, fmt.Errorf("front: cannot write a chunk: %w", err)
	}
	return len(p), nil
}
