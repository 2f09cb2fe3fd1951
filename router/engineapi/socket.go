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

// call is one request of the socket under way. It is the front.Party of the
// detached Exchange by which the runner serves it.
type call struct {
	itemWriter
	s       *wire.Stream
	e       *Engine
	p       *preparedRequest
	pass    front.Principal // of the caller's key; nil: none is asked for
	x       *front.Exchange
	id      string
	abort   *abortSignal
	payload []byte

	// What the runner's answer was: a stream to be relayed, or one of the others.
	resp    *upstream.Response
	engine  *upstream.Call
	hooks   front.RelayHooks
	result  relay.Result
	sendErr error // of sending an answer that was no stream

	// While a loop has the stream: offering, due and held are of its thread.
	rest       chan func() (relay.Result, bool)
	inPut      bool   // within Put
	needsFlush bool   // what was offered is to be flushed
	unsent     []byte // items that the caller has not taken: 4 bytes of length, then the payload
}

// calls keeps the scratch of calls that have ended.
var calls = objpool.Pool[call]{New: func() *call { return &call{rest: make(chan func() (relay.Result, bool), 1)} }}

// maxPooledBuffer bounds the scratch that is kept.
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

// sendItem sends one item. On a loop's thread it does not wait: what the caller does not
// take is kept, until the loop has let go of the stream and Write sends it.
func (c *call) sendItem(it *item) error {
	c.payload = msgpackItems{}.append(c.payload[:0], it)
	return c.trySend(c.payload)
}

// trySendIDs is put for an item that has token ids and nothing else.
func (c *call) trySendIDs(ids []uint32) error {
	var room [96]byte
	return c.trySend(msgpackItems{}.appendIDs(room[:0], ids))
}

// trySend sends an item's payload, or keeps a copy.
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
		if c.needsFlush && due == nil { // a panic: what other streams offered goes out all the same
			c.s.Flush()
		}
	}()
	_, err = c.itemWriter.Write(p)
	if c.needsFlush {
		due = c.s
	}
	return due, len(c.unsent) > 0, err
}

// Write implements relay.ClientConn. It waits while the caller takes nothing.
func (c *call) Write(p []byte) (int, error) {
	if err := c.sendUnsent(); err != nil {
		return 0, err
	}
	return c.itemWriter.Write(p)
}

// sendUnsent sends what was held back on a loop's thread; it waits likewise.
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

// refuse ends the stream with an error before anything was sent to an engine.
func (c *call) refuse(reason front.Reason, field, message string) {
	_ = c.sendItem(&item{failure: &failure{message: message, kind: reason.Type(), param: field, code: reason.Status()}, usage: noUsage})
	c.s.End(nil)
}

// refuseBudget refuses a request that there is no memory for, as one that does not even fit in
// as it comes.
func (c *call) refuseBudget() {
	c.s.End(&wire.Error{Code: wire.CodeMemory, Message: errBudgetExhausted.Error()})
}

func (e *Engine) run(c *call) {
	pass, denied := e.authenticate(c.s)
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
		c.refuse(front.BadField, "", "the request is not what was expected: "+err.Error())
		return
	case len(rest) > 0:
		c.refuse(front.BadField, "", fmt.Sprintf("the request is followed by %d bytes; want one msgpack value", len(rest)))
		return
	case made.dst[0] != '{':
		c.refuse(front.BadField, "", "the request is no map")
		return
	}
	c.s.ReleasePayload()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c.s.Watch(cancel, cancel)
	p, err := e.prepare(ctx, made.dst, pass, c.s.LeaseMemory)
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
	c.e, c.p, c.pass = e, p, pass
	if !p.deadline.IsZero() {
		c.s.SetDeadline(p.deadline)
	}
	if c.id = p.context.id; c.id == "" {
		c.id = e.ids.make()
	}
	// Only legs hear of these: the request goes on to its end by itself. A caller who
	// stops is told at once where nothing was told before: what must still be done for
	// the legs, to have blocks freed, is nothing to wait for.
	left, s, prompt := c.abort, c.s, p.prompt
	defer left.awaitEnd()
	c.s.Watch(func() {
		left.abort()
		go left.answerEnd(func() { sendStopped(s, prompt) })
	}, left.abort)
	if !p.deadline.IsZero() {
		// The caller leaves when his time is over. Legs with a deadline of their own would
		// be cut wherever they are, and a decode that is not admitted keeps blocks waiting.
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
	left.awaitEnd() // who is telling the answer ends the stream
	if c.s.Err() != nil {
		return // killed, gone or stalled: nobody listens
	}
	// Legs that were cut under a caller that is slow leave items that came before.
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

// sendStopped ends a stream of which nothing was sent, as its caller asked.
func sendStopped(s *wire.Stream, prompt int) {
	it := item{data: true, finish: "cancelled", usage: usage{prompt: prompt, completion: 0, cached: -1}}
	if s.Send(msgpackItems{}.append(nil, &it)) == nil {
		s.End(nil)
	}
}

// sendDeadline ends a stream of which nothing was sent, and whose time is over.
func sendDeadline(s *wire.Stream) {
	if s.Send(msgpackItems{}.append(nil, &item{failure: deadlineFailure(), usage: noUsage})) == nil {
		s.End(nil)
	}
}

// deadlineFailure is what a caller is told whose time is over.
func deadlineFailure() *failure {
	return &failure{message: "the request's time (context.timeout_ms) is over", kind: front.Deadline.Type(), param: "context.timeout_ms", code: front.Deadline.Status()}
}

// handlePrefillOnly takes the answer of a request that only warmed a cache.
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

// errorOf finds the error in a refusal, of the router's or an engine's: OpenAI's
// shape, the flat one, or FastAPI's detail.
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
