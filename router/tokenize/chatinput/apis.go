package chatinput

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// readMessages converts a /v1/messages request to a chat request, as the server does, and reads
// that.
func (in *Input) readMessages(body []byte, s *Settings) {
	var o object
	o.find(body, "messages", "system", "tools", "tool_choice", "chat_template_kwargs", "thinking", "output_config")
	if o.kind(0) != jsonscan.Array {
		in.fail("messages is not a list")
		return
	}
	b := append(in.body[:0], `{"messages":[`...)
	b = in.anthropicSystem(b, &o)
	var m object
	for it := jsonscan.Walk(o.get(0)); it.Next() && in.reason == ""; {
		m.find(it.Raw(), "role", "content")
		switch {
		case m.isString(0, "user"):
			b = in.anthropicMessage(b, &m, true)
		case m.isString(0, "assistant"):
			b = in.anthropicMessage(b, &m, false)
		default:
			in.fail("messages has a role other than user and assistant")
		}
	}
	b = append(b, `]`...)
	if o.has(4) {
		b = append(append(b, `,"chat_template_kwargs":`...), o.get(4)...)
	}
	if o.has(6) {
		m.find(o.get(6), "effort")
		if m.has(0) {
			b = append(append(b, `,"reasoning_effort":`...), m.get(0)...)
		}
	}
	b = append(b, '}')
	in.body = b
	if o.has(5) {
		// How thinking is turned off depends on what the server found when it tried.
		if m.find(o.get(5), "type"); !m.isString(0, "enabled") && !m.isString(0, "adaptive") {
			in.fail("thinking is neither enabled nor adaptive")
		}
	}
	if in.reason != "" {
		return
	}
	in.readAnthropicChat(b, &o, s)
}

// readAnthropicChat is readChat for a converted request, whose tools are those of the original.
func (in *Input) readAnthropicChat(body []byte, original *object, s *Settings) {
	var o, choice object
	o.find(body, "messages", "chat_template_kwargs", "reasoning_effort")
	opt := options{generate: true}
	if o.has(1) {
		opt.kwargs = o.get(1)
	}
	if o.has(2) {
		opt.effort = o.get(2)
	}
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(o.get(0), s, true)
	none := false
	if original.kind(3) == jsonscan.Object {
		choice.find(original.get(3), "type")
		none = choice.isString(0, "none")
	}
	if original.has(2) && !(s.NoToolsIfNone && none) {
		in.writeAnthropicTools(original.get(2))
	}
	in.writeOptions(&opt, s)
}

func (in *Input) anthropicSystem(b []byte, o *object) []byte {
	var text []byte
	switch {
	case !o.has(1):
		return b
	case o.kind(1) == jsonscan.String:
		text = jsonscan.Text(o.get(1))
	case o.kind(1) == jsonscan.Array:
		var block object
		for it := jsonscan.Walk(o.get(1)); it.Next(); {
			block.find(it.Raw(), "type", "text")
			if !block.isString(0, "text") || block.kind(1) != jsonscan.String {
				in.fail("a system block is not text")
				return b
			}
			if t := jsonscan.Text(block.get(1)); !bytes.HasPrefix(t, []byte(billingHeader)) {
				text = append(text[:len(text):len(text)], t...)
			}
		}
	default:
		in.fail("system is neither text nor a list")
	}
	if len(text) == 0 {
		return b
	}
	return append(jsonscan.AppendQuoted(append(b, `{"role":"system","content":`...), text), '}')
}

// anthropicBlocks collects what the content of a message becomes.
type anthropicBlocks struct {
	parts, calls, reasoning []byte
	nParts, nCalls          int
	thought                 bool
}

var blockNames = []string{"type", "text", "thinking", "id", "name", "input", "tool_use_id", "content"}

