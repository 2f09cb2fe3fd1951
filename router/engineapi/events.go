package engineapi

import (
	"bytes"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// converter converts an engine's events into items. It belongs to one stream and is used by one
// goroutine. It reuses its memory, so that an item does not allocate.
type converter struct {
	dialect engineDialect
	// deltas means that an event of a native stream contains only the new tokens. While
	// formKnown is false, because the engine has not reported it, the token counts in the
	// stream decide.
	deltas, formKnown bool
	eos               []byte // eos_token_ids, raw
	stops             []byte // stop_token_ids, raw; any other id that ends an answer is the model's own
	prompt            int    // number of prompt tokens, for an engine that does not count them

	send func(*item) error // sends one item, borrowed until it returns
	// sendIDs, if set, replaces send for an item of the first choice that has token ids and
	// nothing else.
	sendIDs func(ids []uint32) error
	// stopRequested, if set, returns whether the caller has asked to stop. An engine error is
	// then a consequence of cancelling the legs.
	stopRequested func() bool
	// deadlinePassed, if set, returns whether the request's deadline has passed, with the same
	// consequence.
	deadlinePassed func() bool

	eventTemplate eventTemplate
	current       item
	pendingFinish item // the last item of the last choice, delayed until its usage arrives
	hasPending    bool
	ended         bool // the last item or an error was sent
	usage         usage
	outputTokens  int   // tokens sent
	sentByChoice  []int // by choice: tokens sent, for native streams whose events repeat all tokens
	scratch       []uint32
	firstComments []string // comments of the first item
}

// reset takes over the memory of a converter that is no longer used.
func (c *converter) reset(old *converter) {
	c.scratch, c.current.tokens, c.pendingFinish.tokens, c.sentByChoice = old.scratch[:0], old.current.tokens[:0], old.pendingFinish.tokens[:0], old.sentByChoice[:0]
	c.eventTemplate = old.eventTemplate
	c.eventTemplate.shape.Reset()
}

// handleEvent converts one event of the engine. The error is that of send.
func (c *converter) handleEvent(event []byte) error {
	data := sse.EventData(event)
	switch {
	case len(data) == 0: // a keep-alive comment
		return nil
	case string(data) == "[DONE]":
		return c.flush()
	case data[0] != '{':
		return nil
	}
	if c.ended {
		return nil
	}
	if c.dialect == native {
		return c.readNative(data)
	}
	if done, err := c.readTemplate(data); done {
		return err
	}
	return c.readOpenAI(data)
}

// readOpenAI converts an event of completions or of generate.
func (c *converter) readOpenAI(data []byte) error {
	var choices, use []byte
	for it := jsonscan.Walk(data); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("choices"):
			choices = it.Raw()
		case it.IsKey("usage"):
			use = it.Raw()
		case it.IsKey("error"):
			return c.sendEngineError(it.Raw())
		}
	}
	if use != nil {
		c.readUsage(use)
	}
	several := 0
	for it := jsonscan.Walk(choices); it.Next(); {
		several++
	}
	for it := jsonscan.Walk(choices); it.Next(); {
		if err := c.readChoice(data, it.Raw(), several == 1 && use == nil); err != nil {
			return err
		}
	}
	return nil
}

// readUsage parses an engine's usage.
func (c *converter) readUsage(raw []byte) {
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.IsKey("prompt_tokens"):
			c.usage.prompt = atoi(it.Raw())
		case it.IsKey("completion_tokens"):
			c.usage.completion = atoi(it.Raw())
		case it.IsKey("prompt_tokens_details"):
			for d := jsonscan.Walk(it.Raw()); d.Next(); {
				if d.IsKey("cached_tokens") && d.Value.Kind == jsonscan.Number {
					c.usage.cached = atoi(d.Raw())
				}
			}
		}
	}
}

func atoi(raw []byte) int {
	n := 0
	for _, d := range raw {
		if d -= '0'; d > 9 || n > 1<<40 {
			return n
		}
		n = n*10 + int(d)
	}
	return n
}

// readChoice converts one choice of an event. plain means that the event has no other choice
// and no usage.
func (c *converter) readChoice(data, raw []byte, plain bool) error {
	c.begin()
	var index, finish, stop, logs, text, ids []byte
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("index"):
			index = it.Raw()
			c.current.index = atoi(index)
		case it.IsKey("token_ids"):
			ids = it.Raw()
			c.current.tokens, _ = jsonscan.TokenIDs(c.current.tokens, ids)
		case it.IsKey("text"):
			text = it.Raw()
		case it.IsKey("finish_reason"):
			finish = it.Raw()
		case it.IsKey("stop_reason"):
			stop = it.Raw()
		case it.IsKey("logprobs"):
			logs = it.Raw()
		}
	}
	if logs != nil {
		c.logprobs(logs)
	}
	if finish == nil {
		if len(c.current.tokens) == 0 {
			return nil // the first event of some engines, with the prompt's ids
		}
		if plain && logs == nil && stop == nil && c.outputTokens > 0 && c.eventTemplate.learn(data, text, ids) {
			c.eventTemplate.index = c.eventTemplate.gap(data, index)
		}
		return c.sendItem()
	}
	return c.finish(finish, stop)
}

