package api

import "strconv"

// generateFormat implements Format for /inference/v1/generate, whose prompts and output are token ids.
type generateFormat struct {
	openAIFailure
	r *Response
}

func newGenerateFormat(r *Response) Format {
	return &generateFormat{openAIFailure: openAIFailure{r.Config}, r: r}
}

func (f *generateFormat) Prefix() string { return "generate-tokens-" }

func (f *generateFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	ids, ok := ParseIDs(b.TokenIDs)
	if !ok || len(ids) == 0 {
		return nil, Refuse(400, "body.token_ids", "1 validation error:\n  {'type': 'list_type', 'loc': 'body.token_ids', 'msg': 'Input should be a non-empty list of non-negative integers'}")
	}
	return [][]uint32{ids}, nil
}

func (f *generateFormat) First(w *Chunker, s *Choice) {}

func (f *generateFormat) choice(b []byte, s *Choice, ids []uint32, start int) []byte {
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(s.Index), 10)
	b = append(b, `,"finish_reason":`...)
	if s.Reason == "" {
		b = append(b, `null,"stop_reason":null`...)
	} else {
		b = appendReason(b, s)
	}
	b = append(b, `,"token_ids":`...)
	b = AppendIDs(b, ids)
	b = append(b, `,"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":`...)
	b = strconv.AppendInt(b, int64(start), 10)
	b = append(b, `,"end":`...)
	b = strconv.AppendInt(b, int64(start+len(ids)), 10)
	return append(s.appendTokenLogprobs(append(b, `}],"logprobs":`...), s.newTokens(len(ids))), '}')
}

func (f *generateFormat) event(w *Chunker, choice func([]byte) []byte, s *Choice) {
	b := append(w.Begin(), `data: {"request_id":`...)
	b = AppendJSON(b, f.r.ID)
	b = append(b, `,"usage":`...)
	if f.r.Params.includeUsage && s == nil || f.r.Params.everyUsage {
		b = f.r.appendUsage(b, s)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"output_mode":"tokens","choices":[`...)
	w.End(append(choice(b), "]}\n\n"...))
}

func (f *generateFormat) Delta(w *Chunker, s *Choice, id uint32, _ string) {
	f.event(w, func(b []byte) []byte { return f.choice(b, s, []uint32{id}, len(s.Out)-1) }, s)
}

func (f *generateFormat) Last(w *Chunker, r *Response) {
	if r.Params.includeUsage {
		f.event(w, func(b []byte) []byte { return b }, nil)
	}
	done(w)
}

func (f *generateFormat) Full(b []byte, r *Response) []byte {
	b = append(b, `{"request_id":`...)
	b = AppendJSON(b, r.ID)
	b = append(b, `,"model":`...)
	b = AppendJSON(b, r.model)
	b = append(b, `,"created":`...)
	b = strconv.AppendInt(b, r.Created, 10)
	b = append(b, `,"usage":`...)
	b = r.appendWholeUsage(b)
	b = append(b, `,"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":`...)
	b = r.appendTokenIDs(b, r.choices[0].Prompt...)
	b = append(b, `,"mm_placeholders":null,"metrics":null,"kv_transfer_params":`...)
	b = r.Members.AppendHandle(b)
	b = append(b, `,"ec_transfer_params":null,"output_mode":"tokens","choices":[`...)
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = f.choice(b, s, s.Out, 0)
	}
	return append(b, `]}`...)
}
