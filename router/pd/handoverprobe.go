package pd

import (
	"encoding/json"
	"fmt"
	"strings"
)

// HandoverProbe is a prefill leg of a family by which an operator's check learns whether an
// engine gives a handle at all: one token of a short prompt, whose blocks the engine keeps
// until its lease ends, for no decode asks for them.
type HandoverProbe struct {
	family Family
	Path   string
	Body   []byte
}

// probePrompt are so many that the prompt fills a block of every usual size.
const probePrompt = 160

// NewHandoverProbe makes that of a family for a model; ok is false for families whose prefill
// legs cannot be run by themselves.
func NewHandoverProbe(family, model string) (probe HandoverProbe, ok bool) {
	if family == "" {
		family = "nixl"
	}
	f, err := FamilyByName(family)
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
	return HandoverProbe{family: f, Path: "/v1/completions", Body: body}, true
}

// Check says why the engine's answer cannot be handed over, nil when it can.
func (t *HandoverProbe) Check(status int, answer []byte) error {
	if status != 200 {
		return fmt.Errorf("POST %s with kv_transfer_params answered %d; want 200", t.Path, status)
	}
	if _, err := t.family.Handle(&Handover{Path: t.Path}, answer); err != nil {
		return fmt.Errorf("it gives no handle for a hand-over: %w; start it with --kv-transfer-config, or every request is decoded alone", err)
	}
	return nil
}
