package family

import (
	"bytes"
	"fmt"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/router/pd/reqbody"
)

// trtllm is TensorRT-LLM's context-first hand-over. A context server computes the prompt and one
// token and returns disaggregated_params in its first choice. A generation server receives these
// params and the prompt's token ids from the context server, and streams the response from the
// first token on. The transceiver state in the params is opaque and passes unchanged.
type trtllm struct{}

var (
	contextOnly    = []byte(`{"request_type":"context_only"}`)
	generationOnly = []byte(`"generation_only"`)
)

// Name implements Family.
func (trtllm) Name() string { return "trtllm" }

// Traits implements Family. The context server's configuration limits how long it keeps the KV, so
// the router treats that time as a lease.
func (trtllm) Traits() Traits { return Traits{Kinds: kindsOf(front.Chat, front.Completions)} }

// Order implements Family.
func (trtllm) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family. Current servers generate one token for a context_only request on their
// own; older ones need the limit.
func (trtllm) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	if n, ok := p.Doc.Int(jsonscan.KeyMinTokens); ok && n > 0 {
		leg.Set(jsonscan.KeyMinTokens, jsonOne) // without a minimum the first token could end the response
	}
	leg.limitToOneToken(p)
	leg.Set(jsonscan.KeyDisaggregatedParams, contextOnly)
}

// Handle implements Family. The handle is the first choice's disaggregated_params. A finish reason
// other than the length limit means that the first token was the last, or that the engine failed.
func (trtllm) Handle(p *Handover, body []byte) ([]byte, error) {
	choice, ids, err := firstChoice(body, "prompt_token_ids")
	if err != nil {
		return nil, err
	}
	var of [2]jsonscan.Value
	jsonscan.Members(choice, of[:], "finish_reason", "disaggregated_params")
	if end := of[0]; end.Kind == jsonscan.String {
		reason := choice[end.Start:end.End]
		if err := checkFinish(reason); err != nil {
			return nil, err
		}
		switch string(reason) {
		case `"length"`, `"not_finished"`:
		default:
			return nil, ErrFinal
		}
	}
	v := of[1]
	if v.Kind != jsonscan.Object {
		return nil, fmt.Errorf("%w: choices[0].disaggregated_params is missing or null", ErrIncompleteHandle)
	}
	params := choice[v.Start:v.End]
	var in [3]jsonscan.Value
	jsonscan.Members(params, in[:], "ctx_request_id", "first_gen_tokens", "request_type")
	if in[0].Kind <= jsonscan.Null {
		return nil, fmt.Errorf("%w: ctx_request_id is missing or null", ErrIncompleteHandle)
	}
	if id := params[in[0].Start:in[0].End]; !isInteger(in[0].Kind, id) {
		return nil, fmt.Errorf("%w: ctx_request_id is %.64s, want an integer", ErrIncompleteHandle, id)
	}
	tokens := in[1]
	if tokens.Kind != jsonscan.Array || !areNumbers(params[tokens.Start:tokens.End]) {
		return nil, fmt.Errorf("%w: first_gen_tokens is missing or empty", ErrIncompleteHandle)
	}
	p.handleMembers = handleMembers{parsed: true, kind: in[2]}
	if ids.Kind == jsonscan.Array {
		p.promptIDs = body[ids.Start:ids.End]
	}
	return params, nil
}

// isInteger reports whether a JSON value is an integer. Context servers also use negative ids.
func isInteger(kind jsonscan.Kind, raw []byte) bool {
	_, ok := integer(kind, bytes.TrimPrefix(raw, []byte{'-'}))
	return ok
}

// areNumbers reports whether an array is not empty and all its elements are numbers.
func areNumbers(array []byte) bool {
	it, n := jsonscan.Walk(array), 0
	for ; it.Next(); n++ {
		if it.Value.Kind != jsonscan.Number {
			return false
		}
	}
	return n > 0
}

// firstChoice returns choices[0] of a response and the position of the top-level member named
// member. choice borrows from body.
func firstChoice(body []byte, member string) (choice []byte, other jsonscan.Value, err error) {
	v, other, err := jsonscan.FindTwo(body, "choices", member)
	if err != nil {
		return nil, other, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if it := jsonscan.Walk(body[v.Start:v.End]); it.Next() && it.Value.Kind == jsonscan.Object {
		return it.Raw(), other, nil
	}
	return nil, other, fmt.Errorf("%w: the prefill response has no choice", ErrIncompleteHandle)
}

// Decode implements Family.
func (trtllm) Decode(leg *LegRequest, p *Handover) {
	leg.Set(jsonscan.KeyDisaggregatedParams, leg.Render(func(dst []byte) []byte { return asGenerationOnly(dst, p) }))
	if p.promptIDs == nil {
		return // An older context server returns no ids, so the generation server tokenizes the prompt again.
	}
	key := jsonscan.KeyPromptTokenIDs
	if p.Kind == front.Completions {
		key = jsonscan.KeyPrompt
	}
	leg.Set(key, p.promptIDs)
}

// asGenerationOnly appends the context server's params with request_type set to generation_only.
func asGenerationOnly(dst []byte, p *Handover) []byte {
	params := p.Handle
	if v := p.handleMembers.kind; v.Kind != jsonscan.Absent {
		dst = append(append(dst, params[:v.Start]...), generationOnly...)
		return append(dst, params[v.End:]...)
	}
	dst = append(append(dst, `{"request_type":`...), generationOnly...)
	return append(append(dst, ','), params[1:]...) // params is not empty: Handle requires two members
}

// Body implements AnswerRewriter.
func (trtllm) Body(dst []byte, _ *Handover, body []byte) []byte {
	return redact.Append(dst, body)
}

// Events implements AnswerRewriter.
func (trtllm) Events(*Handover) sse.Rewriter { return redact.Rewriter{} }

// Final implements FinalAnswerer.
func (trtllm) Final(dst []byte, p *Handover, body []byte) []byte {
	return apiformat.AppendEvents(dst, redact.Append(nil, body), reqbody.WantsUsage(p.Doc))
}
