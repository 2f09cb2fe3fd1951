package transcript

import (
	"bytes"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"strconv"
)

// responsesStream is OpenAI's /v1/responses with one message: response.created,
// response.in_progress, response.output_item.added, response.content_part.added,
// response.output_text.delta …, the same in reverse as "done", response.completed. No engine
// returns ids there, so the text is kept. The response, item and part that the first engine wrote
// are repeated at the end with their final state.
type responsesStream struct {
	t              *Transcript
	response       []byte // raw, of response.created
	item           []byte // raw, of output_item.added; nil: not seen yet
	part           []byte // raw, of content_part.added; nil: not seen yet
	itemID         []byte // raw
	output         int    // index of the item
	seq            int    // sequence_number of the next event
	inProgressSent bool   // the client has response.in_progress
}

func (r *responsesStream) event(dst, event []byte) []byte {
	t := r.t
	data := sse.EventData(event)
	if t.resumed() != nil {
		return t.resumedEvent(dst, event, data)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	w := jsonscan.Cursor{Data: data}
	var kind, delta, response, item, part, code []byte
	output, seq := 0, r.seq
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "type":
			kind = w.Word()
		case "sequence_number":
			if n := w.Number(); n >= 0 {
				seq = n + 1
			}
		case "output_index":
			output = max(w.Number(), 0)
		case "delta":
			delta = w.Text()
		case "response":
			response = w.Raw()
		case "item":
			item = w.Raw()
		case "part":
			part = w.Raw()
		case "code":
			code = w.Raw()
		default:
			w.Skip()
		}
	}
	if w.Bad {
		t.blockOnce("unreadable")
		return append(dst, event...)
	}
	switch string(kind) {
	case "response.created":
		r.response = bytes.Clone(response)
	case "response.output_item.added":
		t.blockUnlessText(jsonscan.MemberOf(item, "type"), `"message"`)
		r.item, r.itemID, r.output = bytes.Clone(item), bytes.Clone(jsonscan.MemberOf(item, "id")), output
	case "response.content_part.added":
		t.blockUnlessText(jsonscan.MemberOf(part, "type"), `"output_text"`)
		r.part = bytes.Clone(part)
	case "response.output_text.delta":
		if len(delta) > 0 {
			t.appendSent(delta)
		}
	case "response.in_progress":
		r.inProgressSent = true
	case "response.completed", "response.incomplete":
		t.Finished, t.doneSent = true, true
	case "error":
		return t.engineFailed(dst, event, codeOf(append(append([]byte(`{"code":`), apiformat.OrNull(code)...), '}')))
	case "response.failed":
		return t.engineFailed(dst, event, 500)
	default:
		// A part of the end, or of an output that is not text. How the answer ended is not known
		// yet.
		t.blockOnce("ending")
	}
	r.seq = seq // of an event that is sent to the client
	return append(dst, event...)
}

func (r *responsesStream) nextEngine() sse.Rewriter { return &responsesResumed{first: r} }

func (r *responsesStream) appendEnd(dst []byte, _ bool) []byte {
	if next, ok := r.t.resumed().(*responsesResumed); ok {
		return next.appendEnd(dst)
	}
	return dst
}

// responsesResumed converts completions events into events of the stream.
type responsesResumed struct {
	first     *responsesStream
	finish    []byte // raw
	usage     []byte // raw, of the last event
	completed bool
}

// Event implements Rewriter.
func (n *responsesResumed) Event(dst, event []byte) []byte {
	r := n.first
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		return n.appendEnd(dst)
	}
	if usage := jsonscan.MemberOf(data, "usage"); apiformat.IsObject(usage) {
		n.usage = bytes.Clone(usage)
	}
	text, finish, _ := parseCompletion(data)
	if len(text) > 0 {
		dst = n.appendPartAdded(dst)
		r.t.ensureExtras().text = append(r.t.Text(), text...)
		dst = n.appendPartEventHead(dst, "response.output_text.delta")
		dst = append(append(append(dst, `,"delta":"`...), text...), "\",\"logprobs\":[]}\n\n"...)
	}
	if finish != nil {
		n.finish = bytes.Clone(finish)
	}
	return dst
}

