package pd

import (
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// nativeDefault is what SGLang's /generate takes when max_new_tokens is not given.
const nativeDefault = 128

// Continuation is what is left of a generation: the prompt and what has been made of
// it, as token ids, and how much more may come. Ids alone say where another engine
// begins; how a client was told them is not its affair.
type Continuation struct {
	Tokens    []uint32 // prompt and output so far
	PromptLen int      // how many of them are the client's prompt
	MaxOutput int      // the client's limit on the output; 0: it gave none
	MinOutput int      // and its minimum
}

// Remaining is how many tokens may and must still come: of a rank whose model takes
// maxModelLen tokens (0 unknown), where kind's limit counts without one given. ok is
// false when none may, or it cannot be known how many.
func (c *Continuation) Remaining(kind front.Kind, maxModelLen int) (maxLeft, minLeft int, ok bool) {
	generated := len(c.Tokens) - c.PromptLen
	if maxLeft = c.MaxOutput - generated; c.MaxOutput == 0 {
		switch kind {
		case front.Completions:
			maxLeft = completionsDefault - generated
		case front.NativeGenerate:
			maxLeft = nativeDefault - generated
		default: // on to the end of the model's length
			maxLeft = maxModelLen - len(c.Tokens)
		}
	}
	return maxLeft, max(c.MinOutput-generated, 0), maxLeft > 0
}

// endpoint is the endpoint at which another engine is asked to go on with a request of
// a kind: with token ids as the prompt.
func (a *resumeTemplate) endpoint(kind front.Kind) string {
	switch kind {
	case front.Generate:
		return "/inference/v1/generate"
	case front.NativeGenerate:
		return "/generate"
	}
	return completionsPath
}

// complete makes the body that another engine is asked with, for at least and at most so
// many tokens of each of conts, with a member more: nil, or behind a comma.
func (a *resumeTemplate) complete(kind front.Kind, conts []Continuation, minTokens, maxTokens int, member []byte) []byte {
	size := len(a.body) + len(a.sampling) + len(member) + 128
	for i := range conts {
		size += 8 * len(conts[i].Tokens)
	}
	body := append(make([]byte, 0, size), a.body...)
	prompt, limit, minimum := "prompt", "max_tokens", "min_tokens"
	switch kind {
	case front.Generate:
		prompt = "token_ids"
	case front.NativeGenerate:
		prompt, limit, minimum = "input_ids", "max_new_tokens", "min_new_tokens"
	}
	if len(body) > 1 {
		body = append(body, ',')
	}
	body = append(append(append(body, '"'), prompt...), `":`...)
	if len(conts) > 1 {
		body = append(body, '[')
		for i := range conts {
			if i > 0 {
				body = append(body, ',')
			}
			body = jsonscan.AppendTokenIDs(body, conts[i].Tokens)
		}
		body = append(body, ']')
	} else {
		body = jsonscan.AppendTokenIDs(body, conts[0].Tokens)
	}
	inside := kind == front.Generate || kind == front.NativeGenerate
	if body = append(body, ','); inside {
		body = append(body, `"sampling_params":{`...)
	}
	body = append(append(append(body, '"'), limit...), `":`...)
	body = strconv.AppendInt(body, int64(maxTokens), 10)
	if minTokens > 0 {
		body = append(append(append(body, `,"`...), minimum...), `":`...)
		body = strconv.AppendInt(body, int64(minTokens), 10)
	}
	if inside {
		body = append(append(body, a.sampling...), '}')
	}
	return append(append(body, member...), '}')
}

// minModelLen is the least known model length of ranks, 0 when none is known.
func minModelLen(ranks []*worker.Rank) (n int) {
	for _, r := range ranks {
		if have := r.Worker.Info().MaxModelLen; have > 0 && (n == 0 || have < n) {
			n = have
		}
	}
	return n
}
