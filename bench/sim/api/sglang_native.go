package api

import (
	"encoding/json"
	"strconv"
	"time"

	"sluice/bench/sim/textgen"
)

// readNative parses the body of SGLang's /generate into the common one. Text and
// input_ids become the prompt; sampling_params may be a list, one for each prompt.
func readNative(raw []byte) (*Body, error) {
	var n struct {
		Text        json.RawMessage `json:"text"`
		IDs         json.RawMessage `json:"input_ids"`
		Sampling    json.RawMessage `json:"sampling_params"`
		Stream      bool            `json:"stream"`
		RID         json.RawMessage `json:"rid"`
		Host        json.RawMessage `json:"bootstrap_host"`
		Port        json.RawMessage `json:"bootstrap_port"`
		Room        json.RawMessage `json:"bootstrap_room"`
		RoutedRank  *int            `json:"routed_dp_rank"`
		DPRank      *int            `json:"data_parallel_rank"`
		PrefillRank *int            `json:"disagg_prefill_dp_rank"`
		CacheSalt   string          `json:"cache_salt"`
	}
	if err := json.Unmarshal(raw, &n); err != nil {
		_, err = ReadBody(raw) // returns the usual error if the whole body is invalid
		if err == nil {
			err = Refuse(400, "", "1 validation error for GenerateReqInput")
		}
		return &Body{}, err
	}
	given := func(m json.RawMessage) bool { return len(m) > 0 && string(m) != "null" }
	b := &Body{Stream: n.Stream, RID: n.RID, Host: n.Host, Port: n.Port, Room: n.Room,
		RoutedRank: n.RoutedRank, DPRank: n.DPRank, PrefillRank: n.PrefillRank, CacheSalt: n.CacheSalt}
	switch {
	case given(n.Text) == given(n.IDs):
		return b, Refuse(400, "", "Either text, input_ids or input_embeds should be provided.")
	case given(n.Text):
		b.Prompt = n.Text
	default:
		b.Prompt = n.IDs
	}
	var err error
	if b.logprobs, err = readLogprobOptions(raw); err != nil || !given(n.Sampling) {
		return b, err
	}
	list := []json.RawMessage{n.Sampling}
	if n.Sampling[0] == '[' {
		if json.Unmarshal(n.Sampling, &list) != nil || len(list) == 0 {
			return b, Refuse(400, "", "sampling_params should be a dict or a list of dicts.")
		}
		b.samplingList = true
	}
	for _, raw := range list {
		var s nativeSampling
		if err := json.Unmarshal(raw, &s); err != nil {
			return b, Refuse(400, "", "sampling_params: %s", err)
		}
		b.native = append(b.native, s)
	}
	return b, nil
}

// nativeSampling are the members of SGLang's sampling_params that the engine obeys.
type nativeSampling struct {
	MaxNew    *int            `json:"max_new_tokens"`
	MinNew    int             `json:"min_new_tokens"`
	Stop      json.RawMessage `json:"stop"`
	IgnoreEOS bool            `json:"ignore_eos"`
	N         *int            `json:"n"`
	Seed      int64           `json:"sampling_seed"`
}

const nativeMaxNew = 128 // SGLang's default of max_new_tokens

// nativeParams converts sampling_params of /generate. In a list every prompt has its
// own limit, and the longest one is the response's.
func (b *Body) nativeParams(p *Params) (maxTokens, n *int, stop json.RawMessage, err error) {
	limit := nativeMaxNew
	if len(b.native) > 0 {
		limit = 0
	}
	for i := range b.native {
		limit = max(limit, nativeLimit(&b.native[i]))
	}
	if len(b.native) > 0 {
		s := &b.native[0]
		p.seed, p.minTokens, p.ignoreEOS = s.Seed, s.MinNew, s.IgnoreEOS
		n, stop = s.N, s.Stop
		for _, x := range b.native[1:] {
			if (x.N == nil) != (n == nil) || n != nil && *x.N != *n {
				return nil, nil, nil, Refuse(400, "", "The parallel_sample_num should be the same for all samples in sample params.")
			}
		}
	}
	return &limit, n, stop, nil
}

func nativeLimit(s *nativeSampling) int {
	if s.MaxNew == nil {
		return nativeMaxNew
	}
	return *s.MaxNew
}

// nativeFormat implements Format for SGLang's /generate. Each event repeats all text and ids so far,
// or with Config.Incremental contains only the new ones.
type nativeFormat struct {
	r     *Response
	batch bool // the response is a list, and events have an index
	begun time.Time
}

func newNativeFormat(r *Response) Format { return &nativeFormat{r: r, begun: time.Now()} }

func (f *nativeFormat) Prefix() string  { return "" }
func (f *nativeFormat) needsText() bool { return true }

func (f *nativeFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	lists, err := ParsePrompts(b.Prompt)
	if err != nil {
		return nil, Refuse(400, "", "Either text, input_ids or input_embeds should be provided.")
	}
	var items []json.RawMessage
	if json.Unmarshal(b.Prompt, &items) == nil && len(items) > 0 && (items[0][0] == '[' || items[0][0] == '"') {
		f.batch = true
	}
	if b.samplingList && len(b.native) != len(lists) {
		return nil, Refuse(400, "", "sampling_params has %d elements for a batch of %d.", len(b.native), len(lists))
	}
	for _, s := range b.native {
		f.batch = f.batch || s.N != nil && *s.N > 1
	}
	return lists, nil
}

