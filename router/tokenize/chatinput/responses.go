package chatinput

import "sluice/dataplane/jsonscan"

// readResponses converts a /v1/responses request.
func (in *Input) readResponses(body []byte, s *Settings) {
	var o, r object
	o.find(body, "input", "instructions", "tools", "tool_choice", "previous_response_id", "prompt", "truncation", "reasoning", "chat_template_kwargs", "max_output_tokens")
	switch {
	case o.has(4):
		in.fail("the request continues an earlier response")
	case o.has(5):
		in.refuse("the request has a prompt template")
	case o.has(1) && o.kind(1) != jsonscan.String:
		in.refuse("instructions is not a string")
	}
	switch {
	case o.kind(6) == jsonscan.Absent, o.isString(6, "disabled"):
	case o.kind(6) == jsonscan.Null, o.isString(6, "auto"):
		in.Truncation = Truncation{Keep: KeepContext, Output: !o.isZero(9)}
	default:
		in.refuse("truncation has an unknown value")
	}
	in.AddSpecial = true // unlike a chat request
	b := append(in.body[:0], '[')
	if o.has(1) && len(o.get(1)) > 2 {
		b = append(append(append(b, `{"role":"system","content":`...), o.get(1)...), '}')
	}
	opt := options{generate: true}
	switch o.kind(0) {
	case jsonscan.String:
		b = appendComma(b)
		b = append(append(append(b, `{"role":"user","content":`...), o.get(0)...), '}')
	case jsonscan.Array:
		b = in.responseItems(b, o.get(0), &opt)
	default:
		in.refuse("input is neither text nor a list")
	}
	b = append(b, ']')
	in.body = b
	switch {
	case !o.has(7):
	case o.kind(7) != jsonscan.Object:
		in.refuse("reasoning is not an object")
	default:
		if r.find(o.get(7), "effort"); r.has(0) {
			opt.effort = r.get(0)
		}
	}
	if o.has(8) {
		opt.kwargs = o.get(8)
	}
	in.readParams(&opt, s)
	if in.reason != "" {
		return
	}
	tools := opt.tools == nil && o.has(2) && !(o.kind(2) == jsonscan.Array && isEmpty(o.get(2))) && !(s.NoToolsIfNone && o.isString(3, "none"))
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(b, s.template(tools || opt.tools != nil), false)
	if tools {
		in.writeResponseTools(o.get(2))
	}
	in.writeOptions(&opt, s)
}

// assistant is the message that items of an assistant are joined in.
type assistant struct {
	open                      bool
	content, reasoning, calls []byte
}

// flush appends the message.
func (a *assistant) flush(b []byte) []byte {
	if !a.open {
		return b
	}
	b = append(appendComma(b), `{"role":"assistant"`...)
	if a.content != nil {
		b = append(append(b, `,"content":`...), a.content...)
	}
	if a.reasoning != nil {
		b = append(append(b, `,"reasoning":`...), a.reasoning...)
	}
	if a.calls != nil {
		b = append(append(append(b, `,"tool_calls":[`...), a.calls...), ']')
	}
	*a = assistant{}
	return append(b, '}')
}

var itemNames = []string{"type", "role", "content", "status", "call_id", "name", "arguments", "output", "summary", "encrypted_content", "namespace", "input", "id", "task", "tools"}

func (in *Input) responseItems(b, items []byte, opt *options) []byte {
	var a assistant
	var o object
	for it := jsonscan.Walk(items); it.Next() && in.reason == ""; {
		if it.Value.Kind != jsonscan.Object {
			in.refuse("an input item is not an object")
			return b
		}
		o.find(it.Raw(), itemNames...)
		message := o.kind(0) == jsonscan.Absent || o.isString(0, "message")
		opt.continueFinal = (message || o.isString(0, "reasoning")) && (o.isString(3, "in_progress") || o.isString(3, "incomplete"))
		opt.generate = !opt.continueFinal
		switch {
		case message && o.isString(1, "assistant"):
			b = in.assistantItem(b, &a, &o)
		case message && (o.isString(1, "user") || o.isString(1, "system") || o.isString(1, "developer")):
			b = in.messageItem(a.flush(b), &o)
		case o.isString(0, "function_call"):
			in.callItem(&a, &o)
		case o.isString(0, "custom_tool_call"):
			in.customCallItem(&a, &o)
		case o.isString(0, "function_call_output"), o.isString(0, "custom_tool_call_output"):
			b = in.outputItem(a.flush(b), &o)
		case o.isString(0, "reasoning"):
			b = in.reasoningItem(b, &a, &o)
		default:
			in.refuse("an input item is none of a chat")
		}
		if in.Refused && o.kind(12) == jsonscan.String && o.kind(0) <= jsonscan.Null {
			// The server takes it for a reference to an item, whose other members it does not check.
			in.Refused = false
		}
	}
	return a.flush(b)
}

