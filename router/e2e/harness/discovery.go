package harness

import (
	"os"
	"testing"
)

const RegisterToken = "register-token-0123456789"

func WriteFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
