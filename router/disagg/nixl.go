package disagg

import (
	"bytes"
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// nixlPull is vLLM's NixlConnector in pull mode: prefill answers with a handle
// in kv_transfer_params, decode is given it verbatim, pulls the blocks and
// tells prefill to free them. The handle's members differ from release to
// release (0.9 … 0.33) and are opaque but for the checks of Handle.
type nixlPull struct{}

var nixlPrefillParams = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)

// vllmKinds are the endpoints of vLLM that take kv_transfer_params.
var vllmKinds = kindsOf(front.Chat, front.Completions, front.ResponsesAPI, front.Messages, front.Generate)

// Name implements Family.
func (nixlPull) Name() string { return "nixl" }

// Traits implements Family.
func (nixlPull) Traits() Traits { return Traits{Kinds: vllmKinds} }

// Order implements Family.
func (nixlPull) Order(*Pair) Order { return PrefillFirst }

// Prefill implements Family: one token, no stream (a streamed prefill never
// carries the handle before vLLM 0.33).
func (nixlPull) Prefill(leg *Leg, p *Pair) {
	leg.notStreamed()
	leg.Set(jsonscan.KeyKVTransferParams, nixlPrefillParams)
	leg.oneToken(p)
}

// Handle implements Family. The checks are those whose failure kills a decode
// engine (vLLM 0.32 asserts on missing or empty remote_block_ids) or makes it
// recompute in silence; everything else of the handle stays unread.
func (nixlPull) Handle(_ *Pair, body []byte) ([]byte, error) {
	handle, err := transferParams(body, "remote_engine_id", "remote_host", "remote_port")
	if err != nil {
		return nil, err
	}
	ids, ok, err := jsonscan.Find(handle, "remote_block_ids")
	if err != nil || !ok || ids.Kind != jsonscan.Array {
		return nil, fmt.Errorf("%w: remote_block_ids is missing or null", ErrIncompleteHandle)
	}
	// A flat list up to vLLM 0.17, a list per KV group since: either way some
	// block is named exactly when a digit stands in it.
	if !bytes.ContainsAny(handle[ids.Start:ids.End], "0123456789") {
		return nil, fmt.Errorf("%w: remote_block_ids is empty", ErrIncompleteHandle)
	}
	return handle, nil
}

// transferParams finds kv_transfer_params in a vLLM answer, an object in which
// the members called names are not null.
func transferParams(body []byte, names ...string) ([]byte, error) {
	v, ok, err := jsonscan.Find(body, "kv_transfer_params")
	if err != nil {
		return nil, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if !ok || v.Kind != jsonscan.Object {
		return nil, fmt.Errorf("%w: kv_transfer_params is missing or null", ErrIncompleteHandle)
	}
	handle := body[v.Start:v.End]
	for _, name := range names {
		m, ok, err := jsonscan.Find(handle, name)
		if err != nil || !ok || m.Kind <= jsonscan.Null {
			return nil, fmt.Errorf("%w: %s is missing or null", ErrIncompleteHandle, name)
		}
	}
	return handle, nil
}

// Decode implements Family: the client's body with the handle as its
// kv_transfer_params, the handle's own bytes untouched.
func (nixlPull) Decode(leg *Leg, p *Pair) {
	leg.Set(jsonscan.KeyKVTransferParams, p.Handle)
}
