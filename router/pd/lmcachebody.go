package pd

import (
	"bytes"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/tokenize"
)

// completionsBody builds a completions body for token ids from the client's body. It omits the
// members that only chat has and copies the others unchanged.
type completionsBody struct {
	out        []byte
	start      int // offset of the body in out
	p          *Handover
	decode     bool
	tokenSpent bool // prefill generated the first token
}

func newCompletionsBody(dst []byte, p *Handover, decode bool) *completionsBody {
	return &completionsBody{out: append(dst, '{'), start: len(dst) + 1, p: p, decode: decode}
}

func (b *completionsBody) key(name string) {
	if len(b.out) > b.start {
		b.out = append(b.out, ',')
	}
	b.out = append(append(append(b.out, '"'), name...), `":`...)
}

func (b *completionsBody) member(name string, value []byte) {
	b.key(name)
	b.out = append(b.out, value...)
}

// prompt appends the prompt. If the client sent token ids, it copies the client's bytes.
func (b *completionsBody) prompt(tokens []uint32) {
	b.key("prompt")
	if b.p.rawTokens != nil {
		b.out = append(b.out, b.p.rawTokens...)
		return
	}
	b.out = jsonscan.AppendTokenIDs(b.out, tokens)
}

// rawTokens returns the prompt's token ids as they appear in a completions body, a JSON array of
// numbers. It returns nil if the ids have another source.
func (q *request) rawTokens() []byte {
	if q.x.Endpoint.Kind != front.Completions || q.prompt.Source != tokenize.FromRequest {
		return nil
	}
	if h, ok := q.x.Attached.(*Hints); ok && len(h.Tokens) > 0 {
		return nil
	}
	return rawNumberArray(q.x.Doc.Raw(jsonscan.KeyPrompt))
}

// rawNumberArray returns raw if it is an array that starts with a number, else nil.
func rawNumberArray(raw []byte) []byte {
	for i, c := range raw {
		switch {
		case i == 0 && c == '[', i > 0 && (c == ' ' || c == '\t' || c == '\n' || c == '\r'):
		case i > 0 && '0' <= c && c <= '9':
			return raw
		default:
			return nil
		}
	}
	return nil
}

// appendToken appends a token to the prompt that was just written.
func (b *completionsBody) appendToken(id uint32) {
	b.out = strconv.AppendUint(append(b.out[:len(b.out)-1], ','), uint64(id), 10)
	b.out = append(b.out, ']')
}

// finish copies the other members of the client's body and closes the body.
func (b *completionsBody) finish() []byte {
	var buf [64]byte
	for it := jsonscan.Walk(b.p.Doc.Body); it.Next(); {
		key := memberName(buf[:0], b.p.Doc.Body, it.Value.KeyStart)
		switch string(key) {
		case "prompt", "max_tokens", "max_completion_tokens", "kv_transfer_params",
			"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs",
			"add_generation_prompt", "continue_final_message", "documents", "top_logprobs", "add_special_tokens":
			continue
		case "return_token_ids":
			if b.decode && b.p.WantTokenIDs && !b.p.Doc.Bool(jsonscan.KeyReturnTokenIDs) { // Decode has already written it
				continue
			}
		case "stream", "stream_options", "min_completion_tokens":
			if !b.decode {
				continue
			}
		case "min_tokens":
			n, ok := b.p.Doc.Int(jsonscan.KeyMinTokens)
			switch {
			case !b.decode && ok && n > 0:
				b.member("min_tokens", jsonOne) // without a minimum the first token could end the response
				continue
			case !b.decode:
				continue
			case ok && b.tokenSpent:
				b.key("min_tokens")
				b.out = strconv.AppendInt(b.out, max(n-1, 0), 10)
				continue
			}
		case "logprobs":
			if b.p.Kind == front.Chat {
				if string(it.Raw()) == "true" {
					b.key("logprobs")
					b.out = strconv.AppendInt(b.out, int64(topLogprobs(b.p.Doc)), 10)
				}
				continue
			}
		}
		b.key(string(key))
		b.out = append(b.out, it.Raw()...)
	}
	return append(b.out, '}')
}

// memberName appends the unescaped key whose opening quote is at start to dst.
func memberName(dst, body []byte, start int) []byte {
	for i := start + 1; i < len(body); i++ {
		switch body[i] {
		case '\\':
			i++
		case '"':
			return jsonscan.Unquote(dst, body[start:i+1])
		}
	}
	return dst
}

// findMember returns the raw value of any top-level member of a request, nil if it is absent or
// null. If a member occurs twice, it returns the last one, as engines do. Members that affect
// access control use a jsonscan.Key instead, which may occur only once.
func findMember(doc *jsonscan.Doc, name string) (raw []byte) {
	for it := jsonscan.Walk(doc.Body); it.Next(); {
		switch {
		case !it.IsKey(name):
		case it.Value.Kind > jsonscan.Null:
			raw = it.Raw()
		default:
			raw = nil
		}
	}
	return raw
}

func topLogprobs(doc *jsonscan.Doc) int {
	n, err := strconv.Atoi(string(findMember(doc, "top_logprobs")))
	if err != nil || n < 0 {
		return 0
	}
	return min(n, 1<<10)
}

// isSet reports whether a raw value has an effect: it is not null, false, 0, "", [] or {}.
func isSet(raw []byte) bool {
	switch string(bytes.Trim(raw, " \t\r\n")) {
	case "", "null", "false", `""`, "[]", "{}", "0", "0.0", "-0":
		return false
	}
	return true
}
