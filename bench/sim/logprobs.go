package sim

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"sluice/bench/sim/textgen"
)

// Log-probabilities on vLLM's chat completions, completions and /inference/v1/generate. Like
// the text they are a pure function of what stands before: of the generator's state behind
// a token. A continuation's equal the undisturbed run's to the last digit, where those of
// real engines differ by noise. The token that came is always the likeliest.

// noLogprobs: the request asks for none.
const noLogprobs = -1

// requestedLogprobs is how many alternatives a request wants of each token, noLogprobs where it
// wants no log-probabilities.
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

// scoredToken is a token and the state of its sequence behind it.
type scoredToken struct {
	id    uint32
	state uint64
}

// newTokens are the newest n tokens; nil where nobody asked for their scores.
func (s *seq) newTokens(n int) []scoredToken {
	p := s.j.params
	if p.logprobs == noLogprobs {
		return nil
	}
	if n == 1 {
		return []scoredToken{{s.out[len(s.out)-1], s.gen.State}}
	}
	g := textgen.NewGenerator(s.j.c.incarnation.e.o.Model, s.j.c.incarnation.e.o.Seed, p.seed, s.index%p.n, s.prompt)
	all := make([]scoredToken, len(s.out))
	for i, id := range s.out {
		g.Fold(id)
		all[i] = scoredToken{id, g.State}
	}
	return all[len(all)-n:]
}

// candidates are the token and so many others, each with its logarithm: falling.
func (t scoredToken) candidates(others int) (ids []uint32, values []float64) {
	v := textgen.Vocab()
	value := -float64(textgen.Mix(t.state)%20000) / 10000
	ids, values = append(ids, t.id), append(values, value)
	for i := uint64(1); len(ids) <= others; i++ {
		id := uint32(textgen.WordBase) + 4*uint32((textgen.Mix(t.state)>>20+i)%uint64(v.Words))
		if !slices.Contains(ids, id) {
			value -= 0.0625
			ids, values = append(ids, id), append(values, value)
		}
	}
	return ids, values
}

// tokenString is a token as log-probabilities tell it.
func tokenString(id uint32) string { return strings.ToValidUTF8(textgen.Vocab().Piece(id), "\ufffd") }

func appendValue(b []byte, v float64) []byte { return strconv.AppendFloat(b, v, 'f', -1, 64) }

// appendChatLogprobs appends chat's logprobs object.
func (s *seq) appendChatLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.j.params.logprobs
	if want == noLogprobs {
		return append(b, "null"...)
	}
	one := func(b []byte, id uint32, value float64) []byte {
		text := tokenString(id)
		b = appendJSON(append(b, `{"token":`...), text)
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
		b = append(one(b, t.id, values[0]), `,"top_logprobs":[`...)
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

// appendTextLogprobs appends completions' logprobs object; text_offset goes on from the tokens
// told before.
func (s *seq) appendTextLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.j.params.logprobs
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
		s.offset += utf8.RuneCountInString(tokenString(t.id))
	})
	list("token_logprobs", func(t scoredToken) {
		_, values := t.candidates(0)
		b = appendValue(b, values[0])
	})
	list("tokens", func(t scoredToken) { b = appendJSON(b, tokenString(t.id)) })
	list("top_logprobs", func(t scoredToken) {
		ids, values := t.candidates(max(want-1, 0))
		b = append(b, '{')
		for k := range ids {
			if k > 0 {
				b = append(b, ',')
			}
			b = appendValue(append(appendJSON(b, tokenString(ids[k])), ':'), values[k])
		}
		b = append(b, '}')
	})
	b[len(b)-1] = '}'
	return b
}

// appendTokenLogprobs appends the logprobs object of /inference/v1/generate, which tells
// tokens by number.
func (s *seq) appendTokenLogprobs(b []byte, tokens []scoredToken) []byte {
	want := s.j.params.logprobs
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
		b = append(one(b, t.id, values[0], 1), `,"top_logprobs":[`...)
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
