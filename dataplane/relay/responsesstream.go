package relay

import (
	"bytes"
	"strconv"
)

// responsesStream is OpenAI's /v1/responses of one message: response.created,
// response.in_progress, response.output_item.added, response.content_part.added,
// response.output_text.delta …, the same in reverse as "done", response.completed. No
// engine tells ids there, so the text is kept. What the first engine wrote of the
// response, the item and the part is repeated at the end with what became of them.
type responsesStream struct {
	t        *Transcript
	response []byte // raw, of response.created
	item     []byte // raw, of output_item.added; nil: not yet
	part     []byte // raw, of content_part.added; nil: not yet
	itemID   []byte // raw
	output   int    // index of the item
	seq      int    // of the next event
	running  bool   // the client has response.in_progress
}

func (r *responsesStream) event(dst, event []byte) []byte {
	t := r.t
	data := DataOf(event)
	if t.next() != nil {
		return t.follow(dst, event, data)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	w := walker{b: data}
	var kind, delta, response, item, part, code []byte
	output, seq := 0, r.seq
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "type":
			kind = w.word()
		case "sequence_number":
			if n := w.number(); n >= 0 {
				seq = n + 1
			}
		case "output_index":
			output = max(w.number(), 0)
		case "delta":
			delta = w.text()
		case "response":
			response = w.raw()
		case "item":
			item = w.raw()
		case "part":
			part = w.raw()
		case "code":
			code = w.raw()
		default:
			w.skip()
		}
	}
	if w.bad {
		t.stuck("unreadable")
		return append(dst, event...)
	}
	switch string(kind) {
	case "response.created":
		r.response = bytes.Clone(response)
	case "response.output_item.added":
		t.onlyText(memberOf(item, "type"), `"message"`)
		r.item, r.itemID, r.output = bytes.Clone(item), bytes.Clone(memberOf(item, "id")), output
	case "response.content_part.added":
		t.onlyText(memberOf(part, "type"), `"output_text"`)
		r.part = bytes.Clone(part)
	case "response.output_text.delta":
		if len(delta) > 0 {
			t.keep(delta)
		}
	case "response.in_progress":
		r.running = true
	case "response.completed", "response.incomplete":
		t.Finished, t.ended = true, true
	case "error":
		return t.broke(dst, event, codeOf(append(append([]byte(`{"code":`), orNull(code)...), '}')))
	case "response.failed":
		return t.broke(dst, event, 500)
	default:
		// A part of the end, or of what is no text: how the answer ended is not known yet.
		t.stuck("ending")
	}
	r.seq = seq // of an event that the client sees
	return append(dst, event...)
}

func (r *responsesStream) turn() Rewriter { return &responsesNext{r: r} }

func (r *responsesStream) end(dst []byte, _ bool) []byte {
	if next, ok := r.t.next().(*responsesNext); ok {
		return next.close(dst)
	}
	return dst
}

// responsesNext makes of completions events those of the stream.
type responsesNext struct {
	r      *responsesStream
	finish []byte // raw
	usage  []byte // raw, of the last event
	closed bool
}

// Event implements Rewriter.
func (n *responsesNext) Event(dst, event []byte) []byte {
	r := n.r
	data := DataOf(event)
	if bytes.Equal(data, done) {
		return n.close(dst)
	}
	if usage := memberOf(data, "usage"); isObject(usage) {
		n.usage = bytes.Clone(usage)
	}
	text, finish, _ := completionOf(data)
	if len(text) > 0 {
		dst = n.open(dst)
		r.t.rare().text = append(r.t.Text(), text...)
		dst = n.about(dst, "response.output_text.delta")
		dst = append(append(append(dst, `,"delta":"`...), text...), "\",\"logprobs\":[]}\n\n"...)
	}
	if finish != nil {
		n.finish = bytes.Clone(finish)
	}
	return dst
}

// open begins item and part where the first engine had not.
func (n *responsesNext) open(dst []byte) []byte {
	r := n.r
	if !isObject(r.response) {
		r.response = []byte(`{"object":"response"}`)
	}
	if r.item == nil && !r.running { // the engine failed right behind response.created
		r.running = true
		dst = append(n.named(dst, "response.in_progress"), `,"response":`...)
		dst = append(append(dst, r.response...), "}\n\n"...)
	}
	if r.item == nil {
		id := memberOf(r.response, "id")
		r.itemID = append([]byte(`"msg_`), bytes.TrimPrefix(bytes.Trim(id, `"`), []byte("resp_"))...)
		r.itemID = append(r.itemID, '"')
		r.item = append(append([]byte(`{"id":`), r.itemID...), `,"content":[],"role":"assistant","status":"in_progress","type":"message"}`...)
		dst = append(n.named(dst, "response.output_item.added"), `,"output_index":0,"item":`...)
		dst = append(append(dst, r.item...), "}\n\n"...)
	}
	if len(r.itemID) == 0 {
		r.itemID = []byte(`""`)
	}
	if r.part == nil {
		r.part = []byte(`{"annotations":[],"text":"","type":"output_text","logprobs":[]}`)
		dst = append(n.about(dst, "response.content_part.added"), `,"part":`...)
		dst = append(append(dst, r.part...), "}\n\n"...)
	}
	return dst
}

