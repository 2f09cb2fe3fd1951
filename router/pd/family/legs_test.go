package family

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// familyCase is one request of a family with the engines' responses.
type familyCase struct {
	name     string
	kind     front.Kind
	client   string
	prefill  string   // prefill's response
	decode   string   // decode's response; "" if the test does not use it
	tokens   []uint32 // of the prompt
	handover func(*Handover)
}

// legsOf renders what a family makes of hand-overs: each leg's endpoint and body, and what the
// client gets or the error.
func legsOf(t *testing.T, f Family, list []familyCase) string {
	t.Helper()
	var out strings.Builder
	for _, h := range list {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(h.client), jsonscan.Limits{}); err != nil {
			t.Fatalf("%s: %v", h.name, err)
		}
		p := Handover{Kind: h.kind, Doc: &doc, Stream: doc.Bool(jsonscan.KeyStream), Tokens: h.tokens, RequestID: "r-1", Token: 0x1234, PrefillCached: -1}
		if h.handover != nil {
			h.handover(&p)
		}
		fmt.Fprintf(&out, "# %s\nclient   %s\n", h.name, h.client)
		leg := func(name string, write func(*LegRequest, *Handover)) {
			var l LegRequest
			write(&l, &p)
			body := l.Body
			if body == nil {
				body = doc.Edited(nil, l.Edits...)
			}
			if l.Path != "" {
				name += " " + l.Path
			}
			fmt.Fprintf(&out, "%s  %s\n", name, body)
		}
		if f.Order(&p) == DecodeFirst {
			p.Trial = true
			leg("trial  ", f.Decode)
			p.Trial = false
		}
		leg("prefill", f.Prefill)
		fmt.Fprintf(&out, "answer   %s\n", h.prefill)
		p.Answer = []byte(h.prefill)
		answerer, _ := f.(AnswerRewriter)
		var err error
		switch p.Handle, err = f.Handle(&p, p.Answer); {
		case errors.Is(err, ErrFinal):
			p.Handle = nil
			what := p.Answer
			if finisher, ok := f.(FinalAnswerer); ok && p.Stream {
				what = finisher.Final(nil, &p, p.Answer)
			} else if answerer != nil {
				what = answerer.Body(nil, &p, p.Answer)
			}
			fmt.Fprintf(&out, "final    %s\n", what)
		case err != nil:
			fmt.Fprintf(&out, "plain    %v\n", err)
		default:
			leg("decode ", f.Decode)
			if h.decode != "" && p.Stream {
				fmt.Fprintf(&out, "answer   %s\nclient   ", h.decode)
				rewriter := answerer.Events(&p)
				var got []byte
				for _, event := range strings.SplitAfter(h.decode, "\n\n") {
					if event != "" {
						got = rewriter.Event(got, []byte(event))
					}
				}
				fmt.Fprintf(&out, "%s\n", got)
			} else if h.decode != "" {
				fmt.Fprintf(&out, "answer   %s\nclient   %s\n", h.decode, answerer.Body(nil, &p, []byte(h.decode)))
			}
		}
		out.WriteString("\n")
	}
	return out.String()
}

