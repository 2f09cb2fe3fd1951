package pd

import (
	"bytes"
	"fmt"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
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
func (nixlPull) Traits() Traits {
	return Traits{Kinds: vllmKinds, Reports: true, OldJoinsByRequestID: true}
}

// Order implements Family.
func (nixlPull) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family: one token, no stream (a streamed prefill never
// carries the handle before vLLM 0.33).
func (nixlPull) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.Set(jsonscan.KeyKVTransferParams, nixlPrefillParams)
	leg.limitToOneToken(p)
	if acceptsPromptIDs(p, p.Prefill) {
		leg.Set(jsonscan.KeyReturnTokenIDs, jsonTrue)
	}
}

// Handle implements Family. The checks are those whose failure kills a decode
// engine (vLLM 0.32 asserts on missing or empty remote_block_ids, and in its worker on a
// group without any) or leaves its request without the KV; everything else of the handle stays unread.
func (nixlPull) Handle(p *Handover, body []byte) ([]byte, error) {
	var vals [7]jsonscan.Value
	handle, err := transferParams(p, body, vals[:], 4,
		"remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "remote_request_id", "remote_prefill_cached_tokens", "prompt_token_ids")
	if err != nil {
		return nil, err
	}
	p.handleMembers = handleMembers{parsed: true, requestID: vals[4], hasCachedTokens: vals[5].Kind != jsonscan.Absent, hasPromptIDs: vals[6].Kind != jsonscan.Absent}
	p.EngineID = handle[vals[0].Start:vals[0].End]
	ids := vals[3]
	if ids.Kind != jsonscan.Array {
		return nil, fmt.Errorf("%w: remote_block_ids is no array", ErrIncompleteHandle)
	}
	// A flat list up to vLLM 0.17, a list per KV group since: either way some block is named
	// exactly when a number, or a string, stands in it. vLLM's own ids are numbers; others
	// that speak its protocol name blocks by strings (llm-d-inference-sim: ["DUMMY_ID"]).
	if !bytes.ContainsAny(handle[ids.Start:ids.End], `0123456789"`) {
		return nil, fmt.Errorf("%w: remote_block_ids is empty", ErrIncompleteHandle)
	}
	return handle, nil
}

// handleMembers are those of a handle that are read again after Handle. It names a block for
// every 16 tokens of a prompt, so each further walk over it would be one for each prompt.
type handleMembers struct {
	parsed                        bool // else nothing is known
	requestID                     jsonscan.Value
	kind                          jsonscan.Value // TensorRT-LLM's request_type
	push                          [len(pushMembers)]jsonscan.Value
	hasCachedTokens, hasPromptIDs bool // remote_prefill_cached_tokens and prompt_token_ids stand in it
}

// What is known of the ids that a prefill engine knows requests by (Pair.Fact).
const (
	randomizedRequestIDs = "own"   // it adds to X-Request-Id
	plainRequestIDs      = "given" // it does not, and joins two requests of one id
)

// LearnPeerInfo implements Learner: from 0.14 on vLLM makes an id of its own of X-Request-Id,
// unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, which its handles tell.
func (nixlPull) LearnPeerInfo(fact []byte, p *Handover) []byte {
	if p.PeerInfo != "" {
		return append(fact, p.PeerInfo...)
	}
	named := [1]jsonscan.Value{p.handleMembers.requestID}
	if !p.handleMembers.parsed {
		jsonscan.Members(p.Handle, named[:], "remote_request_id")
	}
	if named[0].Kind != jsonscan.String {
		return fact
	}
	id := bytes.TrimSuffix(p.Handle[named[0].Start+1:named[0].End-1], []byte("-0")) // of completions
	if bytes.HasSuffix(id, []byte(p.RequestID)) {
		return append(fact, plainRequestIDs...)
	}
	return append(fact, randomizedRequestIDs...)
}

// transferParams finds kv_transfer_params in a vLLM answer, an object in which
// the first so many of the members called names are not null; vals is where those lie
// in it. The prompt's ids beside it are noted in p.
func transferParams(p *Handover, body []byte, vals []jsonscan.Value, required int, names ...string) ([]byte, error) {
	v, ids, err := jsonscan.FindTwo(body, "kv_transfer_params", "prompt_token_ids")
	if err != nil {
		return nil, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if v.Kind != jsonscan.Object {
		return nil, fmt.Errorf("%w: kv_transfer_params is missing or null", ErrIncompleteHandle)
	}
	handle := body[v.Start:v.End]
	jsonscan.Members(handle, vals, names...)
	for i, name := range names {
		if v := vals[i]; v.Kind > jsonscan.Null {
			if want := wrongMember(name, v.Kind, handle[v.Start:v.End]); want != "" {
				return nil, fmt.Errorf("%w: %s is %s, want %s", ErrIncompleteHandle, name, v.Kind, want)
			}
		} else if i < required {
			return nil, fmt.Errorf("%w: %s is missing or null", ErrIncompleteHandle, name)
		}
	}
	if ids.Kind == jsonscan.Array {
		p.promptIDs = body[ids.Start:ids.End]
	}
	return handle, nil
}

// wrongMember says what a member of a handle must be when its value raw is something else,
// and "" when it is not. vLLM takes kv_transfer_params as they are and fails on these, or
// answers 400, when it opens the connection to the prefill engine.
func wrongMember(name string, kind jsonscan.Kind, raw []byte) (want string) {
	switch name {
	case "remote_engine_id", "remote_host", "remote_request_id":
		if kind != jsonscan.String || len(raw) <= len(`""`) {
			return "a string that is not empty"
		}
	case "remote_port":
		if n, ok := integer(kind, raw); !ok || n == 0 || n > 65535 {
			return "an integer from 1 to 65535"
		}
	case "tp_size", "pp_size", "dcp_size":
		if n, ok := integer(kind, raw); !ok || n == 0 {
			return "an integer from 1 on"
		}
	}
	return ""
}

// integer reads a JSON number that is a non-negative integer of 64 bits.
func integer(kind jsonscan.Kind, raw []byte) (n uint64, ok bool) {
	if kind != jsonscan.Number {
		return 0, false
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	return n, err == nil
}

// Decode implements Family: the client's body with the handle as its
// kv_transfer_params, the handle's own bytes untouched; behind them what newer
// releases take from a router.
func (nixlPull) Decode(leg *LegRequest, p *Handover) {
	leg.Set(jsonscan.KeyKVTransferParams, withExtras(leg, p))
}

// withExtras is the handle, and from vLLM 0.31 on how many tokens prefill found
// cached, which decode could not know and then reports; from 0.32 on, for chats
// of text alone, the prompt's ids as prefill had them, so that decode does not
// render and tokenize once more.
func withExtras(leg *LegRequest, p *Handover) []byte {
	cached := -1
	if p.PrefillCached >= 0 && versionAtLeast(p.Decode, 0, 31, 0) && !p.handleMembers.hasCachedTokens {
		cached = p.PrefillCached
	}
	var ids []byte
	if p.promptIDs != nil && !p.handleMembers.hasPromptIDs && acceptsPromptIDs(p, p.Decode) {
		ids = p.promptIDs
	}
	if cached < 0 && ids == nil && p.Slot == nil {
		return p.Handle
	}
	return leg.Render(func(dst []byte) []byte {
		dst = append(dst, p.Handle[:len(p.Handle)-1]...)
		if cached >= 0 {
			dst = appendUint(append(dst, `,"remote_prefill_cached_tokens":`...), uint64(cached))
		}
		if ids != nil {
			dst = append(append(dst, `,"prompt_token_ids":`...), ids...)
		}
		return append(appendSlot(dst, p), '}')
	})
}

// appendSlot names the slot in which decode's connector tells the end of its
// transfer; an engine without it gets none.
func appendSlot(dst []byte, p *Handover) []byte {
	if p.Slot == nil {
		return dst
	}
	return append(append(dst, `,"sluice":`...), p.Slot...)
}

// acceptsPromptIDs says whether an engine takes a chat's prompt as ids beside its
// messages: not for other content than text, and not with echo.
func acceptsPromptIDs(p *Handover, engine *worker.Rank) bool {
	return p.Kind == front.Chat && versionAtLeast(engine, 0, 32, 0) && !p.Doc.Has(jsonscan.KeyEcho) && p.textOnly()
}
