package chatinput

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// API is the form of a request.
type API uint8

// The APIs whose prompts are rendered.
const (
	Chat        API = iota // /v1/chat/completions
	Completions            // /v1/completions
	Responses              // /v1/responses
	Messages               // /v1/messages
)

// Template is what a chat template takes.
type Template struct {
	// Parts selects the content format "openai", in which templates receive lists of parts;
	// otherwise they receive strings. ContentParts finds it from the template, as vLLM does.
	Parts bool
	// Developer says that the template knows the role "developer"; otherwise it becomes "system".
	Developer bool
}

// Settings are how a model's servers render prompts.
type Settings struct {
	// Plain is the template of requests without tools, WithTools that of requests with tools. Most
	// models have one template for both.
	Plain, WithTools Template
	// MergeSystem says that the template takes a system message only at the start, so that the
	// server joins all of a Messages request. MergesSystem finds it, as vLLM does.
	MergeSystem bool
	// DisabledEffort is the reasoning_effort by which the server turns thinking off in a Messages
	// request; "": not known. FindDisabledEffort finds it, as vLLM does.
	DisabledEffort string
	// Defaults is a JSON object with the server's --default-chat-template-kwargs; nil: none.
	Defaults []byte
	// CodeRendered says that the servers render chats by code and not by a template: only
	// completions are read.
	CodeRendered bool
	// NoToolsIfNone is the server's --exclude-tools-when-tool-choice-none.
	NoToolsIfNone bool
	// TrustTemplate is the server's --trust-request-chat-template: a request may contain a template,
	// which is not rendered here. Otherwise the server refuses such a request.
	TrustTemplate bool
}

// Truncation is how the server cuts a prompt that is too long.
type Truncation struct {
	// Keep is the number of ids to which a longer prompt is cut; 0: it is not cut; KeepContext: as
	// many as the model's context has.
	Keep int
	// Output says that the request asks for output tokens: of KeepContext, one is left for them.
	Output bool
	// Side is where it is cut: Left, Right, or Default, the tokenizer's own way, which cuts the text's
	// ids on the left and keeps the special tokens.
	Side Side
}

// KeepContext is a Truncation.Keep.
const KeepContext = -1

// Side is a side of a prompt.
type Side uint8

// The sides.
const (
	Default Side = iota
	Left
	Right
)

// Input is a prompt before it is rendered. It is reused: its slices keep their memory.
type Input struct {
	// Chat is a JSON object for the template: messages, tools, documents, add_generation_prompt,
	// continue_final_message, chat_template_kwargs. It is empty for a completion.
	Chat []byte
	// Text is the prompt of a completion, the first one if it has several.
	Text []byte
	// Prompts is the number of prompts: 1 but for a completion with a list.
	Prompts int
	// AddSpecial says that the tokenizer adds its special tokens.
	AddSpecial bool
	// Truncation is how the server cuts the prompt.
	Truncation Truncation
	// Refused says, if Read has returned a reason, that the server refuses the request, which then
	// has no prompt.
	Refused bool

	reason string
	body   []byte // the chat request that a Messages request becomes
	buf    []byte
	args   []byte
}

// Read converts the body of a request, a JSON object that jsonscan has accepted. It returns "" or
// why the prompt cannot be rendered exactly. Of a body that the server refuses it may return either.
func (in *Input) Read(api API, body []byte, s *Settings) (reason string) {
	*in = Input{Chat: in.Chat[:0], Text: in.Text[:0], Prompts: 1, body: in.body, buf: in.buf, args: in.args}
	if loneSurrogate(body) {
		return "the body has half of a surrogate pair"
	}
	if s.CodeRendered && api != Completions {
		return "the servers render chats of the model by code"
	}
	switch api {
	case Chat:
		in.readChat(body, s)
	case Completions:
		in.readCompletion(body, s)
	case Responses:
		in.readResponses(body, s)
	case Messages:
		in.readMessages(body, s)
	}
	return in.reason
}

// Memory returns the bytes that the slices keep for the next Read.
func (in *Input) Memory() int {
	return cap(in.Chat) + cap(in.Text) + cap(in.body) + cap(in.buf) + cap(in.args)
}

// fail records the first reason.
func (in *Input) fail(reason string) {
	if in.reason == "" {
		in.reason = reason
	}
}

// refuseTemplate records that the request has a chat template.
func (in *Input) refuseTemplate(s *Settings) {
	const reason = "the request has a chat template"
	if s.TrustTemplate {
		in.fail(reason)
	} else {
		in.refuse(reason)
	}
}

// template returns the template of a request with or without tools.
func (s *Settings) template(tools bool) Template {
	if tools {
		return s.WithTools
	}
	return s.Plain
}

// refuse records the first reason, one for which the server refuses the request.
func (in *Input) refuse(reason string) {
	if in.reason == "" {
		in.reason, in.Refused = reason, true
	}
}

// object is a JSON object whose members have been found.
type object struct {
	raw  []byte
	vals []jsonscan.Value
}

func (o *object) find(raw []byte, names ...string) {
	o.raw = raw
	o.vals = append(o.vals[:0], make([]jsonscan.Value, len(names))...)
	jsonscan.Members(raw, o.vals, names...)
}

// findNext moves to the next element of an array and finds its members in the same walk. Long
// messages make each walk a large part of a conversion.
func (o *object) findNext(it *jsonscan.Iter, array []byte, names ...string) bool {
	o.raw = array
	o.vals = append(o.vals[:0], make([]jsonscan.Value, len(names))...)
	return it.NextMembers(o.vals, names...)
}

