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
		in.refuse("messages is not a list")
		return
	}
	b := append(in.body[:0], `{"messages":[`...)
	b = in.anthropicSystem(b, &o, s)
	var m object
	for it := jsonscan.Walk(o.get(0)); it.Next() && in.reason == ""; {
		m.find(it.Raw(), "role", "content")
		switch {
		case m.isString(0, "user"):
			b = in.anthropicMessage(b, &m, true)
		case m.isString(0, "assistant"):
			b = in.anthropicMessage(b, &m, false)
		case m.isString(0, "system"):
			if text := in.inlineSystem(&m); len(text) > 0 && !s.MergeSystem {
				b = appendSystem(b, text)
			}
		default:
			in.refuse("messages has a role other than user, assistant and system")
		}
	}
	b = append(b, `]`...)
	if o.has(4) {
		b = append(append(b, `,"chat_template_kwargs":`...), o.get(4)...)
	}
	effort := in.anthropicEffort(&o, s)
	if effort != nil {
		b = append(append(b, `,"reasoning_effort":`...), effort...)
	}
	b = append(b, '}')
	in.body = b
	if in.reason != "" {
		return
	}
	in.readAnthropicChat(b, &o, s)
}

// anthropicEffort returns the reasoning_effort of the chat request as a JSON string, nil if it has
// none.
func (in *Input) anthropicEffort(o *object, s *Settings) (effort []byte) {
	var m object
	switch {
	case !o.has(6):
	case o.kind(6) != jsonscan.Object:
		in.refuse("output_config is not an object")
	default:
		if m.find(o.get(6), "effort"); m.has(0) {
			effort = m.get(0)
		}
	}
	if !o.has(5) {
		return effort
	}
	if o.kind(5) != jsonscan.Object {
		in.refuse("thinking is not an object")
		return effort
	}
	switch m.find(o.get(5), "type"); {
	case m.isString(0, "enabled"), m.isString(0, "adaptive"):
	case !m.isString(0, "disabled"):
		in.refuse("thinking is neither enabled, adaptive nor disabled")
	case s.DisabledEffort == "":
		in.fail("how thinking is disabled is not known")
	default:
		return []byte(`"` + s.DisabledEffort + `"`)
	}
	return effort
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
	in.readParams(&opt, s)
	none := false
	if original.kind(3) == jsonscan.Object {
		choice.find(original.get(3), "type")
		none = choice.isString(0, "none")
	}
	tools := opt.tools == nil && original.has(2) && !(s.NoToolsIfNone && none)
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(o.get(0), s.template(tools || opt.tools != nil), true)
	if tools {
		in.writeAnthropicTools(original.get(2))
	}
	in.writeOptions(&opt, s)
}

// anthropicSystem appends the system message that begins the chat: the request's own, and with
// MergeSystem those between its messages.
func (in *Input) anthropicSystem(b []byte, o *object, s *Settings) []byte {
	var text []byte
	switch {
	case !o.has(1):
	case o.kind(1) == jsonscan.String:
		text = jsonscan.Text(o.get(1))
	case o.kind(1) == jsonscan.Array:
		text = in.systemBlocks(o.get(1))
	default:
		in.refuse("system is neither text nor a list")
	}
	if s.MergeSystem {
		text = bytes.Clone(text) // it may be a part of the body
		var m object
		for it := jsonscan.Walk(o.get(0)); it.Next() && in.reason == ""; {
			if m.find(it.Raw(), "role", "content"); m.isString(0, "system") {
				text = append(text, in.inlineSystem(&m)...)
			}
		}
	}
	if len(text) == 0 {
		return b
	}
	return appendSystem(b, text)
}

func appendSystem(b, text []byte) []byte {
	return append(jsonscan.AppendQuoted(append(appendComma(b), `{"role":"system","content":`...), text), '}')
}

// inlineSystem returns the text of a system message between others.
func (in *Input) inlineSystem(m *object) []byte {
	switch m.kind(1) {
	case jsonscan.String:
		if hasBillingHeader(m.get(1)) {
			return nil
		}
		return jsonscan.Text(m.get(1))
	case jsonscan.Array:
		return in.systemBlocks(m.get(1))
	}
	in.refuse("a system message's content is neither text nor a list")
	return nil
}

// systemBlocks returns the text of a list of blocks. The server ignores those that are not texts.
func (in *Input) systemBlocks(list []byte) (text []byte) {
	var block object
	for it := jsonscan.Walk(list); it.Next(); {
		switch block.find(it.Raw(), "type", "text"); {
		case block.isString(0, "tool_addition"), block.isString(0, "tool_removal"):
			in.fail("a system message changes the tools")
		case block.isString(0, "text") && block.kind(1) == jsonscan.String && !hasBillingHeader(block.get(1)):
			text = append(text, jsonscan.Text(block.get(1))...)
		}
	}
	return text
}

// anthropicBlocks collects what the content of a message becomes.
type anthropicBlocks struct {
	parts, calls, reasoning []byte
	nParts, nCalls          int
	thought                 bool
}