// messageItem appends a message that is not an assistant's, with the members besides its content that
// the server reads of such a message.
func (in *Input) messageItem(b []byte, o *object) []byte {
	b = append(append(appendComma(b), `{"role":`...), o.get(1)...)
	b = in.appendTexts(append(b, `,"content":`...), o, 2)
	for _, i := range [...]int{5, 13, 14} {
		if o.has(i) {
			b = append(append(b, `,"`+itemNames[i]+`":`...), o.get(i)...)
		}
	}
	return append(b, '}')
}

// outputItem appends a tool's result.
func (in *Input) outputItem(b []byte, o *object) []byte {
	b = in.appendTexts(append(appendComma(b), `{"role":"tool","content":`...), o, 7)
	switch o.kind(4) {
	case jsonscan.String:
		b = append(append(b, `,"tool_call_id":`...), o.get(4)...)
	case jsonscan.Absent, jsonscan.Null:
		b = append(b, `,"tool_call_id":null`...)
	default:
		in.refuse("a call_id is not a string")
	}
	return append(b, '}')
}

// appendTexts appends a member that is text, or a list of texts and media.
func (in *Input) appendTexts(b []byte, o *object, i int) []byte {
	switch o.kind(i) {
	case jsonscan.String:
		return append(b, o.get(i)...)
	case jsonscan.Array:
		b = append(b, '[')
		var part object
		for it := jsonscan.Walk(o.get(i)); it.Next(); {
			switch part.find(it.Raw(), "type", "text"); {
			case part.isString(0, "input_text") && part.kind(1) == jsonscan.String && members(it.Raw()) == 2:
			case part.isString(0, "input_text"):
				in.fail("a text of an input item has members that are not modelled")
				return b
			case part.isString(0, "input_image"), part.isString(0, "input_file"), part.isString(0, "input_audio"):
				in.fail("an input item contains media")
				return b
			default:
				in.refuse("an input item has a part of an unknown type")
				return b
			}
			// The type stays: the server keeps billing headers in texts of this one.
			b = append(append(append(appendComma(b), `{"type":"input_text","text":`...), part.get(1)...), '}')
		}
		return append(b, ']')
	}
	in.refuse("an input item's content is neither text nor a list")
	return b
}

// assistantItem joins an assistant's text, of which the server takes the first part, with the
// reasoning or tool calls before it.
func (in *Input) assistantItem(b []byte, a *assistant, o *object) []byte {
	text := o.get(2)
	switch o.kind(2) {
	case jsonscan.String:
		if len(text) == 2 && o.has(3) && o.has(12) && o.isString(0, "message") {
			// The server takes it for a list, which it does not join with other items.
			b = a.flush(b)
			a.open, a.content = true, []byte("[]")
			return b
		}
	case jsonscan.Array:
		var part object
		it := jsonscan.Walk(text)
		if !it.Next() {
			in.fail("an assistant's message has no parts")
			return b
		}
		part.find(it.Raw(), "type", "text")
		if !part.isString(0, "output_text") || part.kind(1) != jsonscan.String || !o.isString(0, "message") {
			in.fail("an assistant's message has a part that is not modelled")
			return b
		}
		text = part.get(1)
		for it.Next() {
			if part.find(it.Raw(), "type", "text"); !part.isString(0, "output_text") || part.kind(1) != jsonscan.String {
				in.fail("an assistant's message has a part that is not modelled")
			}
		}
	default:
		in.refuse("an assistant's content is neither text nor a list")
		return b
	}
	if a.content != nil {
		b = a.flush(b)
	}
	a.open, a.content = true, text
	return b
}

func (in *Input) callItem(a *assistant, o *object) {
	if o.kind(4) != jsonscan.String || o.kind(5) != jsonscan.String || o.kind(6) != jsonscan.String || o.has(10) && o.kind(10) != jsonscan.String {
		in.refuse("a function call has members of other types than expected")
		return
	}
	name := o.get(5)
	if o.has(10) && len(o.get(10)) > 2 {
		name = namespaced(o.get(10), name)
	}
	a.addCall(o.get(4), name, o.get(6))
}

