package engineapi

import (
	"bytes"
	"cmp"
	"math"
	"slices"
	"strconv"

	"sluice/dataplane/jsonscan"
)

// logprobs parses a choice's log-probabilities. The format of completions is {"tokens",
// "token_logprobs", "top_logprobs"}, that of generate {"content":[{"token", "logprob",
// "top_logprobs"}]}. As the router requests it, engines write a token as "token_id:5"; generate
// of vLLM 0.32 has the number as token_id instead (GenerateLogProb).
func (c *converter) logprobs(raw []byte) {
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.IsKey("token_logprobs"):
			for v := jsonscan.Walk(it.Raw()); v.Next(); {
				c.current.logprobs = append(c.current.logprobs, tokenLogprob{prob: v.Raw()})
			}
		case it.IsKey("content"):
			for v := jsonscan.Walk(it.Raw()); v.Next(); {
				c.current.logprobs = append(c.current.logprobs, contentLogprob(v.Raw()))
			}
		}
	}
	tops, ok, _ := jsonscan.Find(raw, "top_logprobs")
	if !ok || tops.Kind != jsonscan.Array {
		return
	}
	i := 0
	for v := jsonscan.Walk(raw[tops.Start:tops.End]); v.Next() && i < len(c.current.logprobs); i++ {
		for m := jsonscan.Walk(v.Raw()); m.Next(); {
			top := topLogprob{prob: m.Raw()}
			top.id, top.token = tokenOf(jsonscan.AppendQuoted(nil, m.Key(nil)))
			c.current.logprobs[i].top = append(c.current.logprobs[i].top, top)
		}
		sortLikeliestFirst(c.current.logprobs[i].top)
	}
}

// contentLogprob parses an entry of content: a token's log-probability and those of its
// alternatives. The result refers to raw.
func contentLogprob(raw []byte) (l tokenLogprob) {
	for m := jsonscan.Walk(raw); m.Next(); {
		switch {
		case m.IsKey("logprob"):
			l.prob = m.Raw()
		case m.IsKey("top_logprobs"):
			for t := jsonscan.Walk(m.Raw()); t.Next(); {
				l.top = append(l.top, contentAlternative(t.Raw()))
			}
		}
	}
	sortLikeliestFirst(l.top)
	return l
}

// contentAlternative parses an entry of top_logprobs inside content. Its id is -1 if the entry names
// no token. The result refers to raw.
func contentAlternative(raw []byte) topLogprob {
	top := topLogprob{id: -1}
	for k := jsonscan.Walk(raw); k.Next(); {
		switch {
		case k.IsKey("token"):
			top.id, top.token = tokenOf(k.Raw())
		case k.IsKey("token_id"):
			top.id = int64(atoi(k.Raw()))
		case k.IsKey("logprob"):
			top.prob = k.Raw()
		}
	}
	return top
}

// sortLikeliestFirst sorts by descending probability: vLLM puts the sampled token first,
// whatever its probability.
func sortLikeliestFirst(top []topLogprob) {
	slices.SortStableFunc(top, func(a, b topLogprob) int { return cmp.Compare(likelihood(b), likelihood(a)) })
}

func likelihood(t topLogprob) float64 {
	v, err := strconv.ParseFloat(string(t.prob), 64)
	if err != nil {
		return math.Inf(-1)
	}
	return v
}

// tokenOf returns the id of a token written as "token_id:5", otherwise its text.
func tokenOf(raw []byte) (id int64, token []byte) {
	digits, ok := bytes.CutPrefix(raw, []byte(`"token_id:`))
	if ok && len(digits) > 1 {
		return int64(atoi(digits[:len(digits)-1])), nil
	}
	return -1, raw
}

// nativeLogprobs parses SGLang's log-probabilities, [[logprob, id, text or null], …], and the
// lists of alternatives in tops. The first skip entries were sent before; it uses the next n.
func (c *converter) nativeLogprobs(logs, tops []byte, skip, n int) {
	i := 0
	for v := jsonscan.Walk(logs); v.Next(); i++ {
		if i >= skip && i < skip+n {
			prob, _, _ := nativeLogprob(v.Raw())
			c.current.logprobs = append(c.current.logprobs, tokenLogprob{prob: prob})
		}
	}
	i = 0
	for v := jsonscan.Walk(tops); v.Next(); i++ {
		if i < skip || i-skip >= len(c.current.logprobs) {
			continue
		}
		for t := jsonscan.Walk(v.Raw()); t.Next(); {
			prob, id, token := nativeLogprob(t.Raw())
			c.current.logprobs[i-skip].top = append(c.current.logprobs[i-skip].top, topLogprob{id: id, token: token, prob: prob})
		}
	}
}

func nativeLogprob(raw []byte) (prob []byte, id int64, token []byte) {
	i := 0
	for it := jsonscan.Walk(raw); it.Next(); i++ {
		switch {
		case i == 0:
			prob = it.Raw()
		case i == 1:
			id = int64(atoi(it.Raw()))
		case i == 2 && it.Value.Kind == jsonscan.String:
			token = it.Raw()
		}
	}
	return prob, id, token
}
