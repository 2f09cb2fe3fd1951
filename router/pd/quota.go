package pd

import (
	"bytes"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// bytesPerToken estimates the number of tokens if nothing counted them.
const bytesPerToken = 4

// backgroundOutput is the number of output tokens that a key is charged for a background response
// whose client sets no max_output_tokens.
const backgroundOutput = 4096

// reserveQuota reserves the prompt's tokens from the quota of the client's key before an engine
// computes them, so that concurrent requests cannot all use the same remaining tokens. It answers
// with an error and returns false if the quota is too low. commitQuota returns the unused tokens.
// For a background response it also reserves the output, because the engine answers before it
// computes; see adjustCharge.
func (q *request) reserveQuota() bool {
	principal := q.req.Principal
	if principal == nil {
		return true
	}
	if q.req.Endpoint.Kind == front.ResponsesAPI && q.req.Doc.Bool(jsonscan.KeyBackground) {
		if q.backgroundTokens = q.maxTokens; q.backgroundTokens == 0 {
			q.backgroundTokens = backgroundOutput
		}
	}
	tokens := q.promptTokens() + q.backgroundTokens
	if denied := principal.Reserve(tokens); denied != nil {
		principal.VisitLimitHeaders(q.x.SetHeader)
		q.refuse(denied.Reason, denied.Message, denied.RetryAfter)
		return false
	}
	q.reservedTokens = tokens
	return true
}

// promptTokens returns the length of all prompts of the request, as counted or estimated by the
// router.
func (q *request) promptTokens() int {
	switch {
	case q.prompt.Count > 0:
		return q.prompt.Count
	case q.req.Endpoint.Kind == front.Tokenize, q.req.Endpoint.Kind == front.Detokenize, q.req.Endpoint.Kind == front.CountTokens:
		return 0 // no engine computes a prompt
	}
	return len(q.req.Doc.Body) / bytesPerToken
}

// recordUsage charges the client's key for a complete response: the usage that the engine reported,
// else what the router counted.
func (q *request) recordUsage(use *relay.Usage, answer []byte) {
	if q.req.Principal == nil {
		return
	}
	prompt, output := use.Prompt, use.Completion
	if prompt < 0 {
		prompt = q.promptTokens()
	}
	switch {
	case q.backgroundTokens > 0 && output <= 0: // the response only says that it is queued
		output = q.backgroundTokens
		q.r.stored.charge(ownerOf(q.req.Principal), responseID(answer), prompt+output)
	case output < 0 && q.req.Endpoint.Disaggregable:
		output = estimateOutputTokens(answer, 0)
	}
	q.commitQuota(prompt + max(output, 0))
}

// adjustCharge corrects what a background response was charged, when its client reads it after it has
// ended. answer is the stored response. A response without usage stays charged as it was.
func (r *Runner) adjustCharge(principal front.Principal, id string, answer []byte) {
	if principal == nil {
		return
	}
	v, ok, err := jsonscan.Find(answer, "status")
	if err != nil || !ok || v.Kind != jsonscan.String {
		return
	}
	switch string(answer[v.Start+1 : v.End-1]) {
	case "completed", "incomplete", "failed", "cancelled":
	default:
		return
	}
	use := relay.UsageOf(answer)
	if use.Prompt < 0 || use.Completion < 0 {
		return
	}
	if charged := r.stored.removeCharge(ownerOf(principal), id); charged > 0 {
		principal.Adjust(charged, use.Prompt+use.Completion)
	}
}

// recordPrefillOnlyUsage charges the client's key for a prompt that was computed in order to be
// cached, and for the one token that engines generate with it.
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

// recordAbortedUsage charges the prompt of a request whose client disconnected before its response,
// or whose deadline passed, if an engine has received a leg.
func (q *request) recordAbortedUsage(reason front.Reason) {
	if q.legSent && (reason == front.ClientGone || reason == front.Deadline) {
		q.commitQuota(q.promptTokens() + q.backgroundTokens) // the engine continues a background response
	}
}

// commitQuota charges the given tokens instead of the reserved ones. Only the first call has an
// effect. A request that ends without such a call is charged nothing.
func (q *request) commitQuota(tokens int) {
	if q.quotaCommitted || q.x == nil {
		return
	}
	q.quotaCommitted = true
	if principal := q.req.Principal; principal != nil {
		principal.Commit(q.reservedTokens, tokens)
	}
}

// textMembers are the members that contain generated text, in all API formats.
var textMembers = [...]string{"text", "content", "reasoning", "reasoning_content", "refusal", "arguments", "thinking", "partial_json"}

// nestedMembers are the members that contain textMembers.
var nestedMembers = [...]string{"choices", "message", "output", "tool_calls", "function", "summary", "input"}

// estimateOutputTokens estimates the number of generated tokens in a response without usage: one
// per token id, or one per four bytes of text.
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
