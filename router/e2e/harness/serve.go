package harness

import (
	"fmt"
)

const Prompt = "The quick brown fox jumps over the lazy dog and runs on through the long green field until the night has come over the hills and the river is quiet again, and then it sleeps under the old oak tree near the water."

func Chat(extra string) string {
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":12%s}`, Prompt, extra)
}
