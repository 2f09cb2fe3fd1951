package harness

import (
	"os"
	"testing"
)

// RegisterToken is the token of the registration listener in tests. Its value must not appear in
// logs.
const RegisterToken = "register-token-0123456789"

// WriteFile writes text to path and ends the test on an error. It replaces the content in place: a
// process that reads the file meanwhile may see part of it.
func WriteFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
