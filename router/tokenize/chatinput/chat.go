package chatinput

import (
	"bytes"
	"slices"

	"sluice/dataplane/jsonscan"
)

// templateParams are parameters of transformers' apply_chat_template, which chat_template_kwargs
// would set instead of a variable of the template.
var templateParams = []string{"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages", "padding",
	"return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"}

// knownParams are those of them that a request's own members replace, or that readParams reads.
var knownParams = []string{"add_generation_prompt", "chat_template", "continue_final_message", "documents", "tokenize", "tools"}

// efforts are the values of reasoning_effort.
var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// options are what a request says about its rendering besides the messages.
type options struct {
	generate, continueFinal bool
	effort                  []byte // JSON string, or nil
	kwargs                  []byte // JSON object of the request, or nil
	documents               []byte // JSON array, or nil
	tools                   []byte // JSON array in chat_template_kwargs that replaces the request's tools, or nil
}

func (in *Input) readChat(body []byte, s *Settings) {
	var o object
	o.find(body, "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
		"add_special_tokens", "documents", "reasoning_effort", "truncate_prompt_tokens", "truncation_side", "max_tokens", "max_completion_tokens", "prompt_token_ids")
	var opt options
	opt.generate = in.option(&o, 5, true)
	opt.continueFinal = in.option(&o, 6, false)
	in.AddSpecial = in.option(&o, 7, false)
	output := 13
	if !o.has(output) {
		output = 12
	}
	in.readTruncation(&o, 10, 11, !o.isZero(output))
	switch {
	case o.kind(0) != jsonscan.Array:
		in.refuse("messages is not a list")
	case o.has(3):
		in.refuseTemplate(s)
	case o.has(14):
		in.fail("prompt_token_ids is not modelled")
	case o.has(8):
		in.checkDocuments(o.get(8))
	}
	if in.reason != "" {
		return
	}
	if o.has(8) {
		opt.documents = o.get(8)
	}
	if o.has(9) {
		opt.effort = o.get(9)
	}
	if o.has(4) {
		opt.kwargs = o.get(4)
	}
	in.readParams(&opt, s)
	tools := opt.tools == nil && o.has(1) && !(s.NoToolsIfNone && o.isString(2, "none"))
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(o.get(0), s.template(tools || opt.tools != nil), true)
	if tools {
		in.writeTools(o.get(1))
	}
	in.writeOptions(&opt, s)
}

// checkDocuments refuses what is not a list of objects of strings.
func (in *Input) checkDocuments(raw []byte) {
	if !isList(raw, jsonscan.Object) {
		in.refuse("documents is not a list of objects")
		return
	}
	var vals [1]jsonscan.Value
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; {
		for m := jsonscan.Walk(it.Raw()); m.Next() && in.reason == ""; {
			if m.Value.Kind == jsonscan.String {
				continue
			}
			if jsonscan.Members(it.Raw(), vals[:], string(m.Key(nil))); vals[0].Kind == jsonscan.String {
				in.fail("a document has a member twice") // of which the server reads the last
			} else {
				in.refuse("a document has a member that is not a string")
			}
		}
	}
}

// isList reports whether raw is a list all of whose elements are of a kind.
func isList(raw []byte, kind jsonscan.Kind) bool {
	if raw[0] != '[' {
		return false
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind != kind {
			return false
		}
	}
	return true
}

// readParams reads the members of chat_template_kwargs that are not variables of the template.
func (in *Input) readParams(opt *options, s *Settings) {
	if opt.kwargs == nil || opt.kwargs[0] != '{' {
		return
	}
	var o object
	o.find(opt.kwargs, "tools", "documents", "tokenize", "chat_template")
	if o.has(0) && !o.isString(0, "auto") {
		if opt.tools = o.get(0); !isList(opt.tools, jsonscan.Object) {
			in.fail("chat_template_kwargs has tools of an unexpected type")
		}
	}
	if opt.documents == nil && o.has(1) && !o.isString(1, "auto") {
		if opt.documents = o.get(1); !isList(opt.documents, jsonscan.Object) {
			in.fail("chat_template_kwargs has documents of an unexpected type")
		}
	}
	switch {
	case o.has(3):
		in.refuseTemplate(s)
	case !o.has(2), o.isString(2, "auto"), o.kind(2) == jsonscan.Bool && o.get(2)[0] == 'f':
	case o.kind(2) == jsonscan.Bool:
		in.AddSpecial = false // transformers tokenizes, and adds no special tokens
	default:
		in.fail("chat_template_kwargs has a tokenize that is not a boolean")
	}
}

