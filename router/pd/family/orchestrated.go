package family

import (
	"bytes"
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// orchestrated is the hand-over of production-stack's orchestrated mode, for any kv_connector.
// Prefill generates one token, and its whole response goes into the decode request as
// disagg_prefill_resp. The response carries whatever the connector needs; the router only checks
// that it has choices.
type orchestrated struct{}

// Name implements Family.
func (orchestrated) Name() string { return "orchestrated" }

// Traits implements Family. The protocol does not say how long a connector keeps blocks, so the
// router observes no lease.
func (orchestrated) Traits() Traits {
	return Traits{Kinds: kindsOf(front.Chat, front.Completions), NoLease: true, PromptIDs: true}
}

// Order implements Family.
func (orchestrated) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family.
func (orchestrated) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.limitToOneToken(p)
	leg.setPromptIDsAlone(p, p.Prefill)
}

// Handle implements Family. The handle is the whole response.
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
	leg.setPromptIDsAlone(p, p.Decode)
}
