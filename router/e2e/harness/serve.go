package harness

import (
	"fmt"
)

// Prompt is a prompt of some 40 words, more than one KV block of 16 tokens, without characters that
// JSON escapes.
const Prompt = "The quick brown fox jumps over the lazy dog and runs on through the long green field until the night has come over the hills and the river is quiet again, and then it sleeps under the old oak tree near the water."

// Chat returns the body of a chat request with Prompt for 12 output tokens. extra is appended to its
// members, for example `,"stream":true`.
func Chat(extra string) string {
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":12%s}`, Prompt, extra)
}
