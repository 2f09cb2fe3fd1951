package apiformat

import (
	"bytes"
	"sluice/dataplane/jsonscan"
)

// Choice holds the raw members of one choice of a completions answer; nil: missing.
type Choice struct {
	index                                               int
	Text, logprobs, Finish, Stop, ids, prompt, promptLP []byte
}

// Read reads the choice at w and passes its unknown members to other.
func (ch *Choice) Read(w *jsonscan.Cursor, other func(key, value []byte)) {
	if !w.Enter('{') {
		return
	}
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "index":
			ch.index = max(w.Number(), 0)
			continue
		case "text":
			ch.Text = w.Text()
			continue
		}
		value := w.Raw()
		if string(value) == "null" {
			value = nil
		}
		switch string(key) {
		case "logprobs":
			ch.logprobs = value
		case "finish_reason":
			ch.Finish = value
		case "stop_reason":
			ch.Stop = value
		case "token_ids":
			ch.ids = value
		case "prompt_token_ids":
			ch.prompt = value
		case "prompt_logprobs":
			ch.promptLP = value
		case "disaggregated_params", "kv_transfer_params":
		default:
			if other != nil {
				other(key, value)
			}
		}
	}
}

// hideIDs removes ids that the client did not ask for.
func (ch *Choice) hideIDs(s *SplicePoint) {
	if s == nil {
		return
	}
	if !s.ShowIDs {
		ch.ids, ch.prompt = nil, nil
	} else if s.Head != nil {
		ch.prompt = nil // sent before, and without the tokens that followed
	}
}

// hasContent reports whether an event with this choice has anything for the client.
func (ch *Choice) hasContent() bool {
	return len(ch.Text) > 0 || ch.Finish != nil || ch.logprobs != nil || len(ch.ids) > len("[]")
}

// appendOpenings creates the head of all events. Before the event itself it puts the first events
// of the choices that occur in data for the first time: the role, and the first token.
func (c *Conversion) appendOpenings(dst, data []byte) (_ []byte, ok bool) {
	w := jsonscan.Cursor{Data: data}
	var id, created, model, choices []byte
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "id":
			id = w.Raw()
		case "created":
			created = w.Raw()
		case "model":
			model = w.Raw()
		case "choices":
			choices = w.Raw()
		case "error":
			if !w.Null() {
				return dst, false
			}
			w.Skip()
		default:
			w.Skip()
		}
	}
	if w.Bad || choices == nil {
		return dst, false
	}
	if c.head == nil {
		c.makeHead(id, created, model)
		c.unstarted = max(c.Choices, 1)
	}
	w = jsonscan.Cursor{Data: choices}
	if !w.Enter('[') {
		return dst, false
	}
	for w.Element() {
		var ch Choice
		ch.Read(&w, nil)
		ch.hideIDs(c.Splice)
		if ch.index >= MaxChoiceIndex || ch.index < len(c.started) && c.started[ch.index] {
			continue
		}
		for len(c.started) <= ch.index {
			c.started = append(c.started, false)
		}
		c.started[ch.index] = true
		c.unstarted--
		dst = c.appendOpening(dst, &ch)
	}
	return dst, !w.Bad
}

func (c *Conversion) makeHead(id, created, model []byte) {
	object := "text_completion"
	if c.Chat {
		object = "chat.completion.chunk"
	}
	c.head = AppendHead(c.head[:0], c.Chat, object, id, created, model)
}

// AppendHead appends the members that begin all events, or a whole answer.
func AppendHead(dst []byte, chat bool, object string, id, created, model []byte) []byte {
	dst = append(dst, `{"id":`...)
	if rest, ok := bytes.CutPrefix(id, []byte(`"cmpl-`)); ok && chat {
		dst = append(append(dst, `"chatcmpl-`...), rest...)
	} else {
		dst = append(dst, OrNull(id)...)
	}
	dst = append(append(append(dst, `,"object":"`...), object...), '"')
	dst = append(append(dst, `,"created":`...), OrNull(created)...)
	return append(append(dst, `,"model":`...), OrNull(model)...)
}

var null = []byte("null")

// OrNull returns raw, or the JSON null for a member that was absent. The result must not be modified.
func OrNull(raw []byte) []byte {
	if len(raw) == 0 {
		return null
	}
	return raw
}