func (in *Input) anthropicMessage(b []byte, m *object, user bool) []byte {
	if m.kind(1) == jsonscan.String {
		b = appendComma(b)
		return append(append(append(append(append(b, `{"role":`...), m.get(0)...), `,"content":`...), m.get(1)...), '}')
	}
	if m.kind(1) != jsonscan.Array {
		in.fail("a message's content is neither text nor a list")
		return b
	}
	var c anthropicBlocks
	var block object
	for it := jsonscan.Walk(m.get(1)); it.Next() && in.reason == ""; {
		block.find(it.Raw(), blockNames...)
		b = in.anthropicBlock(b, &c, &block, user)
	}
	if user && c.nParts == 0 {
		if c.thought || c.nCalls > 0 {
			in.fail("a user's message has an assistant's blocks")
		}
		return b
	}
	b = appendComma(b)
	b = append(append(b, `{"role":`...), m.get(0)...)
	if c.thought {
		b = jsonscan.AppendQuoted(append(b, `,"reasoning":`...), c.reasoning)
	}
	if c.nCalls > 0 {
		b = append(append(append(b, `,"tool_calls":[`...), c.calls...), ']')
	}
	switch {
	case c.nParts == 1:
		var part object
		part.find(c.parts, "text")
		b = append(append(b, `,"content":`...), part.get(0)...)
	case c.nParts > 1:
		b = append(append(append(b, `,"content":[`...), c.parts...), ']')
	}
	return append(b, '}')
}

// anthropicBlock converts a block; a tool's result becomes a message before the user's own.
func (in *Input) anthropicBlock(b []byte, c *anthropicBlocks, block *object, user bool) []byte {
	switch {
	case block.isString(0, "text") && block.kind(1) == jsonscan.String:
		if len(block.get(1)) > 2 {
			c.addPart(block.get(1))
		}
	case block.isString(0, "thinking") && block.kind(2) == jsonscan.String:
		c.thought = true
		c.reasoning = append(c.reasoning, jsonscan.Text(block.get(2))...)
	case block.isString(0, "redacted_thinking"):
	case block.isString(0, "tool_use") && !user && block.kind(3) == jsonscan.String && len(block.get(3)) > 2 && block.kind(4) == jsonscan.String:
		arguments := []byte("{}")
		if block.has(5) {
			if arguments = block.get(5); arguments[0] != '{' {
				in.fail("a tool's input is not an object")
			}
		}
		if c.nCalls++; c.nCalls > 1 {
			c.calls = append(c.calls, ',')
		}
		c.calls = append(append(c.calls, `{"id":`...), block.get(3)...)
		c.calls = append(append(c.calls, `,"type":"function","function":{"name":`...), block.get(4)...)
		c.calls = append(jsonscan.AppendQuoted(append(c.calls, `,"arguments":`...), arguments), `}}`...)
	case block.isString(0, "tool_result") && user && block.kind(6) == jsonscan.String:
		return in.anthropicResult(b, block)
	default:
		in.fail("a message contains media, or a block that is not modelled")
	}
	return b
}

func (c *anthropicBlocks) addPart(text []byte) {
	if c.nParts++; c.nParts > 1 {
		c.parts = append(c.parts, ',')
	}
	c.parts = append(append(append(c.parts, `{"type":"text","text":`...), text...), '}')
}

func (in *Input) anthropicResult(b []byte, block *object) []byte {
	b = appendComma(b)
	b = append(append(b, `{"role":"tool","tool_call_id":`...), block.get(6)...)
	b = append(b, `,"content":"`...)
	switch block.kind(7) {
	case jsonscan.Absent, jsonscan.Null:
	case jsonscan.String:
		b = append(b, block.get(7)[1:len(block.get(7))-1]...)
	case jsonscan.Array:
		var item object
		n := 0
		for it := jsonscan.Walk(block.get(7)); it.Next(); n++ {
			item.find(it.Raw(), "type", "text")
			if !item.isString(0, "text") || item.kind(1) != jsonscan.String {
				in.fail("a tool's result contains media, or a block that is not modelled")
				return b
			}
			if n > 0 {
				b = append(b, `\n`...)
			}
			b = append(b, item.get(1)[1:len(item.get(1))-1]...)
		}
	default:
		in.fail("a tool's result is neither text nor a list")
	}
	return append(b, `"}`...)
}

