package engineapi

import (
	"bytes"
	"cmp"
	"math"
	"slices"
	"strconv"

	"sluice/dataplane/jsonscan"
)

// logprobs reads a choice's log-probabilities: of completions {"tokens",
// "token_logprobs", "top_logprobs"}, of generate {"content":[{"token", "logprob",
// "top_logprobs"}]}. Asked for so, engines write a token as "token_id:5"; vLLM 0.32's
// generate has the number as token_id instead (GenerateLogProb).
func (c *converter) logprobs(raw []byte) {
	for it := jsonscan.Walk(raw); it.Next(); {
		switch {
		case it.IsKey("token_logprobs"):
			for v := jsonscan.Walk(it.Raw()); v.Next(); {
				c.current.logprobs = append(c.current.logprobs, tokenLogprob{prob: v.Raw()})
			}
		case it.IsKey("content"):
			for v := jsonscan.Walk(it.Raw()); v.Next(); {
				var l tokenLogprob
				for m := jsonscan.Walk(v.Raw()); m.Next(); {
					switch {
					case m.IsKey("logprob"):
						l.prob = m.Raw()
					case m.IsKey("top_logprobs"):
						for t := jsonscan.Walk(m.Raw()); t.Next(); {
							top := topLogprob{id: -1}
							for k := jsonscan.Walk(t.Raw()); k.Next(); {
								switch {
								case k.IsKey("token"):
									top.id, top.token = tokenOf(k.Raw())
								case k.IsKey("token_id"):
									top.id = int64(atoi(k.Raw()))
								case k.IsKey("logprob"):
									top.prob = k.Raw()
								}
							}
							l.top = append(l.top, top)
						}
					}
				}
				sortLikeliestFirst(l.top)
				c.current.logprobs = append(c.current.logprobs, l)
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

// sortLikeliestFirst puts the likeliest first: vLLM tells the token that was sampled before the
// others, wherever it stands among them.
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

// tokenOf reads a token's id where it is written as "token_id:5"; else its text.
func tokenOf(raw []byte) (id int64, token []byte) {
	digits, ok := bytes.CutPrefix(raw, []byte(`"token_id:`))
	if ok && len(digits) > 1 {
		return int64(atoi(digits[:len(digits)-1])), nil
	}
	return -1, raw
}

// nativeLogprobs reads SGLang's: [[logprob, id, text or null], …], of which the first
// skip were sent before, and the same in lists for the others.
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
