package harness

import (
	"fmt"
)

func ChatOf(words string) string {
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":4}`, words)
}
