package pd

import (
	"bytes"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// bytesPerToken estimates tokens where none were counted.
const bytesPerToken = 4

// backgroundOutput is the number of output tokens that a key is charged for a background
// response whose client sets no max_output_tokens.
const backgroundOutput = 4096

// reserveQuota reserves the prompt's tokens from the client's key before an engine computes
// them, so concurrent requests cannot all use the tokens that are left for one. It answers
// the request and returns false when the key has too few. commitQuota returns the unused
// tokens. For a background response it reserves the output too: the engine answers before
// it computes, and nothing later tells the router what it computed.
func (q *request) reserveQuota() bool {
	pass := q.x.Principal()
	if pass == nil {
		return true
	}
	if q.x.Endpoint.Kind == front.ResponsesAPI && q.x.Doc.Bool(jsonscan.KeyBackground) {
		if q.backgroundTokens = q.maxTokens; q.backgroundTokens == 0 {
			q.backgroundTokens = backgroundOutput
		}
	}
	tokens := q.promptTokens() + q.backgroundTokens
	if denied := pass.Reserve(tokens); denied != nil {
		pass.VisitLimitHeaders(q.x.SetHeader)
		q.refuse(denied.Reason, denied.Message, denied.RetryAfter)
		return false
	}
	q.reservedTokens = tokens
	return true
}

// promptTokens is the length of all prompts of the request, as the router counted or
// estimated it.
func (q *request) promptTokens() int {
	switch {
	case q.prompt.Count > 0:
		return q.prompt.Count
	case q.x.Endpoint.Kind == front.Tokenize, q.x.Endpoint.Kind == front.Detokenize, q.x.Endpoint.Kind == front.CountTokens:
		return 0 // nothing is computed
	}
	return len(q.x.Doc.Body) / bytesPerToken
}

// recordUsage charges the client's key for a whole answer: what the engine reported, else what
// the router counted.
func (q *request) recordUsage(use *relay.Usage, answer []byte) {
	if q.x.Principal() == nil {
		return
	}
	prompt, output := use.Prompt, use.Completion
	if prompt < 0 {
		prompt = q.promptTokens()
	}
	switch {
	case q.backgroundTokens > 0 && output <= 0: // the answer says that the response is queued
		output = q.backgroundTokens
	case output < 0 && q.x.Endpoint.Disaggregable:
		output = estimateOutputTokens(answer, 0)
	}
	q.commitQuota(prompt + max(output, 0))
}

// recordPrefillOnlyUsage charges a prompt that was computed to be cached, and the one token that
// engines generate with it.
func (q *request) recordPrefillOnlyUsage(use *relay.Usage) {
	prompt := *use
	if prompt.Completion < 0 {
		prompt.Completion = 1
	}
	if prompt.Prompt == 0 {
		prompt.Prompt = -1
	}
	q.recordUsage(&prompt, nil)
}

// recordAbortedUsage charges the prompt of a client that disconnected before its answer, or
// whose deadline passed, once an engine had a leg.
func (q *request) recordAbortedUsage(reason front.Reason) {
	if q.legSent && (reason == front.ClientGone || reason == front.Deadline) {
		q.commitQuota(q.promptTokens() + q.backgroundTokens) // the engine goes on with a background response
	}
}

// commitQuota charges tokens instead of those reserved. Only the first call has an effect. A
// request that ends without one is charged nothing.
func (q *request) commitQuota(tokens int) {
	if q.quotaCommitted || q.x == nil {
		return
	}
	q.quotaCommitted = true
	if pass := q.x.Principal(); pass != nil {
		pass.Commit(q.reservedTokens, tokens)
	}
}

// textMembers are the members that contain generated text, in all protocols.
var textMembers = [...]string{"text", "content", "reasoning", "reasoning_content", "refusal", "arguments", "thinking", "partial_json"}

// nestedMembers are the members that contain textMembers.
var nestedMembers = [...]string{"choices", "message", "output", "tool_calls", "function", "summary", "input"}

// estimateOutputTokens estimates the generated tokens of a whole answer without usage: it
// counts token ids, and one token per four bytes of text.
func estimateOutputTokens(answer []byte, depth int) (tokens int) {
	const deepest = 8 // choices, message, content, parts
	if depth > deepest {
		return 0
	}
	for it := jsonscan.Walk(answer); it.Next(); {
		raw := it.Raw()
		nests := it.Value.Kind == jsonscan.Array || it.Value.Kind == jsonscan.Object
		switch {
		case it.Value.KeyStart == 0: // an element of one of the members below
			if nests {
				tokens += estimateOutputTokens(raw, depth+1)
			}
		case it.Value.Kind == jsonscan.Array && (it.IsKey("token_ids") || it.IsKey("output_ids")):
			tokens += bytes.Count(raw, []byte{','}) + 1
		case nests && (isOneOf(&it, textMembers[:]) || isOneOf(&it, nestedMembers[:])):
			tokens += estimateOutputTokens(raw, depth+1)
		case it.Value.Kind == jsonscan.String && isOneOf(&it, textMembers[:]):
			tokens += (len(raw) - 2 + bytesPerToken - 1) / bytesPerToken
		}
	}
	return tokens
}

func isOneOf(it *jsonscan.Iter, names []string) bool {
	for _, name := range names {
		if it.IsKey(name) {
			return true
		}
	}
	return false
}
