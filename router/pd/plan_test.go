package pd

import (
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// TestSingleEngineReason checks which requests run on one engine in every family.
func TestSingleEngineReason(t *testing.T) {
	for _, c := range []struct {
		kind front.Kind
		body string
		want string
	}{
		{front.Completions, `{"prompt":"a","prompt_logprobs":0}`, "prompt_logprobs"},
		{front.Completions, `{"prompt":"a","prompt_logprobs":null}`, ""},
		{front.Completions, `{"prompt":"a","prompt_\u006cogprobs":5}`, "prompt_logprobs"},
		{front.Completions, `{"prompt":"a","echo":true,"logprobs":0,"max_tokens":0}`, "prompt_logprobs"},
		{front.Completions, `{"prompt":"a","echo":1,"logprobs":1}`, "prompt_logprobs"},
		{front.Completions, `{"prompt":"a","echo":true}`, ""},
		{front.Completions, `{"prompt":"a","echo":true,"logprobs":null}`, ""},
		{front.Completions, `{"prompt":"a","echo":false,"logprobs":1}`, ""},
		{front.Chat, `{"messages":[{"role":"user","content":"prompt_logprobs"}],"echo":true,"logprobs":true}`, ""},
		{front.Chat, `{"messages":[],"prompt_logprobs":1}`, "prompt_logprobs"},
		{front.Generate, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`, "prompt_logprobs"},
		{front.Generate, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":null}}`, ""},
		{front.ResponsesAPI, `{"input":"previous_response_id","x":"background"}`, ""},
		{front.ResponsesAPI, `{"input":"a","previous_response_id":"resp_1"}`, "stored_response"},
		{front.ResponsesAPI, `{"input":"a","previous_response_id":null,"background":false}`, ""},
		{front.ResponsesAPI, `{"input":"a","background":true}`, "stored_response"},
	} {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(c.body), jsonscan.Limits{}); err != nil {
			t.Fatalf("%s: %v", c.body, err)
		}
		if got := singleEngineReason(c.kind, &doc); got != c.want {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
	}
}
