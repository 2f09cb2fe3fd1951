package relay

import (
	"strings"
	"testing"
)

// BenchmarkUsageOf is the walk over a short whole answer, as each request that is not
// streamed has one.
func BenchmarkUsageOf(b *testing.B) {
	body := []byte(`{"id":"cmpl-2f3c66d1a09b-00000001","object":"text_completion","created":1763690000,"model":"sim","choices":[{"index":0,"text":" word word word word","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":64,"total_tokens":68,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0}},"kv_transfer_params":null}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if UsageOf(body).Prompt != 64 {
			b.Fatal("the usage was not found")
		}
	}
}

// BenchmarkUsageOfLong is the walk over an answer that repeats a prompt's ids, as
// TensorRT-LLM's context servers give it.
func BenchmarkUsageOfLong(b *testing.B) {
	body := []byte(`{"prompt_token_ids":[` + strings.Repeat("12345,", 16383) + `12345],"usage":{"prompt_tokens":16384}}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if UsageOf(body).Prompt != 16384 {
			b.Fatal("the usage was not found")
		}
	}
}
