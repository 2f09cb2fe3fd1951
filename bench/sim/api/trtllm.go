package api

import "encoding/json"

// TRTLLMFormats are the generating endpoints of TensorRT-LLM.
var TRTLLMFormats = map[string]func(*Response) Format{
	"/v1/chat/completions": newChatFormat,
	"/v1/completions":      newCompletionFormat,
}

// trtllmMembers are the members that /v1/completions accepts (CompletionRequest of
// serve/openai_protocol.py); a request with any other member is rejected.
var trtllmMembers = map[string]bool{}

func init() {
	for _, name := range []string{
		"model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options",
		"suffix", "temperature", "top_p", "user", "lora_request", "prompt_ignore_length", "use_beam_search", "top_k", "top_p_min", "min_p", "repetition_penalty", "length_penalty",
		"early_stopping", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
		"truncate_prompt_tokens", "return_context_logits", "detokenize", "thinking_token_budget", "add_special_tokens", "response_format", "disaggregated_params", "priority",
		"conversation_params",
	} {
		trtllmMembers[name] = true
	}
}

// ReadTRTLLMBody parses a request; for completions the token ids replace the text.
func ReadTRTLLMBody(path string, raw []byte) (*Body, error) {
	b, err := ReadBody(raw)
	if err != nil || path != "/v1/completions" {
		return b, err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return b, Refuse(400, "", "%s", err)
	}
	for name := range members {
		if !trtllmMembers[name] {
			return b, Refuse(400, "", "[{'type': 'extra_forbidden', 'loc': ('body', '%s'), 'msg': 'Extra inputs are not permitted'}]", name)
		}
	}
	b.ReturnIDs = string(members["detokenize"]) == "false"
	return b, nil
}
