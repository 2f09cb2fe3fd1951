package harness

import (
	"encoding/json"
	"testing"
)

// prefillOnlyAnswer is the response to a prefill-only request.
type prefillOnlyAnswer struct {
	Object       string `json:"object"`
	Worker       string `json:"worker"`
	Role         string `json:"role"`
	PromptTokens int    `json:"prompt_tokens"`
	CachedBefore *int   `json:"cached_tokens_before"`
	Blocks       int    `json:"blocks"`
	BlockSize    int    `json:"block_size"`
}

// PrefillOnly returns the members of a successful response to a prefill-only request. Any other
// response ends the test.
func (a *Answer) PrefillOnly(t *testing.T) (w prefillOnlyAnswer) {
	t.Helper()
	if err := json.Unmarshal(a.Body, &w); err != nil || a.Status != 200 || w.Object != "sluice.prefill" {
		t.Fatalf("%d %s (%v)", a.Status, a.Body, err)
	}
	return w
}
