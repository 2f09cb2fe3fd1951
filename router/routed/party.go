package routed

import (
	"bytes"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/dataplane/wire"
)

// serve has the runner serve the call, and relays what it gives.
func (c *call) serve() {
	var err error
	fields := append(c.p.says, c.p.context.trace...)
	c.x, err = front.NewExchange(&front.Detached{
		Endpoint: &endpoints[c.p.pool.dialect], RequestID: c.id, Body: c.p.body, MaxDepth: c.e.opt.MaxDepth,
		Fields: fields, Received: c.p.began, ClientIP: c.s.Peer(), Unix: c.s.Unix(), Pass: c.pass, Party: c, Lend: c.s.Lend, Budget: c.s.Budget(), Log: c.e.opt.Log,
	})
	if err != nil {
		c.Refuse(front.BadField, "", err.Error(), 0)
		return
	}
	c.x.Attached = c.p.hints
	c.e.opt.Runner.ServeInference(c.x)
	c.p.mem.Release() // the stream outlives its request
	if c.resp != nil {
		c.relay()
	}
}

// leaving is a caller's leaving, as the legs hear of it. f is called with mu held,
// so that a set that returns leaves no call of an older f running.
type leaving struct {
	mu   sync.Mutex
	f    func()
	left atomic.Bool
	late atomic.Bool // it leaves because its time is over

	answer sync.Mutex // whose the answer is, held while the other way of ending tells it
	begun  bool       // the call's own
	told   bool       // it was told, by tell
}

// begin makes the answer the call's; false when tell was there before. It does not wait
// for one that is telling: nothing else keeps the lock before the answer has begun.
func (l *leaving) begin() bool {
	if !l.answer.TryLock() {
		return false
	}
	defer l.answer.Unlock()
	l.begun = true
	return !l.told
}

// tell has end tell the whole answer, if none has begun.
func (l *leaving) tell(end func()) {
	l.answer.Lock()
	defer l.answer.Unlock()
	if l.begun || l.told {
		return
	}
	l.told = true
	end()
}

// wait waits for a tell that is telling: the stream must not end before.
func (l *leaving) wait() {
	l.answer.Lock()
	defer l.answer.Unlock()
}

func (l *leaving) set(f func()) {
	l.mu.Lock()
	l.f = f
	l.mu.Unlock()
	if f != nil && l.left.Load() {
		go l.fire()
	}
}

func (l *leaving) leave() {
	l.left.Store(true)
	go l.fire()
}

func (l *leaving) fire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.f; f != nil {
		l.f = nil
		f()
	}
}

// OnGone implements front.Party.
func (c *call) OnGone(f func()) { c.left.set(f) }

// Gone implements front.Party.
func (c *call) Gone() bool { return c.left.left.Load() }

// begun makes the converter, when an answer begins.
func (c *call) begun(told func(string) string) {
	if c.send != nil {
		return
	}
	if told == nil {
		told = func(string) string { return "" }
	}
	old := c.converter
	c.converter = c.e.converter(c.p, told)
	c.reuse(&old)
	c.send, c.stopped, c.late = c.putFirst, c.s.Stopped, c.left.late.Load
}

// putFirst is put of the first item, by which the answer is begun: until then a caller who
// stops, or whose time is over, is told at once, although the engine may not hear of it
// yet (upstream.Request.Grace).
func (c *call) putFirst(it *item) error {
	c.send, c.sendIDs = c.put, c.offerIDs
	if !c.left.begin() {
		c.send, c.sendIDs = func(*item) error { return wire.ErrEnded }, nil
	}
	return c.send(it)
}

// Refuse implements front.Party.
func (c *call) Refuse(reason front.Reason, param, message string, _ time.Duration) {
	c.begun(nil)
	c.broke = c.fail(&failure{message: message, kind: reason.Type(), param: param, code: reason.Status()})
}

// Answer implements front.Party.
func (c *call) Answer(status int, body []byte) {
	c.begun(c.x.AnswerHeader)
	switch {
	case status == http.StatusOK && bytes.HasPrefix(body, []byte("data: ")):
		_, c.broke = c.outlet.Write(body) // a stream that was whole
	case status == http.StatusOK:
		c.broke = c.whole(body)
	default:
		c.broke = c.failed(errorOf(status, body))
	}
}

