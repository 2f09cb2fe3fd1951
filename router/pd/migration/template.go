package migration

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
	"sluice/router/pd/reqbody"
)

// Bounds of the request data that the router keeps for a migration.
const (
	maxMigratableBody = 1 << 20  // bytes of the client's body: its prompt's ids arrive in one event
	maxTemplateBody   = 16 << 10 // bytes without prompt, messages and tools
)

// Template is the request to the next engine without the prompt and the token limits, which
// continuation.go adds: a body without its closing brace, and the members of sampling_params, if
// any, each with a leading comma.
type Template struct {
	body, sampling []byte
	minTokens      int            // min_tokens
	choices        int            // n
	logprobs       bool           // the response has log-probabilities
	topLogprobs    int            // number of alternatives per token in a chat
	choice         *choiceGrammar // the response is one of its texts; nil without such a grammar
	unconstrained  bool           // the resume request carries no grammar although the client set one
}

// maxChoices bounds n of a request whose stream may migrate: each choice becomes a prompt of its
// own.
const maxChoices = 32

// newTemplate builds the resume template of a request. reason is one word that says why the
// stream cannot migrate, "" if it can; docs/migration.md lists the words. returnsTokenIDs says that
// the body itself makes the engine return token ids.
func newTemplate(doc *jsonscan.Doc, kind front.Kind, policy *config.Migration, returnsTokenIDs bool) (a Template, reason string) {
	if len(doc.Body) > maxMigratableBody {
		return a, "too_long"
	}
	m := templateBuilder{kind: kind, allow: policy.Allow, structured: policy.Structured}
	if reason = reqbody.SeveralSequences(kind, doc); reason != "" && !(reason == "multiple_choices" && m.mayMigrateChoices(doc)) {
		return a, reason
	}
	if kind == front.NativeGenerate && (reqbody.IsPromptList(doc.Raw(jsonscan.KeyInputIDs)) || reqbody.IsPromptList(doc.Raw(jsonscan.KeyText))) {
		return a, "batch_prompt"
	}
	switch kind {
	case front.Chat:
		if reason = statefulChat(doc); reason != "" {
			return a, reason
		}
		m.body = append(m.body, `{"return_token_ids":true`...)
	case front.Completions:
		if m.body = append(m.body, '{'); !returnsTokenIDs {
			m.body = append(m.body, `"return_token_ids":true`...)
		}
	case front.Messages, front.ResponsesAPI:
		if reason = statefulChat(doc); reason != "" {
			return a, reason
		}
		m.body = append(m.body, `{"return_token_ids":true,"stream_options":{"include_usage":true}`...)
	case front.Generate, front.NativeGenerate:
		m.body = append(m.body, '{')
	default:
		return a, "endpoint"
	}
	kept := doc.Edited(nil,
		jsonscan.Edit{Key: jsonscan.KeyMessages, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyPrompt, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyInput, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeySystem, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyInstructions, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyTokenIDs, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyText, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyInputIDs, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyTools, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyToolChoice, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyChatTemplate, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyChatTemplateKwargs, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyMaxTokens, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyMaxCompletionTokens, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyMaxOutputTokens, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyMinTokens, Op: jsonscan.Remove}, jsonscan.Edit{Key: jsonscan.KeyMinCompletionTokens, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyAddSpecialTokens, Op: jsonscan.Remove},
	)
	if kind == front.ResponsesAPI && doc.Has(jsonscan.KeyText) && formatOf(doc.Raw(jsonscan.KeyText)) != "" {
		// Here text is not a prompt but the format of the response.
		if reason = m.addGrammar("text", doc.Raw(jsonscan.KeyText)); reason != "" {
			return a, reason
		}
	}
	if len(kept) > maxTemplateBody {
		return a, "too_long"
	}
	if n, ok := doc.Int(jsonscan.KeyMinTokens); ok {
		m.minTokens = int(min(max(n, 0), 1<<24))
	}
	if reason = m.copyMembers(kept, &m.body); reason != "" {
		return a, reason
	}
	if m.seeded && !m.greedy && !slices.Contains(m.allow, "seed") {
		return a, "seed" // a second engine starts the seed's random sequence at its beginning
	}
	if kind == front.Chat && m.logprobs {
		if m.tokensAsIDs {
			return a, "logprobs" // chat reports a token's bytes beside its id, completions does not
		}
		m.body = strconv.AppendInt(append(m.body, `,"logprobs":`...), int64(m.topLogprobs), 10)
		if m.namedLogprobTokens || m.topLogprobs < 0 {
			m.topLogprobs = math.MaxInt
		}
	}
	return m.Template, ""
}

// mayMigrateChoices reports whether a request for several choices may migrate: the configuration
// allows it, and a second engine can continue each choice as a prompt of its own.
func (m *templateBuilder) mayMigrateChoices(doc *jsonscan.Doc) bool {
	n, ok := doc.Int(jsonscan.KeyN)
	if !ok || n < 2 || n > maxChoices || m.kind != front.Chat && m.kind != front.Completions ||
		reqbody.WantsSeveral(doc.Raw(jsonscan.KeyBestOf)) || doc.Bool(jsonscan.KeyUseBeamSearch) || !slices.Contains(m.allow, "multiple_choices") {
		return false
	}
	m.choices = int(n)
	return true
}

