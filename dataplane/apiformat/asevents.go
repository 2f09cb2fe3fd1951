package apiformat

import "sluice/dataplane/jsonscan"

// AppendEvents appends a whole chat or completions answer as a stream: the role, the content, the
// end of each choice, the usage if the client asked for it, and [DONE]. It serves a leg that
// answers whole although the client wants a stream. A body that is not such an answer becomes one
// event.
func AppendEvents(dst, body []byte, usage bool) []byte {
	w := jsonscan.Cursor{Data: body}
	if w.Peek() != '{' {
		return appendDone(append(append(append(dst, "data: "...), body...), "\n\n"...))
	}
	var id, created, model, object, choices, use []byte
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "id":
			id = w.Raw()
		case "created":
			created = w.Raw()
		case "model":
			model = w.Raw()
		case "object":
			object = w.Word()
		case "choices":
			choices = w.Raw()
		case "usage":
			use = w.Raw()
		default:
			w.Skip()
		}
	}
	if w.Bad || choices == nil {
		return appendDone(append(append(append(dst, "data: "...), body...), "\n\n"...))
	}
	chat := string(object) == "chat.completion"
	name := "text_completion"
	if chat {
		name = "chat.completion.chunk"
	}
	open := func(dst []byte) []byte {
		return AppendHead(append(dst, "data: "...), false, name, id, created, model)
	}
	w = jsonscan.Cursor{Data: choices}
	w.Enter('[')
	for w.Element() {
		if chat {
			dst = chatEvents(dst, open, w.Raw())
		} else {
			dst = append(append(append(open(dst), `,"choices":[`...), w.Raw()...), "]}\n\n"...)
		}
	}
	if usage && len(use) > 0 {
		dst = append(append(append(open(dst), `,"choices":[],"usage":`...), use...), "}\n\n"...)
	}
	return appendDone(dst)
}

func appendDone(dst []byte) []byte { return append(dst, "data: [DONE]\n\n"...) }

// chatEvents appends the events of one choice of a chat answer.
func chatEvents(dst []byte, open func([]byte) []byte, choice []byte) []byte {
	index, message := jsonscan.MemberOf(choice, "index"), jsonscan.MemberOf(choice, "message")
	event := func(delta func([]byte) []byte, rest string) {
		dst = append(append(open(dst), `,"choices":[{"index":`...), OrNull(index)...)
		dst = delta(append(dst, `,"delta":`...))
		dst = append(dst, rest...)
	}
	const running = `,"finish_reason":null}]}` + "\n\n"
	event(func(b []byte) []byte { return append(b, `{"role":"assistant","content":""}`...) }, `,"logprobs":null`+running)
	wrote := false
	content := func(b []byte) []byte {
		from := len(b)
		w := jsonscan.Cursor{Data: message}
		for ok := len(message) > 0 && w.Enter('{'); ok; {
			var key []byte
			if key, ok = w.Member(); !ok {
				break
			}
			value := w.Raw()
			switch string(key) {
			case "content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call":
				if v := string(value); v != "null" && v != `""` && v != "[]" {
					b = append(AppendKey(b, from, key), value...)
					wrote = true
				}
			}
		}
		if !wrote {
			b = append(b, '{')
		}
		return append(b, '}')
	}
	mark := len(dst)
	event(content, "")
	if wrote {
		dst = append(append(dst, `,"logprobs":`...), OrNull(jsonscan.MemberOf(choice, "logprobs"))...)
		dst = append(dst, running...)
	} else {
		dst = dst[:mark]
	}
	event(func(b []byte) []byte { return append(b, "{}"...) }, `,"logprobs":null,"finish_reason":`)
	dst = append(dst, OrNull(jsonscan.MemberOf(choice, "finish_reason"))...)
	dst = append(append(dst, `,"stop_reason":`...), OrNull(jsonscan.MemberOf(choice, "stop_reason"))...)
	return append(dst, "}]}\n\n"...)
}
