package family

import (
	"errors"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
	"sluice/router/worker"
)

func lmcacheDecode(spec worker.Spec) *worker.Rank {
	spec.ID, spec.URL = "d", "http://10.0.0.9:8000"
	if spec.Options == nil {
		spec.Options = map[string][]string{"init_port": {"7300", "7301"}, "alloc_port": {"7400", "7401"}}
	}
	return worker.New(spec).Ranks[0]
}

func TestLMCacheLegs(t *testing.T) {
	to := func(p *Handover) {
		p.Decode = lmcacheDecode(worker.Spec{})
		p.PrefillCached = 2
	}
	answer := func(text, finish, more string) string {
		return `{"id":"cmpl-r-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"` + text + `","logprobs":` + more + `,"finish_reason":"` + finish + `","stop_reason":null}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}},"kv_transfer_params":{"first_tok":785,"num_lmcache_cached_tokens":2}}`
	}
	ids := []uint32{1, 2, 3}
	stream := `data: {"id":"cmpl-r-1","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":"length","stop_reason":null}]}` + "\n\n" +
		`data: {"id":"cmpl-r-1","object":"text_completion","created":2,"model":"m","choices":[],"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1}}` + "\n\ndata: [DONE]\n\n"
	reply := `{"id":"cmpl-r-1","object":"text_completion","created":2,"model":"m","choices":[{"index":0,"text":" cat","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`
	golden(t, "testdata/lmcache_legs.txt", legsOf(t, lmcache{}, []familyCase{
		{name: "chat, streamed", kind: front.Chat, tokens: ids, handover: to, client: `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"temperature":0.0,"seed":9007199254740993,"stream":true,"stream_options":{"include_usage":true},"user":"u","min_tokens":2}`,
			prefill: answer("The", "length", "null"), decode: stream},
		{name: "chat with max_completion_tokens and logprobs", kind: front.Chat, tokens: ids, handover: to, client: `{"model":"m","max_completion_tokens":9,"messages":[],"logprobs":true,"top_logprobs":1}`,
			prefill: answer("The", "length", `{"tokens":["The"],"token_logprobs":[-0.5],"top_logprobs":[{"The":-0.5,"A":-1}],"text_offset":[0]}`), decode: reply},
		{name: "completions without max_tokens, ids asked", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":"hi","return_token_ids":true}`, prefill: answer("The", "length", "null"), decode: reply},
		{name: "a stop string: decode makes the first token again", kind: front.Chat, tokens: ids, handover: to, client: `{"model":"m","messages":[],"max_tokens":5,"stop":["x"]}`, prefill: answer("The", "length", "null"), decode: reply},
		{name: "a seed: the same", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":[1,2,3],"max_tokens":5,"seed":0,"temperature":0.5}`, prefill: answer("The", "length", "null")},
		{name: "a grammar", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":[1,2,3],"max_tokens":5,"guided_json":{"a":1}}`, prefill: answer("{", "length", "null")},
		{name: "half a character", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":[1,2,3],"max_tokens":5}`, prefill: answer(`\ufffd`, "length", "null")},
		{name: "ids as the client spelled them", kind: front.Completions, tokens: ids, handover: func(p *Handover) { to(p); p.RawTokens = reqbody.NumberArray(p.Doc.Raw(jsonscan.KeyPrompt)) },
			client: `{"model":"m","prompt":[ 1, 2 ,3 ],"max_tokens":5}`, prefill: answer("The", "length", "null"), decode: reply},
		{name: "one token asked", kind: front.Chat, tokens: ids, handover: to, client: `{"model":"m","messages":[],"max_tokens":1}`, prefill: answer("The", "length", "null")},
		{name: "the first token is the last, streamed", kind: front.Chat, tokens: ids, handover: to, client: `{"model":"m","messages":[],"max_tokens":9,"stream":true,"stream_options":{"include_usage":true}}`, prefill: answer("", "stop", "null")},
		{name: "the same, completions", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":"a","max_tokens":9,"stream":true}`, prefill: answer("No", "stop", "null")},
		{name: "no first_tok", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":"a","max_tokens":9}`, prefill: `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":null}`},
		{name: "no choices", kind: front.Completions, tokens: ids, handover: to, client: `{"model":"m","prompt":"a","max_tokens":9}`, prefill: `{"error":"x"}`},
		{name: "a peer host, one rank", kind: front.Completions, tokens: ids, client: `{"model":"m","prompt":"a","max_tokens":9}`, prefill: answer("The", "length", "null"), handover: func(p *Handover) {
			p.Decode = lmcacheDecode(worker.Spec{Options: map[string][]string{"init_port": {"7300"}, "alloc_port": {"7400"}, "peer_host": {"[fd00::1]"}}})
		}},
		{name: "a host that is none", kind: front.Completions, tokens: ids, client: `{"model":"m","prompt":"a","max_tokens":9}`, prefill: answer("The", "length", "null"), handover: func(p *Handover) {
			p.Decode = lmcacheDecode(worker.Spec{Options: map[string][]string{"init_port": {"7300", `1],"x":[2`}, "alloc_port": {"7400"}, "peer_host": {`h","x":"y`}}})
		}},
		{name: "a decode worker without ports", kind: front.Completions, tokens: ids, client: `{"model":"m","prompt":"a","max_tokens":9}`, prefill: answer("The", "length", "null"), handover: func(p *Handover) {
			p.Decode = lmcacheDecode(worker.Spec{Options: map[string][]string{"peer_host": {"h"}}})
		}},
	}))
}

func TestLMCacheWaitsForEveryRank(t *testing.T) {
	p := Handover{Decode: lmcacheDecode(worker.Spec{}), Token: 0xabc}
	if id, n := (lmcache{}).ExpectedCompletions(&p); id != "sluice-abc" || n != 2 {
		t.Errorf("%q, %d", id, n)
	}
	p.Decode = lmcacheDecode(worker.Spec{Options: map[string][]string{"x": nil}})
	if _, n := (lmcache{}).ExpectedCompletions(&p); n != 0 {
		t.Errorf("waits for %d of a worker without ports", n)
	}
}

func TestLMCacheUnsupportedCompletions(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":"a"}`:              "",
		`{"prompt":"a","echo":false}`: "",
		`{"prompt":"a","echo":true}`:  "echo",
		`{"prompt":"a","suffix":"b"}`: "echo",
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(body), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		r := Request{Kind: front.Completions, Doc: &doc, Tokens: []uint32{1}, Decode: []*worker.Rank{lmcacheDecode(worker.Spec{})}}
		if got := (lmcache{}).Unsupported(&r); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestLMCacheUnsupported(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[{"role":"user","content":"a"}],"max_tokens":3}`:                                            "",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"max_tokens":3}`:                   "",
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}],"max_tokens":3}`: "media",
		`{"messages":[],"max_tokens":3,"tools":[{"type":"function"}]}`:                                           "tools",
		`{"messages":[],"max_tokens":3,"tools":[{"type":"function"}],"tool_choice":"none"}`:                      "",
		`{"messages":[],"max_tokens":3,"tools":[]}`:                                                              "",
		`{"messages":[],"max_tokens":3,"reasoning_effort":"high"}`:                                               "reasoning",
		`{"messages":[],"max_tokens":3,"chat_template_kwargs":{"enable_thinking":true}}`:                         "reasoning",
		`{"messages":[],"max_tokens":3,"chat_template_kwargs":{"enable_thinking":false}}`:                        "",
		`{"messages":[]}`: "no_max_tokens",
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(body), jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		r := Request{Kind: front.Chat, Doc: &doc, Tokens: []uint32{1}, Decode: []*worker.Rank{lmcacheDecode(worker.Spec{})}}
		if got := (lmcache{}).Unsupported(&r); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
		if got := (lmcache{reasoning: true}).Unsupported(&r); got != "reasoning" {
			t.Errorf("%s with a reasoning parser: %q", body, got)
		}
		if r.Tokens = nil; want == "" && (lmcache{}).Unsupported(&r) != "no_tokens" {
			t.Errorf("%s without tokens is fit", body)
		}
	}
}

// TestFailedPrefillIsNoAnswer: a 200 whose finish reason says that the engine failed is neither the
// client's answer nor a hand-over.
func TestFailedPrefillIsNoAnswer(t *testing.T) {
	for _, finish := range []string{"error", "abort", "cancelled", "timeout"} {
		answer := []byte(`{"choices":[{"text":"a","finish_reason":"` + finish + `","disaggregated_params":{"first_gen_tokens":[1],"ctx_request_id":2}}],"kv_transfer_params":{"first_tok":7}}`)
		for _, family := range []Family{trtllm{}, lmcache{}} {
			if got, err := family.Handle(&Handover{}, answer); !errors.Is(err, ErrPrefillFailed) {
				t.Errorf("%s, %s: %q, %v; want ErrPrefillFailed", family.Name(), finish, got, err)
			}
		}
	}
}
