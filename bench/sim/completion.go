package sim

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// completionFormat is /v1/completions.
type completionFormat struct {
	openAIFailure
	r    *response
	head []byte
}

func newCompletionFormat(r *response) format {
	return &completionFormat{openAIFailure: openAIFailure{r.config}, r: r}
}

func (f *completionFormat) prefix() string { return "cmpl-" }

func (f *completionFormat) prompts(_ *response, b *body) ([][]uint32, error) {
	return parsePrompts(b.Prompt)
}

func (f *completionFormat) open(w *chunker) []byte {
	if f.head == nil {
		f.head = f.r.appendIdentity(append(f.head, "data: "...), "text_completion")
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(w.begin(), f.head...)
}

func (f *completionFormat) first(w *chunker, s *choice) {}

func (f *completionFormat) delta(w *chunker, s *choice, id uint32, text string) {
	r := f.r
	b := append(f.open(w), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.index), 10)
	b = append(b, `,"text":"`...)
	first := len(s.out) == 1
	if first && r.params.echo {
		b = appendEscaped(b, textgen.Detokenize(s.prompt))
	}
	b = appendEscaped(b, text)
	b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(1))
	b = append(b, `,"finish_reason":`...)
	b = f.reason(b, s)
	b = append(b, `,"prompt_token_ids":`...)
	if first {
		b = r.appendTokenIDs(b, s.prompt...)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"token_ids":`...)
	b = r.appendTokenIDs(b, id)
	b = r.members.AppendToChoice(b, s.index)
	b = r.members.AppendStreamedHandle(append(b, `}]`...), s.index)
	if s.reason != "" && r.unfinished == 1 && !r.params.includeUsage {
		b = append(b, `,"system_fingerprint":`...)
		b = appendJSON(b, r.fingerprint())
	}
	if r.params.everyUsage {
		b = r.appendUsage(append(b, `,"usage":`...), s)
	}
	w.end(append(b, "}\n\n"...))
}

// reason appends finish_reason and stop_reason, which completions always have.
func (f *completionFormat) reason(b []byte, s *choice) []byte {
	if s.reason == "" {
		return append(b, `null,"stop_reason":null`...)
	}
	return appendReason(b, s)
}

func (f *completionFormat) last(w *chunker, r *response) {
	if r.params.includeUsage {
		b := append(f.open(w), `],"usage":`...)
		b = r.appendUsage(b, nil)
		b = append(b, `,"system_fingerprint":`...)
		b = appendJSON(b, r.fingerprint())
		w.end(append(b, "}\n\n"...))
	}
	done(w)
}

func (f *completionFormat) full(b []byte, r *response) []byte {
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
		b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(len(s.out)))
		b = append(b, `,"finish_reason":`...)
		b = f.reason(b, s)
		b = append(b, `,"token_ids":`...)
		b = r.appendTokenIDs(b, s.out...)
		b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":`...)
		b = r.appendTokenIDs(b, s.prompt...)
		b = r.members.AppendToChoice(b, s.index)
		b = append(b, `,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = appendJSON(b, r.fingerprint())
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"kv_transfer_params":`...)
	b = r.members.AppendToAnswer(r.members.AppendHandle(b))
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}
