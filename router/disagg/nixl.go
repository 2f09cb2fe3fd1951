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

var (
	jsonOne   = []byte("1")
	jsonFalse = []byte("false")

	nixlPrefillParams = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)
	oneTokenSampling  = []byte(`{"max_tokens":1}`)
)

// Name implements Family.
func (nixlPull) Name() string { return "nixl" }

// PrefillEdits implements Family: one token, no stream (a streamed prefill
// never carries the handle before vLLM 0.33), and no minimum that would keep
// the engine from ending with the reason "length", the one end after which
// every release keeps the blocks.
func (nixlPull) PrefillEdits(dst []jsonscan.Edit, kind front.Kind, doc *jsonscan.Doc) []jsonscan.Edit {
	dst = append(dst,
		jsonscan.Edit{Key: jsonscan.KeyStream, Op: jsonscan.Set, Value: jsonFalse},
		jsonscan.Edit{Key: jsonscan.KeyStreamOptions, Op: jsonscan.Remove},
		jsonscan.Edit{Key: jsonscan.KeyKVTransferParams, Op: jsonscan.Set, Value: nixlPrefillParams},
	)
	switch kind {
	case front.Chat, front.Completions:
		dst = append(dst,
			jsonscan.Edit{Key: jsonscan.KeyMaxTokens, Op: jsonscan.Set, Value: jsonOne},
			jsonscan.Edit{Key: jsonscan.KeyMaxCompletionTokens, Op: jsonscan.Replace, Value: jsonOne},
			jsonscan.Edit{Key: jsonscan.KeyMinTokens, Op: jsonscan.Remove},
			jsonscan.Edit{Key: jsonscan.KeyMinCompletionTokens, Op: jsonscan.Remove},
		)
	case front.ResponsesAPI:
		dst = append(dst, jsonscan.Edit{Key: jsonscan.KeyMaxOutputTokens, Op: jsonscan.Set, Value: jsonOne})
	case front.Messages:
		dst = append(dst, jsonscan.Edit{Key: jsonscan.KeyMaxTokens, Op: jsonscan.Set, Value: jsonOne})
	case front.Generate:
		if !doc.Has(jsonscan.KeySamplingParams) {
			return append(dst, jsonscan.Edit{Key: jsonscan.KeySamplingParams, Op: jsonscan.Set, Value: oneTokenSampling})
		}
		dst = append(dst,
			jsonscan.Edit{Key: jsonscan.KeySamplingMaxTokens, Op: jsonscan.Set, Value: jsonOne},
			jsonscan.Edit{Key: jsonscan.KeySamplingMinTokens, Op: jsonscan.Remove},
		)
	}
	return dst
}

// Handle implements Family. The checks are those whose failure kills a decode
// engine (vLLM 0.32 asserts on missing or empty remote_block_ids) or makes it
// recompute in silence; everything else of the handle stays unread.
func (nixlPull) Handle(body []byte) ([]byte, error) {
	v, ok, err := jsonscan.Find(body, "kv_transfer_params")
	if err != nil {
		return nil, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if !ok || v.Kind != jsonscan.Object {
		return nil, fmt.Errorf("%w: kv_transfer_params is missing or null", ErrIncompleteHandle)
	}
	handle := body[v.Start:v.End]
	for _, name := range [...]string{"remote_engine_id", "remote_host", "remote_port"} {
		m, ok, err := jsonscan.Find(handle, name)
		if err != nil || !ok || m.Kind <= jsonscan.Null {
			return nil, fmt.Errorf("%w: %s is missing or null", ErrIncompleteHandle, name)
		}
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

// DecodeEdits implements Family: the client's body with the handle as its
// kv_transfer_params, the handle's own bytes untouched.
func (nixlPull) DecodeEdits(dst []jsonscan.Edit, handle []byte) []jsonscan.Edit {
	return append(dst, jsonscan.Edit{Key: jsonscan.KeyKVTransferParams, Op: jsonscan.Set, Value: handle})
}
