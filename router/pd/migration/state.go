// Package migration decides which streams another engine could continue, keeps what that needs, and
// writes the request to the next engine. It sends nothing and chooses no rank: package pd runs the
// request like any other.
//
//   - Check and CheckEngine say, once per request and once per leg, whether a stream may migrate
//     (check.go, stateful.go, grammar.go, template.go).
//   - State is what a stream keeps (state.go). Package relay fills its Transcript with the tokens that
//     the client has received.
//   - State.Resume writes the request for the rest of the stream (state.go, continuation.go), and
//     State.Retokenize finds the token ids of a stream that has only text (retokenize.go).
package migration

import (
	"encoding/binary"
	"math"
	"slices"
	"unsafe"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// State is what the router keeps of a request in order to continue its stream on another engine, because
// the request's scratch memory and the client's body are no longer available by then. The Transcript
// holds the generated tokens. Thousands of streams have one; the resume request stays packed until the
// stream migrates.
type State struct {
	transcript.Transcript
	packed        string         // body and sampling of the Template, then the header fields
	choice        *choiceGrammar // the response is one of its texts; nil without such a grammar
	maxTokens     int32          // the client's max_tokens; 0 if the client set no limit
	bodyLen       int32          // length of the body in packed, in bytes
	samplingLen   int32          // length of the sampling members in packed, in bytes
	minTokens     int32
	kind          front.Kind
	unconstrained bool
}

// Init stores the template of a request of a kind, the client's limit on the output (0: none) and the
// header fields.
func (c *State) Init(t *Template, kind front.Kind, maxTokens int, fields []upstream.Field) {
	c.kind, c.maxTokens, c.Format = kind, int32(min(maxTokens, math.MaxInt32)), formats[kind]
	c.pack(t, fields)
}

// formats maps the endpoints whose streams can migrate to their formats.
var formats = map[front.Kind]transcript.APIFormat{
	front.Chat: transcript.ChatFormat, front.Completions: transcript.CompletionsFormat, front.Generate: transcript.GenerateFormat,
	front.NativeGenerate: transcript.NativeFormat, front.Messages: transcript.MessagesFormat, front.ResponsesAPI: transcript.ResponsesFormat,
}

// pack stores the resume template and the header fields in c.
func (c *State) pack(a *Template, fields []upstream.Field) {
	size := len(a.body) + len(a.sampling)
	for i := range fields {
		size += 2 + len(fields[i].Name) + len(fields[i].Value)
	}
	packed := append(append(make([]byte, 0, size), a.body...), a.sampling...)
	for i := range fields {
		f := &fields[i]
		packed = binary.AppendUvarint(binary.AppendUvarint(packed, uint64(len(f.Name))), uint64(len(f.Value)))
		packed = append(append(packed, f.Name...), f.Value...)
	}
	c.packed, c.choice = unsafe.String(unsafe.SliceData(packed), len(packed)), a.choice
	c.bodyLen, c.samplingLen, c.minTokens, c.unconstrained = int32(len(a.body)), int32(len(a.sampling)), int32(a.minTokens), a.unconstrained
	c.Logprobs, c.TopLogprobs, c.Choices = a.logprobs, int32(min(a.topLogprobs, math.MaxInt32)), int32(a.choices)
	c.KeepText = a.choice != nil
}

// template returns the Template that pack stored.
func (c *State) template() Template {
	samplingEnd := c.bodyLen + c.samplingLen
	return Template{
		body: []byte(c.packed[:c.bodyLen]), sampling: []byte(c.packed[c.bodyLen:samplingEnd]), minTokens: int(c.minTokens), choices: int(c.Choices),
		logprobs: c.Logprobs, topLogprobs: int(c.TopLogprobs), choice: c.choice, unconstrained: c.unconstrained,
	}
}

// Fields returns the header fields that pack stored.
func (c *State) Fields() (all []upstream.Field) {
	text := c.packed[c.bodyLen+c.samplingLen:]
	raw := []byte(text)
	for at := 0; at < len(text); {
		n, used := binary.Uvarint(raw[at:])
		at += used
		v, used := binary.Uvarint(raw[at:])
		at += used
		all = append(all, upstream.Field{Name: text[at : at+int(n)], Value: text[at+int(n) : at+int(n+v)]})
		at += int(n + v)
	}
	return all
}

// Unconstrained reports whether the rest of the stream runs without the client's grammar.
func (c *State) Unconstrained() bool { return c.unconstrained }

// Spent reports whether one of the open choices has all the tokens that the client asked for.
func (c *State) Spent(open []*apiformat.ChoiceState) bool {
	return c.maxTokens > 0 && slices.ContainsFunc(open, func(q *apiformat.ChoiceState) bool { return q.Delivered >= int(c.maxTokens) })
}

// RemainingGrammar returns the request member that makes the next engine follow the rest of the
// grammar, or nil if the request has no grammar. structured is migration.structured. reason is
// "structured" if the text sent so far is not a prefix of any text that the grammar allows.
func (c *State) RemainingGrammar(structured string) (member []byte, reason string) {
	if c.choice == nil {
		return nil, ""
	}
	text := jsonscan.Unquote(make([]byte, 0, len(c.Text())), append(append([]byte{'"'}, c.Text()...), '"'))
	member, ok := c.choice.appendRemaining([]byte{','}, text)
	switch {
	case ok:
		return member, ""
	case structured == structuredUnconstrained:
		return nil, "" // the failed engine did not follow the grammar
	}
	return nil, "structured"
}

// Resumption is the request for the rest of a stream.
type Resumption struct {
	Path string
	Body []byte
	// Tokens are the prompt of the first open choice: the client's prompt and the choice's output.
	Tokens []uint32
	// OtherTokens is the number of output tokens so far of the other open choices, which are prompts
	// of their own.
	OtherTokens int
	// MaxTokens is the number of tokens that each prompt may still get.
	MaxTokens int
}

// maxResumeTokens bounds the token ids of a resume request. Each of several choices is a prompt of
// its own.
const maxResumeTokens = 1 << 20

// Resume writes the request that continues the open choices, with grammar as an additional member.
// modelLen is the model's length in tokens, 0 if unknown. Tokens use the memory of buf. reason says why
// the stream cannot continue, "" if it can.
func (c *State) Resume(open []*apiformat.ChoiceState, modelLen int, grammar []byte, buf []uint32) (r Resumption, reason string) {
	conts := make([]Continuation, len(open))
	minTokens, total := 0, 0
	for i, o := range open {
		cont := &conts[i]
		*cont = Continuation{PromptLen: c.Prompt.Len(), MaxOutput: int(c.maxTokens), MinOutput: int(c.minTokens)}
		cont.Tokens = append(c.Prompt.Append(buf), o.Out[:o.Delivered]...)
		buf = nil
		remaining, required, ok := cont.Remaining(c.kind, modelLen)
		if !ok {
			return r, "the model's length, which bounds an answer without max_tokens, is not known, or reached"
		}
		c.Limit = int32(min(o.Delivered+remaining, math.MaxInt32)) // equal for all choices
		if i > 0 {
			r.OtherTokens += o.Delivered // all choices begin with the client's prompt, which is computed once
		}
		if r.MaxTokens == 0 || remaining < r.MaxTokens {
			r.MaxTokens = remaining
		}
		minTokens = max(minTokens, required)
		if total += len(cont.Tokens); total > maxResumeTokens && len(open) > 1 {
			return r, "too_long"
		}
	}
	tmpl := c.template()
	r.Path, r.Tokens = tmpl.endpoint(c.kind), conts[0].Tokens
	r.Body = tmpl.complete(c.kind, conts, min(minTokens, r.MaxTokens), r.MaxTokens, grammar)
	return r, ""
}
