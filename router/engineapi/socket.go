package engineapi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"time"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/dataplane/wire"
)

// call is one request on the socket. It is the front.Responder of the in-process Exchange that
// the Runner serves.
type call struct {
	itemWriter
	s         *wire.Stream
	e         *Engine
	p         *preparedRequest
	principal front.Principal // of the caller's key; nil: no key is required
	x         front.Exchange
	id        string
	abort     *abortSignal
	payload   []byte

	// The Runner's answer: a stream to relay, or the error of sending another answer.
	resp    *upstream.Response
	engine  *upstream.Call
	hooks   front.RelayHooks
	result  relay.Result
	sendErr error // of sending an answer that is not a stream

	// While an event loop drives the stream, the fields below rest are used only by the loop's
	// thread.
	rest       chan func() (relay.Result, bool)
	inPut      bool   // Send is running
	needsFlush bool   // sent items must be flushed
	unsent     []byte // items that the wire stream did not accept: 4 bytes of length, then the payload
}

// calls pools calls for their buffers.
var calls = objpool.Pool[call]{New: func() *call { return &call{rest: make(chan func() (relay.Result, bool), 1)} }}

// maxPooledBuffer bounds the buffers of a pooled call.
const maxPooledBuffer = 64 << 10

// ServeStream implements wire.Handler.
func (e *Engine) ServeStream(s *wire.Stream) {
	c := calls.Get()
	c.s, c.abort = s, new(abortSignal)
	e.run(c)
	c.events.Release()
	if cap(c.payload)+cap(c.unsent) > maxPooledBuffer || cap(c.scratch) > maxPooledBuffer/4 {
		return
	}
	keep := call{payload: c.payload[:0], unsent: c.unsent[:0], rest: c.rest}
	keep.reset(&c.converter)
	*c = keep
	calls.Put(c)
}

// sendItem sends one item. On a loop's thread it does not block: an item that the wire stream
// does not accept is kept until the loop has detached the stream and Write sends it.
func (c *call) sendItem(it *item) error {
	c.payload = msgpackItems{}.append(c.payload[:0], it)
	return c.trySend(c.payload)
}

// trySendIDs sends an item that has token ids and nothing else.
func (c *call) trySendIDs(ids []uint32) error {
	var room [96]byte
	return c.trySend(msgpackItems{}.appendIDs(room[:0], ids))
}

// trySend sends an item's payload, or on a loop's thread keeps a copy if the wire stream does
// not accept it.
func (c *call) trySend(payload []byte) error {
	if !c.inPut {
		return c.s.Send(payload)
	}
	if len(c.unsent) == 0 {
		taken, due, err := c.s.TrySend(payload)
		c.needsFlush = c.needsFlush || due
		if taken || err != nil {
			return err
		}
	}
	c.unsent = append(binary.BigEndian.AppendUint32(c.unsent, uint32(len(payload))), payload...)
	return nil
}

// Send implements eventloop.Sink.
func (c *call) Send(p []byte) (due eventloop.Flusher, full bool, err error) {
	c.inPut, c.needsFlush = true, false
	defer func() {
		c.inPut = false
		if c.needsFlush && due == nil { // after a panic, the items of other streams are still sent
			c.s.Flush()
		}
	}()
	_, err = c.itemWriter.Write(p)
	if c.needsFlush {
		due = c.s
	}
	return due, len(c.unsent) > 0, err
}

// Write implements relay.ClientConn. It blocks while the caller does not read.
func (c *call) Write(p []byte) (int, error) {
	if err := c.sendUnsent(); err != nil {
		return 0, err
	}
	return c.itemWriter.Write(p)
}

// sendUnsent sends the items kept on a loop's thread. It blocks while the caller does not read.
func (c *call) sendUnsent() error {
	for held := c.unsent; len(held) > 0; {
		n := 4 + int(binary.BigEndian.Uint32(held))
		if err := c.s.Send(held[4:n]); err != nil {
			return err
		}
		held = held[n:]
	}
	c.unsent = c.unsent[:0]
	return nil
}

// Resume implements relay.ClientConn: ServeStream's goroutine relays the rest of a stream that a
// loop has detached.
func (c *call) Resume(f func() (relay.Result, bool)) { c.rest <- f }

// refuse ends the stream with an error before anything is sent to an engine.
func (c *call) refuse(reason front.Reason, field, message string) {
	_ = c.sendItem(&item{failure: &failure{message: message, kind: reason.Type(), param: field, code: reason.Status()}, usage: noUsage})
	c.s.End(nil)
}

// refuseBudget rejects a request because the memory budget is exhausted, in the same way as a
// request whose frame does not fit into the budget.
func (c *call) refuseBudget() {
	c.s.End(&wire.Error{Code: wire.CodeMemory, Message: errBudgetExhausted.Error()})
}

