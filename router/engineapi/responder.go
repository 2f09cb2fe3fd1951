package engineapi

import (
	"bytes"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
	"sluice/dataplane/wire"
)

// serve passes the call to the Runner and relays the resulting stream, if there is one.
func (c *call) serve() {
	var err error
	live := c.e.opt.Live()
	fields := append(c.p.responseHeaders, c.p.context.trace...)
	c.x, err = front.NewExchange(&front.InProcessRequest{
		Endpoint: &endpoints[c.p.pool.dialect], RequestID: c.id, Body: c.p.body, MaxDepth: live.MaxDepth,
		Fields: fields, Received: c.p.began, ClientIP: c.s.Peer(), Unix: c.s.Unix(), Principal: c.principal, CheckFields: true, MediaHosts: live.MediaHosts, Responder: c, LeaseMemory: c.s.LeaseMemory, Budget: c.s.Budget(), Log: c.e.opt.Log,
	})
	var refused *front.FieldRefusal
	if errors.As(err, &refused) {
		c.RespondError(refused.Reason, refused.Field, err.Error(), 0)
		return
	}
	if err != nil {
		c.RespondError(front.BadField, "", err.Error(), 0)
		return
	}
	c.x.Request().Attached = c.p.hints
	c.e.opt.Runner.ServeInference(c.x)
	c.p.mem.Release() // the stream outlives its request
	if c.resp != nil {
		c.relay()
	}
}

// abortSignal tells the legs of a request that its caller has disconnected, asked to stop or
// exceeded its deadline. onAbort is called with mu locked; when setCallback returns, no call of
// the previous callback is running.
//
// It also decides who sends the beginning of the answer: the call (beginAnswer), or the
// goroutine that reports a stop or an exceeded deadline (answerEnd).
type abortSignal struct {
	mu             sync.Mutex
	onAbort        func()
	aborted        atomic.Bool
	deadlinePassed atomic.Bool // the reason is the request's deadline

	answerMu    sync.Mutex // locked by answerEnd while it sends
	answerBegun bool       // the call has begun the answer
	endSent     bool       // answerEnd has sent the complete answer
}

// beginAnswer reserves the answer for the call. It returns false if answerEnd was first. It
// does not wait for an answerEnd that is sending, the only other user of the lock before the
// answer has begun.
func (l *abortSignal) beginAnswer() bool {
	if !l.answerMu.TryLock() {
		return false
	}
	defer l.answerMu.Unlock()
	l.answerBegun = true
	return !l.endSent
}

// answerEnd calls end to send the complete answer, if none has begun.
func (l *abortSignal) answerEnd(end func()) {
	l.answerMu.Lock()
	defer l.answerMu.Unlock()
	if l.answerBegun || l.endSent {
		return
	}
	l.endSent = true
	end()
}

// awaitEnd waits for a running answerEnd: the stream must not end before it.
func (l *abortSignal) awaitEnd() {
	l.answerMu.Lock()
	defer l.answerMu.Unlock()
}

func (l *abortSignal) setCallback(f func()) {
	l.mu.Lock()
	l.onAbort = f
	l.mu.Unlock()
	if f != nil && l.aborted.Load() {
		go l.runCallback()
	}
}

func (l *abortSignal) abort() {
	l.aborted.Store(true)
	go l.runCallback()
}

func (l *abortSignal) runCallback() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.onAbort; f != nil {
		l.onAbort = nil
		f()
	}
}

// OnClientGone implements front.Responder.
func (c *call) OnClientGone(f func()) { c.abort.setCallback(f) }

// ClientGone implements front.Responder.
func (c *call) ClientGone() bool { return c.abort.aborted.Load() }

// startConverter creates the converter when an answer begins.
func (c *call) startConverter(responseHeader func(string) string) {
	if c.send != nil {
		return
	}
	if responseHeader == nil {
		responseHeader = func(string) string { return "" }
	}
	old := c.converter
	c.converter = c.e.converter(c.p, responseHeader)
	c.reset(&old)
	c.send, c.stopRequested, c.deadlinePassed = c.sendFirst, c.s.Stopped, c.abort.deadlinePassed.Load
}

// sendFirst sends the first item, which begins the answer. Until then a caller that stops, or
// whose deadline passes, gets its answer at once, although the engine may not be notified yet
// (upstream.Request.Grace).
func (c *call) sendFirst(it *item) error {
	c.send, c.sendIDs = c.sendItem, c.trySendIDs
	if !c.abort.beginAnswer() {
		c.send, c.sendIDs = func(*item) error { return wire.ErrEnded }, nil
	}
	return c.send(it)
}

// RespondError implements front.Responder.
func (c *call) RespondError(reason front.Reason, param, message string, _ time.Duration) {
	c.startConverter(nil)
	c.sendErr = c.fail(&failure{message: message, kind: reason.Type(), param: param, code: reason.Status()})
}

// Respond implements front.Responder.
func (c *call) Respond(status int, body []byte) {
	c.startConverter(c.x.ResponseHeader)
	switch {
	case status == http.StatusOK && bytes.HasPrefix(body, []byte("data: ")):
		_, c.sendErr = c.itemWriter.Write(body) // a complete stream
	case status == http.StatusOK:
		c.sendErr = c.handlePrefillOnly(body)
	default:
		c.sendErr = c.sendEngineError(errorOf(status, body))
	}
}

