package pd

import (
	"bytes"
	"strconv"
	"strings"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// prefillToken is what prefill's answer tells of the token that it made: members' values as
// they are written there, nil where there are none.
type prefillToken struct {
	parsed                       bool // the answer was read
	finishReason, text, logprobs []byte
	id                           []byte
	token                        relay.FirstToken // what usablePrefillToken makes of it
}

// parse finds them in an answer, which they borrow.
func (f *prefillToken) parse(answer []byte) error {
	*f = prefillToken{parsed: true}
	choice, params, err := firstChoice(answer, "kv_transfer_params")
	if err != nil {
		return err
	}
	var of [3]jsonscan.Value
	jsonscan.Members(choice, of[:], "finish_reason", "text", "logprobs")
	f.finishReason, f.text, f.logprobs = valueAt(choice, of[0]), valueAt(choice, of[1]), valueAt(choice, of[2])
	if params.Kind == jsonscan.Object {
		var id [1]jsonscan.Value
		handle := answer[params.Start:params.End]
		jsonscan.Members(handle, id[:], "first_tok")
		f.id = valueAt(handle, id[0])
	}
	return nil
}

// valueAt is a value that lies in b; nil: there is none.
func valueAt(b []byte, v jsonscan.Value) []byte {
	if v.Kind == jsonscan.Absent {
		return nil
	}
	return b[v.Start:v.End]
}

// usablePrefillToken is the token that prefill made, when decode can go on behind it;
// nil: decode makes it again, its KV of the prompt being there. It is p's and borrows
// from prefill's answer.
func usablePrefillToken(p *Handover) *relay.FirstToken {
	if p.decodeContinues == triUnknown {
		p.decodeContinues = triFalse
		if decodeContinues(p.Doc) {
			p.decodeContinues = triTrue
		}
	}
	first := &p.prefillToken
	if p.decodeContinues != triTrue || !first.parsed && first.parse(p.Answer) != nil {
		return nil
	}
	n, err := strconv.ParseUint(unsafeString(first.id), 10, 32)
	if err != nil || len(first.text) == 0 || first.text[0] != '"' {
		return nil
	}
	f := &first.token
	*f = relay.FirstToken{ID: uint32(n), Text: first.text[1 : len(first.text)-1], IDs: p.WantTokenIDs || p.Doc.Bool(jsonscan.KeyReturnTokenIDs)}
	if bytes.HasSuffix(f.Text, []byte("\ufffd")) || endsWithReplacement(f.Text) {
		return nil // half a character: only the engine that makes both halves knows it
	}
	if lp := first.logprobs; len(lp) > 0 && lp[0] == '{' {
		f.Logprobs = lp
	}
	return f
}

// endsWithReplacement says whether the inside of a JSON string ends with U+FFFD, escaped.
func endsWithReplacement(text []byte) bool {
	const escape = `\ufffd`
	return len(text) >= len(escape) && bytes.EqualFold(text[len(text)-len(escape):], []byte(escape))
}

// decodeContinues says whether an engine that is given the first token as a part of
// the prompt makes the same of a request as one that made it: not where it would
// have to look at its own output as a whole, as for stop strings that may begin
// in the first token, grammars, and penalties on what was said before. Nor with a seed,
// whose draws begin anew behind the prompt.
func decodeContinues(doc *jsonscan.Doc) bool {
	var buf [64]byte
	seeded, greedy := false, false
	for it := jsonscan.Walk(doc.Body); it.Next(); {
		raw := it.Raw()
		switch key := string(memberName(buf[:0], doc.Body, it.Value.KeyStart)); key {
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

// Unsupported implements Picky.
func (f lmcache) Unsupported(r *Request) string {
	switch {
	case r.Kind == front.Chat && f.reasoning:
		return "reasoning"
	case r.Kind == front.Chat:
		if reason := unsupportedChat(r.Doc); reason != "" {
			return reason
		}
	case wantsEcho(r.Doc):
		return "echo" // prefill's one token could not be told from the prompt
	}
	if len(r.Tokens) == 0 {
		return "no_tokens"
	}
	if r.Kind == front.Chat && requestedTokens(r.Doc, r.Kind) == 0 {
		for _, d := range r.Decode {
			if d.Worker.Info().MaxModelLen == 0 {
				return "no_max_tokens"
			}
		}
	}
	return ""
}

// wantsEcho says whether completions are to say the prompt again, or what comes behind them.
func wantsEcho(doc *jsonscan.Doc) bool {
	var of [2]jsonscan.Value
	jsonscan.Members(doc.Body, of[:], "echo", "suffix")
	return isSet(valueAt(doc.Body, of[0])) || isSet(valueAt(doc.Body, of[1]))
}

// unsupportedChat names what a chat request holds that completions of token ids cannot
// answer.
func unsupportedChat(doc *jsonscan.Doc) string {
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
	if hasMedia(doc) {
		return "media"
	}
	return ""
}

// hasMedia says whether a chat's messages hold anything but text.
func hasMedia(doc *jsonscan.Doc) bool {
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