// customCallItem converts the call of a tool that takes a text.
func (in *Input) customCallItem(a *assistant, o *object) {
	if o.kind(4) != jsonscan.String || o.kind(5) != jsonscan.String || o.kind(11) != jsonscan.String {
		in.refuse("a custom tool's call has members of other types than expected")
		return
	}
	arguments := append(append([]byte(`{"input":`), o.get(11)...), '}')
	a.addCall(o.get(4), o.get(5), jsonscan.AppendQuoted(nil, arguments))
}

// namespaced returns the name, a JSON string, that the model is shown of a namespace's function.
func namespaced(namespace, name []byte) []byte {
	return append(append(append([]byte(nil), namespace[:len(namespace)-1]...), "__"...), name[1:]...)
}

// addCall adds a tool call to the message. All are JSON strings.
func (a *assistant) addCall(id, name, arguments []byte) {
	a.open = true
	if a.calls != nil {
		a.calls = append(a.calls, ',')
	}
	a.calls = append(append(a.calls, `{"id":`...), id...)
	a.calls = append(append(a.calls, `,"function":{"name":`...), name...)
	a.calls = append(append(append(a.calls, `,"arguments":`...), arguments...), `},"type":"function"}`...)
}

// reasoningItem joins reasoning with the assistant's message before it, if that has none.
func (in *Input) reasoningItem(b []byte, a *assistant, o *object) []byte {
	text := []byte(`""`)
	from := 2
	if o.kind(2) != jsonscan.Array || isEmpty(o.get(2)) {
		from = 8
	}
	switch {
	case o.has(9) && !o.isString(9, ""):
		in.refuse("a reasoning item is encrypted")
		return b
	case o.kind(8) != jsonscan.Array || o.has(2) && o.kind(2) != jsonscan.Array:
		in.fail("a reasoning item is not modelled")
		return b
	}
	it := jsonscan.Walk(o.get(from))
	if it.Next() {
		var part object
		part.find(it.Raw(), "type", "text")
		if part.kind(1) != jsonscan.String || !part.isString(0, "reasoning_text") && !part.isString(0, "summary_text") {
			in.fail("a reasoning item is not modelled")
			return b
		}
		text = part.get(1)
	}
	if a.reasoning != nil {
		b = a.flush(b)
	}
	a.open, a.reasoning = true, text
	return b
}

// writeResponseTools appends the tools that the server shows to the model: functions, those of
// namespaces, and custom tools, which it turns into functions. It drops all others.
func (in *Input) writeResponseTools(raw []byte) {
	if raw[0] != '[' {
		in.refuse("tools is not a list")
		return
	}
	in.Chat = append(in.Chat, `,"tools":[`...)
	var o object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; {
		switch o.find(it.Raw(), "type", "name", "description", "tools"); {
		case o.kind(0) != jsonscan.String:
			in.refuse("a tool has no type")
		case o.isString(0, "function"):
			in.writeResponseFunction(it.Raw(), nil)
		case o.isString(0, "custom"):
			in.writeCustomTool(&o)
		case o.isString(0, "namespace"):
			in.writeNamespace(&o)
		}
	}
	in.Chat = append(in.Chat, ']')
}

// writeResponseFunction appends a function. name, a JSON string, replaces its own unless it is nil.
func (in *Input) writeResponseFunction(f, name []byte) {
	in.Chat = appendComma(in.Chat)
	in.writeFunction(f, "parameters", name, nil)
	in.Chat = append(in.Chat, '}')
}

// customParameters is the schema that the server gives to custom tools, which take a text.
const customParameters = `{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}`

func (in *Input) writeCustomTool(o *object) {
	if o.kind(1) != jsonscan.String || o.has(2) && o.kind(2) != jsonscan.String {
		in.refuse("a custom tool has members of other types than expected")
		return
	}
	in.Chat = append(append(appendComma(in.Chat), `{"type":"function","function":{"name":`...), o.get(1)...)
	in.Chat = append(in.Chat, `,"description":`...)
	in.writeOrNull(o, 2)
	in.Chat = append(in.Chat, `,"parameters":`+customParameters+`}}`...)
}

// writeNamespace appends the functions of a namespace under their full names.
func (in *Input) writeNamespace(o *object) {
	if o.kind(1) != jsonscan.String || o.kind(3) != jsonscan.Array {
		in.refuse("a namespace has members of other types than expected")
		return
	}
	var f object
	for it := jsonscan.Walk(o.get(3)); it.Next() && in.reason == ""; {
		if f.find(it.Raw(), "type", "name"); !f.isString(0, "function") {
			continue
		}
		if f.kind(1) != jsonscan.String {
			in.refuse("a function of a namespace has no name")
			return
		}
		in.writeResponseFunction(it.Raw(), namespaced(o.get(1), f.get(1)))
	}
}
