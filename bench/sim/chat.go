package sim

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// openAIFailure formats the errors of vLLM's OpenAI endpoints.
type openAIFailure struct{ config *apiConfig }

func (openAIFailure) needsText() bool { return false }

func (f openAIFailure) errorBody(status int, msg string) []byte {
	return f.config.failure(status, msg, "")
}

func (f openAIFailure) streamError(w *chunker, r *response, status int, msg string) {
	b := append(w.begin(), "data: "...)
	b = append(b, f.config.failure(status, msg, "")...)
	w.end(append(b, "\n\n"...))
	done(w)
}

func done(w *chunker) { w.end(append(w.begin(), "data: [DONE]\n\n"...)) }

// chatFormat is /v1/chat/completions.
type chatFormat struct {
	openAIFailure
	r    *response
	head []byte // an event up to its choices
}

func newChatFormat(r *response) format {
	return &chatFormat{openAIFailure: openAIFailure{r.config}, r: r}
}

func (f *chatFormat) prefix() string { return "chatcmpl-" }

func (f *chatFormat) prompts(_ *response, b *body) ([][]uint32, error) {
	if len(b.Messages) == 0 {
		return nil, refuse(400, "body.messages", "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}")
	}
	text, err := renderChat(b.Messages, b.Tools, b.AddGeneration == nil || *b.AddGeneration)
	if err != nil {
		return nil, err
	}
	return [][]uint32{textgen.Vocab().Append(nil, text)}, nil
}

// open starts an event.
func (f *chatFormat) open(w *chunker) []byte {
	if f.head == nil {
		f.head = f.r.appendIdentity(append(f.head, "data: "...), "chat.completion.chunk")
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(w.begin(), f.head...)
}

// appendIdentity appends the first members of every OpenAI response.
func (r *response) appendIdentity(b []byte, object string) []byte {
	b = append(b, `{"id":`...)
	b = appendJSON(b, r.id)
	b = append(b, `,"object":"`...)
	b = append(b, object...)
	b = append(b, `","created":`...)
	b = strconv.AppendInt(b, r.created, 10)
	b = append(b, `,"model":`...)
	return appendJSON(b, r.model)
}

// openChoice starts an event and its one choice.
func (f *chatFormat) openChoice(w *chunker, s *choice) []byte {
	b := append(f.open(w), `{"index":`...)
	return strconv.AppendInt(b, int64(s.index), 10)
}

// close ends an event whose choices are complete.
func (f *chatFormat) close(w *chunker, b []byte, s *choice) {
	b = append(b, ']')
	if s != nil {
		b = f.r.members.AppendStreamedHandle(b, s.index)
	}
	if f.r.params.everyUsage && s != nil {
		b = f.r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.end(append(b, "}\n\n"...))
}

func (f *chatFormat) first(w *chunker, s *choice) {
	b := append(f.openChoice(w, s), `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":`...)
	if f.r.params.returnIDs {
		b = appendIDs(b, s.prompt)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"prompt_text":null`...)
	if f.r.params.everyUsage {
		b = f.r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.end(append(b, "}\n\n"...))
	if s.script != nil {
		b = append(f.openChoice(w, s), `,"delta":{"tool_calls":[{"id":`...)
		b = appendJSON(b, f.callID(s))
		b = append(b, `,"type":"function","index":0,"function":{"name":`...)
		b = appendJSON(b, f.r.params.toolName)
		b = append(b, `,"arguments":""}}]},"logprobs":null,"finish_reason":null}`...)
		f.close(w, b, s)
	}
}

func (f *chatFormat) callID(s *choice) string {
	return "call_" + strconv.FormatUint(textgen.Mix(s.gen.State^uint64(s.index)), 16)
}

func (f *chatFormat) delta(w *chunker, s *choice, id uint32, text string) {
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
	b = f.r.members.AppendToChoice(b, s.index)
	f.close(w, append(b, '}'), s)
}

// appendReason appends finish_reason, and stop_reason when there is one.
func appendReason(b []byte, s *choice) []byte {
	if s.reason == "" {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = append(b, s.reason...)
	b = append(b, `","stop_reason":`...)
	return appendStopped(b, s)
}

func appendStopped(b []byte, s *choice) []byte {
	if s.stopped == "" {
		return append(b, "null"...)
	}
	return appendJSON(b, s.stopped)
}

func (r *response) appendTokenIDs(b []byte, ids ...uint32) []byte {
	if !r.params.returnIDs {
		return append(b, "null"...)
	}
	return appendIDs(b, ids)
}

func (f *chatFormat) last(w *chunker, r *response) {
	if r.params.includeUsage {
		b := append(f.open(w), `],"usage":`...)
		b = r.appendUsage(b, nil)
		b = append(b, `,"system_fingerprint":`...)
		b = appendJSON(b, r.fingerprint())
		w.end(append(b, "}\n\n"...))
	}
	done(w)
}

// appendUsage appends the usage in a stream, of one sequence so far or of all
// sequences.
func (r *response) appendUsage(b []byte, s *choice) []byte {
	prompt, completion, cached := r.usage()
	if s != nil {
		prompt, completion = len(s.prompt), len(s.out)
	}
	b = appendCounts(b, prompt, completion)
	if !r.config.hideCached {
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
func (r *response) appendWholeUsage(b []byte) []byte {
	prompt, completion, cached := r.usage()
	b = appendCounts(b, prompt, completion)
	b = append(b, `,"prompt_tokens_details":`...)
	if r.config.hideCached {
		b = append(b, "null"...)
	} else {
		b = append(b, `{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, '}')
	}
	return append(b, `,"completion_tokens_details":null}`...)
}

func (f *chatFormat) full(b []byte, r *response) []byte {
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
			b = appendJSON(b, string(s.text))
		}
		b = append(b, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,`...)
		if s.script != nil {
			b = append(b, `"tool_calls":[{"id":`...)
			b = appendJSON(b, f.callID(s))
			b = append(b, `,"type":"function","function":{"name":`...)
			b = appendJSON(b, r.params.toolName)
			b = append(b, `,"arguments":`...)
			b = appendJSON(b, string(s.text))
			b = append(b, `}}],`...)
		}
		b = s.appendChatLogprobs(append(b, `"reasoning":null},"logprobs":`...), s.newTokens(len(s.out)))
		b = append(b, `,"finish_reason":`...)
		b = appendReason(b, s)
		b = append(b, `,"token_ids":`...)
		b = r.appendTokenIDs(b, s.out...)
		b = r.members.AppendToChoice(b, s.index)
		b = append(b, `,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = appendJSON(b, r.fingerprint())
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":`...)
	b = r.appendTokenIDs(b, r.choices[0].prompt...)
	b = append(b, `,"prompt_text":null,"kv_transfer_params":`...)
	b = r.members.AppendHandle(b)
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}
