package apiformat

import "sluice/dataplane/jsonscan"

// Body appends a whole completions answer with status 200 in the client's format. Another body is
// appended unchanged.
func (c *Conversion) Body(dst, body []byte) []byte {
	mark := len(dst)
	w := jsonscan.Cursor{Data: body}
	if w.Peek() != '{' {
		return append(dst, body...)
	}
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
		default:
			w.Skip()
		}
	}
	if w.Bad || choices == nil {
		return append(dst, body...)
	}
	object := "text_completion"
	if c.Chat {
		object = "chat.completion"
	}
	dst = AppendHead(dst, c.Chat, object, id, created, model)
	dst = append(dst, `,"choices":[`...)
	var prompt, promptLP []byte
	cw := jsonscan.Cursor{Data: choices}
	cw.Enter('[')
	for n := 0; cw.Element(); n++ {
		if n > 0 {
			dst = append(dst, ',')
		}
		var ch Choice
		dst, ch = c.wholeChoice(dst, &cw)
		if prompt == nil {
			prompt, promptLP = ch.prompt, ch.promptLP
		}
	}
	if cw.Bad {
		return append(dst[:mark], body...)
	}
	dst = append(dst, ']')
	w = jsonscan.Cursor{Data: body}
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "id", "created", "model", "object", "choices":
			w.Skip()
		case "kv_transfer_params", "ec_transfer_params", "disaggregated_params":
			w.Skip()
		case "usage":
			dst = append(dst, `,"usage":`...)
			dst = c.Usage(dst, &w)
		default:
			dst = appendMember(dst, key, w.Raw())
		}
	}
	if c.Chat {
		dst = append(append(dst, `,"prompt_logprobs":`...), OrNull(promptLP)...)
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = c.promptIDs(dst, prompt)
	}
	return append(dst, '}')
}

// wholeChoice appends the choice at w of a whole answer.
func (c *Conversion) wholeChoice(dst []byte, w *jsonscan.Cursor) ([]byte, Choice) {
	start := w.Pos
	var ch Choice
	ch.Read(w, nil)
	var firstText, firstLP []byte
	if f := c.First; f != nil {
		firstText = f.Text
		if IsObject(f.Logprobs) {
			firstLP = f.Logprobs
		}
	}
	dst = appendInt(append(dst, `{"index":`...), ch.index)
	if c.Chat {
		dst = append(dst, `,"message":{"role":"assistant","content":"`...)
		dst = append(append(append(dst, firstText...), ch.Text...), `","refusal":null},"logprobs":`...)
	} else {
		dst = append(dst, `,"text":"`...)
		dst = append(append(append(dst, firstText...), ch.Text...), `","logprobs":`...)
	}
	switch {
	case !c.Chat && firstLP != nil:
		dst = joinLogprobs(dst, firstLP, ch.logprobs)
	case !c.Chat:
		dst = append(dst, OrNull(ch.logprobs)...)
	case firstLP == nil && ch.logprobs == nil:
		dst = append(dst, "null"...)
	default:
		dst = append(dst, `{"content":[`...)
		more := false
		if firstLP != nil {
			dst, more = c.logprobItems(dst, firstLP, false)
		}
		if IsObject(ch.logprobs) {
			dst, _ = c.logprobItems(dst, ch.logprobs, more)
		}
		dst = append(dst, "]}"...)
	}
	dst = append(append(dst, `,"finish_reason":`...), OrNull(ch.Finish)...)
	dst = append(append(dst, `,"stop_reason":`...), OrNull(ch.Stop)...)
	dst = append(dst, `,"token_ids":`...)
	if c.First != nil && ch.ids != nil {
		dst = appendInt(append(dst, '['), int(c.First.ID))
		if len(ch.ids) > len("[]") {
			dst = append(dst, ',')
		}
		dst = append(dst, ch.ids[1:]...)
	} else {
		dst = append(dst, OrNull(ch.ids)...)
	}
	if !c.Chat {
		dst = append(append(dst, `,"prompt_logprobs":`...), OrNull(ch.promptLP)...)
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = c.promptIDs(dst, ch.prompt)
	}
	var rest Choice
	again := jsonscan.Cursor{Data: w.Data, Pos: start}
	rest.Read(&again, func(key, value []byte) { dst = appendMember(dst, key, OrNull(value)) })
	return append(dst, '}'), ch
}

// joinLogprobs appends two completions logprobs objects as one: list by list, with the text of the
// second after that of the first. text_offset is omitted if the engine does not report it.
func joinLogprobs(dst, first, rest []byte) []byte {
	if !IsObject(rest) {
		return append(dst, first...)
	}
	names := []string{"text_offset", "tokens", "token_logprobs", "top_logprobs"}
	if second := nextTextOffset(first); second < 0 {
		names = names[1:]
	} else {
		rest = appendShiftedOffsets(nil, rest, second)
	}
	from := len(dst)
	for _, name := range names {
		a, b := jsonscan.MemberOf(first, name), jsonscan.MemberOf(rest, name)
		dst = AppendKey(dst, from, []byte(name))
		switch {
		case len(a) < 2 || a[0] != '[':
			dst = append(dst, OrNull(b)...)
		case len(b) <= 2 || b[0] != '[':
			dst = append(dst, a...)
		case len(a) == 2:
			dst = append(dst, b...)
		default:
			dst = append(append(append(dst, a[:len(a)-1]...), ','), b[1:]...)
		}
	}
	return append(dst, '}')
}
