package pd

import (
	"bytes"
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// orchestrated is the hand-over of production-stack's orchestrated mode, for
// any kv_connector: prefill makes one token, and its whole answer goes into
// decode's request as disagg_prefill_resp. What the connector needs stands in
// that answer; nothing of it is looked at but that it is one.
type orchestrated struct{}

// Name implements Family.
func (orchestrated) Name() string { return "orchestrated" }

// Traits implements Family. How long a connector keeps blocks is not told, so
// there is no lease to keep.
func (orchestrated) Traits() Traits {
	return Traits{Kinds: kindsOf(front.Chat, front.Completions), NoLease: true}
}

// Order implements Family.
func (orchestrated) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family.
func (orchestrated) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.limitToOneToken(p)
}

// Handle implements Family: the whole answer, an object with choices.
func (orchestrated) Handle(_ *Handover, body []byte) ([]byte, error) {
	v, ok, err := jsonscan.Find(body, "choices")
	if err != nil {
		return nil, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if !ok || v.Kind != jsonscan.Array {
		return nil, fmt.Errorf("%w: the prefill response has no choices", ErrIncompleteHandle)
	}
	return bytes.TrimSpace(body), nil
}

// Decode implements Family.
func (orchestrated) Decode(leg *LegRequest, p *Handover) {
	leg.Set(jsonscan.KeyDisaggPrefillResp, p.Handle)
}