// appendOpening appends the events that precede a choice's own first event.
func (c *Conversion) appendOpening(dst []byte, ch *Choice) []byte {
	event := func(b []byte) []byte {
		b = append(append(b, "data: "...), c.head...)
		index := ch.index
		if q := c.Splice.sequence(index); q != nil {
			index = int(q.Index)
		}
		return appendInt(append(b, `,"choices":[{"index":`...), index)
	}
	if c.Chat {
		dst = append(event(dst), `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		if ch.prompt != nil {
			dst = append(dst, `,"prompt_token_ids":`...)
			dst = c.promptIDs(dst, ch.prompt)
		}
		dst = append(dst, "}\n\n"...)
	}
	f := c.First
	if f == nil || c.Chat && len(f.Text) == 0 && !f.IDs && !IsObject(f.Logprobs) {
		return dst
	}
	dst = event(dst)
	first := Choice{index: ch.index, Text: f.Text, logprobs: f.Logprobs}
	if !IsObject(f.Logprobs) {
		first.logprobs = nil
	}
	var scratch [16]byte
	if f.IDs {
		first.ids = append(appendInt(append(scratch[:0], '['), int(f.ID)), ']')
	}
	if !c.Chat && first.logprobs != nil {
		c.origin = max(nextTextOffset(first.logprobs), 0)
	}
	dst = c.appendChoice(dst, &first, 0)
	if !c.Chat {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = c.promptIDs(dst, ch.prompt)
	}
	return append(dst, "}]}\n\n"...)
}

// promptIDs appends the prompt's ids without the first token, which was the end of the decode
// engine's prompt.
func (c *Conversion) promptIDs(dst, ids []byte) []byte {
	if ids == nil {
		return append(dst, "null"...)
	}
	if c.First == nil {
		return append(dst, ids...)
	}
	if i := bytes.LastIndexByte(ids, ','); i > 0 {
		return append(append(dst, ids[:i]...), ']')
	}
	return append(dst, "[]"...)
}

// choices appends the choices at w in the client's format. It returns how many were read and how
// many of them were written.
func (c *Conversion) choices(dst []byte, w *jsonscan.Cursor) (_ []byte, seen, sent int) {
	if !w.Enter('[') {
		return dst, 0, 0
	}
	for w.Element() {
		var ch Choice
		ch.Read(w, nil)
		ch.hideIDs(c.Splice)
		origin := c.origin
		if seen++; seen > 1 {
			c.choice = nil
		}
		if q := c.Splice.sequence(ch.index); q != nil {
			if seen == 1 {
				c.choice = q
			}
			ch.index, origin = int(q.Index), origin+int(q.EngineOrigin)
			if !q.Finished {
				ch.Finish, ch.Stop = nil, nil // the choice continues in the next round
			}
		} else if c.Splice != nil && c.Splice.TotalTokens != nil {
			continue // not requested; its index belongs to another choice
		}
		if c.Chat && !ch.hasContent() {
			continue
		}
		if sent++; sent > 1 {
			dst = append(dst, ',')
		}
		dst = appendInt(append(dst, `{"index":`...), ch.index)
		dst = c.appendChoice(dst, &ch, origin)
		if !c.Chat {
			dst = append(dst, `,"prompt_token_ids":`...)
			if c.First != nil {
				dst = append(dst, "null"...) // they are in the event of the first token
			} else {
				dst = append(dst, OrNull(ch.prompt)...)
			}
		}
		dst = append(dst, '}')
	}
	return dst, seen, sent
}

// appendChoice appends a choice's members after its index. text_offset counts from origin.
func (c *Conversion) appendChoice(dst []byte, ch *Choice, origin int) []byte {
	if c.Chat {
		if len(ch.Text) == 0 && ch.Finish != nil {
			dst = append(dst, `,"delta":{`...)
		} else {
			dst = append(append(append(dst, `,"delta":{"content":"`...), ch.Text...), '"')
		}
		dst = append(dst, `},"logprobs":`...)
		dst = c.logprobs(dst, ch.logprobs)
	} else {
		dst = append(append(append(dst, `,"text":"`...), ch.Text...), '"')
		dst = appendShiftedOffsets(append(dst, `,"logprobs":`...), ch.logprobs, origin)
	}
	dst = append(append(dst, `,"finish_reason":`...), OrNull(ch.Finish)...)
	if ch.Finish != nil || !c.Chat {
		dst = append(append(dst, `,"stop_reason":`...), OrNull(ch.Stop)...)
	}
	return append(append(dst, `,"token_ids":`...), OrNull(ch.ids)...)
}

// IsObject reports whether a JSON value is an object. It looks at the first byte only: raw must be one
// valid value without leading spaces.
func IsObject(raw []byte) bool { return len(raw) > 0 && raw[0] == '{' }