// Relay implements front.Party.
func (c *call) Relay(resp *upstream.Response, engine *upstream.Call, hooks front.RelayHooks) {
	c.resp, c.engine, c.hooks = resp, engine, hooks
}

// relay passes the stream on to its end.
func (c *call) relay() {
	ended := false
	c.result = relay.Result{Cause: relay.Cut, Err: errPanic}
	defer func() {
		c.left.set(nil)
		if !ended {
			c.engine.Cut()
		}
		c.resp.Release()
		c.hooks.Of.End(c.result)
	}()
	c.left.set(c.leaveEngine)
	c.begun(c.x.AnswerHeader)
	c.chunked = c.resp.ContentLength == upstream.LengthChunked
	var carry relay.Carry
	if t := c.hooks.Transcript; t != nil {
		t.Records = t.ShowIDs && t.Prompt.Len() > 0 && relay.IsEventStream(c.resp.Header("Content-Type"))
		c.records = t.Records
		carry = relay.Carry{Transcript: t, Usage: c.hooks.Usage, Next: c}
	}
	res, over := relay.Begin(c, c.resp, relay.Options{
		Protocol: relay.OpenAI, IdleTimeout: c.e.opt.StreamIdle, Rewrite: c.hooks.Rewrite, Carry: carry,
		Drains: c.s.Stopped, Loops: c.e.opt.Loops, Budget: c.s.Budget(),
	})
	for !over {
		res, over = (<-c.rest)()
	}
	switch why := c.s.Err(); {
	case res.Err == nil, res.Cause == relay.EngineErred: // it had its end
	case why == wire.ErrKilled || why == wire.ErrGone:
		res.Cause = relay.ClientGone
	case why == wire.ErrStalled:
		res.Cause = relay.ClientStalled
	case why == wire.ErrLate || c.left.late.Load():
		res.Cause = relay.Deadline
	case c.left.left.Load():
		res.Cause = relay.ClientGone
	}
	c.result, ended = res, true
}

// leaveEngine ends the leg of a caller who leaves. What had come from the engine is
// still read for one who stops.
func (c *call) leaveEngine() {
	if c.s.Stopped() {
		c.engine.HangUp()
		return
	}
	c.engine.Cut()
}

var errPanic = errors.New("routed: a panic while relaying")

// FirstToken implements relay.FirstTold.
func (c *call) FirstToken() { c.hooks.Of.FirstToken() }

// Done implements relay.DoneTold.
func (c *call) Done(usage relay.Usage, failed bool) {
	if d, ok := c.hooks.Of.(front.Doner); ok {
		d.Done(usage, failed)
	}
}

// Next takes the answer of another engine in the place of the one that failed.
func (c *call) Next(b relay.Break) *upstream.Response {
	c.left.set(nil)
	defer func() { c.left.set(c.leaveEngine) }()
	if c.Gone() {
		return nil
	}
	resp, engine := c.hooks.Of.Next(b, c)
	c.left.set(nil)
	if resp == nil {
		return nil
	}
	c.resp.Release()
	c.resp, c.engine = resp, engine
	return resp
}

// end ends an answer that has not ended itself.
func (c *call) end() error {
	switch {
	case c.broke != nil:
		return c.broke
	case c.send == nil:
		c.begun(nil)
		return c.fail(&failure{message: "the router gave no answer to this request", kind: front.Internal.Type(), code: front.Internal.Status()})
	case c.pending || c.ended:
		return c.flush()
	}
	return c.fail(endedBy(c.result.Cause))
}

// endedBy says what became of a stream that did not end itself.
func endedBy(cause relay.Cause) *failure {
	reason, message := front.UpstreamFailed, "the engine ended the stream before its end"
	switch cause {
	case relay.Completed, relay.EngineErred:
	case relay.EngineClosed:
		message = "the engine closed the connection before the end of the stream"
	case relay.EngineBroke:
		message = "the engine broke the framing of its stream"
	case relay.EngineEnded:
	case relay.EngineStalled:
		reason, message = front.UpstreamTimeout, "the engine took too long to go on with the stream"
	case relay.Deadline:
		return overdue()
	case relay.Cut:
		message = "the router ended the stream: another part of this request failed"
	case relay.MemorySpent:
		reason, message = front.BudgetSpent, "the memory for request bodies and events that have not come whole (limits.body_budget) is spent; send the request again"
	default:
		message = "the stream ended early: " + cause.String()
	}
	return &failure{message: message, kind: reason.Type(), code: reason.Status()}
}
