package sim

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// sglangOpenAI is shared by SGLang's OpenAI endpoints.
type sglangOpenAI struct{ r *response }

func (sglangOpenAI) prefix() string                          { return "" }
func (sglangOpenAI) needsText() bool                         { return false }
func (sglangOpenAI) errorBody(status int, msg string) []byte { return sglangError(status, msg, "") }

func (sglangOpenAI) streamError(w *chunker, _ *response, status int, msg string) {
	b := append(w.begin(), `data: {"error":`...)
	b = append(b, sglangError(status, msg, "")...)
	w.end(append(b, "}\n\n"...))
	done(w)
}

// usage appends SGLang's usage, with cached tokens as with --enable-cache-report.
func (f sglangOpenAI) usage(b []byte) []byte {
	prompt, completion, cached := f.r.usage()
	b = appendCounts(b, prompt, completion)
	b = append(b, `,"prompt_tokens_details":`...)
	if f.r.config.hideCached {
		b = append(b, "null"...)
	} else {
		b = append(b, `{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, '}')
	}
	return append(b, `,"reasoning_tokens":0,"completion_tokens_details":null}`...)
}

// ending appends finish_reason and matched_stop.
func (f sglangOpenAI) ending(b []byte, s *choice) []byte {
	if s.reason == "" {
		return append(b, `null,"matched_stop":null`...)
	}
	b = appendJSON(b, s.reason)
	b = append(b, `,"matched_stop":`...)
	switch {
	case s.stopped != "":
		return appendJSON(b, s.stopped)
	case s.reason == "stop":
		return strconv.AppendInt(b, textgen.EOS, 10)
	}
	return append(b, "null"...)
}

func (f sglangOpenAI) open(w *chunker, object string) []byte {
	b := f.r.appendIdentity(append(w.begin(), "data: "...), object)
	return append(b, `,"choices":[`...)
}

// usageEvent ends a stream whose request asked for usage.
func (f sglangOpenAI) usageEvent(w *chunker, object string) {
	if f.r.params.includeUsage {
		b := append(f.open(w, object), `],"usage":`...)
		w.end(append(f.usage(b), "}\n\n"...))
	}
	done(w)
}

// sglangChat is /v1/chat/completions, verified against a capture of 0.5.23.
type sglangChat struct{ sglangOpenAI }

func newSGLangChat(r *response) format { return &sglangChat{sglangOpenAI{r}} }

func (f *sglangChat) prompts(r *response, b *body) ([][]uint32, error) {
	if b.ReturnIDs && b.Stream && r.config.sglangSince(19) {
		return nil, refuse(400, "", "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using return_token_ids=true.")
	}
	return (&chatFormat{}).prompts(r, b)
}

const sglangChunk = "chat.completion.chunk"

func (f *sglangChat) choice(w *chunker, s *choice, delta string) []byte {
	b := append(f.open(w, sglangChunk), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.index), 10)
	return append(b, `,"delta":{"reasoning_content":null`+delta...)
}

func (f *sglangChat) first(w *chunker, s *choice) {
	b := f.choice(w, s, `,"role":"assistant","content":""`)
	w.end(append(b, "},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
	if s.script != nil {
		b = f.choice(w, s, `,"tool_calls":[{"id":`)
		b = appendJSON(b, f.callID(s))
		b = append(b, `,"index":0,"type":"function","function":{"name":`...)
		b = appendJSON(b, f.r.params.toolName)
		w.end(append(b, ",\"arguments\":\"\"}}]},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
	}
}

func (f *sglangChat) callID(s *choice) string {
	return "call_" + strconv.FormatUint(textgen.Mix(s.gen.State^uint64(s.index)), 16)
}

func (f *sglangChat) delta(w *chunker, s *choice, id uint32, text string) {
	if text == "" {
		return // the reason is sent in an event of its own
	}
	var b []byte
	if s.script != nil {
		b = f.choice(w, s, `,"tool_calls":[{"id":null,"index":0,"type":"function","function":{"name":null,"arguments":`)
		b = append(appendJSON(b, text), "}}]"...)
	} else {
		b = appendJSON(f.choice(w, s, `,"content":`), text)
	}
	w.end(append(b, "},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
}

func (f *sglangChat) last(w *chunker, r *response) {
	for _, s := range r.choices {
		b := append(f.choice(w, s, ""), `},"logprobs":null,"finish_reason":`...)
		w.end(append(f.ending(b, s), "}]}\n\n"...))
	}
	f.usageEvent(w, sglangChunk)
}

func (f *sglangChat) full(b []byte, r *response) []byte {
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
			b = append(b, `null,"reasoning_content":null,"tool_calls":[{"id":`...)
			b = appendJSON(b, f.callID(s))
			b = append(b, `,"index":0,"type":"function","function":{"name":`...)
			b = appendJSON(b, r.params.toolName)
			b = append(b, `,"arguments":`...)
			b = appendJSON(b, string(s.text))
			b = append(b, "}}]"...)
		} else {
			b = appendJSON(b, string(s.text))
			b = append(b, `,"reasoning_content":null,"tool_calls":null`...)
		}
		b = append(b, `},"logprobs":null,"finish_reason":`...)
		b = append(f.ending(b, s), '}')
	}
	b = append(b, `],"usage":`...)
	b = f.usage(b)
	return append(b, `,"metadata":{"weight_version":"default"}}`...)
}

// sglangCompletion is /v1/completions.
type sglangCompletion struct{ sglangOpenAI }

func newSGLangCompletion(r *response) format { return &sglangCompletion{sglangOpenAI{r}} }

func (f *sglangCompletion) prompts(_ *response, b *body) ([][]uint32, error) {
	return parsePrompts(b.Prompt)
}

func (f *sglangCompletion) first(*chunker, *choice) {}

func (f *sglangCompletion) delta(w *chunker, s *choice, id uint32, text string) {
	b := append(f.open(w, "text_completion"), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.index), 10)
	b = append(b, `,"text":"`...)
	if len(s.out) == 1 && f.r.params.echo {
		b = appendEscaped(b, textgen.Detokenize(s.prompt))
	}
	b = appendEscaped(b, text)
	b = append(b, `","logprobs":null,"finish_reason":`...)
	b = f.ending(b, s)
	if f.returnsIDs() {
		b = appendIDs(append(b, `,"token_ids":`...), []uint32{id})
		if len(s.out) == 1 {
			b = appendIDs(append(b, `,"prompt_token_ids":`...), s.prompt)
		}
	}
	w.end(append(b, "}]}\n\n"...))
}

// returnsIDs reports return_token_ids of completions, also for streams (0.5.19).
func (f *sglangCompletion) returnsIDs() bool {
	return f.r.params.returnIDs && f.r.config.sglangSince(19)
}

func (f *sglangCompletion) last(w *chunker, _ *response) { f.usageEvent(w, "text_completion") }

func (f *sglangCompletion) full(b []byte, r *response) []byte {
	b = r.appendIdentity(b, "text_completion")
	b = append(b, `,"choices":[`...)
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(i), 10)
		b = append(b, `,"text":"`...)
		if r.params.echo {
			b = appendEscaped(b, textgen.Detokenize(s.prompt))
		}
		b = appendEscaped(b, string(s.text))
		b = append(b, `","logprobs":null,"finish_reason":`...)
		b = f.ending(b, s)
		if f.returnsIDs() {
			b = appendIDs(append(b, `,"token_ids":`...), s.out)
			b = appendIDs(append(b, `,"prompt_token_ids":`...), s.prompt)
		}
		b = append(b, '}')
	}
	b = append(b, `],"usage":`...)
	b = f.usage(b)
	return append(b, `,"metadata":{"weight_version":"default"}}`...)
}