// appendComma appends a comma unless b ends with the beginning of a list.
func appendComma(b []byte) []byte {
	if b[len(b)-1] == '[' {
		return b
	}
	return append(b, ',')
}

func (in *Input) writeAnthropicTools(raw []byte) {
	if raw[0] != '[' {
		in.fail("tools is not a list")
		return
	}
	in.Chat = append(in.Chat, `,"tools":[`...)
	n := 0
	var o, schema object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		o.find(it.Raw(), "input_schema")
		if o.kind(0) != jsonscan.Object {
			in.fail("a tool has no input_schema")
			return
		}
		from := len(in.Chat)
		in.writeFunction(it.Raw(), "input_schema")
		if schema.find(o.get(0), "type"); schema.kind(0) == jsonscan.Absent {
			in.addSchemaType(from, o.get(0))
		}
	}
	in.Chat = append(in.Chat, ']')
}

// addSchemaType adds the type that the server gives to a schema without one, to the tool that
// begins at from.
func (in *Input) addSchemaType(from int, schema []byte) {
	i := bytes.Index(in.Chat[from:], append([]byte(`,"parameters":`), schema...))
	if i < 0 {
		return
	}
	end := from + i + len(`,"parameters":`) + len(schema) - 1 // the closing brace
	member := `,"type":"object"`
	if len(bytes.TrimSpace(schema[1:len(schema)-1])) == 0 {
		member = member[1:]
	}
	tail := append([]byte(member), in.Chat[end:]...)
	in.Chat = append(in.Chat[:end], tail...)
}

