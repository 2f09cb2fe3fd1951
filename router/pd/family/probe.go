package family

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Probe is a prefill leg with which sluice check --probe tests whether an engine returns a
// KV handle. It computes one token for a short prompt. The engine keeps the prompt's blocks until
// its lease ends, because no decode fetches them.
type Probe struct {
	family Family
	Path   string
	Body   []byte
}

// probePrompt is the number of words in the prompt, enough to fill a block of any usual size.
const probePrompt = 160

// NewProbe returns the probe of a family for a model. ok is false for families whose
// prefill legs cannot run alone.
func NewProbe(family, model string) (probe Probe, ok bool) {
	if family == "" {
		family = "nixl"
	}
	f, err := ByName(family)
	if err != nil {
		return probe, false
	}
	switch f.(type) {
	case nixlPull, nixlPush:
	default:
		return probe, false
	}
	body, err := json.Marshal(map[string]any{
		"model": model, "prompt": strings.Repeat("a b ", probePrompt/2), "max_tokens": 1, "stream": false,
		"kv_transfer_params": json.RawMessage(nixlPrefillParams),
	})
	if err != nil {
		return probe, false
	}
	return Probe{family: f, Path: "/v1/completions", Body: body}, true
}

// Check returns an error that says why the engine's response cannot be handed over, or nil if it
// can.
func (t *Probe) Check(status int, answer []byte) error {
	if status != 200 {
		return fmt.Errorf("POST %s with kv_transfer_params answered %d; want 200", t.Path, status)
	}
	if _, err := t.family.Handle(&Handover{Path: t.Path}, answer); err != nil {
		return fmt.Errorf("it gives no handle for a hand-over: %w; start it with --kv-transfer-config, or every request is decoded alone", err)
	}
	return nil
}
