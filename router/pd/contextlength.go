package pd

import (
	"strconv"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"sluice/router/fleet"
	"sluice/router/pd/reqbody"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// checkContextLength answers a request that asks for more tokens, or whose prompt has more, than any
// of its ranks' context lengths allow, with the words of the engine. It returns true if it has
// answered.
//
// It knows the checks of vLLM 0.32 (renderers/params.py, TokenizeParams) and leaves other engines and
// releases to themselves, and so every prompt whose length is not certain: several prompts,
// truncation, ids that have not been compared with the engine's. Engines with ids of their own
// (tokenize.FromEngine) have refused such a prompt when they were asked for them.
func (q *request) checkContextLength() bool {
	switch q.req.Endpoint.Kind {
	case front.Chat, front.Completions, front.ResponsesAPI, front.Messages:
	default:
		return false
	}
	doc, p := &q.req.Doc, &q.prompt
	param, maxTokens := maxTokensMember(q.req.Endpoint.Kind, doc)
	n := len(p.Tokens)
	limit := q.contextLength(max(int64(n), maxTokens))
	if limit == 0 {
		return false
	}
	if maxTokens > int64(limit) {
		q.refuseLength(param, maxTokens, param+"="+strconv.FormatInt(maxTokens, 10)+" cannot be greater than max_model_len="+strconv.Itoa(limit)+". Please request fewer output tokens.")
		return true
	}
	if n != p.Count || len(q.media) > 0 || reqbody.Member(doc, "truncate_prompt_tokens") != nil {
		return false
	}
	switch {
	case p.Source == tokenize.FromRequest:
	case p.Source == tokenize.FromNative && p.Verified && p.TextBytes <= limit*p.LongestToken:
		n = limit + 1 // the server's tokenizer stops there
	default: // a longer text is refused by its number of characters
		return false
	}
	atLeast := ""
	if n == limit+1 {
		atLeast = "at least "
	}
	q.refuseLength("input_tokens", int64(n), "This model's maximum context length is "+strconv.Itoa(limit)+" tokens. However, your prompt contains "+atLeast+strconv.Itoa(n)+
		" input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.")
	return true
}

// contextLength returns the longest context of the ranks that may run the request, in tokens, if it
// is shorter than tokens; 0 if it is not, or if a rank's is unknown or that of another engine.
func (q *request) contextLength(tokens int64) (longest int) {
	for _, ranks := range [...][]*worker.Rank{q.plan.Whole, q.plan.Prefill, q.plan.Decode} {
		for _, r := range ranks {
			info := r.Worker.Info()
			if int64(info.MaxModelLen) >= tokens || info.MaxModelLen == 0 || info.Engine != fleet.VLLM || !worker.VersionAtLeast(info.Version, 0, 32, 0) {
				return 0
			}
			longest = max(longest, info.MaxModelLen)
		}
	}
	return longest
}

// Contexts returns the shortest and the longest context of the ranks that may run the request, in
// tokens; 0 if one is unknown.
func (q *request) Contexts() (shortest, longest int) {
	for _, ranks := range [...][]*worker.Rank{q.plan.Whole, q.plan.Prefill, q.plan.Decode} {
		for _, r := range ranks {
			n := r.Worker.Info().MaxModelLen
			if n == 0 {
				return 0, 0
			}
			if shortest == 0 || n < shortest {
				shortest = n
			}
			longest = max(longest, n)
		}
	}
	return shortest, longest
}

// maxTokensMember returns the member that bounds the output, by the name in the engine's errors, and
// its value.
func maxTokensMember(kind front.Kind, doc *jsonscan.Doc) (name string, n int64) {
	switch kind {
	case front.ResponsesAPI:
		n, _ = doc.Int(jsonscan.KeyMaxOutputTokens)
		return "max_output_tokens", n
	case front.Messages: // the server fills in both members of a chat request
		n, _ = doc.Int(jsonscan.KeyMaxTokens)
		return "max_completion_tokens", n
	case front.Chat:
		if doc.Has(jsonscan.KeyMaxCompletionTokens) {
			n, _ = doc.Int(jsonscan.KeyMaxCompletionTokens)
			return "max_completion_tokens", n
		}
	}
	n, _ = doc.Int(jsonscan.KeyMaxTokens)
	return "max_tokens", n
}

// refuseLength answers as vLLM does when one of its checks of a request fails.
func (q *request) refuseLength(param string, value int64, message string) {
	message += " (parameter=" + param + ", value=" + strconv.FormatInt(value, 10) + ")"
	var body []byte
	if q.req.Endpoint.Protocol == sse.Anthropic {
		body = append(body, `{"type":"error","error":{"type":"BadRequestError","message":`...)
		body = jsonscan.AppendQuoted(body, []byte(message))
		body = append(body, `}}`...)
	} else {
		body = append(body, `{"error":{"message":`...)
		body = jsonscan.AppendQuoted(body, []byte(message))
		body = append(body, `,"type":"BadRequestError","param":"`+param+`","code":400}}`...)
	}
	q.x.ReplyRefusal(front.ContextLength, body)
	q.endExplain(schedule.Outcome{Status: front.ContextLength.Status(), Reason: string(front.ContextLength), CachedTokens: -1, Total: time.Since(q.req.Received)})
}