func (e *Engine) run(c *call) {
	principal, denied := e.authenticate(c.s)
	if denied != nil {
		c.refuse(denied.Reason, "", rejectionMessage(denied))
		return
	}
	var made jsonWriter
	defer made.mem.Release()
	rest, err := made.read(c.s.Payload, c.s.LeaseMemory)
	switch {
	case errors.Is(err, errBudgetExhausted):
		c.refuseBudget()
		return
	case err != nil:
		c.refuse(front.BadField, "", "cannot parse the request: "+err.Error())
		return
	case len(rest) > 0:
		c.refuse(front.BadField, "", fmt.Sprintf("the request is followed by %d bytes; want one msgpack value", len(rest)))
		return
	case made.dst[0] != '{':
		c.refuse(front.BadField, "", "the request is not a map")
		return
	}
	c.s.ReleasePayload()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c.s.Watch(cancel, cancel)
	p, err := e.prepare(ctx, made.dst, principal, c.s.LeaseMemory)
	made.mem.Release()
	switch {
	case errors.Is(err, errBudgetExhausted):
		c.refuseBudget()
		return
	case err != nil:
		reason, field := refusal(err)
		c.refuse(reason, field, err.Error())
		return
	}
	defer p.mem.Release()
	c.e, c.p, c.principal = e, p, principal
	if !p.deadline.IsZero() {
		c.s.SetDeadline(p.deadline)
	}
	if c.id = p.context.id; c.id == "" {
		c.id = e.ids.make()
	}
	// Only the legs are notified; the request continues to its end. A caller that stops before
	// the answer has begun gets its answer at once, because it need not wait for the work that
	// remains for the legs, such as freeing blocks.
	left, s, prompt := c.abort, c.s, p.prompt
	defer left.awaitEnd()
	c.s.Watch(func() {
		left.abort()
		go left.answerEnd(func() { sendStopped(s, prompt) })
	}, left.abort)
	if !p.deadline.IsZero() {
		// At its deadline the request is treated like a disconnected caller's. If the legs had
		// a deadline of their own, they would be cut at any point, and a decode request that
		// was not admitted would keep blocks allocated.
		p.hints.DisconnectsAt, p.hints.Deadline = p.deadline, time.Time{}
		s.SetDeadline(p.deadline)
		defer time.AfterFunc(time.Until(p.deadline), func() {
			left.deadlinePassed.Store(true)
			left.abort()
			left.answerEnd(func() { sendDeadline(s) })
		}).Stop()
	}
	c.serve()
	c.s.Watch(nil, nil)
	left.awaitEnd() // a running answerEnd ends the stream itself
	if c.s.Err() != nil {
		return // killed, disconnected or stalled: nobody reads the answer
	}
	// Legs that were cut while the caller was slow leave unsent items.
	if err = c.sendUnsent(); err != nil {
		return
	}
	if c.s.Stopped() {
		c.startConverter(nil)
		err = c.cancel()
	} else {
		err = c.endAnswer()
	}
	if err == nil {
		c.s.End(nil)
	}
}

// sendStopped answers a stop request on a stream without any item.
func sendStopped(s *wire.Stream, prompt int) {
	it := item{data: true, finish: "cancelled", usage: usage{prompt: prompt, completion: 0, cached: -1}}
	if s.Send(msgpackItems{}.append(nil, &it)) == nil {
		s.End(nil)
	}
}

// sendDeadline ends a stream without any item whose deadline has passed.
func sendDeadline(s *wire.Stream) {
	if s.Send(msgpackItems{}.append(nil, &item{failure: deadlineFailure(), usage: noUsage})) == nil {
		s.End(nil)
	}
}

// deadlineFailure is the error for a request whose deadline has passed.
func deadlineFailure() *failure {
	return &failure{message: "the request's time (context.timeout_ms) is over", kind: front.Deadline.Type(), param: "context.timeout_ms", code: front.Deadline.Status()}
}

// handlePrefillOnly processes the answer to a prefill-only request.
func (c *call) handlePrefillOnly(body []byte) error {
	object, _, err := jsonscan.Find(body, "object")
	if err != nil || string(body[object.Start:object.End]) != `"sluice.prefill"` {
		return c.fail(&failure{message: "the engine did not answer with a stream", kind: "upstream_error", code: 502})
	}
	c.begin()
	c.current.finish, c.current.extra = "stop", body
	for it := jsonscan.Walk(body); it.Next(); {
		switch {
		case it.IsKey("prompt_tokens"):
			c.usage.prompt = atoi(it.Raw())
		case it.IsKey("cached_tokens_before") && it.Value.Kind == jsonscan.Number:
			c.usage.cached = atoi(it.Raw())
		}
	}
	c.usage.completion = 0
	c.holdItem()
	return c.flush()
}

// errorOf extracts the error from an error response of the router or an engine. It knows
// OpenAI's format, the flat format and FastAPI's detail.
func errorOf(status int, body []byte) []byte {
	out := object{dst: []byte{'{'}}
	raw := body
	if v, ok, err := jsonscan.Find(body, "error"); err == nil && ok && v.Kind == jsonscan.Object {
		raw = body[v.Start:v.End]
	}
	for _, name := range [...]string{"message", "type", "param"} {
		if v, ok, err := jsonscan.Find(raw, name); err == nil && ok && v.Kind == jsonscan.String {
			out.raw(name, raw[v.Start:v.End])
		} else if name == "message" {
			text := "the engine answered " + http.StatusText(status)
			if v, ok, err := jsonscan.Find(body, "detail"); err == nil && ok {
				text += ": " + quoteValue(body[v.Start:v.End], v.Kind)
			} else if errors.Is(err, nil) && len(body) > 0 && len(body) < 200 && body[0] != '{' {
				text += ": " + string(body)
			}
			out.text(name, text)
		}
	}
	out.number("code", status)
	return append(out.dst, '}')
}
