package disagg

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
	maxMovableBody = 1 << 20  // bytes of the client's body: its prompt's ids come back in one event
	maxMovableRest = 16 << 10 // without prompt, messages and tools
)

// asked is what another engine is asked with, but for prompt and limits, which are
// added then (continuation.go): a body without its closing brace, and the members
// of its sampling_params, where it has them, each behind a comma.
type asked struct {
	body, sampling []byte
	least          int    // min_tokens
	choices        int    // n
	scored         bool   // the answer has log-probabilities,
	alternatives   int    // with so many others of each token, in a chat
	oneOf          *oneOf // the texts of which the answer is one
	loose          bool   // the rest is asked for without the grammar
}

// maxChoices bounds n of a stream that may move: each is a prompt of its own then.
const maxChoices = 32

// movable makes of a request what another engine is asked with. why is one word for
// what keeps a stream from going on, "" when nothing does; the words stand in
// docs/migration.md. tells: the body itself has its engine tell token ids.
func movable(doc *jsonscan.Doc, kind front.Kind, policy *config.Migration, tells bool) (a asked, why string) {
	if len(doc.Body) > maxMovableBody {
		return a, "too_long"
	}
	m := mover{kind: kind, allow: policy.Allow, structured: policy.Structured}
	if why = notOne(kind, doc); why != "" && !(why == "many_choices" && m.several(doc)) {
		return a, why
	}
	if kind == front.NativeGenerate && (isBatch(doc.Raw(jsonscan.KeyInputIDs)) || isBatch(doc.Raw(jsonscan.KeyText))) {
		return a, "batch_prompt"
	}
	switch kind {
	case front.Chat:
		if why = stateOfChat(doc); why != "" {
			return a, why
		}
		m.body = append(m.body, `{"return_token_ids":true`...)
	case front.Completions:
		if m.body = append(m.body, '{'); !tells {
			m.body = append(m.body, `"return_token_ids":true`...)
		}
	case front.Messages, front.ResponsesAPI:
		if why = stateOfChat(doc); why != "" {
			return a, why
		}
		m.body = append(m.body, `{"return_token_ids":true,"stream_options":{"include_usage":true}`...)
	case front.Generate, front.NativeGenerate:
		m.body = append(m.body, '{')
	default:
		return a, "endpoint"
	}
	rest := doc.Edited(nil,
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
		if why = m.grammar("text", doc.Raw(jsonscan.KeyText)); why != "" {
			return a, why
		}
	}
	if len(rest) > maxMovableRest {
		return a, "too_long"
	}
	if n, ok := doc.Int(jsonscan.KeyMinTokens); ok {
		m.least = int(min(max(n, 0), 1<<24))
	}
	if why = m.members(rest, &m.body); why != "" {
		return a, why
	}
	if m.seeded && !m.greedy && !slices.Contains(m.allow, "seed") {
		return a, "seed" // an engine draws from the seed's beginning, not from where another stood
	}
	if kind == front.Chat && m.scored {
		if m.numbered {
			return a, "logprobs" // a chat tells a token's bytes beside its number, completions do not
		}
		m.body = strconv.AppendInt(append(m.body, `,"logprobs":`...), int64(m.alternatives), 10)
		if m.named || m.alternatives < 0 {
			m.alternatives = math.MaxInt
		}
	}
	return m.asked, ""
}

// several says whether a request for several choices may move: where it is allowed, and
// another engine can be given a prompt for each.
func (m *mover) several(doc *jsonscan.Doc) bool {
	n, ok := doc.Int(jsonscan.KeyN)
	if !ok || n < 2 || n > maxChoices || m.kind != front.Chat && m.kind != front.Completions ||
		several(doc.Raw(jsonscan.KeyBestOf)) || doc.Bool(jsonscan.KeyUseBeamSearch) || !slices.Contains(m.allow, "many_choices") {
		return false
	}
	m.choices = int(n)
	return true
}

// mover collects what is asked again.
type mover struct {
	asked
	kind           front.Kind
	allow          []string
	structured     string // migration.structured
	seeded, greedy bool
	numbered       bool // tokens are told by number in the place of text
	named          bool // the client named the tokens it wants the scores of
	inside         bool // of sampling_params
}

// members copies the members of an object that count for the rest of an answer; why
// names one that another engine could not honour.
func (m *mover) members(object []byte, dst *[]byte) (why string) {
	var room [64]byte
	for it := jsonscan.Walk(object); it.Next(); {
		raw := it.Raw()
		key := memberName(room[:0], object, it.Value.KeyStart)
		if bytes.ContainsAny(key, "\"\\\n") {
			continue // no member that an engine knows
		}
		name := string(key)
		if m.skips(name, raw) {
			continue
		}
		if name == "sampling_params" && m.kind != front.Chat && m.kind != front.Completions {
			if it.Value.Kind != jsonscan.Object {
				if isSet(raw) {
					return "batch_prompt" // a list: one for each prompt
				}
				continue
			}
			m.inside = true
			if why = m.members(raw, &m.sampling); why != "" {
				return why
			}
			m.inside = false
			continue
		}
		switch what := m.stateful(name, raw); what {
		case "":
		case "seed":
			m.seeded = true
		case "structured":
			if why = m.grammar(name, raw); why != "" {
				return why
			}
			continue
		case "logprobs":
			if !m.scores() {
				return what
			}
			if m.scored = true; m.kind == front.Chat {
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

// scores says whether a stream with log-probabilities may move. SGLang's /generate repeats
// all of them in every event, and Responses at its end.
func (m *mover) scores() bool {
	return (m.kind == front.Chat || m.kind == front.Completions || m.kind == front.Generate) && slices.Contains(m.allow, "logprobs")
}

// skips says whether a member says nothing about the rest of the answer, or is asked
// for by the router in its own way.
func (m *mover) skips(key string, raw []byte) bool {
	switch {
	case key == "n" && m.choices > 1:
		return true // a prompt for each
	case key == "logprob_token_ids":
		m.named = isSet(raw)
	case key == "return_tokens_as_token_ids":
		m.numbered = isSet(raw)
	}
	switch m.kind {
	case front.Chat:
		switch key {
		case "return_token_ids", "documents", "add_generation_prompt", "continue_final_message", "parallel_tool_calls",
			"include_reasoning", "mm_processor_kwargs", "media_io_kwargs":
			return true
		case "top_logprobs":
			m.alternatives, _ = strconv.Atoi(string(raw))
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
			if m.inside {
				m.least = countOf(raw)
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
			m.least = countOf(raw)
			return true
		}
	}
	return false
}

// countOf reads a member that counts something, 0 for anything else.
func countOf(raw []byte) int {
	n, _ := jsonscan.Integer(raw)
	return int(max(n, 0))
}
