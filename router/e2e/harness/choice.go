package harness

import (
	"fmt"
)

// ChatOf returns the body of a chat request for 4 output tokens, not streamed, whose only message is
// words.
func ChatOf(words string) string {
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":4}`, words)
}