// named begins an event.
func (n *responsesNext) named(dst []byte, kind string) []byte {
	dst = append(append(dst, "event: "...), kind...)
	dst = append(append(dst, "\ndata: {\"type\":\""...), kind...)
	dst = strconv.AppendInt(append(dst, `","sequence_number":`...), int64(n.r.seq), 10)
	n.r.seq++
	return dst
}

// about begins an event about the part.
func (n *responsesNext) about(dst []byte, kind string) []byte {
	dst = append(append(n.named(dst, kind), `,"item_id":`...), n.r.itemID...)
	dst = strconv.AppendInt(append(dst, `,"output_index":`...), int64(n.r.output), 10)
	return append(dst, `,"content_index":0`...)
}

// close tells what became of part, item and response.
func (n *responsesNext) close(dst []byte) []byte {
	if n.closed {
		return dst
	}
	n.closed = true
	r, t := n.r, n.r.t
	dst = n.open(dst)
	text := append(append([]byte{'"'}, t.Text()...), '"')
	part := spliced(r.part, "text", text)
	item := spliced(spliced(r.item, "status", []byte(`"completed"`)), "content", append(append([]byte{'['}, part...), ']'))

	dst = append(append(n.about(dst, "response.output_text.done"), `,"text":`...), text...)
	dst = append(dst, ",\"logprobs\":[]}\n\n"...)
	dst = append(append(append(n.about(dst, "response.content_part.done"), `,"part":`...), part...), "}\n\n"...)
	dst = n.named(dst, "response.output_item.done")
	dst = strconv.AppendInt(append(dst, `,"output_index":`...), int64(r.output), 10)
	dst = append(append(append(dst, `,"item":`...), item...), "}\n\n"...)

	kind, status, details := "response.completed", `"completed"`, "null"
	if string(n.finish) == `"length"` {
		kind, status, details = "response.incomplete", `"incomplete"`, `{"reason":"max_output_tokens"}`
	}
	response := spliced(r.response, "status", []byte(status))
	response = spliced(response, "incomplete_details", []byte(details))
	response = spliced(response, "output", append(append([]byte{'['}, item...), ']'))
	response = spliced(response, "usage", n.appendUsage(nil))
	dst = append(append(n.named(dst, kind), `,"response":`...), response...)
	return append(dst, "}\n\n"...)
}

func (n *responsesNext) appendUsage(dst []byte) []byte {
	t := n.r.t
	prompt, output := t.Prompt.Len(), len(t.Out)
	details := walker{b: memberOf(memberOf(n.usage, "prompt_tokens_details"), "cached_tokens")}
	cached := min(max(details.digits(), 0), prompt)
	dst = strconv.AppendInt(append(dst, `{"input_tokens":`...), int64(prompt), 10)
	dst = strconv.AppendInt(append(dst, `,"input_tokens_details":{"cached_tokens":`...), int64(cached), 10)
	dst = strconv.AppendInt(append(dst, `},"output_tokens":`...), int64(output), 10)
	dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":`...)
	return append(strconv.AppendInt(dst, int64(prompt+output), 10), '}')
}

// spliced gives object with another value for a member, in its place or at the end.
func spliced(object []byte, name string, value []byte) []byte {
	w := walker{b: object}
	if !w.enter('{') {
		return object
	}
	from, to, empty := -1, -1, true
	for key, more := w.member(); more; key, more = w.member() {
		empty = false
		if string(key) != name {
			w.skip()
			continue
		}
		w.peek()
		from = w.i
		w.skip()
		to = w.i
	}
	out := make([]byte, 0, len(object)+len(value)+len(name)+4)
	if from >= 0 {
		return append(append(append(out, object[:from]...), value...), object[to:]...)
	}
	end := bytes.LastIndexByte(object, '}')
	if end < 0 {
		return object
	}
	out = append(out, object[:end]...)
	if !empty {
		out = append(out, ',')
	}
	out = append(append(append(out, '"'), name...), `":`...)
	return append(append(out, value...), object[end:]...)
}
