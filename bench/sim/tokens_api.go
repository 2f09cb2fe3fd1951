package sim

import "strconv"

// generateFormat is /inference/v1/generate, token ids in and out.
type generateFormat struct {
	openAIFailure
	r *response
}

func newGenerateFormat(r *response) format {
	return &generateFormat{openAIFailure: openAIFailure{r.config}, r: r}
}

func (f *generateFormat) prefix() string { return "generate-tokens-" }

func (f *generateFormat) prompts(_ *response, b *body) ([][]uint32, error) {
	ids, ok := idList(b.TokenIDs)
	if !ok || len(ids) == 0 {
		return nil, refuse(400, "body.token_ids", "1 validation error:\n  {'type': 'list_type', 'loc': 'body.token_ids', 'msg': 'Input should be a non-empty list of non-negative integers'}")
	}
	return [][]uint32{ids}, nil
}

func (f *generateFormat) first(w *chunker, s *choice) {}

func (f *generateFormat) choice(b []byte, s *choice, ids []uint32, start int) []byte {
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(s.index), 10)
	b = append(b, `,"finish_reason":`...)
	if s.reason == "" {
		b = append(b, `null,"stop_reason":null`...)
	} else {
		b = appendReason(b, s)
	}
	b = append(b, `,"token_ids":`...)
	b = appendIDs(b, ids)
	b = append(b, `,"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":`...)
	b = strconv.AppendInt(b, int64(start), 10)
	b = append(b, `,"end":`...)
	b = strconv.AppendInt(b, int64(start+len(ids)), 10)
	return append(s.appendTokenLogprobs(append(b, `}],"logprobs":`...), s.newTokens(len(ids))), '}')
}

func (f *generateFormat) event(w *chunker, choice func([]byte) []byte, s *choice) {
	b := append(w.begin(), `data: {"request_id":`...)
	b = appendJSON(b, f.r.id)
	b = append(b, `,"usage":`...)
	if f.r.params.includeUsage && s == nil || f.r.params.everyUsage {
		b = f.r.appendUsage(b, s)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"output_mode":"tokens","choices":[`...)
	w.end(append(choice(b), "]}\n\n"...))
}

func (f *generateFormat) delta(w *chunker, s *choice, id uint32, _ string) {
	f.event(w, func(b []byte) []byte { return f.choice(b, s, []uint32{id}, len(s.out)-1) }, s)
}

func (f *generateFormat) last(w *chunker, r *response) {
	if r.params.includeUsage {
		f.event(w, func(b []byte) []byte { return b }, nil)
	}
	done(w)
}

func (f *generateFormat) full(b []byte, r *response) []byte {
	b = append(b, `{"request_id":`...)
	b = appendJSON(b, r.id)
	b = append(b, `,"model":`...)
	b = appendJSON(b, r.model)
	b = append(b, `,"created":`...)
	b = strconv.AppendInt(b, r.created, 10)
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":`...)
	b = r.appendTokenIDs(b, r.choices[0].prompt...)
	b = append(b, `,"mm_placeholders":null,"metrics":null,"kv_transfer_params":`...)
	b = r.members.AppendHandle(b)
	b = append(b, `,"ec_transfer_params":null,"output_mode":"tokens","choices":[`...)
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = f.choice(b, s, s.out, 0)
	}
	return append(b, `]}`...)
}
