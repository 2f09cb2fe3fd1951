package family

import (
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
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
	if b.p.RawTokens != nil {
		b.out = append(b.out, b.p.RawTokens...)
		return
	}
	b.out = jsonscan.AppendTokenIDs(b.out, tokens)
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
		key := reqbody.MemberName(buf[:0], b.p.Doc.Body, it.Value.KeyStart)
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

func topLogprobs(doc *jsonscan.Doc) int {
	n, err := strconv.Atoi(string(reqbody.Member(doc, "top_logprobs")))
	if err != nil || n < 0 {
		return 0
	}
	return min(n, 1<<10)
}