// meta appends text, output_ids and meta_info of a sequence.
func (f *nativeFormat) meta(b []byte, s *Choice, text string, ids []uint32) []byte {
	b = append(b, '{')
	if !f.r.Config.SkipTokenizer {
		b = append(b, `"text":`...)
		b = AppendJSON(b, text)
		b = append(b, ',')
	}
	b = append(b, `"output_ids":`...)
	b = AppendIDs(b, ids)
	b = append(b, `,"meta_info":{"id":`...)
	b = AppendJSON(b, f.r.rid(s))
	b = append(b, `,"finish_reason":`...)
	b = f.reason(b, s)
	b = append(b, `,"prompt_tokens":`...)
	b = strconv.AppendInt(b, int64(len(s.Prompt)), 10)
	b = append(b, `,"weight_version":"default","num_retractions":0,"reasoning_tokens":0,"completion_tokens":`...)
	b = strconv.AppendInt(b, int64(len(s.Out)), 10)
	b = append(b, `,"cached_tokens":`...)
	b = strconv.AppendInt(b, int64(s.Cached), 10)
	b = append(b, `,"cached_tokens_details":null,"dp_rank":`...)
	if f.r.Config.Ranks > 1 {
		b = strconv.AppendInt(b, int64(f.r.Rank), 10)
	} else {
		b = append(b, "null"...)
	}
	b = s.appendLogprobs(b, len(ids))
	if s.Reason != "" {
		b = append(b, `,"e2e_latency":`...)
		b = strconv.AppendFloat(b, time.Since(f.begun).Seconds(), 'f', 6, 64)
	}
	return append(b, '}')
}

func (f *nativeFormat) reason(b []byte, s *Choice) []byte {
	switch {
	case f.r.Aborted != "":
		b = append(b, `{"type":"abort","message":`...)
		b = AppendJSON(b, f.r.Aborted)
		return append(b, `,"status_code":500,"err_type":"InternalServerError"}`...)
	case s.Reason == "":
		return append(b, "null"...)
	case s.Reason == "abort":
		return append(b, `{"type":"abort","message":"Abort in waiting queue","status_code":null,"err_type":null}`...)
	case s.Reason == "length":
		b = append(b, `{"type":"length","length":`...)
		b = strconv.AppendInt(b, int64(len(s.Out)), 10)
		return append(b, '}')
	}
	b = append(b, `{"type":"stop","matched":`...)
	if s.stopped != "" {
		b = AppendJSON(b, s.stopped)
	} else {
		b = strconv.AppendInt(b, textgen.EOS, 10)
	}
	return append(b, '}')
}

func (f *nativeFormat) event(w *Chunker, s *Choice, text string, ids []uint32) {
	b := f.meta(append(w.Begin(), "data: "...), s, text, ids)
	if f.batch {
		b = append(b, `,"index":`...)
		b = strconv.AppendInt(b, int64(s.Index), 10)
	}
	w.End(append(b, "}\n\n"...))
}

func (f *nativeFormat) First(*Chunker, *Choice) {}

func (f *nativeFormat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	if f.r.Config.Incremental {
		f.event(w, s, text, []uint32{id})
		return
	}
	f.event(w, s, string(s.text), s.Out)
}

func (f *nativeFormat) Last(w *Chunker, _ *Response) { done(w) }

func (f *nativeFormat) Full(b []byte, r *Response) []byte {
	if !f.batch {
		return append(f.meta(b, r.choices[0], string(r.choices[0].text), r.choices[0].Out), '}')
	}
	b = append(b, '[')
	for i, s := range r.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(f.meta(b, s, string(s.text), s.Out), '}')
	}
	return append(b, ']')
}

// StreamError reports a failed transfer as an ordinary chunk with that finish_reason,
// and any other failure as an error event.
func (f *nativeFormat) StreamError(w *Chunker, r *Response, status int, msg string) {
	if r.Aborted != "" {
		for _, s := range r.choices {
			f.event(w, s, string(s.text), s.Out)
		}
	} else {
		b := append(w.Begin(), `data: {"error":{"message":`...)
		b = AppendJSON(b, msg)
		b = append(b, `,"type":"invalid_request_error","code":`...)
		b = strconv.AppendInt(b, int64(status), 10)
		w.End(append(b, ",\"retryable\":false}}\n\n"...))
	}
	done(w)
}

func (f *nativeFormat) ErrorBody(_ int, msg string) []byte {
	return append(AppendJSON([]byte(`{"error":{"message":`), msg), "}}"...)
}

// rid returns the request id of one sequence: the client's, one for each prompt, or a
// generated one.
func (r *Response) rid(s *Choice) string {
	if item := s.Index / r.Params.N; item < len(r.RIDs) {
		return r.RIDs[item]
	}
	return r.ID
}