// begin clears the current item.
func (c *converter) begin() {
	c.current = item{data: true, tokens: c.current.tokens[:0], logprobs: c.current.logprobs[:0], usage: noUsage}
}

// sendItem sends the current item, after the pending last item of another choice.
func (c *converter) sendItem() error {
	if err := c.sendPending(); err != nil {
		return err
	}
	c.outputTokens += len(c.current.tokens)
	return c.emit(&c.current)
}

// emit sends an item and adds firstComments to the first one.
func (c *converter) emit(it *item) error {
	it.comment, c.firstComments = c.firstComments, nil
	return c.send(it)
}

// sendPending sends the pending last item.
func (c *converter) sendPending() error {
	if !c.hasPending {
		return nil
	}
	c.hasPending = false
	return c.emit(&c.pendingFinish)
}

// finish makes the current item the last of its choice and delays it, because its usage
// follows.
func (c *converter) finish(reason, stop []byte) error {
	if err := c.sendPending(); err != nil {
		return err
	}
	c.outputTokens += len(c.current.tokens)
	c.current.finish, c.current.stop = c.reason(reason, stop), nil
	if stop != nil {
		c.current.stop = bytes.Clone(stop)
	}
	c.holdItem()
	return nil
}

// holdItem makes the current item the pending one.
func (c *converter) holdItem() {
	c.pendingFinish, c.current = c.current, item{tokens: c.pendingFinish.tokens[:0]}
	for i := range c.pendingFinish.logprobs { // they borrow from the event
		l := &c.pendingFinish.logprobs[i]
		l.prob = bytes.Clone(l.prob)
		for k := range l.top {
			l.top[k].token, l.top[k].prob = bytes.Clone(l.top[k].token), bytes.Clone(l.top[k].prob)
		}
	}
	c.hasPending = true
}

// reason returns the finish reason in the API's terms: "eos" for an end token, "stop" for a
// stop string or another token.
func (c *converter) reason(raw, stop []byte) string {
	switch string(raw) {
	case `"stop"`:
		if stop == nil || stop[0] != '"' && (containsID(c.eos, stop) || !containsID(c.stops, stop)) {
			return "eos"
		}
		return "stop"
	case `"length"`:
		return "length"
	case `"abort"`, `"cancelled"`:
		return "cancelled"
	case `"content_filter"`:
		return "content_filter"
	}
	return string(appendText(nil, raw))
}

// containsID returns whether a list of ids contains id.
func containsID(list, id []byte) bool {
	for it := jsonscan.Walk(list); it.Next(); {
		if bytes.Equal(it.Raw(), id) {
			return true
		}
	}
	return false
}

// flush sends the pending item with the usage, as the last item of the stream.
func (c *converter) flush() error {
	if c.ended {
		return nil
	}
	if !c.hasPending {
		return nil
	}
	c.ended = true
	c.pendingFinish.usage = c.total()
	return c.sendPending()
}

// total returns the usage as reported by the engine, else as counted by the converter.
func (c *converter) total() usage {
	u := c.usage
	if u.prompt < 0 {
		u.prompt = c.prompt
	}
	if u.completion < 0 {
		u.completion = c.outputTokens
	}
	return u
}

// sendEngineError sends an engine's error as the last item.
func (c *converter) sendEngineError(raw []byte) error {
	f := &failure{kind: "upstream_error", code: 502}
	if raw[0] == '"' {
		f.message = string(appendText(nil, raw))
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.IsKey("message"):
			f.message = string(appendText(nil, it.Raw()))
		case it.IsKey("type") && it.Value.Kind == jsonscan.String:
			f.kind = string(appendText(nil, it.Raw()))
		case it.IsKey("param") && it.Value.Kind == jsonscan.String:
			f.param = string(appendText(nil, it.Raw()))
		case it.IsKey("code") && it.Value.Kind == jsonscan.Number:
			f.code = atoi(it.Raw())
		}
	}
	if f.message == "" {
		f.message = "the engine failed"
	}
	return c.fail(f)
}

