package apiformat

import (
	"fmt"
	"strings"
	"testing"
)

func TestAppendEvents(t *testing.T) {
	var out strings.Builder
	for _, in := range []string{
		`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"No\"","reasoning_content":null,"tool_calls":[]},"logprobs":{"content":[]},"finish_reason":"stop","stop_reason":"No"}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`,
		`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}`,
		`{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"No","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`,
		`{"error":{"message":"x"}}`,
		`garbage`,
	} {
		for _, usage := range []bool{true, false} {
			got := AppendEvents(nil, []byte(in), usage)
			fmt.Fprintf(&out, "# usage asked: %v\n%s\n-- becomes --\n%s\n", usage, in, got)
		}
	}
	golden(t, "testdata/as_events.txt", out.String())
}
