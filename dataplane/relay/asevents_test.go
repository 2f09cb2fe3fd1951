package relay

import (
	"sluice/dataplane/apiformat"
	"sluice/dataplane/sse"
	"strings"
	"testing"
)

// TestScanAppendedEvents checks that the scan understands a whole answer that was written as a stream.
func TestScanAppendedEvents(t *testing.T) {
	for _, in := range []string{
		`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No\"","reasoning_content":null,"tool_calls":[]},"logprobs":{"content":[]},"finish_reason":"stop","stop_reason":"No"}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`,
		`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}`,
		`{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"No","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`,
	} {
		for _, usage := range []bool{true, false} {
			got := apiformat.AppendEvents(nil, []byte(in), usage)
			s := newScanner(sse.OpenAI)
			s.feed(got)
			if s.finish != "stop" || !s.ended || (s.usage.Completion == 1) != (usage && strings.Contains(in, "usage")) {
				t.Errorf("%s: %+v", in, s)
			}
		}
	}
}
