package api

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"sluice/bench/sim/textgen"
)

// Log probabilities on vLLM's chat completions, completions and /inference/v1/generate.
// Like the text they are a pure function of what comes before: of the generator's state
// after a token. Those of a continuation equal the undisturbed run's to the last digit,
// whereas those of real engines differ by noise. The chosen token is always the most
// likely one.

// noLogprobs means that the request asks for none.
const noLogprobs = -1

// requestedLogprobs returns how many alternatives the request wants for each token, or
// noLogprobs.
func requestedLogprobs(chat bool, logprobs json.RawMessage, top int) int {
	if chat {
		if string(logprobs) == "true" {
			return max(top, 0)
		}
		return noLogprobs
	}
	if n, err := strconv.Atoi(string(logprobs)); err == nil && n >= 0 {
		return n
	}
	return noLogprobs
}

// scoredToken is a token and the state of its sequence after it.
type scoredToken struct {
	ID    uint32
	state uint64
}

// newTokens returns the newest n tokens; nil if the request asks for no log
// probabilities.
func (s *Choice) newTokens(n int) []scoredToken {
	p := s.response.Params
	if p.logprobs == noLogprobs {
		return nil
	}
	if n == 1 {
		return []scoredToken{{s.Out[len(s.Out)-1], s.Gen.State}}
	}
	g := textgen.NewGenerator(s.response.Config.Model, s.response.Config.Seed, p.seed, s.Index%p.N, s.Prompt)
	all := make([]scoredToken, len(s.Out))
	for i, id := range s.Out {
		g.Fold(id)
		all[i] = scoredToken{id, g.State}
	}
	return all[len(all)-n:]
}

// candidates returns the token and n alternatives, each with its log probability, in
// descending order.
func (t scoredToken) candidates(others int) (ids []uint32, values []float64) {
	v := textgen.Vocab()
	value := -float64(textgen.Mix(t.state)%20000) / 10000
	ids, values = append(ids, t.ID), append(values, value)
	for i := uint64(1); len(ids) <= others; i++ {
		id := uint32(textgen.WordBase) + 4*uint32((textgen.Mix(t.state)>>20+i)%uint64(v.Words))
		if !slices.Contains(ids, id) {
			value -= 0.0625
			ids, values = append(ids, id), append(values, value)
		}
	}
	return ids, values
}

// tokenString returns the text of a token in log probabilities.
func tokenString(id uint32) string { return strings.ToValidUTF8(textgen.Vocab().Piece(id), "\ufffd") }

func appendValue(b []byte, v float64) []byte { return strconv.AppendFloat(b, v, 'f', -1, 64) }

// appendChatLogprobs appends the logprobs object of chat completions.
func (s *Choice) appendChatLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.response.Params.logprobs
	if want == noLogprobs {
		return append(b, "null"...)
	}
	one := func(b []byte, id uint32, value float64) []byte {
		text := tokenString(id)
		b = AppendJSON(append(b, `{"token":`...), text)
		b = appendValue(append(b, `,"logprob":`...), value)
		b = append(b, `,"bytes":[`...)
		for i := range len(text) {
			if i > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendUint(b, uint64(text[i]), 10)
		}
		return append(b, ']')
	}
	b = append(b, `{"content":[`...)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		ids, values := t.candidates(max(want-1, 0))
		b = append(one(b, t.ID, values[0]), `,"top_logprobs":[`...)
		for k := range min(want, len(ids)) {
			if k > 0 {
				b = append(b, ',')
			}
			b = append(one(b, ids[k], values[k]), '}')
		}
		b = append(b, "]}"...)
	}
	return append(b, "]}"...)
}

// appendTextLogprobs appends the logprobs object of completions; text_offset continues
// from the tokens sent before.
func (s *Choice) appendTextLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.response.Params.logprobs
	if want == noLogprobs {
		return append(b, "null"...)
	}
	list := func(name string, one func(t scoredToken)) {
		b = append(append(append(b, '"'), name...), `":[`...)
		for i, t := range tokens {
			if i > 0 {
				b = append(b, ',')
			}
			one(t)
		}
		b = append(b, `],`...)
	}
	b = append(b, '{')
	list("text_offset", func(t scoredToken) {
		b = strconv.AppendInt(b, int64(s.offset), 10)
		s.offset += utf8.RuneCountInString(tokenString(t.ID))
	})
	list("token_logprobs", func(t scoredToken) {
		_, values := t.candidates(0)
		b = appendValue(b, values[0])
	})
	list("tokens", func(t scoredToken) { b = AppendJSON(b, tokenString(t.ID)) })
	list("top_logprobs", func(t scoredToken) {
		ids, values := t.candidates(max(want-1, 0))
		b = append(b, '{')
		for k := range ids {
			if k > 0 {
				b = append(b, ',')
			}
			b = appendValue(append(AppendJSON(b, tokenString(ids[k])), ':'), values[k])
		}
		b = append(b, '}')
	})
	b[len(b)-1] = '}'
	return b
}

// appendTokenLogprobs appends the logprobs object of /inference/v1/generate, which
// identifies tokens by id.
func (s *Choice) appendTokenLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.response.Params.logprobs
	if want == noLogprobs {
		return append(b, "null"...)
	}
	one := func(b []byte, id uint32, value float64, rank int) []byte {
		b = strconv.AppendUint(append(b, `{"token_id":`...), uint64(id), 10)
		b = appendValue(append(b, `,"logprob":`...), value)
		return strconv.AppendInt(append(b, `,"rank":`...), int64(rank), 10)
	}
	b = append(b, `{"content":[`...)
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		ids, values := t.candidates(max(want-1, 0))
		b = append(one(b, t.ID, values[0], 1), `,"top_logprobs":[`...)
		for k := range ids {
			if k > 0 {
				b = append(b, ',')
			}
			b = append(one(b, ids[k], values[k], k+1), '}')
		}
		b = append(b, "]}"...)
	}
	return append(b, "]}"...)
}
