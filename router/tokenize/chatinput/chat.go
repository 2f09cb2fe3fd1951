package chatinput

import (
	"bytes"
	"encoding/json"
	"slices"

	"sluice/dataplane/jsonscan"
)

// templateParams are parameters of transformers' apply_chat_template, which chat_template_kwargs
// would set instead of a variable of the template.
var templateParams = []string{"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages", "padding",
	"return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"}

// efforts are the values of reasoning_effort.
var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// options are what a request says about its rendering besides the messages.
type options struct {
	generate, continueFinal bool
	effort                  []byte // JSON string, or nil
	kwargs                  []byte // JSON object of the request, or nil
	documents               []byte // JSON array, or nil
	keepsUnset              bool   // /v1/responses: a null in kwargs can reach the template
}

func (in *Input) readChat(body []byte, s *Settings) {
	var o object
	o.find(body, "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
		"add_special_tokens", "documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_token_ids", "max_length")
	var opt options
	var ok [3]bool
	opt.generate, ok[0] = o.boolean(5, true)
	opt.continueFinal, ok[1] = o.boolean(6, false)
	in.AddSpecial, ok[2] = o.boolean(7, false)
	switch {
	case o.kind(0) != jsonscan.Array:
		in.fail("messages is not a list")
	case ok != [3]bool{true, true, true}:
		in.fail("an option is not a boolean")
	case o.has(3):
		in.fail("the request has a chat template")
	case o.has(10) || o.has(11):
		in.fail("truncate_prompt_tokens and prompt_token_ids are not modelled")
	case o.has(8) && !stringMaps(o.get(8)):
		in.fail("documents is not a list of objects of strings")
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
	in.Chat = append(in.Chat, `{"messages":`...)
	in.writeMessages(o.get(0), s, true)
	if o.has(1) && !(s.NoToolsIfNone && o.isString(2, "none")) {
		in.writeTools(o.get(1))
	}
	in.writeOptions(&opt, s)
}

// stringMaps reports whether raw is a list of objects all of whose values are strings.
func stringMaps(raw []byte) bool {
	if raw[0] != '[' {
		return false
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if it.Value.Kind != jsonscan.Object {
			return false
		}
		for m := jsonscan.Walk(it.Raw()); m.Next(); {
			if m.Value.Kind != jsonscan.String {
				return false
			}
		}
	}
	return true
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

// writeMessages appends the conversation. validated says that the server's request types have put
// the members of tool calls into their order.
func (in *Input) writeMessages(raw []byte, s *Settings, validated bool) {
	from, before := len(in.Chat), in.reason
	in.writeList(raw, s, validated)
	// writeList refuses the role "developer", which is rare, so that only then it is searched for.
	if in.reason != "" && !s.Developer && hasDeveloper(raw) {
		in.Chat, in.reason = in.Chat[:from], before
		in.writeList(in.mergeSystem(raw, s), s, validated)
	}
}

func (in *Input) writeList(raw []byte, s *Settings, validated bool) {
	in.Chat = append(in.Chat, '[')
	first := true
	var m message
	for it := jsonscan.Walk(raw); in.reason == "" && m.findNext(&it, raw, messageNames...); {
		if it.Value.Kind != jsonscan.Object {
			in.fail("a message is not an object")
			return
		}
		if !first {
			in.Chat = append(in.Chat, ',')
		}
		first = false
		in.writeMessage(&m, s, validated)
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

// mergeSystem is for templates without the role "developer": such messages become system messages,
// and if then one is not the first message, all become one.
func (in *Input) mergeSystem(messages []byte, s *Settings) []byte {
	out := []byte(`[`)
	var merged, rest []byte
	n, merge := 0, false
	systems := 0
	var m message
	for it := jsonscan.Walk(messages); it.Next(); n++ {
		m.find(it.Raw(), messageNames...)
		system := m.isString(mRole, "system") || m.isString(mRole, "developer")
		if !system {
			rest = append(append(rest, ','), it.Raw()...)
			continue
		}
		merge = merge || n > 0 || systems > 0
		systems++
		if m.isString(mRole, "developer") && m.has(mTools) {
			in.fail("a developer message has tools")
		}
		text, ok := in.plainText(&m)
		if !ok || m.has(mName) || m.has(mTask) {
			in.fail("a system message is not plain text")
		}
		if len(text) > 0 {
			if merged != nil {
				merged = append(merged, "\n\n"...)
			}
			merged = append(merged, text...)
		}
	}
	if !merge {
		// A single leading message only changes its role.
		m.find(firstElement(messages), messageNames...)
		out = append(out, `{"role":"system"`...)
		if m.kind(mContent) != jsonscan.Absent {
			out = append(append(out, `,"content":`...), m.get(mContent)...)
		}
		return append(append(append(out, '}'), rest...), ']')
	}
	out = append(out, `{"role":"system","content":`...)
	out = jsonscan.AppendQuoted(out, merged)
	// The server merges after it has split contents into parts: the merged one is a string.
	if s.Parts {
		in.fail("system messages are merged into a string where parts are expected")
	}
	return append(append(append(out, '}'), rest...), ']')
}

func firstElement(array []byte) []byte {
	it := jsonscan.Walk(array)
	it.Next()
	return it.Raw()
}

// plainText returns the text of a message whose content is a string or text parts, joined by line
// ends.
func (in *Input) plainText(m *message) ([]byte, bool) {
	switch m.kind(mContent) {
	case jsonscan.Absent:
		return nil, true
	case jsonscan.String:
		if hasBillingHeader(m.get(mContent)) {
			return nil, false
		}
		return jsonscan.Text(m.get(mContent)), true
	case jsonscan.Array:
		var out []byte
		n := 0
		for it := jsonscan.Walk(m.get(mContent)); it.Next(); n++ {
			text, _, ok := partText(it.Raw(), it.Value.Kind, false)
			if !ok || hasBillingHeader(text) {
				return nil, false
			}
			if len(text) == 2 {
				n--
				continue
			}
			if n > 0 {
				out = append(out, '\n')
			}
			out = append(out, jsonscan.Text(text)...)
		}
		return out, true
	}
	return nil, false
}

func (in *Input) writeMessage(m *message, s *Settings, validated bool) {
	for i := mOther; i < len(messageNames); i++ {
		if m.has(i) {
			in.fail("a message has the member " + messageNames[i])
			return
		}
	}
	role := ""
	if m.kind(mRole) == jsonscan.String {
		role = string(jsonscan.Text(m.get(mRole)))
	}
	if !slices.Contains([]string{"system", "developer", "user", "assistant", "tool"}, role) {
		in.fail("a message has an unknown role")
		return
	}
	if role == "developer" && !s.Developer {
		in.fail("a developer message was not merged") // see writeMessages
		return
	}
	in.Chat = append(append(in.Chat, `{"role":`...), m.get(mRole)...)
	in.Chat = append(in.Chat, `,"content":`...)
	in.writeContent(m, role, s)
	switch role {
	case "assistant":
		in.writeAssistant(m, validated)
	case "tool":
		in.writeStringMember(m, mToolCallID)
	}
	in.writeStringMember(m, mName)
	in.writeStringMember(m, mTask)
	if role == "developer" {
		if m.has(mTools) {
			in.fail("a developer message has tools")
		}
		in.Chat = append(in.Chat, `,"tools":null`...)
	}
	in.Chat = append(in.Chat, '}')
}

func (in *Input) writeStringMember(m *message, i int) {
	switch m.kind(i) {
	case jsonscan.Absent:
	case jsonscan.String:
		in.Chat = append(append(in.Chat, `,"`+messageNames[i]+`":`...), m.get(i)...)
	default:
		in.fail("a message's " + messageNames[i] + " is not a string")
	}
}

// writeAssistant appends the members of an assistant's message besides its content.
func (in *Input) writeAssistant(m *message, validated bool) {
	switch m.kind(mToolCalls) {
	case jsonscan.Absent, jsonscan.Null:
	case jsonscan.Array:
		in.writeToolCalls(m.get(mToolCalls), validated)
	default:
		in.fail("tool_calls is not a list")
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

// billingHeader begins a line of Claude Code's system prompts that the server drops.
const billingHeader = "x-anthropic-billing-header"

func hasBillingHeader(quoted []byte) bool {
	return bytes.HasPrefix(jsonscan.Text(quoted), []byte(billingHeader))
}

// writeContent appends a message's content: a string, or with Parts a list. A tool's is always a
// string.
func (in *Input) writeContent(m *message, role string, s *Settings) {
	parts := s.Parts && role != "tool"
	if parts {
		in.Chat = append(in.Chat, '[')
	} else {
		in.Chat = append(in.Chat, '"')
	}
	switch kind := m.kind(mContent); {
	case kind == jsonscan.Absent, kind == jsonscan.Null && role == "assistant":
	case kind == jsonscan.String:
		in.writePart(m.get(mContent), nil, role, s, 0)
	case kind == jsonscan.Array:
		n := 0
		for it := jsonscan.Walk(m.get(mContent)); it.Next() && in.reason == ""; {
			text, extra, ok := partText(it.Raw(), it.Value.Kind, role == "assistant")
			if !ok {
				in.fail("a message contains media, or a part that is not modelled")
				return
			}
			n += in.writePart(text, extra, role, s, n)
		}
	default:
		in.fail("a message's content is neither text nor a list")
		return
	}
	if parts {
		in.Chat = append(in.Chat, ']')
	} else {
		in.Chat = append(in.Chat, '"')
	}
}

// writePart appends a text, a JSON string, behind n others; it returns how many parts it became.
// extra is the part's object if members besides its text are to be kept.
func (in *Input) writePart(text, extra []byte, role string, s *Settings, n int) int {
	parts := s.Parts && role != "tool"
	if role == "system" && hasBillingHeader(text) {
		_, rest, _ := bytes.Cut(jsonscan.Text(text), []byte("\n"))
		if len(rest) == 0 {
			return 0
		}
		in.buf = jsonscan.AppendQuoted(in.buf[:0], rest)
		text = in.buf
	}
	if !parts {
		if len(text) == 2 && !s.Parts {
			return 0 // the server drops empty strings, but not empty parts
		}
		if n > 0 {
			in.Chat = append(in.Chat, `\n`...)
		}
		in.Chat = append(in.Chat, text[1:len(text)-1]...)
		return 1
	}
	if n > 0 {
		in.Chat = append(in.Chat, ',')
	}
	in.Chat = append(append(in.Chat, `{"type":"text","text":`...), text...)
	for it := jsonscan.Walk(extra); it.Next(); {
		if !it.IsKey("type") && !it.IsKey("text") {
			in.Chat = append(in.Chat, ',')
			in.Chat = append(in.Chat, extra[it.Value.KeyStart:it.Value.End]...)
		}
	}
	in.Chat = append(in.Chat, '}')
	return 1
}

// partMembers are the members that the server knows in parts of any type; a text part with one of
// them besides its own is not modelled.
var partMembers = []string{"type", "text", "refusal", "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio", "name",
	"prompt_cache_breakpoint", "thinking", "uuid", "video_embeds", "video_url"}

// partText returns the text of a part as a JSON string. extra is the part itself if it has more
// members.
func partText(part []byte, kind jsonscan.Kind, assistant bool) (text, extra []byte, ok bool) {
	if kind == jsonscan.String {
		return part, nil, true
	}
	if kind != jsonscan.Object {
		return nil, nil, false
	}
	var o object
	o.find(part, partMembers...)
	for i := 3; i < len(partMembers); i++ {
		if o.kind(i) != jsonscan.Absent {
			return nil, nil, false
		}
	}
	at := 1
	switch {
	case o.isString(0, "text") && o.kind(2) == jsonscan.Absent:
	case o.isString(0, "refusal") && assistant && o.kind(1) == jsonscan.Absent:
		at = 2
	default:
		return nil, nil, false
	}
	if o.kind(at) != jsonscan.String {
		return nil, nil, false
	}
	members := 0
	for it := jsonscan.Walk(part); it.Next(); {
		members++
	}
	if members > 2 {
		extra = part
		if at == 2 {
			return nil, nil, false
		}
	}
	return o.get(at), extra, true
}

// writeToolCalls appends the tool calls with their arguments as objects.
func (in *Input) writeToolCalls(raw []byte, validated bool) {
	if len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0 {
		return // the server drops an empty list
	}
	in.Chat = append(in.Chat, `,"tool_calls":[`...)
	n := 0
	var call, f object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		call.find(it.Raw(), "id", "function", "type")
		if it.Value.Kind != jsonscan.Object || call.kind(0) != jsonscan.String || call.kind(1) != jsonscan.Object || !call.isString(2, "function") {
			in.fail("a tool call is not a function's")
			return
		}
		f.find(call.get(1), "arguments", "name")
		if f.kind(0) != jsonscan.String || f.kind(1) != jsonscan.String {
			in.fail("a tool call's name or arguments are not strings")
			return
		}
		if !in.parseArguments(f.get(0)) {
			return
		}
		in.Chat = append(append(in.Chat, `{"id":`...), call.get(0)...)
		in.Chat = append(in.Chat, `,"function":{`...)
		if validated {
			in.Chat = append(append(in.Chat, `"arguments":`...), in.args...)
			in.Chat = append(append(in.Chat, `,"name":`...), f.get(1)...)
		} else {
			in.Chat = append(append(in.Chat, `"name":`...), f.get(1)...)
			in.Chat = append(append(in.Chat, `,"arguments":`...), in.args...)
		}
		in.writeExtra(call.get(1), "arguments", "name", "")
		in.Chat = append(in.Chat, `},"type":"function"`...)
		in.writeExtra(it.Raw(), "id", "function", "type")
		in.Chat = append(in.Chat, '}')
	}
	in.Chat = append(in.Chat, ']')
}

// writeExtra appends the members of an object besides three.
func (in *Input) writeExtra(object []byte, a, b, c string) {
	for it := jsonscan.Walk(object); it.Next(); {
		if !it.IsKey(a) && !it.IsKey(b) && (c == "" || !it.IsKey(c)) {
			in.Chat = append(in.Chat, ',')
			in.Chat = append(in.Chat, object[it.Value.KeyStart:it.Value.End]...)
		}
	}
}

// parseArguments sets in.args to the object in a tool call's arguments, a JSON string. What is not
// an object becomes an empty one, as in the server.
func (in *Input) parseArguments(quoted []byte) bool {
	in.args = bytes.TrimSpace(jsonscan.Unquote(in.args[:0], quoted))
	switch {
	case !json.Valid(in.args):
		// Python's reader accepts more.
		if bytes.Contains(in.args, []byte("NaN")) || bytes.Contains(in.args, []byte("Infinity")) {
			return in.fail("a tool call's arguments have numbers that are not JSON")
		}
		in.args = append(in.args[:0], "{}"...)
	case in.args[0] != '{':
		in.args = append(in.args[:0], "{}"...)
	case loneSurrogate(in.args):
		return in.fail("a tool call's arguments have half of a surrogate pair")
	}
	return true
}

// writeTools appends the tools of a chat request as the server's types print them.
func (in *Input) writeTools(raw []byte) {
	if raw[0] != '[' {
		in.fail("tools is not a list")
		return
	}
	in.Chat = append(in.Chat, `,"tools":[`...)
	n := 0
	var tool object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		tool.find(it.Raw(), "type", "function", "defer_loading")
		if tool.kind(1) != jsonscan.Object || tool.kind(0) != jsonscan.Absent && !tool.isString(0, "function") || tool.has(2) {
			in.fail("a tool is not a function")
			return
		}
		in.writeFunction(tool.get(1), "parameters")
	}
	if n == 0 {
		in.fail("tools is empty")
	}
	in.Chat = append(in.Chat, ']')
}

// writeFunction appends a tool. parameters is the name of the member with its schema.
func (in *Input) writeFunction(f []byte, parameters string) {
	var o object
	o.find(f, "name", "description", parameters, "strict", "defer_loading")
	if o.kind(0) != jsonscan.String || o.has(1) && o.kind(1) != jsonscan.String || o.has(2) && o.kind(2) != jsonscan.Object || o.has(3) && o.kind(3) != jsonscan.Bool || o.has(4) {
		in.fail("a tool's function has members of other types than expected")
		return
	}
	in.Chat = append(append(in.Chat, `{"type":"function","function":{"name":`...), o.get(0)...)
	in.Chat = append(in.Chat, `,"description":`...)
	in.writeOrNull(&o, 1)
	in.Chat = append(in.Chat, `,"parameters":`...)
	in.writeOrNull(&o, 2)
	if o.has(3) {
		in.Chat = append(append(in.Chat, `,"strict":`...), o.get(3)...)
	}
	in.Chat = append(in.Chat, `}}`...)
}

func (in *Input) writeOrNull(o *object, i int) {
	if o.has(i) {
		in.Chat = append(in.Chat, o.get(i)...)
	} else {
		in.Chat = append(in.Chat, "null"...)
	}
}

// writeOptions appends what follows messages and tools, and closes the object.
func (in *Input) writeOptions(opt *options, s *Settings) {
	if opt.generate && opt.continueFinal {
		in.fail("add_generation_prompt and continue_final_message exclude each other")
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
		in.fail("chat_template_kwargs is not an object")
		return
	}
	effort := ""
	if opt.effort != nil {
		if opt.effort[0] == '"' {
			effort = string(jsonscan.Text(opt.effort))
		}
		if !slices.Contains(efforts, effort) {
			in.fail("reasoning_effort has an unknown value")
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
	for it := jsonscan.Walk(opt.kwargs); it.Next(); {
		name = it.Key(name[:0])
		if slices.Contains(templateParams, string(name)) {
			in.fail("chat_template_kwargs has the member " + string(name))
			return
		}
		unset := it.Value.Kind == jsonscan.Null || string(it.Raw()) == `"auto"`
		if unset && opt.keepsUnset {
			in.fail("chat_template_kwargs has a member without a value")
			return
		}
		if !unset && !(effort != "" && string(name) == "reasoning_effort") {
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
		if has(opt.kwargs, string(name)) {
			v := opt.kwargs[vals[0].Start:vals[0].End]
			set = set || string(v) != "null" && string(v) != `"auto"`
		}
		if !set {
			write(s.Defaults[it.Value.KeyStart:it.Value.End])
		}
	}
}
