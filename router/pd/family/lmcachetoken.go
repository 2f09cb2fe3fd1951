package family

import (
	"bytes"
	"strconv"
	"strings"
	"unsafe"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
)

// prefillToken holds what a prefill response says about the token that prefill generated: the raw
// values of the members, nil if absent.
type prefillToken struct {
	parsed                       bool // parse has run
	finishReason, text, logprobs []byte
	id                           []byte
	token                        apiformat.FirstToken // filled by usablePrefillToken
}

// parse reads a prefill response. The fields borrow from answer.
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

// valueAt returns the bytes of v in b, or nil if v is absent.
func valueAt(b []byte, v jsonscan.Value) []byte {
	if v.Kind == jsonscan.Absent {
		return nil
	}
	return b[v.Start:v.End]
}

// usablePrefillToken returns the token that prefill generated if decode can continue after it. If
// it returns nil, decode generates the token again from the prompt's KV. The result belongs to p
// and borrows from prefill's response.
func usablePrefillToken(p *Handover) *apiformat.FirstToken {
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
	n, err := strconv.ParseUint(unsafe.String(unsafe.SliceData(first.id), len(first.id)), 10, 32)
	if err != nil || len(first.text) == 0 || first.text[0] != '"' {
		return nil
	}
	f := &first.token
	*f = apiformat.FirstToken{ID: uint32(n), Text: first.text[1 : len(first.text)-1], IDs: p.WantTokenIDs || p.Doc.Bool(jsonscan.KeyReturnTokenIDs)}
	if bytes.HasSuffix(f.Text, []byte("\ufffd")) || endsWithReplacement(f.Text) {
		return nil // half a character: only the engine that generates both halves can decode it
	}
	if lp := first.logprobs; len(lp) > 0 && lp[0] == '{' {
		f.Logprobs = lp
	}
	return f
}

// endsWithReplacement reports whether the content of a JSON string ends with an escaped U+FFFD.
func endsWithReplacement(text []byte) bool {
	const escape = `\ufffd`
	return len(text) >= len(escape) && bytes.EqualFold(text[len(text)-len(escape):], []byte(escape))
}

// decodeContinues reports whether decode produces the same output whether the first token is part
// of its prompt or of its own output. This does not hold if the engine must consider its output as
// a whole: stop strings that may start in the first token, grammars, and penalties on earlier
// output. Nor does it hold with a seed, because the engine restarts the random sequence after the
// prompt.
func decodeContinues(doc *jsonscan.Doc) bool {
	var buf [64]byte
	seeded, greedy := false, false
	for it := jsonscan.Walk(doc.Body); it.Next(); {
		raw := it.Raw()
		switch key := string(reqbody.MemberName(buf[:0], doc.Body, it.Value.KeyStart)); key {
		case "stop", "presence_penalty", "frequency_penalty", "prompt_logprobs", "bad_words",
			"logits_processors", "structured_outputs", "truncate_prompt_tokens", "vllm_xargs":
			// prompt_logprobs 0 also requests log-probabilities.
			if reqbody.IsSet(raw) || key == "prompt_logprobs" && string(raw) == "0" {
				return false
			}
		case "response_format":
			if kind, ok, _ := jsonscan.Find(raw, "type"); !ok || string(raw[kind.Start:kind.End]) != `"text"` {
				if reqbody.IsSet(raw) {
					return false
				}
			}
		case "seed":
			seeded = it.Value.Kind > jsonscan.Null
		case "temperature":
			t, err := strconv.ParseFloat(string(raw), 64)
			greedy = err == nil && t == 0
		default:
			if strings.HasPrefix(key, "guided_") && reqbody.IsSet(raw) {
				return false
			}
		}
	}
	return greedy || !seeded
}

// Unsupported implements RequestFilter.
func (f lmcache) Unsupported(r *Request) string {
	switch {
	case r.Kind == front.Chat && f.reasoning:
		return "reasoning"
	case r.Kind == front.Chat:
		if reason := unsupportedChat(r.Doc); reason != "" {
			return reason
		}
	case wantsEcho(r.Doc):
		return "echo" // prefill's token could not be separated from the prompt
	}
	if len(r.Tokens) == 0 {
		return "no_tokens"
	}
	if r.Kind == front.Chat && reqbody.MaxTokens(r.Doc, r.Kind) == 0 {
		for _, d := range r.Decode {
			if d.Worker.Info().MaxModelLen == 0 {
				return "no_max_tokens"
			}
		}
	}
	return ""
}

// wantsEcho reports whether a completions request asks to repeat the prompt or to insert before a
// suffix.
func wantsEcho(doc *jsonscan.Doc) bool {
	var of [2]jsonscan.Value
	jsonscan.Members(doc.Body, of[:], "echo", "suffix")
	return reqbody.IsSet(valueAt(doc.Body, of[0])) || reqbody.IsSet(valueAt(doc.Body, of[1]))
}

// unsupportedChat returns one word for the content of a chat that completions of token ids cannot
// serve, or "" if there is none.
func unsupportedChat(doc *jsonscan.Doc) string {
	if tools := doc.Raw(jsonscan.KeyTools); reqbody.IsSet(tools) && string(doc.Raw(jsonscan.KeyToolChoice)) != `"none"` {
		return "tools"
	}
	for _, name := range [...]string{"reasoning_effort", "thinking", "thinking_token_budget"} {
		if reqbody.IsSet(reqbody.Member(doc, name)) {
			return "reasoning"
		}
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