// appendPartAdded begins the item and part unless the first engine has.
func (n *responsesResumed) appendPartAdded(dst []byte) []byte {
	r := n.first
	if !apiformat.IsObject(r.response) {
		r.response = []byte(`{"object":"response"}`)
	}
	if r.item == nil && !r.inProgressSent { // the engine failed right after response.created
		r.inProgressSent = true
		dst = append(n.appendEventHead(dst, "response.in_progress"), `,"response":`...)
		dst = append(append(dst, r.response...), "}\n\n"...)
	}
	if r.item == nil {
		id := jsonscan.MemberOf(r.response, "id")
		r.itemID = append([]byte(`"msg_`), bytes.TrimPrefix(bytes.Trim(id, `"`), []byte("resp_"))...)
		r.itemID = append(r.itemID, '"')
		r.item = append(append([]byte(`{"id":`), r.itemID...), `,"content":[],"role":"assistant","status":"in_progress","type":"message"}`...)
		dst = append(n.appendEventHead(dst, "response.output_item.added"), `,"output_index":0,"item":`...)
		dst = append(append(dst, r.item...), "}\n\n"...)
	}
	if len(r.itemID) == 0 {
		r.itemID = []byte(`""`)
	}
	if r.part == nil {
		r.part = []byte(`{"annotations":[],"text":"","type":"output_text","logprobs":[]}`)
		dst = append(n.appendPartEventHead(dst, "response.content_part.added"), `,"part":`...)
		dst = append(append(dst, r.part...), "}\n\n"...)
	}
	return dst
}

// appendEventHead begins an event.
func (n *responsesResumed) appendEventHead(dst []byte, kind string) []byte {
	dst = append(append(dst, "event: "...), kind...)
	dst = append(append(dst, "\ndata: {\"type\":\""...), kind...)
	dst = strconv.AppendInt(append(dst, `","sequence_number":`...), int64(n.first.seq), 10)
	n.first.seq++
	return dst
}

// appendPartEventHead begins an event about the part.
func (n *responsesResumed) appendPartEventHead(dst []byte, kind string) []byte {
	dst = append(append(n.appendEventHead(dst, kind), `,"item_id":`...), n.first.itemID...)
	dst = strconv.AppendInt(append(dst, `,"output_index":`...), int64(n.first.output), 10)
	return append(dst, `,"content_index":0`...)
}

// appendEnd ends the part, the item and the response.
func (n *responsesResumed) appendEnd(dst []byte) []byte {
	if n.completed {
		return dst
	}
	n.completed = true
	r, t := n.first, n.first.t
	dst = n.appendPartAdded(dst)
	text := append(append([]byte{'"'}, t.Text()...), '"')
	part := withMember(r.part, "text", text)
	item := withMember(withMember(r.item, "status", []byte(`"completed"`)), "content", append(append([]byte{'['}, part...), ']'))

	dst = append(append(n.appendPartEventHead(dst, "response.output_text.done"), `,"text":`...), text...)
	dst = append(dst, ",\"logprobs\":[]}\n\n"...)
	dst = append(append(append(n.appendPartEventHead(dst, "response.content_part.done"), `,"part":`...), part...), "}\n\n"...)
	dst = n.appendEventHead(dst, "response.output_item.done")
	dst = strconv.AppendInt(append(dst, `,"output_index":`...), int64(r.output), 10)
	dst = append(append(append(dst, `,"item":`...), item...), "}\n\n"...)

	kind, status, details := "response.completed", `"completed"`, "null"
	if string(n.finish) == `"length"` {
		kind, status, details = "response.incomplete", `"incomplete"`, `{"reason":"max_output_tokens"}`
	}
	response := withMember(r.response, "status", []byte(status))
	response = withMember(response, "incomplete_details", []byte(details))
	response = withMember(response, "output", append(append([]byte{'['}, item...), ']'))
	response = withMember(response, "usage", n.appendUsage(nil))
	dst = append(append(n.appendEventHead(dst, kind), `,"response":`...), response...)
	return append(dst, "}\n\n"...)
}

func (n *responsesResumed) appendUsage(dst []byte) []byte {
	t := n.first.t
	prompt, output := t.Prompt.Len(), len(t.Out)
	details := jsonscan.Cursor{Data: jsonscan.MemberOf(jsonscan.MemberOf(n.usage, "prompt_tokens_details"), "cached_tokens")}
	cached := min(max(details.Unsigned(), 0), prompt)
	dst = strconv.AppendInt(append(dst, `{"input_tokens":`...), int64(prompt), 10)
	dst = strconv.AppendInt(append(dst, `,"input_tokens_details":{"cached_tokens":`...), int64(cached), 10)
	dst = strconv.AppendInt(append(dst, `},"output_tokens":`...), int64(output), 10)
	dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":`...)
	return append(strconv.AppendInt(dst, int64(prompt+output), 10), '}')
}

// withMember returns object with a new value for a member, in its place or at the end.
func withMember(object []byte, name string, value []byte) []byte {
	w := jsonscan.Cursor{Data: object}
	if !w.Enter('{') {
		return object
	}
	from, to, empty := -1, -1, true
	for key, more := w.Member(); more; key, more = w.Member() {
		empty = false
		if string(key) != name {
			w.Skip()
			continue
		}
		w.Peek()
		from = w.Pos
		w.Skip()
		to = w.Pos
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
