package api

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// openAIFailure formats the errors of vLLM's OpenAI endpoints.
type openAIFailure struct{ config *Config }

func (openAIFailure) needsText() bool { return false }

// ErrorBody implements Format.
func (f openAIFailure) ErrorBody(status int, msg string) []byte {
	return f.config.Failure(status, msg, "")
}

// StreamError implements Format: the error is an event, and [DONE] follows.
func (f openAIFailure) StreamError(w *Chunker, r *Response, status int, msg string) {
	b := append(w.Begin(), "data: "...)
	b = append(b, f.config.Failure(status, msg, "")...)
	w.End(append(b, "\n\n"...))
	done(w)
}

func done(w *Chunker) { w.End(append(w.Begin(), "data: [DONE]\n\n"...)) }

// chatFormat implements Format for /v1/chat/completions.
type chatFormat struct {
	openAIFailure
	r    *Response
	head []byte // an event up to its choices
}

func newChatFormat(r *Response) Format {
	return &chatFormat{openAIFailure: openAIFailure{r.Config}, r: r}
}

func (f *chatFormat) Prefix() string { return "chatcmpl-" }

func (f *chatFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	if len(b.Messages) == 0 {
		return nil, Refuse(400, "body.messages", "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}")
	}
	text, err := RenderChat(b.Messages, b.Tools, b.AddGeneration == nil || *b.AddGeneration)
	if err != nil {
		return nil, err
	}
	return [][]uint32{textgen.Vocab().Append(nil, text)}, nil
}