func TestOrchestratedLegs(t *testing.T) {
	answer := ` {"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":"x"}}],"kv_transfer_params":{"remote_block_ids":[[1,18446744073709551615]]}, "unknown": 1.50}` + "\n"
	golden(t, "testdata/orchestrated_legs.txt", legsOf(t, orchestrated{}, []familyCase{
		{name: "chat", kind: front.Chat, client: `{"model":"m","messages":[],"max_tokens":99,"stream":true,"stream_options":{"include_usage":true}}`, prefill: answer},
		{name: "chat with max_completion_tokens", kind: front.Chat, client: `{"model":"m","messages":[],"max_completion_tokens":99}`, prefill: answer},
		{name: "completions", kind: front.Completions, client: `{"model":"m","prompt":"hi","min_tokens":3}`, prefill: answer},
		{name: "an answer without choices", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"detail":"x"}`},
		{name: "no JSON", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `<html>`},
	}))
}

func TestStorageLegs(t *testing.T) {
	list := []familyCase{
		{name: "chat, two choices", kind: front.Chat, client: `{"model":"m","messages":[],"max_tokens":99,"n":2,"stream":true}`, prefill: `{"choices":[]}`},
		{name: "completions, a batch", kind: front.Completions, client: `{"model":"m","prompt":["a","b"],"best_of":3,"cache_hit_threshold":0.9}`, prefill: `{"choices":[]}`},
		{name: "an error", kind: front.Completions, client: `{"model":"m","prompt":"a"}`, prefill: `{"error":{}}`},
		{name: "messages with a budget of thinking", kind: front.Messages, client: `{"model":"m","messages":[],"max_tokens":2000,"thinking":{"type":"enabled","budget_tokens":1024}}`, prefill: `{"content":[]}`},
		{name: "messages that do not think", kind: front.Messages, client: `{"model":"m","messages":[],"max_tokens":9,"thinking":{"type":"disabled"}}`, prefill: `{"content":[]}`},
	}
	golden(t, "testdata/storage_legs.txt", "## prefill first\n\n"+legsOf(t, storage{}, list)+
		"## decode first\n\n"+legsOf(t, storage{threshold: []byte("0.8")}, list))
}

func TestDeclined(t *testing.T) {
	const role = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	for answer, want := range map[string][2]bool{
		`{"choices":[{"finish_reason":"cache_threshold"}]}`:                                     {true, false},
		`{"choices":[{"finish_reason": "cache_threshold"}]}`:                                    {true, false},
		`{"choices":[{"text":"\"finish_reason\":\"cache_threshold\"","finish_reason":"stop"}]}`: {false, true},
		role:      {false, true},
		role[:40]: {false, true},
		role + `data: {"choices":[{"delta":{},"finish_reason":"cache_threshold"}]}` + "\n\n":      {true, false},
		role + `data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n":      {false, false},
		"5d\r\n" + `data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n\r\n": {false, false},
		`data: {"choices":[{"index":0,"text":"","finish_reason":"cache_threshold"}]}` + "\n\n":    {true, false},
	} {
		declined, more := storage{}.Declined([]byte(answer))
		if declined != want[0] || !declined && more != want[1] {
			t.Errorf("%s: declined %v, more %v; want %v", answer, declined, more, want)
		}
	}
}

func TestTRTLLMLegs(t *testing.T) {
	params := `{"request_type":"context_only","first_gen_tokens":[785],"ctx_request_id":9007199254740993,"encoded_opaque_state":"AAEC/+==","draft_tokens":null,"later":{"b":1.50,"a":[]}}`
	answer := `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"The","disaggregated_params":` + params + `,"finish_reason":"length"}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1},"prompt_token_ids":[1,2,3]}`
	stopped := strings.Replace(answer, `"length"`, `"stop"`, 1)
	chatStopped := `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No"},"finish_reason":"stop","disaggregated_params":` + params + `}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1},"prompt_token_ids":[1,2,3]}`
	stream := `data: {"id":"cmpl-2","choices":[{"index":0,"text":"The","disaggregated_params":null,"finish_reason":null}]}` + "\n\n" +
		`data: {"id":"cmpl-2","choices":[{"index":0,"text":" cat","disaggregated_params":` + params + `,"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	golden(t, "testdata/trtllm_legs.txt", legsOf(t, trtllm{}, []familyCase{
		{name: "completions", kind: front.Completions, client: `{"model":"m","prompt":"hi","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}}`, prefill: answer, decode: stream},
		{name: "chat, not finished", kind: front.Chat, client: `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9}`,
			prefill: strings.Replace(answer, `"length"`, `"not_finished"`, 1), decode: `{"choices":[{"message":{"content":"The cat"},"disaggregated_params":` + params + `}]}`},
		{name: "no request_type, no ids", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[{"disaggregated_params":{"first_gen_tokens":[1],"ctx_request_id":2},"finish_reason":"length"}]}`},
		{name: "a least number of tokens", kind: front.Completions, client: `{"model":"m","prompt":"hi","min_tokens":5}`, prefill: answer},
		{name: "the first token is the last", kind: front.Completions, client: `{"model":"m","prompt":"hi"}`, prefill: stopped},
		{name: "the same, chat, streamed", kind: front.Chat, client: `{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}`, prefill: chatStopped},
		{name: "the same, completions, streamed, no usage", kind: front.Completions, client: `{"model":"m","prompt":"a","stream":true}`, prefill: stopped},
		{name: "no params", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[{"finish_reason":"length","disaggregated_params":null}]}`},
		{name: "no ctx_request_id", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[{"finish_reason":"length","disaggregated_params":{"first_gen_tokens":[1]}}]}`},
		{name: "no first token", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":[]}}]}`},
		{name: "no choice", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[]}`},
		{name: "no JSON", kind: front.Chat, client: `{"model":"m","messages":[]}`, prefill: `{"choices":[`},
	}))
}