// Relay implements front.Responder.
func (c *call) Relay(resp *upstream.Response, engine *upstream.Call, hooks front.RelayHooks) {
	c.resp, c.engine, c.hooks = resp, engine, hooks
}

// relay relays the stream to its end.
func (c *call) relay() {
	ended := false
	c.result = relay.Result{Cause: relay.Cancelled, Err: errPanic}
	defer func() {
		c.abort.setCallback(nil)
		if !ended {
			c.engine.Cancel()
		}
		c.resp.Release()
		c.hooks.Handler.Ended(c.result)
	}()
	c.abort.setCallback(c.abortLeg)
	c.startConverter(c.x.ResponseHeader)
	c.chunked = c.resp.ContentLength == upstream.LengthChunked
	var migration relay.Migration
	if t := c.hooks.Transcript; t != nil {
		t.Records = t.ShowIDs && t.Prompt.Len() > 0 && sse.IsEventStream(c.resp.Header("Content-Type"))
		c.idRecords = t.Records
		migration = relay.Migration{Transcript: t, IncludeUsage: c.hooks.Usage, Next: c}
	}
	res, over := relay.Start(c, c.resp, relay.Options{
		Protocol: sse.OpenAI, IdleTimeout: c.e.opt.Live().StreamIdle, Rewrite: c.hooks.Rewrite, Migration: migration,
		Intervals: c.hooks.Intervals, DrainOnCancel: c.s.Stopped, Loops: c.e.opt.Loops, Budget: c.s.Budget(),
	})
	for !over {
		res, over = (<-c.rest)()
	}
	switch why := c.s.Err(); {
	case res.Err == nil, res.Cause == relay.EngineReportedError: // the stream ended regularly
	case why == wire.ErrKilled || why == wire.ErrConnClosed:
		res.Cause = relay.ClientGone
	case why == wire.ErrStalled:
		res.Cause = relay.ClientStalled
	case why == wire.ErrDeadline || c.abort.deadlinePassed.Load():
		res.Cause = relay.Deadline
	case c.abort.aborted.Load():
		res.Cause = relay.ClientGone
	}
	c.result, ended = res, true
}

// abortLeg ends the current leg when the caller goes away. For a caller that only stops, data
// already received from the engine is still read.
func (c *call) abortLeg() {
	if c.s.Stopped() {
		c.engine.HalfClose()
		return
	}
	c.engine.Cancel()
}

var errPanic = errors.New("engineapi: a panic while relaying")

// FirstToken implements relay.ClientConn.
func (c *call) FirstToken() { c.hooks.Handler.FirstToken() }

// Done implements relay.ClientConn.
func (c *call) Done(usage relay.Usage, failed bool) {
	if d, ok := c.hooks.Handler.(front.Doner); ok {
		d.Done(usage, failed)
	}
}

// ResponseID implements relay.ClientConn; items carry no response id.
func (c *call) ResponseID(string) {}

// BeforeEnd implements relay.ClientConn.
func (c *call) BeforeEnd() {}

// DetectsStalls implements relay.ClientConn: the wire stream has its own stall timeout.
func (c *call) DetectsStalls() bool { return false }

// Reframes implements relay.ClientConn.
func (c *call) Reframes() bool { return false }

// LoopOutput implements relay.ClientConn.
func (c *call) LoopOutput() (fd int, sink eventloop.Sink, ok bool) { return -1, c, true }

// NextEngine implements relay.Migrator: it continues the stream with another engine's response.
func (c *call) NextEngine(b relay.Interruption) *upstream.Response {
	c.abort.setCallback(nil)
	defer func() { c.abort.setCallback(c.abortLeg) }()
	if c.ClientGone() {
		return nil
	}
	if leave := b.Leave; leave != nil {
		b.Leave = func() {
			c.engine.Cancel()
			leave()
		}
	}
	resp, engine := c.hooks.Handler.NextEngine(b, c)
	c.abort.setCallback(nil)
	if resp == nil {
		return nil
	}
	c.resp.Release()
	c.resp, c.engine = resp, engine
	return resp
}

// endAnswer completes an answer whose stream did not end by itself.
func (c *call) endAnswer() error {
	switch {
	case c.sendErr != nil:
		return c.sendErr
	case c.send == nil:
		c.startConverter(nil)
		return c.fail(&failure{message: "the router did not answer this request", kind: front.Internal.Type(), code: front.Internal.Status()})
	case c.hasPending || c.ended:
		return c.flush()
	}
	return c.fail(endReason(c.result.Cause))
}

// endReason returns the error for a stream that did not end by itself.
func endReason(cause relay.Cause) *failure {
	reason, message := front.UpstreamFailed, "the engine ended the stream early"
	switch cause {
	case relay.Completed, relay.EngineReportedError:
	case relay.EngineClosed:
		message = "the engine closed the connection before the end of the stream"
	case relay.EngineMalformed:
		message = "the engine sent a malformed stream"
	case relay.EngineIncomplete:
	case relay.EngineStalled:
		reason, message = front.UpstreamTimeout, "the engine sent nothing for too long"
	case relay.Deadline:
		return deadlineFailure()
	case relay.Cancelled:
		message = "the router ended the stream: another part of this request failed"
	case relay.BudgetExhausted:
		reason, message = front.BudgetExhausted, "the memory budget (limits.memory_budget) is exhausted; send the request again"
	default:
		message = "the stream ended early: " + cause.String()
	}
	return &failure{message: message, kind: reason.Type(), code: reason.Status()}
}
