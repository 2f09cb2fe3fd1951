package migration

import (
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
	"sluice/router/worker"
)

// Continuation is the state of a partial generation: prompt and output so far as token ids, and the
// limits on the rest. It is independent of the format in which the client received the output.
type Continuation struct {
	Tokens    []uint32 // prompt and output so far
	PromptLen int      // number of Tokens that are the client's prompt
	MaxOutput int      // the client's limit on the output; 0 if it set none
	MinOutput int      // the client's minimum of the output
}

// Remaining returns how many tokens may still follow and how many must. maxModelLen is the model's
// length in tokens, 0 if unknown; it or the default of kind applies if the client set no limit. ok
// is false if no token may follow or the limit is unknown.
func (c *Continuation) Remaining(kind front.Kind, maxModelLen int) (maxLeft, minLeft int, ok bool) {
	generated := len(c.Tokens) - c.PromptLen
	if maxLeft = c.MaxOutput - generated; c.MaxOutput == 0 {
		switch kind {
		case front.Completions:
			maxLeft = reqbody.DefaultMaxTokens - generated
		case front.NativeGenerate:
			maxLeft = reqbody.DefaultMaxNewTokens - generated
		default: // up to the model's length
			maxLeft = maxModelLen - len(c.Tokens)
		}
	}
	return maxLeft, max(c.MinOutput-generated, 0), maxLeft > 0
}

// endpoint returns the path of the endpoint that continues a request of a kind from token ids.
func (a *Template) endpoint(kind front.Kind) string {
	switch kind {
	case front.Generate:
		return "/inference/v1/generate"
	case front.NativeGenerate:
		return "/generate"
	}
	return reqbody.CompletionsPath
}

// complete returns the body of a resume request for the given continuations, with a minimum and a
// maximum of tokens for each. member is an additional member with a leading comma, or nil.
func (a *Template) complete(kind front.Kind, conts []Continuation, minTokens, maxTokens int, member []byte) []byte {
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

// MinModelLen returns the smallest known model length of ranks, 0 if none is known.
func MinModelLen(ranks []*worker.Rank) (n int) {
	for _, r := range ranks {
		if have := r.Worker.Info().MaxModelLen; have > 0 && (n == 0 || have < n) {
			n = have
		}
	}
	return n
}
