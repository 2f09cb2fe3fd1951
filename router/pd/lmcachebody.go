package pd

import (
	"bytes"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/tokenize"
)

// completionsBody is a completions body for token ids, made from the client's: members
// that only chat has are left out, the rest is copied byte for byte.
type completionsBody struct {
	out        []byte
	start      int // where the body begins in out
	p          *Handover
	decode     bool
	tokenSpent bool // the first token was made by prefill
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

// prompt appends the prompt, as the client has spelled it where that was in ids.
func (b *completionsBody) prompt(tokens []uint32) {
	b.key("prompt")
	if b.p.rawTokens != nil {
		b.out = append(b.out, b.p.rawTokens...)
		return
	}
	b.out = jsonscan.AppendTokenIDs(b.out, tokens)
}

// rawTokens is the prompt's ids as they stand in the body of completions, an array of
// numbers; nil where they came from elsewhere.
func (q *request) rawTokens() []byte {
	if q.x.Endpoint.Kind != front.Completions || q.prompt.Source != tokenize.FromRequest {
		return nil
	}
	if h, ok := q.x.Attached.(*Hints); ok && len(h.Tokens) > 0 {
		return nil
	}
	return rawNumberArray(q.x.Doc.Raw(jsonscan.KeyPrompt))
}

// rawNumberArray is raw where it is an array that begins with a number, else nil.
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

// appendToken puts a token behind the prompt just appended.
func (b *completionsBody) appendToken(id uint32) {
	b.out = strconv.AppendUint(append(b.out[:len(b.out)-1], ','), uint64(id), 10)
	b.out = append(b.out, ']')
}

// finish copies what the client's body has besides.
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
			if b.decode && b.p.WantTokenIDs && !b.p.Doc.Bool(jsonscan.KeyReturnTokenIDs) { // Decode has written it
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
				b.member("min_tokens", jsonOne) // else the first token could be the end
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

// memberName reads the key whose opening quote is at start, unescaped.
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

// findMember is the raw value of any top-level member of a request, nil when absent or null.
// Of a member that stands twice it is the last, as engines read it. What a decision about
// access depends on is a jsonscan.Key instead: those may stand only once.
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

// isSet says whether a raw value asks for something: not null, false, 0, "", []
// or {}.
func isSet(raw []byte) bool {
	switch string(bytes.Trim(raw, " \t\r\n")) {
	case "", "null", "false", `""`, "[]", "{}", "0", "0.0", "-0":
		return false
	}
	return true
}
