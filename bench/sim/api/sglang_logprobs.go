package api

import (
	"encoding/json"
	"strconv"

	"sluice/bench/sim/textgen"
)

// Log probabilities of SGLang's /generate (0.4.6 to 0.5.23). Their values depend on a
// token and the one before it, so every engine returns the same for the same tokens. As
// in SGLang, the first scored token of a prompt has no value; scored tokens are not
// taken from the prefix cache; and the decode server of a P/D pair returns empty lists
// for the prompt.

// logprobOptions is what a request asks for about one prompt.
type logprobOptions struct {
	from int // first token of the prompt that is scored
	top  int // number of most likely tokens to return for each token
	text bool
}

// readLogprobOptions parses return_logprob, logprob_start_len and top_logprobs_num,
// each one value or one for each prompt. An element is nil if none are requested.
func readLogprobOptions(raw []byte) ([]*logprobOptions, error) {
	var n struct {
		Asked json.RawMessage `json:"return_logprob"`
		Start json.RawMessage `json:"logprob_start_len"`
		Top   json.RawMessage `json:"top_logprobs_num"`
		Text  bool            `json:"return_text_in_logprobs"`
	}
	if err := json.Unmarshal(raw, &n); err != nil {
		return nil, Refuse(400, "", "return_text_in_logprobs: %s", err)
	}
	asked, _, err := OneOrMany[bool](n.Asked, "return_logprob", "a boolean")
	if err != nil {
		return nil, err
	}
	starts, _, err := OneOrMany[int](n.Start, "logprob_start_len", "an integer")
	if err != nil {
		return nil, err
	}
	tops, _, err := OneOrMany[int](n.Top, "top_logprobs_num", "an integer")
	if err != nil {
		return nil, err
	}
	list := make([]*logprobOptions, max(len(asked), len(starts), len(tops)))
	of := func(values []int, i, other int) int {
		if len(values) == 0 {
			return other
		}
		return values[i%len(values)]
	}
	for i := range list {
		if len(asked) > 0 && asked[i%len(asked)] {
			list[i] = &logprobOptions{from: of(starts, i, -1), top: of(tops, i, 0), text: n.Text}
		}
	}
	return list, nil
}

// promptLogprobs returns the scored tokens of the prompt of s, the item-th of the
// batch.
func (s *Choice) promptLogprobs(list []*logprobOptions, item int) {
	if len(list) == 0 || list[item%len(list)] == nil {
		return
	}
	own := *list[item%len(list)]
	if own.from < 0 || own.from >= len(s.Prompt) { // -1: output tokens only
		own.from = len(s.Prompt) - 1
	}
	s.logprobs = &own
}

// ScoresBefore reports whether a token of the prompt before position end is scored.
func (s *Choice) ScoresBefore(end int) bool { return s.logprobs != nil && end > s.logprobs.from }

// appendLogprobs appends the members of meta_info, for the output tokens ids.
func (s *Choice) appendLogprobs(b []byte, ids int) []byte {
	w := s.logprobs
	if w == nil {
		return b
	}
	first, last := w.from, len(s.Prompt)
	if s.response.Config.HidesPromptLogprobs {
		first = last
	}
	for _, m := range [...]struct {
		name        string
		from, until int
	}{{"input", first, last}, {"output", s.Total() - ids, s.Total()}} {
		b = append(append(append(b, `,"`...), m.name...), `_token_logprobs":[`...)
		for i := m.from; i < m.until; i++ {
			if i > m.from {
				b = append(b, ',')
			}
			b = s.appendLogprob(b, i, s.token(i), m.name == "input" && i == w.from)
		}
		b = append(b, ']')
		if w.top <= 0 {
			continue
		}
		b = append(append(append(b, `,"`...), m.name...), `_top_logprobs":[`...)
		for i := m.from; i < m.until; i++ {
			if i > m.from {
				b = append(b, ',')
			}
			if m.name == "input" && i == w.from {
				b = append(b, "null"...)
				continue
			}
			b = append(b, '[')
			for k := range w.top {
				if k > 0 {
					b = append(b, ',')
				}
				b = s.appendLogprob(b, i, s.token(i)+uint32(k), false)
			}
			b = append(b, ']')
		}
		b = append(b, ']')
	}
	return b
}

// appendLogprob appends [value, id, text or null] of id at position i.
func (s *Choice) appendLogprob(b []byte, i int, id uint32, none bool) []byte {
	if b = append(b, '['); none {
		b = append(b, "null"...)
	} else {
		before := uint64(0)
		if i > 0 {
			before = uint64(s.token(i-1)) << 32
		}
		b = strconv.AppendFloat(b, -float64(textgen.Mix(before|uint64(id))%9000+1)/1000, 'f', 3, 64)
	}
	b = strconv.AppendUint(append(b, ','), uint64(id), 10)
	if b = append(b, ','); s.logprobs.text {
		b = AppendJSON(b, s.Gen.Vocab.Piece(id))
	} else {
		b = append(b, "null"...)
	}
	return append(b, ']')
}
