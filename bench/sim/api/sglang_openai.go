package api

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// sglangOpenAI is the part of a Format that all OpenAI endpoints of SGLang share.
type sglangOpenAI struct{ r *Response }

func (sglangOpenAI) Prefix() string                          { return "" }
func (sglangOpenAI) needsText() bool                         { return false }
func (sglangOpenAI) ErrorBody(status int, msg string) []byte { return SGLangError(status, msg, "") }

func (sglangOpenAI) StreamError(w *Chunker, _ *Response, status int, msg string) {
	b := append(w.Begin(), `data: {"error":`...)
	b = append(b, SGLangError(status, msg, "")...)
	w.End(append(b, "}\n\n"...))
	done(w)
}

// usage appends SGLang's usage, with cached tokens as with --enable-cache-report.
func (f sglangOpenAI) usage(b []byte) []byte {
	prompt, completion, cached := f.r.usage()
	b = appendCounts(b, prompt, completion)
	b = append(b, `,"prompt_tokens_details":`...)
	if f.r.Config.HideCached {
		b = append(b, "null"...)
	} else {
		b = append(b, `{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, '}')
	}
	return append(b, `,"reasoning_tokens":0,"completion_tokens_details":null}`...)
}

// ending appends finish_reason and matched_stop.
func (f sglangOpenAI) ending(b []byte, s *Choice) []byte {
	if s.Reason == "" {
		return append(b, `null,"matched_stop":null`...)
	}
	b = AppendJSON(b, s.Reason)
	b = append(b, `,"matched_stop":`...)
	switch {
	case s.stopped != "":
		return AppendJSON(b, s.stopped)
	case s.Reason == "stop":
		return strconv.AppendInt(b, textgen.EOS, 10)
	}
	return append(b, "null"...)
}

func (f sglangOpenAI) open(w *Chunker, object string) []byte {
	b := f.r.appendIdentity(append(w.Begin(), "data: "...), object)
	return append(b, `,"choices":[`...)
}

// usageEvent ends a stream whose request asked for usage.
func (f sglangOpenAI) usageEvent(w *Chunker, object string) {
	if f.r.Params.includeUsage {
		b := append(f.open(w, object), `],"usage":`...)
		w.End(append(f.usage(b), "}\n\n"...))
	}
	done(w)
}

// sglangChat implements Format for /v1/chat/completions, verified against a capture of 0.5.23.
type sglangChat struct{ sglangOpenAI }

func newSGLangChat(r *Response) Format { return &sglangChat{sglangOpenAI{r}} }

func (f *sglangChat) prompts(r *Response, b *Body) ([][]uint32, error) {
	if b.ReturnIDs && b.Stream && r.Config.sglangSince(19) {
		return nil, Refuse(400, "", "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using return_token_ids=true.")
	}
	return (&chatFormat{}).prompts(r, b)
}

const sglangChunk = "chat.completion.chunk"

func (f *sglangChat) choice(w *Chunker, s *Choice, delta string) []byte {
	b := append(f.open(w, sglangChunk), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.Index), 10)
	return append(b, `,"delta":{"reasoning_content":null`+delta...)
}

func (f *sglangChat) First(w *Chunker, s *Choice) {
	b := f.choice(w, s, `,"role":"assistant","content":""`)
	w.End(append(b, "},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
	if s.script != nil {
		b = f.choice(w, s, `,"tool_calls":[{"id":`)
		b = AppendJSON(b, f.callID(s))
		b = append(b, `,"index":0,"type":"function","function":{"name":`...)
		b = AppendJSON(b, f.r.Params.toolName)
		w.End(append(b, ",\"arguments\":\"\"}}]},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
	}
}

func (f *sglangChat) callID(s *Choice) string {
	return "call_" + strconv.FormatUint(textgen.Mix(s.Gen.State^uint64(s.Index)), 16)
}

func (f *sglangChat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	if text == "" {
		return // the reason is sent in an event of its own
	}
	var b []byte
	if s.script != nil {
		b = f.choice(w, s, `,"tool_calls":[{"id":null,"index":0,"type":"function","function":{"name":null,"arguments":`)
		b = append(AppendJSON(b, text), "}}]"...)
	} else {
		b = AppendJSON(f.choice(w, s, `,"content":`), text)
	}
	w.End(append(b, "},\"logprobs\":null,\"finish_reason\":null,\"matched_stop\":null}]}\n\n"...))
}

func (f *sglangChat) Last(w *Chunker, r *Response) {
	for _, s := range r.choices {
		b := append(f.choice(w, s, ""), `},"logprobs":null,"finish_reason":`...)
		w.End(append(f.ending(b, s), "}]}\n\n"...))
	}
	f.usageEvent(w, sglangChunk)
}

func (f *sglangChat) Full(b []byte, r *Response) []byte {
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
			b = AppendJSON(b, f.callID(s))
			b = append(b, `,"index":0,"type":"function","function":{"name":`...)
			b = AppendJSON(b, r.Params.toolName)
			b = append(b, `,"arguments":`...)
			b = AppendJSON(b, string(s.text))
			b = append(b, "}}]"...)
		} else {
			b = AppendJSON(b, string(s.text))
			b = append(b, `,"reasoning_content":null,"tool_calls":null`...)
		}
		b = append(b, `},"logprobs":null,"finish_reason":`...)
		b = append(f.ending(b, s), '}')
	}
	b = append(b, `],"usage":`...)
	b = f.usage(b)
	return append(b, `,"metadata":{"weight_version":"default"}}`...)
}

// sglangCompletion implements Format for /v1/completions.
type sglangCompletion struct{ sglangOpenAI }

func newSGLangCompletion(r *Response) Format { return &sglangCompletion{sglangOpenAI{r}} }

func (f *sglangCompletion) prompts(_ *Response, b *Body) ([][]uint32, error) {
	return ParsePrompts(b.Prompt)
}

func (f *sglangCompletion) First(*Chunker, *Choice) {}

func (f *sglangCompletion) Delta(w *Chunker, s *Choice, id uint32, text string) {
	b := append(f.open(w, "text_completion"), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.Index), 10)
	b = append(b, `,"text":"`...)
	if len(s.Out) == 1 && f.r.Params.echo {
		b = appendEscaped(b, textgen.Detokenize(s.Prompt))
	}
	b = appendEscaped(b, text)
	b = append(b, `","logprobs":null,"finish_reason":`...)
	b = f.ending(b, s)
	if f.returnsIDs() {
		b = AppendIDs(append(b, `,"token_ids":`...), []uint32{id})
		if len(s.Out) == 1 {
			b = AppendIDs(append(b, `,"prompt_token_ids":`...), s.Prompt)
		}
	}
	w.End(append(b, "}]}\n\n"...))
}

// returnsIDs reports return_token_ids of completions, also for streams (0.5.19).
func (f *sglangCompletion) returnsIDs() bool {
	return f.r.Params.ReturnIDs && f.r.Config.sglangSince(19)
}

func (f *sglangCompletion) Last(w *Chunker, _ *Response) { f.usageEvent(w, "text_completion") }

func (f *sglangCompletion) Full(b []byte, r *Response) []byte {
	b = r.appendIdentity(b, "text_completion")
	b = append(b, `,"choices":[`...)
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(i), 10)
		b = append(b, `,"text":"`...)
		if r.Params.echo {
			b = appendEscaped(b, textgen.Detokenize(s.Prompt))
		}
		b = appendEscaped(b, string(s.text))
		b = append(b, `","logprobs":null,"finish_reason":`...)
		b = f.ending(b, s)
		if f.returnsIDs() {
			b = AppendIDs(append(b, `,"token_ids":`...), s.Out)
			b = AppendIDs(append(b, `,"prompt_token_ids":`...), s.Prompt)
		}
		b = append(b, '}')
	}
	b = append(b, `],"usage":`...)
	b = f.usage(b)
	return append(b, `,"metadata":{"weight_version":"default"}}`...)
}
