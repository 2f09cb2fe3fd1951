package sim

import (
	"strconv"

	"sluice/bench/sim/textgen"
)

// completionFormat is /v1/completions.
type completionFormat struct {
	openAIFailure
	j    *job
	head []byte
}

func newCompletionFormat(j *job) format {
	return &completionFormat{openAIFailure: openAIFailure{j.c.incarnation.e}, j: j}
}

func (f *completionFormat) prefix() string { return "cmpl-" }

func (f *completionFormat) prompts(_ *job, b *body) ([][]uint32, error) { return prompts(b.Prompt) }

func (f *completionFormat) open(w *chunker) []byte {
	if f.head == nil {
		f.head = f.j.appendIdentity(append(f.head, "data: "...), "text_completion")
		f.head = append(f.head, `,"choices":[`...)
	}
	return append(w.begin(), f.head...)
}

func (f *completionFormat) first(w *chunker, s *seq) {}

func (f *completionFormat) delta(w *chunker, s *seq, id uint32, text string) {
	j := f.j
	b := append(f.open(w), `{"index":`...)
	b = strconv.AppendInt(b, int64(s.index), 10)
	b = append(b, `,"text":"`...)
	first := len(s.out) == 1
	if first && j.params.echo {
		b = appendEscaped(b, textgen.Detokenize(s.prompt))
	}
	b = appendEscaped(b, text)
	b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(1))
	b = append(b, `,"finish_reason":`...)
	b = f.reason(b, s)
	b = append(b, `,"prompt_token_ids":`...)
	if first {
		b = j.appendTokenIDs(b, s.prompt...)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"token_ids":`...)
	b = j.appendTokenIDs(b, id)
	b = j.choiceMembers(b, s)
	b = j.streamedHandle(append(b, `}]`...), s)
	if s.reason != "" && j.unfinished == 1 && !j.params.includeUsage {
		b = append(b, `,"system_fingerprint":`...)
		b = appendJSON(b, j.fingerprint())
	}
	if j.params.everyUsage {
		b = j.appendUsage(append(b, `,"usage":`...), s)
	}
	w.end(append(b, "}\n\n"...))
}

// reason appends finish_reason and stop_reason, which completions always have.
func (f *completionFormat) reason(b []byte, s *seq) []byte {
	if s.reason == "" {
		return append(b, `null,"stop_reason":null`...)
	}
	return appendReason(b, s)
}

func (f *completionFormat) last(w *chunker, j *job) {
	if j.params.includeUsage {
		b := append(f.open(w), `],"usage":`...)
		b = j.appendUsage(b, nil)
		b = append(b, `,"system_fingerprint":`...)
		b = appendJSON(b, j.fingerprint())
		w.end(append(b, "}\n\n"...))
	}
	done(w)
}

func (f *completionFormat) full(b []byte, j *job) []byte {
	b = j.appendIdentity(b, "text_completion")
	b = append(b, `,"choices":[`...)
	for i, s := range j.seqs {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"index":`...)
		b = strconv.AppendInt(b, int64(i), 10)
		b = append(b, `,"text":"`...)
		if j.params.echo {
			b = appendEscaped(b, textgen.Detokenize(s.prompt))
		}
		b = appendEscaped(b, string(s.text))
		b = s.appendTextLogprobs(append(b, `","logprobs":`...), s.newTokens(len(s.out)))
		b = append(b, `,"finish_reason":`...)
		b = f.reason(b, s)
		b = append(b, `,"token_ids":`...)
		b = j.appendTokenIDs(b, s.out...)
		b = append(b, `,"prompt_logprobs":null,"prompt_token_ids":`...)
		b = j.appendTokenIDs(b, s.prompt...)
		b = j.choiceMembers(b, s)
		b = append(b, `,"routed_experts":null}`...)
	}
	b = append(b, `],"service_tier":null,"system_fingerprint":`...)
	b = appendJSON(b, j.fingerprint())
	b = append(b, `,"usage":`...)
	b = j.appendWholeUsage(b)
	b = append(b, `,"kv_transfer_params":`...)
	b = j.answerMembers(j.handleJSON(b))
	return append(b, `,"ec_transfer_params":null,"metrics":null}`...)
}
