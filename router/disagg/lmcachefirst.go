package disagg

import (
	"bytes"
	"strconv"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// firstToken is the token that prefill made, when decode can go on behind it;
// nil: decode makes it again, its KV of the prompt being there. It borrows from
// prefill's answer.
func firstToken(p *Pair) *relay.FirstToken {
	if !continues(p.Doc) {
		return nil
	}
	params, ok, _ := jsonscan.Find(p.Answer, "kv_transfer_params")
	if !ok || params.Kind != jsonscan.Object {
		return nil
	}
	handle := p.Answer[params.Start:params.End]
	id, ok, _ := jsonscan.Find(handle, "first_tok")
	if !ok {
		return nil
	}
	n, err := strconv.ParseUint(string(handle[id.Start:id.End]), 10, 32)
	if err != nil {
		return nil
	}
	choice, err := firstChoice(p.Answer)
	if err != nil {
		return nil
	}
	text, ok, _ := jsonscan.Find(choice, "text")
	if !ok || text.Kind != jsonscan.String {
		return nil
	}
	f := &relay.FirstToken{ID: uint32(n), Text: choice[text.Start+1 : text.End-1], IDs: p.IDs || p.Doc.Bool(jsonscan.KeyReturnTokenIDs)}
	if bytes.HasSuffix(f.Text, []byte("\ufffd")) || bytes.HasSuffix(bytes.ToLower(f.Text), []byte(`\ufffd`)) {
		return nil // half a character: only the engine that makes both halves knows it
	}
	if lp, ok, _ := jsonscan.Find(choice, "logprobs"); ok && lp.Kind == jsonscan.Object {
		f.Logprobs = choice[lp.Start:lp.End]
	}
	return f
}

// continues says whether an engine that is given the first token as a part of
// the prompt makes the same of a request as one that made it: not where it would
// have to look at its own output as a whole, as for stop strings that may begin
// in the first token, grammars, and penalties on what was said before. Nor with a seed,
// whose draws begin anew behind the prompt.
func continues(doc *jsonscan.Doc) bool {
	var room [64]byte
	seeded, greedy := false, false
	for it := jsonscan.Walk(doc.Body); it.Next(); {
		raw := it.Raw()
		switch key := string(memberName(room[:0], doc.Body, it.Value.KeyStart)); key {
		case "stop", "presence_penalty", "frequency_penalty", "prompt_logprobs", "bad_words",
			"logits_processors", "structured_outputs", "truncate_prompt_tokens", "vllm_xargs":
			// prompt_logprobs 0 asks for something.
			if isSet(raw) || key == "prompt_logprobs" && string(raw) == "0" {
				return false
			}
		case "response_format":
			if kind, ok, _ := jsonscan.Find(raw, "type"); !ok || string(raw[kind.Start:kind.End]) != `"text"` {
				if isSet(raw) {
					return false
				}
			}
		case "seed":
			seeded = it.Value.Kind > jsonscan.Null
		case "temperature":
			t, err := strconv.ParseFloat(string(raw), 64)
			greedy = err == nil && t == 0
		default:
			if strings.HasPrefix(key, "guided_") && isSet(raw) {
				return false
			}
		}
	}
	return greedy || !seeded
}

// Unfit implements Picky.
func (f lmcache) Unfit(r *Request) string {
	switch {
	case r.Kind == front.Chat && f.reasoning:
		return "reasoning"
	case r.Kind == front.Chat:
		if why := unfitChat(r.Doc); why != "" {
			return why
		}
	case isSet(findMember(r.Doc, "echo")) || isSet(findMember(r.Doc, "suffix")):
		return "echo" // prefill's one token could not be told from the prompt
	}
	if len(r.Tokens) == 0 {
		return "no_tokens"
	}
	if r.Kind == front.Chat && askedTokens(r.Doc, r.Kind) == 0 {
		for _, d := range r.Decode {
			if d.Worker.Info().MaxModelLen == 0 {
				return "no_max_tokens"
			}
		}
	}
	return ""
}

// unfitChat names what a chat request holds that completions of token ids cannot
// answer.
func unfitChat(doc *jsonscan.Doc) string {
	if tools := doc.Raw(jsonscan.KeyTools); isSet(tools) && string(doc.Raw(jsonscan.KeyToolChoice)) != `"none"` {
		return "tools"
	}
	for _, name := range [...]string{"reasoning_effort", "thinking", "thinking_token_budget"} {
		if isSet(findMember(doc, name)) {
			return "reasoning"
		}
	}
	for it := jsonscan.Walk(doc.Raw(jsonscan.KeyChatTemplateKwargs)); it.Next(); {
		if (it.IsKey("enable_thinking") || it.IsKey("thinking")) && isSet(it.Raw()) {
			return "reasoning"
		}
	}
	if holdsMedia(doc) {
		return "media"
	}
	return ""
}

// holdsMedia says whether a chat's messages hold anything but text.
func holdsMedia(doc *jsonscan.Doc) bool {
	for it := jsonscan.Walk(doc.Raw(jsonscan.KeyMessages)); it.Next(); {
		content, ok, _ := jsonscan.Find(it.Raw(), "content")
		if !ok || content.Kind != jsonscan.Array {
			continue
		}
		for part := jsonscan.Walk(it.Raw()[content.Start:content.End]); part.Next(); {
			if part.Value.Kind != jsonscan.Object {
				continue
			}
			kind, ok, _ := jsonscan.Find(part.Raw(), "type")
			if !ok { // vLLM takes {"image_url":"…"} too
				if _, text, _ := jsonscan.Find(part.Raw(), "text"); text {
					continue
				}
				return true
			}
			switch string(part.Raw()[kind.Start:kind.End]) {
			case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`:
			default:
				return true
			}
		}
	}
	return false
}
