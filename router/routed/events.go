package routed

import (
	"bytes"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// converter makes items of an engine's events. It belongs to one stream and is
// called by one goroutine; its scratch is kept, so that an item allocates nothing.
type converter struct {
	dialect dialect
	// deltas: an event of a native stream holds what is new. Where the engine has
	// not told (known is false) the stream's own counts say it.
	deltas, known bool
	eos           []byte // eos_token_ids, raw
	stops         []byte // stop_token_ids, raw: others that end an answer are the model's own
	prompt        int    // tokens of the prompt, for an engine that counts nothing

	send func(*item) error // one item, borrowed until it returns
	// sendIDs, where set, is send for an item of the first choice that has token ids and
	// nothing else.
	sendIDs func(ids []uint32) error
	// stopped, where set, says whether the caller has asked to stop: what breaks then
	// breaks because the legs were cut.
	stopped func() bool
	// late, where set, says whether the caller's time is over, likewise.
	late func() bool

	around  template
	it      item
	last    item // the finish of the last choice, held back for the usage behind it
	pending bool
	ended   bool // the last item is out, or an error
	usage   usage
	out     int   // tokens sent
	seen    []int // by choice: tokens sent, for native streams that repeat all
	scratch []uint32
	first   []string // comments of the first item
}

// reuse gives c the memory of a converter that has ended.
func (c *converter) reuse(old *converter) {
	c.scratch, c.it.tokens, c.last.tokens, c.seen = old.scratch[:0], old.it.tokens[:0], old.last.tokens[:0], old.seen[:0]
	c.around = old.around
	c.around.shape.Forget()
}

// event takes in one event of the engine's. The error is send's.
func (c *converter) event(event []byte) error {
	data := relay.DataOf(event)
	switch {
	case len(data) == 0: // a comment, to keep the connection alive
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
		return c.native(data)
	}
	if done, err := c.plain(data); done {
		return err
	}
	return c.openAI(data)
}

// openAI reads an event of completions or of generate.
func (c *converter) openAI(data []byte) error {
	var choices, use []byte
	for it := jsonscan.Walk(data); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("choices"):
			choices = it.Raw()
		case it.IsKey("usage"):
			use = it.Raw()
		case it.IsKey("error"):
			return c.failed(it.Raw())
		}
	}
	if use != nil {
		c.counted(use)
	}
	several := 0
	for it := jsonscan.Walk(choices); it.Next(); {
		several++
	}
	for it := jsonscan.Walk(choices); it.Next(); {
		if err := c.choice(data, it.Raw(), several == 1 && use == nil); err != nil {
			return err
		}
	}
	return nil
}

// counted reads an engine's usage.
func (c *converter) counted(raw []byte) {
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

// choice reads one choice of an event; plain: the event has no other, and no usage.
func (c *converter) choice(data, raw []byte, plain bool) error {
	c.begin()
	var index, finish, stop, logs, text, ids []byte
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.Value.Kind == jsonscan.Null:
		case it.IsKey("index"):
			index = it.Raw()
			c.it.index = atoi(index)
		case it.IsKey("token_ids"):
			ids = it.Raw()
			c.it.tokens, _ = jsonscan.TokenIDs(c.it.tokens, ids)
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
		if len(c.it.tokens) == 0 {
			return nil // the first event of some engines, with the prompt's ids
		}
		if plain && logs == nil && stop == nil && c.out > 0 && c.around.learn(data, text, ids) {
			c.around.index = c.around.gap(data, index)
		}
		return c.put()
	}
	return c.finish(finish, stop)
}

// begin empties the item.
func (c *converter) begin() {
	c.it = item{data: true, tokens: c.it.tokens[:0], logs: c.it.logs[:0], usage: noUsage}
}

// put sends the item; before it, a finish of another choice that was held back.
func (c *converter) put() error {
	if err := c.release(); err != nil {
		return err
	}
	c.out += len(c.it.tokens)
	return c.emit(&c.it)
}

// emit sends an item, with the comments of the first on it.
func (c *converter) emit(it *item) error {
	it.comment, c.first = c.first, nil
	return c.send(it)
}

// release sends the finish that was held back.
func (c *converter) release() error {
	if !c.pending {
		return nil
	}
	c.pending = false
	return c.emit(&c.last)
}

// finish holds the last item of a choice back: its usage comes behind it.
func (c *converter) finish(reason, stop []byte) error {
	if err := c.release(); err != nil {
		return err
	}
	c.out += len(c.it.tokens)
	c.it.finish, c.it.stop = c.reason(reason, stop), nil
	if stop != nil {
		c.it.stop = bytes.Clone(stop)
	}
	c.hold()
	return nil
}

