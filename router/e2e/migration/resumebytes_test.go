package migration

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// resumables are the endpoints of TestResumedByteForByte. Each body has a prompt, a limit, and
// further members, some of them unknown to the router.
var resumables = []harness.Resumable{
	{EndpointCase: harness.EndpointCase{Path: "/v1/chat/completions", Read: readOpenAIStream,
		Body: `"messages":[{"role":"user","content":%s}],"max_completion_tokens":%d,"ignore_eos":true,"temperature":0.70,"top_p":9.5e-1,"user":"u\u00e9 ☕","x_more":[1,{"b":2.50}],"stream_options":{"include_usage":true}`},
		Prompt: "prompt", Limit: "max_tokens", Nested: false, RequestsTokenIDs: true, TextPrompt: true},
	{EndpointCase: harness.EndpointCase{Path: "/v1/completions", Read: readOpenAIStream,
		Body: `"top_k":20,"prompt":%s,"max_tokens":%d,"x_more":{"a":18446744073709551615},"ignore_eos":true,"stream_options":{"include_usage":true}`},
		Prompt: "prompt", Limit: "max_tokens", Nested: false, RequestsTokenIDs: true, TextPrompt: true},
	{EndpointCase: harness.EndpointCase{Path: "/inference/v1/generate", Read: readOpenAIStream,
		Body: `"token_ids":%s,"sampling_params":{"temperature":0.5,"max_tokens":%d,"ignore_eos":true},"stream_options":{"include_usage":true}`},
		Prompt: "token_ids", Limit: "max_tokens", Nested: true, RequestsTokenIDs: false, TextPrompt: false},
	{EndpointCase: harness.EndpointCase{Engine: "sglang", Path: "/generate", Read: readNativeStream(false),
		Body: `"input_ids":%s,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true,"temperature":0.5}`},
		Prompt: "input_ids", Limit: "max_new_tokens", Nested: true, RequestsTokenIDs: false, TextPrompt: false},
	// Only the client's stream is compared, because it contains no token ids.
	{EndpointCase: harness.EndpointCase{Name: "messages", Path: "/v1/messages", Read: readMessagesStream,
		Body: `"messages":[{"role":"user","content":%s}],"system":"be long","max_tokens":%d,"ignore_eos":true`}, TextPrompt: true},
	{EndpointCase: harness.EndpointCase{Name: "responses", Path: "/v1/responses", Read: readResponsesStream,
		Body: `"input":%s,"instructions":"be long","max_output_tokens":%d,"ignore_eos":true`}, TextPrompt: true},
	{EndpointCase: harness.EndpointCase{Name: "incremental", Engine: "sglang", Path: "/generate", Read: readNativeStream(true),
		Body: `"text":%s,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`,
		Mod:  func(o *sim.Options) { o.Incremental = true }}, TextPrompt: true},
}

// TestResumedByteForByte kills engines at random tokens of random concurrent requests. The resumed
// request is the client's request with the output ids so far after the prompt's ids, and the
// client's stream has the text and ids of an undisturbed one.
func TestResumedByteForByte(t *testing.T) {
	t.Parallel()
	for _, k := range resumables {
		t.Run(k.Path+k.Name, func(t *testing.T) {
			t.Parallel()
			mod := k.Mod
			k.Mod = func(o *sim.Options) {
				if o.Records = 100_000; mod != nil {
					mod(o)
				}
			}
			m := startEndpointFleet(t, &k.EndpointCase, 3, func(c *config.Config) { c.Timeouts.StreamIdle = 5e9 })
			var wg sync.WaitGroup
			for client := range 3 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					rng := rand.New(rand.NewPCG(41, uint64(client)))
					for i := range harness.Trials(12) {
						m.TestResume(t, rng, &k, fmt.Sprintf("c%di%dn", client, i))
						if t.Failed() {
							return
						}
					}
				}()
			}
			wg.Wait()
		})
	}
}