var blockNames = []string{"type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "source"}

func (in *Input) anthropicMessage(b []byte, m *object, user bool) []byte {
	if m.kind(1) == jsonscan.String {
		b = appendComma(b)
		return append(append(append(append(append(b, `{"role":`...), m.get(0)...), `,"content":`...), m.get(1)...), '}')
	}
	if m.kind(1) != jsonscan.Array {
		in.refuse("a message's content is neither text nor a list")
		return b
	}
	var c anthropicBlocks
	var block object
	for it := jsonscan.Walk(m.get(1)); it.Next() && in.reason == ""; {
		block.find(it.Raw(), blockNames...)
		b = in.anthropicBlock(b, &c, &block, user)
	}
	if user && c.nParts == 0 {
		return b
	}
	b = appendComma(b)
	b = append(append(b, `{"role":`...), m.get(0)...)
	if c.thought && !user { // of a user's message the renderer reads neither
		b = jsonscan.AppendQuoted(append(b, `,"reasoning":`...), c.reasoning)
	}
	if c.nCalls > 0 && !user {
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
	case block.isString(0, "text"):
		if block.kind(1) == jsonscan.String && len(block.get(1)) > 2 {
			c.addPart(block.get(1))
		}
	case block.isString(0, "thinking"):
		if block.kind(2) == jsonscan.String {
			c.thought = true
			c.reasoning = append(c.reasoning, jsonscan.Text(block.get(2))...)
		}
	case block.isString(0, "redacted_thinking"), block.isString(0, "tool_reference"):
	case block.isString(0, "image"):
		if block.kind(8) == jsonscan.Object && members(block.get(8)) > 0 {
			in.fail("a message contains media")
		}
	case block.isString(0, "tool_use"):
		in.anthropicCall(c, block)
	case block.isString(0, "tool_result") && user:
		return in.anthropicResult(b, block)
	case block.isString(0, "tool_result"):
		switch {
		case block.kind(7) == jsonscan.String:
			c.addPart(append([]byte(`"Tool result: `), block.get(7)[1:]...))
		case block.kind(7) == jsonscan.Array && !isEmpty(block.get(7)):
			in.fail("an assistant's tool result is a list, which the server prints as Python does")
		default:
			c.addPart([]byte(`"Tool result: "`))
		}
	default:
		in.refuse("a message has a block of an unknown type")
	}
	return b
}

func (in *Input) anthropicCall(c *anthropicBlocks, block *object) {
	arguments, name := []byte("{}"), []byte(`""`)
	switch {
	case block.has(5) && block.kind(5) != jsonscan.Object:
		in.refuse("a tool's input is not an object")
	case block.kind(3) != jsonscan.String || len(block.get(3)) == 2:
		in.fail("a tool call has no id; the server makes one of the time")
	}
	if in.reason != "" {
		return
	}
	if block.has(5) {
		arguments = block.get(5)
	}
	if block.kind(4) == jsonscan.String {
		name = block.get(4)
	}
	if c.nCalls++; c.nCalls > 1 {
		c.calls = append(c.calls, ',')
	}
	c.calls = append(append(c.calls, `{"id":`...), block.get(3)...)
	c.calls = append(append(c.calls, `,"type":"function","function":{"name":`...), name...)
	c.calls = append(jsonscan.AppendQuoted(append(c.calls, `,"arguments":`...), arguments), `}}`...)
}

func (c *anthropicBlocks) addPart(text []byte) {
	if c.nParts++; c.nParts > 1 {
		c.parts = append(c.parts, ',')
	}
	c.parts = append(append(append(c.parts, `{"type":"text","text":`...), text...), '}')
}

// anthropicResult appends a tool's result, and behind it a message with the tools to which it refers.
func (in *Input) anthropicResult(b []byte, block *object) []byte {
	id := []byte(`""`)
	if block.kind(6) == jsonscan.String {
		id = block.get(6)
	}
	b = append(append(appendComma(b), `{"role":"tool","tool_call_id":`...), id...)
	b = append(b, `,"content":"`...)
	var references []byte
	switch block.kind(7) {
	case jsonscan.Absent, jsonscan.Null:
	case jsonscan.String:
		b = append(b, block.get(7)[1:len(block.get(7))-1]...)
	case jsonscan.Array:
		var item object
		n := 0
		for it := jsonscan.Walk(block.get(7)); it.Next(); {
			switch item.find(it.Raw(), "type", "text", "tool_name", "name"); {
			case it.Value.Kind != jsonscan.Object:
				in.refuse("an element of a tool's result is not an object")
			case item.isString(0, "text"):
				if n++; n > 1 {
					b = append(b, `\n`...)
				}
				if item.kind(1) == jsonscan.String {
					b = append(b, item.get(1)[1:len(item.get(1))-1]...)
				} else if item.kind(1) != jsonscan.Absent {
					in.refuse("a text of a tool's result is not a string")
				}
			case item.isString(0, "image"):
				in.fail("a tool's result contains media")
			case item.isString(0, "tool_reference"):
				references = in.appendReference(references, &item)
			}
			if in.reason != "" {
				return b
			}
		}
	default:
		in.refuse("a tool's result is neither text nor a list")
	}
	b = append(b, `"}`...)
	if len(references) > 0 {
		b = append(append(b, `,{"role":"tool","tool_call_id":`...), id...)
		b = append(append(append(b, `,"content":[`...), references...), `]}`...)
	}
	return b
}

func (in *Input) appendReference(b []byte, item *object) []byte {
	for i := 2; i <= 3; i++ {
		if !item.has(i) || item.isString(i, "") {
			continue
		}
		if item.kind(i) != jsonscan.String {
			in.fail("the name of a tool is not a string")
			return b
		}
		if len(b) > 0 {
			b = append(b, ',')
		}
		return append(append(append(b, `{"type":"tool_reference","name":`...), item.get(i)...), '}')
	}
	return b
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
		in.refuse("tools is not a list")
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
			in.refuse("a tool has no input_schema")
			return
		}
		from := len(in.Chat)
		in.writeFunction(it.Raw(), "input_schema", nil, nil)
		in.Chat = append(in.Chat, '}')
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