func (o *object) kind(i int) jsonscan.Kind { return o.vals[i].Kind }

// has reports whether a member is there and is not null.
func (o *object) has(i int) bool { return o.vals[i].Kind > jsonscan.Null }

func (o *object) get(i int) []byte { return o.raw[o.vals[i].Start:o.vals[i].End] }

// isString reports whether the member is the string s.
func (o *object) isString(i int, s string) bool {
	return o.kind(i) == jsonscan.String && string(jsonscan.Text(o.get(i))) == s
}

// isZero reports whether the member is absent, null, false or a zero.
func (o *object) isZero(i int) bool {
	switch o.kind(i) {
	case jsonscan.Absent, jsonscan.Null:
		return true
	case jsonscan.Bool:
		return o.get(i)[0] == 'f'
	case jsonscan.Number:
		n, ok := jsonscan.Integer(o.get(i))
		return ok && n == 0
	}
	return false
}

// option returns a member that is true or false, or absent if it is not there.
func (in *Input) option(o *object, i int, absent bool) bool {
	switch o.kind(i) {
	case jsonscan.Absent:
		return absent
	case jsonscan.Bool:
		return o.get(i)[0] == 't'
	case jsonscan.String, jsonscan.Number:
		in.fail("an option is not a boolean") // the server takes some of them for one
	default:
		in.refuse("an option is not a boolean")
	}
	return absent
}

func (in *Input) readCompletion(body []byte, s *Settings) {
	var o object
	o.find(body, "prompt", "suffix", "prompt_embeds", "truncate_prompt_tokens", "add_special_tokens", "truncation_side", "max_tokens")
	in.AddSpecial = in.option(&o, 4, true)
	switch {
	case o.has(2):
		in.fail("prompt_embeds is not modelled")
	case o.has(1) && s.CodeRendered:
		in.fail("suffix is not modelled")
	case o.has(1):
		in.refuse("the model has no way to render a suffix")
	}
	// A completion without max_tokens asks for 16.
	in.readTruncation(&o, 3, 5, !o.has(6) || !o.isZero(6))
	switch o.kind(0) {
	case jsonscan.String:
		in.Text = jsonscan.Unquote(in.Text, o.get(0))
		if len(in.Text) == 0 {
			in.refuse("the prompt is empty")
		}
	case jsonscan.Array:
		in.readPrompts(o.get(0))
	default:
		in.refuse("the prompt is neither text nor a list")
	}
}

// readPrompts reads a list of prompts.
func (in *Input) readPrompts(list []byte) {
	in.Prompts = 0
	for it := jsonscan.Walk(list); it.Next(); in.Prompts++ {
		if it.Value.Kind != jsonscan.String {
			in.fail("a prompt of several is not a text")
			return
		}
		if in.Prompts == 0 {
			in.Text = jsonscan.Unquote(in.Text, it.Raw())
		}
	}
	if in.Prompts == 0 {
		in.fail("the list of prompts is empty")
	}
}

// readTruncation reads truncate_prompt_tokens and truncation_side. output says that the request asks
// for output tokens.
func (in *Input) readTruncation(o *object, keep, side int, output bool) {
	n, ok := int64(0), false
	switch o.kind(keep) {
	case jsonscan.Absent, jsonscan.Null:
		return
	case jsonscan.Number:
		n, ok = jsonscan.Integer(o.get(keep))
	case jsonscan.Bool: // the server takes true for 1
		ok = true
		if o.get(keep)[0] == 't' {
			n = 1
		}
	case jsonscan.String:
		if bytes.ContainsAny(jsonscan.Text(o.get(keep)), "0123456789") {
			in.fail("truncate_prompt_tokens is a string")
			return
		}
	}
	if !ok || n < KeepContext || n == 0 {
		in.refuse("truncate_prompt_tokens is not a number of tokens, or leaves none")
		return
	}
	in.Truncation = Truncation{Keep: int(min(n, 1<<31)), Output: output}
	switch {
	case !o.has(side):
	case o.isString(side, "left"):
		in.Truncation.Side = Left
	case o.isString(side, "right"):
		in.Truncation.Side = Right
	default:
		in.refuse("truncation_side is neither left nor right")
	}
}

// loneSurrogate reports whether an escape in body is half of a surrogate pair: the server's text
// then has a character that cannot be encoded.
func loneSurrogate(body []byte) bool {
	for {
		i := bytes.Index(body, []byte(`\u`))
		if i < 0 {
			return false
		}
		if escaped(body, i) {
			body = body[i+2:]
			continue
		}
		h := surrogate(body[i:])
		switch {
		case h == 0:
			body = body[i+2:]
		case h == 'h' && surrogate(body[i+6:]) == 'l':
			body = body[i+12:]
		default:
			return true
		}
	}
}

// escaped reports whether the backslash at i is itself escaped.
func escaped(b []byte, i int) bool {
	n := 0
	for i-n > 0 && b[i-n-1] == '\\' {
		n++
	}
	return n%2 == 1
}

// surrogate returns 'h' or 'l' if b begins with the escape of a high or low surrogate, otherwise 0.
func surrogate(b []byte) byte {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' || b[2]|0x20 != 'd' {
		return 0
	}
	switch c := b[3] | 0x20; {
	case c == '8' || c == '9' || c == 'a' || c == 'b':
		return 'h'
	case c >= 'c' && c <= 'f':
		return 'l'
	}
	return 0
}
