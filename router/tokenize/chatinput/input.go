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

// Settings are how a model's servers render prompts.
type Settings struct {
	// Parts selects the content format "openai", in which templates receive lists of parts;
	// otherwise they receive strings. ContentParts finds it from the template, as vLLM does.
	Parts bool
	// Developer says that the template knows the role "developer"; otherwise it becomes "system".
	Developer bool
	// Defaults is a JSON object with the server's --default-chat-template-kwargs; nil: none.
	Defaults []byte
	// CodeRendered says that the servers render chats by code and not by a template: only
	// completions are read.
	CodeRendered bool
	// NoToolsIfNone is the server's --exclude-tools-when-tool-choice-none.
	NoToolsIfNone bool
}

// Input is a prompt before it is rendered. It is reused: its slices keep their memory.
type Input struct {
	// Chat is a JSON object for the template: messages, tools, documents, add_generation_prompt,
	// continue_final_message, chat_template_kwargs. It is empty for a completion.
	Chat []byte
	// Text is the prompt of a completion.
	Text []byte
	// AddSpecial says that the tokenizer adds its special tokens.
	AddSpecial bool

	reason string
	body   []byte // the chat request that a Messages request becomes
	buf    []byte
	args   []byte
}

// Read converts the body of a request, a JSON object that jsonscan has accepted. It returns "" or
// why the prompt cannot be rendered exactly.
func (in *Input) Read(api API, body []byte, s *Settings) (reason string) {
	in.Chat, in.Text, in.AddSpecial, in.reason = in.Chat[:0], in.Text[:0], false, ""
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
		in.readCompletion(body)
	case Responses:
		in.readResponses(body, s)
	case Messages:
		in.readMessages(body, s)
	}
	return in.reason
}

// fail records the first reason.
func (in *Input) fail(reason string) bool {
	if in.reason == "" {
		in.reason = reason
	}
	return false
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

// boolean returns a member that is true or false; ok is false for any other value, null included.
func (o *object) boolean(i int, absent bool) (value, ok bool) {
	switch {
	case o.kind(i) == jsonscan.Absent:
		return absent, true
	case o.kind(i) == jsonscan.Bool:
		return o.get(i)[0] == 't', true
	}
	return false, false
}

func (in *Input) readCompletion(body []byte) {
	var o object
	o.find(body, "prompt", "suffix", "prompt_embeds", "truncate_prompt_tokens", "add_special_tokens")
	special, ok := o.boolean(4, true)
	switch {
	case o.kind(0) != jsonscan.String:
		in.fail("the prompt is not one text")
	case o.has(1) || o.has(2):
		in.fail("suffix and prompt_embeds are not modelled")
	case o.has(3):
		in.fail("truncate_prompt_tokens is not modelled")
	case !ok:
		in.fail("add_special_tokens is not a boolean")
	}
	in.AddSpecial = special
	in.Text = jsonscan.Unquote(in.Text, o.get(0))
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