// message has the positions of a message's members in names.
type message struct{ object }

const (
	mRole = iota
	mContent
	mName
	mToolCalls
	mToolCallID
	mReasoning
	mReasoningContent
	mTools
	mTask
	mOther // from here on: members that are not modelled
)

var messageNames = []string{"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "tools", "task", "channel", "recipient", "author", "content_type", "audio"}

// roles are those for which the server has a type of its own.
var roles = []string{"system", "developer", "user", "assistant", "tool", "function"}

// writeMessages appends the conversation. validated says that the server's request types have put
// the members of tool calls into their order.
func (in *Input) writeMessages(raw []byte, t Template, validated bool) {
	from, before, refused := len(in.Chat), in.reason, in.Refused
	in.writeList(raw, t, validated)
	// writeList refuses the role "developer", which is rare, so that only then it is searched for.
	if in.reason != "" && !t.Developer && hasDeveloper(raw) {
		in.Chat, in.reason, in.Refused = in.Chat[:from], before, refused
		in.writeConverted(raw, t, validated)
	}
	if bytes.HasSuffix(in.Chat[from:], []byte("[]")) && len(in.Chat) == from+2 {
		in.refuse("there are no messages")
	}
}

func (in *Input) writeList(raw []byte, t Template, validated bool) {
	in.Chat = append(in.Chat, '[')
	first := true
	var m message
	for it := jsonscan.Walk(raw); in.reason == "" && m.findNext(&it, raw, messageNames...); {
		if it.Value.Kind != jsonscan.Object {
			in.refuse("a message is not an object")
			return
		}
		if !first {
			in.Chat = append(in.Chat, ',')
		}
		first = false
		in.writeMessage(&m, t, validated, false)
	}
	in.Chat = append(in.Chat, ']')
}

func hasDeveloper(messages []byte) bool {
	if !bytes.Contains(messages, []byte("developer")) {
		return false
	}
	var o object
	for it := jsonscan.Walk(messages); it.Next(); {
		if o.find(it.Raw(), "role"); o.isString(0, "developer") {
			return true
		}
	}
	return false
}

// writeConverted is writeList for templates without the role "developer": such messages become system
// messages, and if then one is not the first message, all become one. The server does that after it
// has read the contents, so that the one has a string where other messages may have parts.
func (in *Input) writeConverted(messages []byte, t Template, validated bool) {
	var m message
	var text []byte
	merge, n := false, 0
	for it := jsonscan.Walk(messages); in.reason == "" && m.findNext(&it, messages, messageNames...); n++ {
		if !m.isString(mRole, "system") && !m.isString(mRole, "developer") {
			continue
		}
		merge = merge || n > 0
		before := len(text)
		if before > 0 {
			text = append(text, "\n\n"...)
		}
		from := len(text)
		if text = in.appendText(text, &m, t); len(text) == from {
			text = text[:before]
		}
	}
	in.Chat = append(in.Chat, '[')
	if merge {
		in.Chat = append(in.Chat, `{"role":"system","content":`...)
		in.Chat = append(jsonscan.AppendQuoted(in.Chat, text), '}')
	}
	for it := jsonscan.Walk(messages); in.reason == "" && m.findNext(&it, messages, messageNames...); {
		if it.Value.Kind != jsonscan.Object {
			in.refuse("a message is not an object")
			return
		}
		if merge && (m.isString(mRole, "system") || m.isString(mRole, "developer")) {
			continue
		}
		in.Chat = appendComma(in.Chat)
		in.writeMessage(&m, t, validated, true)
	}
	in.Chat = append(in.Chat, ']')
}

// appendText appends the text of a system or developer message.
func (in *Input) appendText(dst []byte, m *message, t Template) []byte {
	if m.kind(mContent) == jsonscan.String {
		p := part{text: m.get(mContent), named: true}
		if in.dropHeader(&p, string(jsonscan.Text(m.get(mRole)))) {
			dst = append(dst, jsonscan.Text(p.text)...)
		}
		return dst
	}
	in.checkContent(m, "system")
	n := 0
	for it := jsonscan.Walk(m.content()); it.Next() && in.reason == ""; {
		p := in.readPart(it.Raw(), it.Value.Kind)
		switch {
		case p.text == nil, p.reference && t.Parts, !in.dropHeader(&p, string(jsonscan.Text(m.get(mRole)))):
			continue
		case len(p.text) == 2 && !t.Parts:
			continue
		}
		if n++; n > 1 {
			dst = append(dst, '\n')
		}
		dst = append(dst, jsonscan.Text(p.text)...)
	}
	return dst
}

// content returns a message's content if it is a list, else nil.
func (m *message) content() []byte {
	if m.kind(mContent) != jsonscan.Array {
		return nil
	}
	return m.get(mContent)
}

// checkContent refuses a content that is neither text nor a list.
func (in *Input) checkContent(m *message, role string) {
	switch kind := m.kind(mContent); {
	case kind == jsonscan.Absent, kind == jsonscan.String, kind == jsonscan.Array:
	case kind == jsonscan.Null && (role == "assistant" || role == "function" && m.has(mName)):
	case kind == jsonscan.Object && slices.Contains(roles, role) && members(m.get(mContent)) == 0: // an iterable without elements
	default:
		in.refuse("a message's content is neither text nor a list")
	}
}

// writeMessage appends a message. converted says that the role "developer" becomes "system".
func (in *Input) writeMessage(m *message, t Template, validated, converted bool) {
	for i := mOther; i < len(messageNames); i++ {
		if m.has(i) {
			in.fail("a message has the member " + messageNames[i])
			return
		}
	}
	if m.kind(mRole) != jsonscan.String {
		in.refuse("a message has no role")
		return
	}
	role, printed := string(jsonscan.Text(m.get(mRole))), m.get(mRole)
	if role == "developer" && !t.Developer {
		if !converted {
			in.fail("a developer message was not converted") // see writeMessages
			return
		}
		printed = []byte(`"system"`)
	}
	in.Chat = append(append(in.Chat, `{"role":`...), printed...)
	in.Chat = append(in.Chat, `,"content":`...)
	in.writeContent(m, role, t)
	switch role {
	case "assistant":
		in.writeAssistant(m, validated)
	case "tool":
		switch m.kind(mToolCallID) {
		case jsonscan.Absent, jsonscan.String:
			in.writeStringMember(m, mToolCallID)
		case jsonscan.Null:
			in.Chat = append(in.Chat, `,"tool_call_id":null`...)
		default:
			in.refuse("a tool_call_id is not a string")
		}
	}
	in.writeStringMember(m, mName)
	in.writeStringMember(m, mTask)
	if role == "developer" && t.Developer {
		if m.has(mTools) {
			in.fail("a developer message has tools")
		}
		in.Chat = append(in.Chat, `,"tools":null`...)
	}
	in.Chat = append(in.Chat, '}')
}

// writeStringMember appends a member if it is a string; the server drops others.
func (in *Input) writeStringMember(m *message, i int) {
	if m.kind(i) == jsonscan.String {
		in.Chat = append(append(in.Chat, `,"`+messageNames[i]+`":`...), m.get(i)...)
	}
}

// writeAssistant appends the members of an assistant's message besides its content.
func (in *Input) writeAssistant(m *message, validated bool) {
	switch m.kind(mToolCalls) {
	case jsonscan.Absent, jsonscan.Null:
	case jsonscan.Array:
		in.writeToolCalls(m.get(mToolCalls), validated)
	default:
		in.refuse("tool_calls is not a list")
	}
	reasoning := mReasoning
	if !m.has(mReasoning) && validated {
		reasoning = mReasoningContent
	}
	switch {
	case !m.has(reasoning):
	case m.kind(reasoning) != jsonscan.String:
		in.fail("an assistant's reasoning is not a string")
	default:
		in.Chat = append(append(in.Chat, `,"reasoning":`...), m.get(reasoning)...)
		in.Chat = append(append(in.Chat, `,"reasoning_content":`...), m.get(reasoning)...)
	}
}

// writeOptions appends what follows messages and tools, and closes the object.
func (in *Input) writeOptions(opt *options, s *Settings) {
	if opt.generate && opt.continueFinal {
		in.refuse("add_generation_prompt and continue_final_message exclude each other")
	}
	if opt.tools != nil {
		in.Chat = append(append(in.Chat, `,"tools":`...), opt.tools...)
	}
	if opt.documents != nil {
		in.Chat = append(append(in.Chat, `,"documents":`...), opt.documents...)
	}
	in.Chat = append(in.Chat, `,"add_generation_prompt":`...)
	in.writeBool(opt.generate)
	in.Chat = append(in.Chat, `,"continue_final_message":`...)
	in.writeBool(opt.continueFinal)
	in.Chat = append(in.Chat, `,"chat_template_kwargs":{`...)
	in.writeKwargs(opt, s)
	in.Chat = append(in.Chat, `}}`...)
}

func (in *Input) writeBool(b bool) {
	if b {
		in.Chat = append(in.Chat, "true"...)
	} else {
		in.Chat = append(in.Chat, "false"...)
	}
}

// writeKwargs appends the variables: what the request's own members say, before its
// chat_template_kwargs, before the server's defaults. A null or "auto" of the request sets nothing.
func (in *Input) writeKwargs(opt *options, s *Settings) {
	if opt.kwargs != nil && opt.kwargs[0] != '{' {
		in.refuse("chat_template_kwargs is not an object")
		return
	}
	effort := ""
	if opt.effort != nil {
		if opt.effort[0] == '"' {
			effort = string(jsonscan.Text(opt.effort))
		}
		if !slices.Contains(efforts, effort) {
			in.refuse("reasoning_effort has an unknown value")
			return
		}
	}
	n := 0
	write := func(member []byte) {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		in.Chat = append(in.Chat, member...)
		n++
	}
	var vals [1]jsonscan.Value
	has := func(object []byte, name string) bool {
		if object == nil {
			return false
		}
		jsonscan.Members(object, vals[:], name)
		return vals[0].Kind != jsonscan.Absent
	}
	var name []byte
	unset := unsetMembers(opt.kwargs)
	for it := jsonscan.Walk(opt.kwargs); it.Next(); {
		name = it.Key(name[:0])
		if slices.Contains(knownParams, string(name)) {
			continue
		}
		if slices.Contains(templateParams, string(name)) {
			in.fail("chat_template_kwargs has the member " + string(name))
			return
		}
		if !unset[string(name)] && !(effort != "" && string(name) == "reasoning_effort") {
			write(opt.kwargs[it.Value.KeyStart:it.Value.End])
		}
	}
	ownThinking := has(opt.kwargs, "enable_thinking")
	if effort != "" {
		write([]byte(`"reasoning_effort":"` + effort + `"`))
		if !ownThinking {
			write([]byte(`"enable_thinking":`))
			in.writeBool(effort != "none")
		}
	}
	for it := jsonscan.Walk(s.Defaults); it.Next(); {
		name = it.Key(name[:0])
		set := effort != "" && (string(name) == "reasoning_effort" || string(name) == "enable_thinking" && !ownThinking)
		if !set && (unset[string(name)] || !has(opt.kwargs, string(name))) {
			write(s.Defaults[it.Value.KeyStart:it.Value.End])
		}
	}
}

// unsetMembers returns the members of an object that are null or "auto"; of one that is there several times
// the last value counts. It is nil if there are none.
func unsetMembers(object []byte) (unset map[string]bool) {
	var name []byte
	for it := jsonscan.Walk(object); it.Next(); {
		is := it.Value.Kind == jsonscan.Null || it.Value.Kind == jsonscan.String && string(jsonscan.Text(it.Raw())) == "auto"
		if !is && unset == nil {
			continue
		}
		if name = it.Key(name[:0]); !is {
			delete(unset, string(name))
			continue
		}
		if unset == nil {
			unset = map[string]bool{}
		}
		unset[string(name)] = true
	}
	return unset
}