// open starts an event.
func (f *chatFormat) open(w *Chunker) []byte {
	if f.head == nil {
		f.head = f.r.appendIdentity(append(f.head, "data: "...), "chat.completion.chunk")
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(w.Begin(), f.head...)
}

// appendIdentity appends the first members of every OpenAI response.
func (r *Response) appendIdentity(b []byte, object string) []byte {
	b = append(b, `{"id":`...)
	b = AppendJSON(b, r.ID)
	b = append(b, `,"object":"`...)
	b = append(b, object...)
	b = append(b, `","created":`...)
	b = strconv.AppendInt(b, r.Created, 10)
	b = append(b, `,"model":`...)
	return AppendJSON(b, r.model)
}

// openChoice starts an event and its one choice.
func (f *chatFormat) openChoice(w *Chunker, s *Choice) []byte {
	b := append(f.open(w), `{"index":`...)
	return strconv.AppendInt(b, int64(s.Index), 10)
}

// close ends an event whose choices are complete.
func (f *chatFormat) close(w *Chunker, b []byte, s *Choice) {
	b = append(b, ']')
	if s != nil {
		b = f.r.Members.AppendStreamedHandle(b, s.Index)
	}
	if f.r.Params.everyUsage && s != nil {
		b = f.r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.End(append(b, "}\n\n"...))
}

func (f *chatFormat) First(w *Chunker, s *Choice) {
	b := append(f.openChoice(w, s), `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":`...)
	if f.r.Params.ReturnIDs {
		b = AppendIDs(b, s.Prompt)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"prompt_text":null`...)
	if f.r.Params.everyUsage {
		b = f.r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.End(append(b, "}\n\n"...))
	if s.script != nil {
		b = append(f.openChoice(w, s), `,"delta":{"tool_calls":[{"id":`...)
		b = AppendJSON(b, f.callID(s))
		b = append(b, `,"type":"function","index":0,"function":{"name":`...)
		b = AppendJSON(b, f.r.Params.toolName)
		b = append(b, `,"arguments":""}}]},"logprobs":null,"finish_reason":null}`...)
		f.close(w, b, s)
	}
}

func (f *chatFormat) callID(s *Choice) string {
	return "call_" + strconv.FormatUint(textgen.Mix(s.Gen.State^uint64(s.Index)), 16)
}

func (f *chatFormat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	b := f.openChoice(w, s)
	if s.script != nil && id != textgen.EOS {
		b = append(b, `,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"`...)
		b = appendEscaped(b, text)
		b = append(b, `"}}]},"logprobs":`...)
	} else {
		b = append(b, `,"delta":{"content":"`...)
		b = appendEscaped(b, text)
		b = append(b, `"},"logprobs":`...)
	}
	b = append(s.appendChatLogprobs(b, s.newTokens(1)), `,"finish_reason":`...)
	b = appendReason(b, s)
	b = append(b, `,"token_ids":`...)
	b = f.r.appendTokenIDs(b, id)
	b = f.r.Members.AppendToChoice(b, s.Index)
	f.close(w, append(b, '}'), s)
}

// appendReason appends finish_reason, and stop_reason when there is one.
func appendReason(b []byte, s *Choice) []byte {
	if s.Reason == "" {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = append(b, s.Reason...)
	b = append(b, `","stop_reason":`...)
	return appendStopped(b, s)
}

func appendStopped(b []byte, s *Choice) []byte {
	if s.stopped == "" {
		return append(b, "null"...)
	}
	return AppendJSON(b, s.stopped)
}

func (r *Response) appendTokenIDs(b []byte, ids ...uint32) []byte {
	if !r.Params.ReturnIDs {
		return append(b, "null"...)
	}
	return AppendIDs(b, ids)
}

func (f *chatFormat) Last(w *Chunker, r *Response) {
	if r.Params.includeUsage {
		b := append(f.open(w), `],"usage":`...)
		b = r.appendUsage(b, nil)
		b = append(b, `,"system_fingerprint":`...)
		b = AppendJSON(b, r.fingerprint())
		w.End(append(b, "}\n\n"...))
	}
	done(w)
}

// appendUsage appends the usage in a stream, of one sequence so far or of all
// sequences.
func (r *Response) appendUsage(b []byte, s *Choice) []byte {
	prompt, completion, cached := r.usage()
	if s != nil {
		prompt, completion = len(s.Prompt), len(s.Out)
	}
	b = appendCounts(b, prompt, completion)
	if !r.Config.HideCached {
		b = append(b, `,"prompt_tokens_details":{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, '}')
	}
	return append(b, '}')
}

func appendCounts(b []byte, prompt, completion int) []byte {
	b = append(b, `{"prompt_tokens":`...)
	b = strconv.AppendInt(b, int64(prompt), 10)
	b = append(b, `,"total_tokens":`...)
	b = strconv.AppendInt(b, int64(prompt+completion), 10)
	b = append(b, `,"completion_tokens":`...)
	return strconv.AppendInt(b, int64(completion), 10)
}

// appendWholeUsage appends the usage of a response that is not streamed, with its
// nulls.
func (r *Response) appendWholeUsage(b []byte) []byte {
	prompt, completion, cached := r.usage()
	b = appendCounts(b, prompt, completion)
	b = append(b, `,"prompt_tokens_details":`...)
	if r.Config.HideCached {
		b = append(b, "null"...)
	} else {
		b = append(b, `{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, '}')
	}
	return append(b, `,"completion_tokens_details":null}`...)
}

func (f *chatFormat) Full(b []byte, r *Response) []byte {
	b = r.appendIdentity(b, "chat.completion")
	b = append(b, `,"choices":[`...)
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(i), 10)
		b = append(b, `,"message":{"role":"assistant","content":`...)
		if s.script != nil {
			b = append(b, "null"...)
		} else {
			b = AppendJSON(b, string(s.text))
		}
		b = append(b, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,`...)
		if s.script != nil {
			b = append(b, `"tool_calls":[{"id":`...)
			b = AppendJSON(b, f.callID(s))
			b = append(b, `,"type":"function","function":{"name":`...)
			b = AppendJSON(b, r.Params.toolName)
			b = append(b, `,"arguments":`...)
			b = AppendJSON(b, string(s.text))
			b = append(b, `}}],`...)
		}
		b = s.appendChatLogprobs(append(b, `"reasoning":null},"logprobs":`...), s.newTokens(len(s.Out)))
		b = append(b, `,"finish_reason":`...)
		b = appendReason(b, s)
		b = append(b, `,"token_ids":`...)
		b = r.appendTokenIDs(b, s.Out...)
		b = r.Members.AppendToChoice(b, s.Index)
		b = append(b, `,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = AppendJSON(b, r.fingerprint())
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":`...)
	b = r.appendTokenIDs(b, r.choices[0].Prompt...)
	b = append(b, `,"prompt_text":null,"kv_transfer_params":`...)
	b = r.Members.AppendHandle(b)
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}