// fail ends the stream with an error. It does nothing after the end of the stream.
func (c *converter) fail(f *failure) error {
	if c.ended {
		return nil
	}
	switch {
	case c.stopRequested != nil && c.stopRequested():
		return c.cancel()
	case c.deadlinePassed != nil && c.deadlinePassed():
		f = deadlineFailure()
	}
	if err := c.sendPending(); err != nil {
		return err
	}
	c.ended = true
	return c.emit(&item{failure: f, usage: noUsage})
}

// cancel ends the stream at the caller's request, with a finish reason and the usage so far.
func (c *converter) cancel() error {
	if c.ended {
		return nil
	}
	if !c.hasPending {
		c.begin()
		c.current.finish = "cancelled"
		c.holdItem()
	}
	return c.flush()
}

// readNative converts an event of SGLang's /generate.
func (c *converter) readNative(data []byte) error {
	if done, err := c.readNativeTemplate(data); done {
		return err
	}
	c.begin()
	var meta, ids, text, index []byte
	for it := jsonscan.Walk(data); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("text"):
			text = it.Raw()
		case it.IsKey("output_ids"):
			ids = it.Raw()
		case it.IsKey("meta_info"):
			meta = it.Raw()
		case it.IsKey("index"):
			index = it.Raw()
			c.current.index = atoi(index)
		case it.IsKey("error"):
			return c.sendEngineError(it.Raw())
		}
	}
	var finish, prompt, completion, cached, logs, tops []byte
	total := -1
	for it := jsonscan.Walk(meta); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("finish_reason"):
			finish = it.Raw()
		case it.IsKey("prompt_tokens"):
			prompt = it.Raw()
			c.usage.prompt = atoi(prompt)
		case it.IsKey("completion_tokens"):
			completion = it.Raw()
			total = atoi(completion)
		case it.IsKey("cached_tokens"):
			cached = it.Raw()
			c.usage.cached = atoi(cached)
		case it.IsKey("output_token_logprobs"):
			logs = it.Raw()
		case it.IsKey("output_top_logprobs"):
			tops = it.Raw()
		}
	}
	i := c.current.index
	if i > maxChoices {
		return c.fail(&failure{message: "the engine sent a choice with the index " + strconv.Itoa(i), kind: "upstream_error", code: 502})
	}
	for len(c.sentByChoice) <= i {
		c.sentByChoice = append(c.sentByChoice, 0)
	}
	c.scratch, _ = jsonscan.TokenIDs(c.scratch[:0], ids)
	fresh, skipped := c.newTokens(i, total, 0)
	c.current.tokens = append(c.current.tokens, c.scratch[skipped:]...)
	if logs != nil {
		c.nativeLogprobs(logs, tops, skipped, fresh)
	}
	if finish == nil {
		if fresh == 0 {
			return nil
		}
		if t := &c.eventTemplate; logs == nil && tops == nil && t.learn(data, text, ids) {
			t.index, t.prompt, t.total, t.cached = t.gap(data, index), t.gap(data, prompt), t.gap(data, completion), t.gap(data, cached)
		}
		return c.sendItem()
	}
	kind, matched, message, status := []byte(nil), []byte(nil), []byte(nil), 500
	for it := jsonscan.Walk(finish); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("type"):
			kind = it.Raw()
		case it.IsKey("matched"):
			matched = it.Raw()
		case it.IsKey("message"):
			message = it.Raw()
		case it.IsKey("status_code"):
			status = atoi(it.Raw())
		}
	}
	if string(kind) == `"abort"` && message != nil && status >= 400 {
		return c.fail(&failure{message: string(appendText(nil, message)), kind: "upstream_error", code: status})
	}
	return c.finish(kind, matched)
}

// newTokens determines which ids of a native event of choice i are new. passed is the number of
// leading ids that the template skipped; scratch contains the rest. total is the event's own
// token count, -1 if it has none. fresh is the number of new ids, which are the last of
// scratch, and skipped the number of the event's ids that were sent before.
func (c *converter) newTokens(i, total, passed int) (fresh, skipped int) {
	n, had := passed+len(c.scratch), c.sentByChoice[i]
	if !c.formKnown && had > 0 && total > 0 && n > 0 {
		// The second event with tokens shows whether events contain all tokens or only the new
		// ones.
		c.deltas, c.formKnown = n < total, true
	}
	if !c.deltas && had > 0 {
		skipped = min(had, n)
	}
	fresh = n - skipped
	c.sentByChoice[i] = had + fresh
	c.usage.completion = 0
	for _, n := range c.sentByChoice {
		c.usage.completion += n
	}
	return fresh, skipped
}

// maxChoices bounds the index of a choice in an engine's answer.
const maxChoices = 1 << 10
