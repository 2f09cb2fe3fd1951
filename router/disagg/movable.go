package disagg

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// Bounds of what is kept of a request for the case that its stream must go on
// elsewhere.
const (
	maxMovableBody = 1 << 20  // bytes of the client's body: its prompt's ids come back in one event
	maxMovableRest = 16 << 10 // without prompt, messages and tools
)

// movable is what a request is asked again with by another engine: a completions
// body but for prompt and limits, which are added then. why is one word for what
// keeps a stream from going on, "" when nothing does; the words stand in
// docs/migration.md.
func movable(doc *jsonscan.Doc, kind front.Kind, allow []string) (body []byte, why string) {
	switch {
	case kind != front.Chat && kind != front.Completions:
		return nil, "endpoint"
	case len(doc.Body) > maxMovableBody:
		return nil, "too_long"
	case several(doc.Raw(jsonscan.KeyN)) || several(doc.Raw(jsonscan.KeyBestOf)):
		return nil, "many_choices"
	case doc.Bool(jsonscan.KeyUseBeamSearch):
		return nil, "beam_search"
	case kind == front.Completions && batched(doc.Raw(jsonscan.KeyPrompt)):
		return nil, "batch_prompt"
	}
	if kind == front.Chat {
		if tools := doc.Raw(jsonscan.KeyTools); isSet(tools) && string(doc.Raw(jsonscan.KeyToolChoice)) != `"none"` {
			return nil, "tools"
		}
		for it := jsonscan.Walk(doc.Raw(jsonscan.KeyChatTemplateKwargs)); it.Next(); {
			if (it.IsKey("enable_thinking") || it.IsKey("thinking")) && isSet(it.Raw()) {
				return nil, "reasoning"
			}
		}
		if holdsMedia(doc) {
			return nil, "media"
		}
	}
	rest := doc.Edited(nil,
		jsonscan.Edit{Key: jsonscan.KeyMessages, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyPrompt, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyTools, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyToolChoice, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyChatTemplate, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyChatTemplateKwargs, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyMaxTokens, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyMaxCompletionTokens, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyMinTokens, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyMinCompletionTokens, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyReturnTokenIDs, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyAddSpecialTokens, Op: jsonscan.Remove},
	)
	if len(rest) > maxMovableRest {
		return nil, "too_long"
	}
	body = append(make([]byte, 0, len(rest)+len(`{"return_token_ids":true`)), `{"return_token_ids":true`...)
	var room [64]byte
	seeded, greedy := false, false
	for it := jsonscan.Walk(rest); it.Next(); {
		raw := it.Raw()
		key := memberName(room[:0], rest, it.Value.KeyStart)
		switch what := stateful(string(key), raw); what {
		case "":
		case "chat_only":
			continue
		case "seed":
			seeded = true
		default:
			if !slices.Contains(allow, what) {
				return nil, what
			}
		}
		if string(key) == "temperature" {
			t, err := strconv.ParseFloat(string(raw), 64)
			greedy = err == nil && t == 0
		}
		if bytes.ContainsAny(key, "\"\\\n") {
			continue // no member that an engine knows
		}
		body = append(append(append(body, `,"`...), key...), `":`...)
		body = append(body, raw...)
	}
	if seeded && !greedy && !slices.Contains(allow, "seed") {
		return nil, "seed" // an engine draws from the seed's beginning, not from where another stood
	}
	return body, ""
}

// stateful says in one word what a member asks an engine to keep that another
// engine, given prompt and output as a prompt, does not know; "" when nothing.
func stateful(key string, raw []byte) string {
	switch key {
	case "messages", "documents", "add_generation_prompt", "continue_final_message", "parallel_tool_calls",
		"include_reasoning", "mm_processor_kwargs", "media_io_kwargs", "chat_template", "chat_template_kwargs":
		return "chat_only"
	case "prompt_logprobs": // 0 asks for something
		if isSet(raw) || string(raw) == "0" {
			return "logprobs"
		}
		return ""
	case "logprobs":
		if isSet(raw) || string(raw) == "0" {
			return "logprobs"
		}
		return "chat_only" // false is no value of completions
	case "top_logprobs":
		return "chat_only"
	}
	if !isSet(raw) {
		if key == "seed" && string(raw) == "0" {
			return "seed"
		}
		return ""
	}
	switch key {
	case "seed":
		return "seed"
	case "stop":
		return "stop"
	case "presence_penalty", "frequency_penalty":
		return "penalties"
	case "bad_words":
		return "bad_words"
	case "echo", "suffix":
		return "echo"
	case "reasoning_effort", "thinking", "thinking_token_budget":
		return "reasoning"
	case "structured_outputs", "json_schema", "regex", "ebnf":
		return "structured"
	case "response_format":
		if kind, ok, _ := jsonscan.Find(raw, "type"); !ok || string(raw[kind.Start:kind.End]) != `"text"` {
			return "structured"
		}
	case "logits_processors", "vllm_xargs", "custom_logit_processor":
		return "processors"
	case "truncate_prompt_tokens", "prompt_embeds":
		return "prompt"
	}
	if strings.HasPrefix(key, "guided_") {
		return "structured"
	}
	return ""
}

// givesIDs says whether a rank's engine is known to tell token ids when asked.
func givesIDs(r *worker.Rank) bool {
	return r.Worker.Info().Engine == "vllm" && atLeast(r, 0, 10, 2)
}
