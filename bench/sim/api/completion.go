package api

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// completionFormat implements Format for /v1/completions.
type completionFormat struct {
	openAIFailure
	r    *Response
	head []byte
}

func newCompletionFormat(r *Response) Format {
	return &completionFormat{openAIFailure: openAIFailure{r.Config}, r: r}
}

func (f *completionFormat) Prefix() string { return "cmpl-" }

func (f *completionFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	return ParsePrompts(b.Prompt)
}

func (f *completionFormat) open(w *Chunker) []byte {
	if f.head == nil {
		f.head = f.r.appendIdentity(append(f.head, "data: "...), "text_completion")
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(w.Begin(), f.head...)
}

func (f *completionFormat) First(w *Chunker, s *Choice) {}

func (f *completionFormat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	r := f.r
	b := append(f.open(w), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.Index), 10)
	b = append(b, `,"text":"`...)
	first := len(s.Out) == 1
	if first && r.Params.echo {
		b = appendEscaped(b, textgen.Detokenize(s.Prompt))
	}
	b = appendEscaped(b, text)
	b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(1))
	b = append(b, `,"finish_reason":`...)
	b = f.reason(b, s)
	b = append(b, `,"prompt_token_ids":`...)
	if first {
		b = r.appendTokenIDs(b, s.Prompt...)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"token_ids":`...)
	b = r.appendTokenIDs(b, id)
	b = r.Members.AppendToChoice(b, s.Index)
	b = r.Members.AppendStreamedHandle(append(b, `}]`...), s.Index)
	if s.Reason != "" && r.Unfinished == 1 && !r.Params.includeUsage {
		b = append(b, `,"system_fingerprint":`...)
		b = AppendJSON(b, r.fingerprint())
	}
	if r.Params.everyUsage {
		b = r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.End(append(b, "}\n\n"...))
}

// reason appends finish_reason and stop_reason, which completions always have.
func (f *completionFormat) reason(b []byte, s *Choice) []byte {
	if s.Reason == "" {
		return append(b, `null,"stop_reason":null`...)
	}
	return appendReason(b, s)
}

func (f *completionFormat) Last(w *Chunker, r *Response) {
	if r.Params.includeUsage {
		b := append(f.open(w), `],"usage":`...)
		b = r.appendUsage(b, nil)
		b = append(b, `,"system_fingerprint":`...)
		b = AppendJSON(b, r.fingerprint())
		w.End(append(b, "}\n\n"...))
	}
	done(w)
}

func (f *completionFormat) Full(b []byte, r *Response) []byte {
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
		b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(len(s.Out)))
		b = append(b, `,"finish_reason":`...)
		b = f.reason(b, s)
		b = append(b, `,"token_ids":`...)
		b = r.appendTokenIDs(b, s.Out...)
		b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":`...)
		b = r.appendTokenIDs(b, s.Prompt...)
		b = r.Members.AppendToChoice(b, s.Index)
		b = append(b, `,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = AppendJSON(b, r.fingerprint())
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"kv_transfer_params":`...)
	b = r.Members.AppendToAnswer(r.Members.AppendHandle(b))
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}
