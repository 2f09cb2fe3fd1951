package migration

import (
	"strings"

	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
)

// statefulMember returns one word for the engine state that a member requires and that a second
// engine, which gets prompt and output as its prompt, does not have. It returns "" if there is no
// such state.
func (m *templateBuilder) statefulMember(key string, raw []byte) string {
	switch key {
	case "prompt_logprobs", "logprobs": // 0 also requests log-probabilities
		if reqbody.IsSet(raw) || string(raw) == "0" {
			return key
		}
		return ""
	}
	if !reqbody.IsSet(raw) {
		if (key == "seed" || key == "sampling_seed") && string(raw) == "0" {
			return "seed"
		}
		return ""
	}
	switch key {
	case "seed", "sampling_seed":
		return "seed"
	case "stop", "stop_sequences", "stop_regex":
		return "stop"
	case "presence_penalty", "frequency_penalty":
		return "penalties"
	case "bad_words", "bad_words_token_ids":
		return "bad_words"
	case "echo", "suffix":
		return "echo"
	case "reasoning_effort", "thinking_token_budget", "reasoning", "reasoning_ended", "reasoning_parser_kwargs", "parse_context":
		return "reasoning"
	case "thinking":
		if kind, ok, _ := jsonscan.Find(raw, "type"); ok && string(raw[kind.Start:kind.End]) == `"disabled"` {
			return ""
		}
		return "reasoning"
	case "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag":
		return "structured"
	case "response_format":
		if kind, ok, _ := jsonscan.Find(raw, "type"); !ok || string(raw[kind.Start:kind.End]) != `"text"` {
			return "structured"
		}
	case "output_config":
		if v, ok, _ := jsonscan.Find(raw, "format"); ok && v.Kind > jsonscan.Null && reqbody.CountElements(raw) == 1 {
			return "structured"
		}
		return "reasoning"
	case "output_mode":
		if string(raw) == `"derender"` {
			return "reasoning"
		}
	case "logits_processors", "vllm_xargs", "custom_logit_processor", "extra_args", "custom_params":
		return "processors"
	case "truncate_prompt_tokens", "prompt_embeds", "input_embeds", "previous_response_id", "previous_input_messages", "prompt", "session_params", "background":
		return "prompt"
	case "mcp_servers":
		return "tools"
	case "features", "content_parts", "image_data", "audio_data", "video_data", "modalities":
		return "media"
	case "include", "top_logprobs", "return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob":
		return "logprobs"
	case "return_hidden_states", "prompt_logprob_token_ids":
		return "prompt_logprobs"
	}
	if strings.HasPrefix(key, "guided_") && key != "guided_decoding_backend" {
		return "structured"
	}
	return ""
}

// formatOf returns "structured" if the text member of a Responses request sets a grammar, else "".
func formatOf(text []byte) string {
	format, ok, err := jsonscan.Find(text, "format")
	if err != nil || !ok || format.Kind != jsonscan.Object {
		return ""
	}
	raw := text[format.Start:format.End]
	if kind, ok, _ := jsonscan.Find(raw, "type"); !ok || string(raw[kind.Start:kind.End]) != `"text"` {
		return "structured"
	}
	return ""
}

// statefulChat returns one word for what makes a parser in the engine keep state about a chat, or
// "".
func statefulChat(doc *jsonscan.Doc) string {
	if tools := doc.Raw(jsonscan.KeyTools); reqbody.IsSet(tools) && string(doc.Raw(jsonscan.KeyToolChoice)) != `"none"` {
		return "tools"
	}
	for it := jsonscan.Walk(doc.Raw(jsonscan.KeyChatTemplateKwargs)); it.Next(); {
		if (it.IsKey("enable_thinking") || it.IsKey("thinking")) && reqbody.IsSet(it.Raw()) {
			return "reasoning"
		}
	}
	if reqbody.HasMedia(doc) {
		return "media"
	}
	return ""
}