// templateBuilder collects the members of a resume template.
type templateBuilder struct {
	Template
	kind               front.Kind
	allow              []string
	structured         string // migration.structured
	seeded, greedy     bool
	tokensAsIDs        bool // the engine reports tokens by id instead of text
	namedLogprobTokens bool // the client named the tokens whose scores it wants
	inSampling         bool // copyMembers is inside sampling_params
}

// copyMembers copies the members of object that affect the rest of the response. reason names a
// member that a second engine could not honour.
func (m *templateBuilder) copyMembers(object []byte, dst *[]byte) (reason string) {
	var buf [64]byte
	for it := jsonscan.Walk(object); it.Next(); {
		raw := it.Raw()
		key := reqbody.MemberName(buf[:0], object, it.Value.KeyStart)
		if bytes.ContainsAny(key, "\"\\\n") {
			continue // engines know no such member
		}
		name := string(key)
		if m.skipMember(name, raw) {
			continue
		}
		if name == "sampling_params" && m.kind != front.Chat && m.kind != front.Completions {
			if it.Value.Kind != jsonscan.Object {
				if reqbody.IsSet(raw) {
					return "batch_prompt" // a list has one entry per prompt
				}
				continue
			}
			m.inSampling = true
			if reason = m.copyMembers(raw, &m.sampling); reason != "" {
				return reason
			}
			m.inSampling = false
			continue
		}
		switch what := m.statefulMember(name, raw); what {
		case "":
		case "seed":
			m.seeded = true
		case "structured":
			if reason = m.addGrammar(name, raw); reason != "" {
				return reason
			}
			continue
		case "logprobs":
			if !m.mayMigrateLogprobs() {
				return what
			}
			if m.logprobs = true; m.kind == front.Chat {
				continue // completions takes a number instead
			}
		default:
			if !slices.Contains(m.allow, what) {
				return what
			}
		}
		if name == "temperature" {
			t, err := strconv.ParseFloat(string(raw), 64)
			m.greedy = err == nil && t == 0
		}
		if m.kind == front.Messages && name == "stop_sequences" {
			name = "stop"
		}
		if len(*dst) != 1 { // dst holds more than the opening brace
			*dst = append(*dst, ',')
		}
		*dst = append(append(append(*dst, '"'), name...), `":`...)
		*dst = append(*dst, raw...)
	}
	return ""
}

// mayMigrateLogprobs reports whether a stream with log-probabilities may migrate. SGLang's
// /generate repeats all of them in every event, and Responses repeats them at the end; those
// cannot.
func (m *templateBuilder) mayMigrateLogprobs() bool {
	return (m.kind == front.Chat || m.kind == front.Completions || m.kind == front.Generate) && slices.Contains(m.allow, "logprobs")
}

// skipMember reports whether a member has no effect on the rest of the response or is set by the
// router itself.
func (m *templateBuilder) skipMember(key string, raw []byte) bool {
	switch {
	case key == "n" && m.choices > 1:
		return true // each choice becomes a prompt
	case key == "logprob_token_ids":
		m.namedLogprobTokens = reqbody.IsSet(raw)
	case key == "return_tokens_as_token_ids":
		m.tokensAsIDs = reqbody.IsSet(raw)
	}
	switch m.kind {
	case front.Chat:
		switch key {
		case "return_token_ids", "documents", "add_generation_prompt", "continue_final_message", "parallel_tool_calls",
			"include_reasoning", "mm_processor_kwargs", "media_io_kwargs":
			return true
		case "top_logprobs":
			m.topLogprobs, _ = strconv.Atoi(string(raw))
			return true
		case "logprobs": // completions does not accept false
			return !reqbody.IsSet(raw) && string(raw) != "0"
		}
	case front.Completions:
		return key == "return_token_ids"
	case front.Messages:
		switch key {
		case "metadata", "service_tier", "return_token_ids", "stream_options", "container", "betas":
			return true
		}
	case front.ResponsesAPI:
		switch key {
		case "metadata", "service_tier", "store", "user", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
			"max_tool_calls", "return_token_ids", "stream_options", "include_reasoning", "enable_response_messages", "request_id", "session_id":
			return true
		case "truncation": // completions has no such member
			return string(raw) == `"disabled"` || string(raw) == `"auto"`
		case "include", "top_logprobs":
			return !bytes.Contains(raw, []byte("logprobs")) && (key == "include" || !reqbody.IsSet(raw))
		}
	case front.Generate:
		switch key {
		case "max_tokens", "request_id":
			return true
		case "min_tokens":
			if m.inSampling {
				m.minTokens = parseCount(raw)
			}
			return true
		case "return_token_ids": // the engine always returns them
			return true
		}
	case front.NativeGenerate:
		switch key {
		case "max_new_tokens", "rid":
			return true
		case "min_new_tokens":
			m.minTokens = parseCount(raw)
			return true
		}
	}
	return false
}

// parseCount returns the number in a member, or 0 if the member is not a positive integer.
func parseCount(raw []byte) int {
	n, _ := jsonscan.Integer(raw)
	return int(max(n, 0))
}