// readResponses converts a /v1/responses request.
func (in *Input) readResponses(body []byte, s *Settings) {
	var o, r object
	o.find(body, "input", "instructions", "tools", "tool_choice", "previous_response_id", "prompt", "truncation", "reasoning", "chat_template_kwargs", "previous_input_messages")
	switch {
	case o.has(4) || o.has(9):
		in.fail("the request continues an earlier response")
	case o.has(5):
		in.fail("prompt templates are not modelled")
	case o.has(6) && !o.isString(6, "disabled"):
		in.fail("truncation is not modelled")
	case o.has(1) && o.kind(1) != jsonscan.String:
		in.fail("instructions is not a string")
	}
	in.AddSpecial = true // unlike a chat request
	b := append(in.body[:0], '[')
	if o.has(1) && len(o.get(1)) > 2 {
		b = append(append(append(b, `{"role":"system","content":`...), o.get(1)...), '}')
	}
	opt := options{generate: true, keepsUnset: true}
	switch o.kind(0) {
	case jsonscan.String:
		b = appendComma(b)
		b = append(append(append(b, `{"role":"user","content":`...), o.get(0)...), '}')
	case jsonscan.Array:
		b = in.responseItems(b, o.get(0), &opt)
	default:
		in.fail("input is neither text nor a list")
	}
	b = append(b, ']')
	in.body = b
	if o.has(7) {
		if r.find(o.get(7), "effort"); r.has(0) {
			opt.effort = r.get(0)
		}
	}
	if o.has(8) {
		opt.kwargs = o.get(8)
	}
	if in.reason != "" {
		return
	}
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(b, s, false)
	if o.has(2) && !(s.NoToolsIfNone && o.isString(3, "none")) {
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

var itemNames = []string{"type", "role", "content", "status", "call_id", "name", "arguments", "output", "summary", "encrypted_content", "namespace"}

func (in *Input) responseItems(b, items []byte, opt *options) []byte {
	var a assistant
	var o object
	for it := jsonscan.Walk(items); it.Next() && in.reason == ""; {
		if it.Value.Kind != jsonscan.Object {
			in.fail("an input item is not an object")
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
		case o.isString(0, "function_call_output") && o.kind(4) == jsonscan.String && o.kind(7) == jsonscan.String:
			b = append(appendComma(a.flush(b)), `{"role":"tool","content":`...)
			b = append(append(append(append(b, o.get(7)...), `,"tool_call_id":`...), o.get(4)...), '}')
		case o.isString(0, "reasoning"):
			b = in.reasoningItem(b, &a, &o)
		default:
			in.fail("an input item is not modelled")
		}
	}
	return a.flush(b)
}

// messageItem appends a message that is not an assistant's.
func (in *Input) messageItem(b []byte, o *object) []byte {
	b = append(append(appendComma(b), `{"role":`...), o.get(1)...)
	b = append(b, `,"content":`...)
	switch o.kind(2) {
	case jsonscan.String:
		b = append(b, o.get(2)...)
	case jsonscan.Array:
		b = append(b, '[')
		var part object
		for it := jsonscan.Walk(o.get(2)); it.Next(); {
			part.find(it.Raw(), "type", "text")
			if !part.isString(0, "input_text") || part.kind(1) != jsonscan.String || members(it.Raw()) != 2 {
				in.fail("an input item contains media, or a part that is not modelled")
				return b
			}
			if o.isString(1, "system") && hasBillingHeader(part.get(1)) {
				in.fail("a system message has a billing header, which the server keeps in parts of this API")
			}
			b = append(append(append(appendComma(b), `{"type":"text","text":`...), part.get(1)...), '}')
		}
		b = append(b, ']')
	default:
		in.fail("an input item's content is neither text nor a list")
	}
	return append(b, '}')
}

func members(object []byte) (n int) {
	for it := jsonscan.Walk(object); it.Next(); {
		n++
	}
	return n
}

// assistantItem joins an assistant's text, of which the server takes the first part, with the
// reasoning or tool calls before it.
func (in *Input) assistantItem(b []byte, a *assistant, o *object) []byte {
	text := o.get(2)
	switch o.kind(2) {
	case jsonscan.String:
		if len(text) == 2 {
			in.fail("an assistant's message is empty") // the server's types may take it for a list
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
		in.fail("an assistant's content is neither text nor a list")
		return b
	}
	if a.content != nil {
		b = a.flush(b)
	}
	a.open, a.content = true, text
	return b
}

func (in *Input) callItem(a *assistant, o *object) {
	if o.kind(4) != jsonscan.String || o.kind(5) != jsonscan.String || o.kind(6) != jsonscan.String || o.has(10) {
		in.fail("a function call is not modelled")
		return
	}
	a.open = true
	if a.calls != nil {
		a.calls = append(a.calls, ',')
	}
	a.calls = append(append(a.calls, `{"id":`...), o.get(4)...)
	a.calls = append(append(a.calls, `,"function":{"name":`...), o.get(5)...)
	a.calls = append(append(append(a.calls, `,"arguments":`...), o.get(6)...), `},"type":"function"}`...)
}

// reasoningItem joins reasoning with the assistant's message before it, if that has none.
func (in *Input) reasoningItem(b []byte, a *assistant, o *object) []byte {
	text := []byte(`""`)
	from := 2
	if o.kind(2) != jsonscan.Array || len(bytes.TrimSpace(o.get(2)[1:len(o.get(2))-1])) == 0 {
		from = 8
	}
	if o.has(9) || o.kind(8) != jsonscan.Array || o.has(2) && o.kind(2) != jsonscan.Array {
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

func (in *Input) writeResponseTools(raw []byte) {
	if raw[0] != '[' {
		in.fail("tools is not a list")
		return
	}
	if members(raw) == 0 {
		return
	}
	in.Chat = append(in.Chat, `,"tools":[`...)
	n := 0
	var o object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		if o.find(it.Raw(), "type"); !o.isString(0, "function") {
			in.fail("a tool is not a function")
			return
		}
		in.writeFunction(it.Raw(), "parameters")
	}
	in.Chat = append(in.Chat, ']')
}
