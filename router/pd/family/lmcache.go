package family

import (
	"bytes"
	"strconv"
	"strings"
	"unicode"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/router/config"
	"sluice/router/pd/reqbody"
	"sluice/router/worker"
)

// lmcache is LMCache's hand-over over NIXL. The prefill leg names the decode worker that receives
// its KV. Each tensor-parallel rank of the prefill worker then notifies the router after it has
// written the KV (package router/kvtransfer/notify). Only then does the router send the decode leg,
// with prefill's first token appended to the prompt.
//
// Both legs are completions of token ids, because both engines must process exactly the same
// tokens. The router converts a chat's response back to the chat format. Requests that token ids
// cannot express (tools, media, reasoning that the engine parses) run on one worker.
type lmcache struct {
	reasoning bool // the decode workers parse reasoning
}

// Name implements Family.
func (lmcache) Name() string { return "lmcache" }

// configure implements configurableFamily.
func (lmcache) configure(pd *config.PD) Family { return lmcache{reasoning: pd.ReasoningParser} }

// Traits implements Family. Prefill pushes the KV, so nothing stays leased on the prefill engine.
func (lmcache) Traits() Traits {
	return Traits{Kinds: kindsOf(front.Chat, front.Completions), NamesDecode: true, PrefillNeedsDecode: true, NoLease: true}
}

// Order implements Family.
func (lmcache) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family.
func (f lmcache) Prefill(leg *LegRequest, p *Handover) {
	leg.Path = reqbody.CompletionsPath
	leg.Body = leg.Render(func(dst []byte) []byte {
		b := newCompletionsBody(dst, p, false)
		b.prompt(p.Tokens)
		b.member("max_tokens", jsonOne)
		b.member("stream", jsonFalse)
		b.key("kv_transfer_params")
		b.out = append(b.out, `{"ret_first_tok":true`...)
		if init, alloc := peerPorts(p.Decode); len(init) > 0 {
			b.out = append(b.out, `,"disagg_spec":{"req_id":"`...)
			b.out = appendSpecID(b.out, p)
			b.out = append(append(append(b.out, `","receiver_host":"`...), peerHost(p.Decode)...), `","receiver_init_port":`...)
			b.out = appendPorts(b.out, init)
			b.out = appendPorts(append(b.out, `,"receiver_alloc_port":`...), alloc)
			b.out = append(b.out, '}')
		}
		b.out = append(b.out, '}')
		return b.finish()
	})
}

// ExpectedCompletions implements CompletionWaiter. It expects one notification per prefill rank;
// there are as many ranks as the decode worker has ports. The id is random and new for each
// attempt, so no other party can forge a notification.
func (lmcache) ExpectedCompletions(p *Handover) (id string, count int) {
	init, _ := peerPorts(p.Decode)
	if len(init) == 0 {
		return "", 0
	}
	return string(appendSpecID(nil, p)), len(init)
}

func appendSpecID(dst []byte, p *Handover) []byte {
	return strconv.AppendUint(append(dst, "sluice-"...), p.Token, 16)
}

// peerPorts returns a decode worker's ports, one init and one alloc port per tensor-parallel rank.
func peerPorts(r *worker.Rank) (init, alloc []string) {
	o := r.Worker.Spec.Options
	return o["init_port"], o["alloc_port"]
}

// peerHost returns the host of those ports, for IPv6 without brackets.
func peerHost(r *worker.Rank) string {
	host := r.Option("peer_host")
	if host == "" || strings.ContainsAny(host, "\"\\") || strings.ContainsFunc(host, unicode.IsControl) {
		host = r.Host()
	}
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	return host
}

// appendPorts appends a JSON list of port numbers. It writes 0 for an invalid port, which engines
// refuse. The text is untrusted because workers may register themselves.
func appendPorts(dst []byte, ports []string) []byte {
	dst = append(dst, '[')
	for i, p := range ports {
		if i > 0 {
			dst = append(dst, ',')
		}
		n, _ := strconv.ParseUint(p, 10, 16)
		dst = strconv.AppendUint(dst, n, 10)
	}
	return append(dst, ']')
}

// Handle implements Family. The handle is the whole response, which contains the first token. It
// returns ErrFinal if the finish reason is not "length" or the client asked for one token only.
func (lmcache) Handle(p *Handover, body []byte) ([]byte, error) {
	if err := p.prefillToken.parse(body); err != nil {
		return nil, err
	}
	if err := checkFinish(p.prefillToken.finishReason); err != nil {
		return nil, err
	}
	if end := p.prefillToken.finishReason; len(end) > 0 && end[0] == '"' && string(end) != `"length"` {
		return nil, ErrFinal
	}
	if reqbody.MaxTokens(p.Doc, p.Kind) == 1 {
		return nil, ErrFinal
	}
	return body, nil
}

// Decode implements Family.
func (f lmcache) Decode(leg *LegRequest, p *Handover) {
	leg.Path = reqbody.CompletionsPath
	first := usablePrefillToken(p)
	leg.Body = leg.Render(func(dst []byte) []byte {
		b := newCompletionsBody(dst, p, true)
		b.tokenSpent = first != nil
		b.prompt(p.Tokens)
		if first != nil {
			b.appendToken(first.ID)
		}
		if n := remaining(p, first); n > 0 {
			b.key("max_tokens")
			b.out = strconv.AppendInt(b.out, int64(n), 10)
		}
		if p.WantTokenIDs && !p.Doc.Bool(jsonscan.KeyReturnTokenIDs) {
			b.member("return_token_ids", jsonTrue)
		}
		return b.finish()
	})
}

// remaining returns the number of tokens that decode may generate, 0 if unknown. A chat without a
// limit may use the rest of the model's length, whereas completions need an explicit number.
func remaining(p *Handover, first *apiformat.FirstToken) int {
	n := reqbody.MaxTokens(p.Doc, p.Kind)
	if n == 0 {
		n = reqbody.DefaultMaxTokens
		if p.Kind == front.Chat {
			n = p.Decode.Worker.Info().MaxModelLen - len(p.Tokens)
		}
	}
	if first != nil {
		n--
	}
	return max(n, 0)
}

// conversion returns the conversion from a response of this hand-over to the client's format.
func conversion(p *Handover) *apiformat.Conversion {
	c := &apiformat.Conversion{Chat: p.Kind == front.Chat, Choices: 1, Cached: p.PrefillCached}
	if c.Chat {
		c.TopLogprobs = topLogprobs(p.Doc)
	}
	if p.Handle != nil {
		c.First = usablePrefillToken(p)
	} else {
		c.Cached = -1 // prefill's own response is the final one
	}
	return c
}

// Body implements AnswerRewriter.
func (lmcache) Body(dst []byte, p *Handover, body []byte) []byte {
	return redact.From(conversion(p).Body(dst, body), len(dst))
}

// Events implements AnswerRewriter.
func (lmcache) Events(p *Handover) sse.Rewriter {
	c := conversion(p)
	if f := c.First; f != nil { // f belongs to p and borrows from prefill's response
		own := *f
		own.Text, own.Logprobs = bytes.Clone(f.Text), bytes.Clone(f.Logprobs)
		c.First = &own
	} else if !c.Chat {
		return nil
	}
	return c
}

// Final implements FinalAnswerer.
func (f lmcache) Final(dst []byte, p *Handover, body []byte) []byte {
	return apiformat.AppendEvents(dst, f.Body(nil, p, body), reqbody.WantsUsage(p.Doc))
}