// hold makes the item the last one.
func (c *converter) hold() {
	c.last, c.it = c.it, item{tokens: c.last.tokens[:0]}
	for i := range c.last.logs { // they borrow from the event
		l := &c.last.logs[i]
		l.prob = bytes.Clone(l.prob)
		for k := range l.top {
			l.top[k].token, l.top[k].prob = bytes.Clone(l.top[k].token), bytes.Clone(l.top[k].prob)
		}
	}
	c.pending = true
}

// reason gives the finish reason in the words of the answer: an end token is
// "eos", a stop string or another token "stop".
func (c *converter) reason(raw, stop []byte) string {
	switch string(raw) {
	case `"stop"`:
		if stop == nil || stop[0] != '"' && (holds(c.eos, stop) || !holds(c.stops, stop)) {
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

// holds says whether a list of ids has one.
func holds(list, id []byte) bool {
	for it := jsonscan.Walk(list); it.Next(); {
		if bytes.Equal(it.Raw(), id) {
			return true
		}
	}
	return false
}

// flush sends what is held back, with the usage: the stream's last item.
func (c *converter) flush() error {
	if c.ended {
		return nil
	}
	if !c.pending {
		return nil
	}
	c.ended = true
	c.last.usage = c.total()
	return c.release()
}

// total is the usage as the engine told it, else as it was counted here.
func (c *converter) total() usage {
	u := c.usage
	if u.prompt < 0 {
		u.prompt = c.prompt
	}
	if u.completion < 0 {
		u.completion = c.out
	}
	return u
}

// failed sends an engine's error as an item, the last one.
func (c *converter) failed(raw []byte) error {
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

// fail ends the stream with an error; it does nothing after its end.
func (c *converter) fail(f *failure) error {
	if c.ended {
		return nil
	}
	switch {
	case c.stopped != nil && c.stopped():
		return c.cancel()
	case c.late != nil && c.late():
		f = overdue()
	}
	if err := c.release(); err != nil {
		return err
	}
	c.ended = true
	return c.emit(&item{failure: f, usage: noUsage})
}

// cancel ends the stream as the caller asked: with a finish reason, and the usage
// so far.
func (c *converter) cancel() error {
	if c.ended {
		return nil
	}
	if !c.pending {
		c.begin()
		c.it.finish = "cancelled"
		c.hold()
	}
	return c.flush()
}

// native reads an event of SGLang's /generate.
func (c *converter) native(data []byte) error {
	if done, err := c.plainNative(data); done {
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
			c.it.index = atoi(index)
		case it.IsKey("error"):
			return c.failed(it.Raw())
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
	i := c.it.index
	if i > maxChoices {
		return c.fail(&failure{message: "the engine numbers a choice " + strconv.Itoa(i), kind: "upstream_error", code: 502})
	}
	for len(c.seen) <= i {
		c.seen = append(c.seen, 0)
	}
	c.scratch, _ = jsonscan.TokenIDs(c.scratch[:0], ids)
	fresh, skipped := c.news(i, total, 0)
	c.it.tokens = append(c.it.tokens, c.scratch[skipped:]...)
	if logs != nil {
		c.nativeLogs(logs, tops, skipped, fresh)
	}
	if finish == nil {
		if fresh == 0 {
			return nil
		}
		if t := &c.around; logs == nil && tops == nil && t.learn(data, text, ids) {
			t.index, t.prompt, t.total, t.cached = t.gap(data, index), t.gap(data, prompt), t.gap(data, completion), t.gap(data, cached)
		}
		return c.put()
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

// news counts in the new ones among the ids of a native event of choice i, which are in
// scratch but for the first passed; total is what the event counts, -1 nothing. It gives
// how many are new, the last of scratch, and how many of the event's were sent before.
func (c *converter) news(i, total, passed int) (fresh, skipped int) {
	n, had := passed+len(c.scratch), c.seen[i]
	if !c.known && had > 0 && total > 0 && n > 0 {
		// The second event with tokens tells: all so far, or what is new.
		c.deltas, c.known = n < total, true
	}
	if !c.deltas && had > 0 {
		skipped = min(had, n)
	}
	fresh = n - skipped
	c.seen[i] = had + fresh
	c.usage.completion = 0
	for _, n := range c.seen {
		c.usage.completion += n
	}
	return fresh, skipped
}

// maxChoices bounds the number an engine may give a choice.
const maxChoices = 1 << 10
