package pd

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
)

// Bounds of what is kept of a request for the case that its stream must go on
// elsewhere.
const (
	maxMigratableBody = 1 << 20  // bytes of the client's body: its prompt's ids come back in one event
	maxTemplateBody   = 16 << 10 // without prompt, messages and tools
)

// resumeTemplate is what another engine is asked with, but for prompt and limits, which are
// added then (continuation.go): a body without its closing brace, and the members
// of its sampling_params, where it has them, each behind a comma.
type resumeTemplate struct {
	body, sampling []byte
	minTokens      int            // min_tokens
	choices        int            // n
	logprobs       bool           // the answer has log-probabilities,
	topLogprobs    int            // with so many others of each token, in a chat
	choice         *choiceGrammar // the texts of which the answer is one
	unconstrained  bool           // the rest is asked for without the grammar
}

// maxChoices bounds n of a stream that may move: each is a prompt of its own then.
const maxChoices = 32

// newResumeTemplate makes of a request what another engine is asked with. why is one word for
// what keeps a stream from going on, "" when nothing does; the words stand in
// docs/migration.md. tells: the body itself has its engine tell token ids.
func newResumeTemplate(doc *jsonscan.Doc, kind front.Kind, policy *config.Migration, returnsTokenIDs bool) (a resumeTemplate, reason string) {
	if len(doc.Body) > maxMigratableBody {
		return a, "too_long"
	}
	m := templateBuilder{kind: kind, allow: policy.Allow, structured: policy.Structured}
	if reason = multiHandoverReason(kind, doc); reason != "" && !(reason == "many_choices" && m.mayMigrateChoices(doc)) {
		return a, reason
	}
	if kind == front.NativeGenerate && (isPromptList(doc.Raw(jsonscan.KeyInputIDs)) || isPromptList(doc.Raw(jsonscan.KeyText))) {
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
		// Not a prompt here, but the answer's format.
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
		return a, "seed" // an engine draws from the seed's beginning, not from where another stood
	}
	if kind == front.Chat && m.logprobs {
		if m.tokensAsIDs {
			return a, "logprobs" // a chat tells a token's bytes beside its number, completions do not
		}
		m.body = strconv.AppendInt(append(m.body, `,"logprobs":`...), int64(m.topLogprobs), 10)
		if m.namedLogprobTokens || m.topLogprobs < 0 {
			m.topLogprobs = math.MaxInt
		}
	}
	return m.resumeTemplate, ""
}

// mayMigrateChoices says whether a request for several choices may move: where it is allowed, and
// another engine can be given a prompt for each.
func (m *templateBuilder) mayMigrateChoices(doc *jsonscan.Doc) bool {
	n, ok := doc.Int(jsonscan.KeyN)
	if !ok || n < 2 || n > maxChoices || m.kind != front.Chat && m.kind != front.Completions ||
		wantsSeveral(doc.Raw(jsonscan.KeyBestOf)) || doc.Bool(jsonscan.KeyUseBeamSearch) || !slices.Contains(m.allow, "many_choices") {
		return false
	}
	m.choices = int(n)
	return true
}

// templateBuilder collects what is asked again.
type templateBuilder struct {
	resumeTemplate
	kind               front.Kind
	allow              []string
	structured         string // migration.structured
	seeded, greedy     bool
	tokensAsIDs        bool // tokens are told by number in the place of text
	namedLogprobTokens bool // the client named the tokens it wants the scores of
	inSampling         bool // of sampling_params
}

// copyMembers copies the members of an object that count for the rest of an answer; why
// names one that another engine could not honour.
func (m *templateBuilder) copyMembers(object []byte, dst *[]byte) (reason string) {
	var buf [64]byte
	for it := jsonscan.Walk(object); it.Next(); {
		raw := it.Raw()
		key := memberName(buf[:0], object, it.Value.KeyStart)
		if bytes.ContainsAny(key, "\"\\\n") {
			continue // no member that an engine knows
		}
		name := string(key)
		if m.skipMember(name, raw) {
			continue
		}
		if name == "sampling_params" && m.kind != front.Chat && m.kind != front.Completions {
			if it.Value.Kind != jsonscan.Object {
				if isSet(raw) {
					return "batch_prompt" // a list: one for each prompt
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
				continue // completions ask for a number
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
		if len(*dst) != 1 { // more than an opening brace
			*dst = append(*dst, ',')
		}
		*dst = append(append(append(*dst, '"'), name...), `":`...)
		*dst = append(*dst, raw...)
	}
	return ""
}

// mayMigrateLogprobs says whether a stream with log-probabilities may move. SGLang's /generate repeats
// all of them in every event, and Responses at its end.
func (m *templateBuilder) mayMigrateLogprobs() bool {
	return (m.kind == front.Chat || m.kind == front.Completions || m.kind == front.Generate) && slices.Contains(m.allow, "logprobs")
}

// skipMember says whether a member says nothing about the rest of the answer, or is asked
// for by the router in its own way.
func (m *templateBuilder) skipMember(key string, raw []byte) bool {
	switch {
	case key == "n" && m.choices > 1:
		return true // a prompt for each
	case key == "logprob_token_ids":
		m.namedLogprobTokens = isSet(raw)
	case key == "return_tokens_as_token_ids":
		m.tokensAsIDs = isSet(raw)
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
		case "logprobs": // false is no value of completions
			return !isSet(raw) && string(raw) != "0"
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
		case "truncation": // completions know no word for it
			return string(raw) == `"disabled"` || string(raw) == `"auto"`
		case "include", "top_logprobs":
			return !bytes.Contains(raw, []byte("logprobs")) && (key == "include" || !isSet(raw))
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
		case "return_token_ids": // they are known, and told already
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

// parseCount reads a member that counts something, 0 for anything else.
func parseCount(raw []byte) int {
	n, _ := jsonscan.Integer(raw)
	return int(max(n, 0))
}
