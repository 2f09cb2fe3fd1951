package family

import (
	"bytes"
	"fmt"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// nixlPull is vLLM's NixlConnector in pull mode. The prefill response carries a handle in
// kv_transfer_params. The decode request passes the handle verbatim, and the decode engine pulls
// the blocks and notifies the prefill engine, which frees them. The handle's members differ between
// releases (0.9 … 0.33); apart from the checks in Handle they are opaque.
type nixlPull struct{}

var nixlPrefillParams = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)

// vllmKinds are the endpoints of vLLM that accept kv_transfer_params.
var vllmKinds = kindsOf(front.Chat, front.Completions, front.ResponsesAPI, front.Messages, front.Generate)

// Name implements Family.
func (nixlPull) Name() string { return "nixl" }

// Traits implements Family.
func (nixlPull) Traits() Traits {
	return Traits{Kinds: vllmKinds, Pulls: true, Reports: true, OldJoinsByRequestID: true, PromptIDs: true}
}

// Order implements Family.
func (nixlPull) Order(*Handover) Order { return PrefillFirst }

// Prefill implements Family: one token without streaming. Before vLLM 0.33 a streamed prefill
// response never carries the handle.
func (nixlPull) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.Set(jsonscan.KeyKVTransferParams, leg.setPromptIDs(p, p.Prefill, nixlPrefillParams))
	leg.limitToOneToken(p)
	if !p.ByIDs && acceptsPromptIDs(p, p.Prefill) {
		leg.Set(jsonscan.KeyReturnTokenIDs, jsonTrue)
	}
}

// Handle implements Family. It checks only what would crash a decode engine or leave its request
// without KV: vLLM 0.32 asserts on missing or empty remote_block_ids, and its worker on a KV group
// without blocks. The rest of the handle stays unread.
func (nixlPull) Handle(p *Handover, body []byte) ([]byte, error) {
	var vals [9]jsonscan.Value
	handle, err := transferParams(p, body, vals[:], 4,
		"remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "remote_request_id", "remote_prefill_cached_tokens", "prompt_token_ids",
		remotePrefillFlag, remoteDecodeFlag)
	if err != nil {
		return nil, err
	}
	p.handleMembers = handleMembers{parsed: true, requestID: vals[4], hasCachedTokens: vals[5].Kind != jsonscan.Absent, hasPromptIDs: vals[6].Kind != jsonscan.Absent}
	p.EngineID = handle[vals[0].Start:vals[0].End]
	ids := vals[3]
	if ids.Kind != jsonscan.Array {
		return nil, fmt.Errorf("%w: remote_block_ids is not an array", ErrIncompleteHandle)
	}
	// remote_block_ids is a flat list up to vLLM 0.17 and a list per KV group since. Either form
	// names a block exactly if it contains a number or a string. vLLM's ids are numbers; other
	// engines with its protocol use strings (llm-d-inference-sim: ["DUMMY_ID"]).
	if !bytes.ContainsAny(handle[ids.Start:ids.End], `0123456789"`) {
		return nil, fmt.Errorf("%w: remote_block_ids is empty", ErrIncompleteHandle)
	}
	return handle, nil
}

// handleMembers are the positions of handle members that other methods read after Handle. A handle
// names a block for every 16 tokens of a prompt, so a second scan would be slow.
type handleMembers struct {
	parsed                        bool // false: the other fields are not set
	requestID                     jsonscan.Value
	kind                          jsonscan.Value // TensorRT-LLM's request_type
	push                          [len(pushMembers)]jsonscan.Value
	hasCachedTokens, hasPromptIDs bool // the handle has remote_prefill_cached_tokens and prompt_token_ids
}

// Handover.PeerInfo values: how a prefill engine names its requests.
const (
	randomizedRequestIDs = "own"   // it appends a random suffix to X-Request-Id
	plainRequestIDs      = "given" // it uses X-Request-Id itself, and two requests with one id collide
)

// LearnPeerInfo implements PeerInfoLearner. From 0.14 on vLLM derives a random request id from
// X-Request-Id unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set. The handle's remote_request_id
// shows which of the two an engine does.
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
	id := bytes.TrimSuffix(p.Handle[named[0].Start+1:named[0].End-1], []byte("-0")) // vLLM's suffix for completions
	if bytes.HasSuffix(id, []byte(p.RequestID)) {
		return append(fact, plainRequestIDs...)
	}
	return append(fact, randomizedRequestIDs...)
}

// transferParams finds kv_transfer_params in a vLLM response. It sets vals to the positions of the
// named members within it and fails if one of the first required members is missing or null. The
// last two names are remotePrefillFlag and remoteDecodeFlag. It stores the prompt token ids that the
// response carries in p.
//
// The handle is the engine's own bytes unless its flags are not those of a decode leg
// (withDecodeFlags).
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
	prefill, decode := vals[len(names)-2], vals[len(names)-1]
	if string(handle[prefill.Start:prefill.End]) != "true" || decode.Kind > jsonscan.Null && string(handle[decode.Start:decode.End]) != "false" {
		handle = withDecodeFlags(handle, prefill, decode)
		jsonscan.Members(handle, vals, names...)
	}
	return handle, nil
}

// The flags of a handle say what an engine does with it: fetch the KV of another engine, or keep its
// own for another engine.
const (
	remotePrefillFlag = "do_remote_prefill"
	remoteDecodeFlag  = "do_remote_decode"
)

// withDecodeFlags returns a copy of a handle with the flags of a decode leg. vLLM sets them so
// itself. With other flags it accepts the request but computes the prompt again without a word, and
// both engines keep the blocks until their leases end. The other members of a complete handle say
// that the KV is there, so the hand-over still works. prefill and decode are the flags in handle.
func withDecodeFlags(handle []byte, prefill, decode jsonscan.Value) []byte {
	flags := [...]struct {
		jsonscan.Value
		want string
	}{{prefill, "true"}, {decode, "false"}}
	if decode.Kind != jsonscan.Absent && decode.Start < prefill.Start {
		flags[0], flags[1] = flags[1], flags[0]
	}
	const missing = `{"do_remote_prefill":true,` // a handle has other members
	out, at := make([]byte, 0, len(handle)+len(missing)), 0
	if prefill.Kind == jsonscan.Absent {
		out, at = append(out, missing...), 1
	}
	for _, f := range flags {
		if f.Kind != jsonscan.Absent {
			out = append(append(out, handle[at:f.Start]...), f.want...)
			at = f.End
		}
	}
	return append(out, handle[at:]...)
}

// wrongMember returns what the member of a handle must be if raw is invalid, and "" if raw is
// valid. vLLM does not validate kv_transfer_params: with such values it fails or answers 400 when
// it connects to the prefill engine.
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

// integer parses a JSON number that is an unsigned 64-bit integer.
func integer(kind jsonscan.Kind, raw []byte) (n uint64, ok bool) {
	if kind != jsonscan.Number {
		return 0, false
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	return n, err == nil
}

// Decode implements Family: the client's body with the unchanged handle as kv_transfer_params,
// followed by the members that newer releases accept from a router.
func (nixlPull) Decode(leg *LegRequest, p *Handover) {
	leg.Set(jsonscan.KeyKVTransferParams, withExtras(leg, p))
}

// withExtras returns the handle with additional members. From vLLM 0.31 on it adds the number of
// tokens that the prefill engine found cached, which the decode engine reports. From 0.32 on it
// adds the prompt's token ids to chats that contain only text, so that the decode engine does not
// render and tokenize them again. Handover.ByIDs adds them to other requests too.
func withExtras(leg *LegRequest, p *Handover) []byte {
	cached := -1
	if p.PrefillCached >= 0 && p.Decode.VersionAtLeast(0, 31, 0) && !p.handleMembers.hasCachedTokens {
		cached = p.PrefillCached
	}
	var ids []byte
	handle := p.Handle
	switch {
	case p.handleMembers.hasPromptIDs:
	case p.ByIDs:
		handle = leg.setPromptIDs(p, p.Decode, handle)
	case p.promptIDs != nil && acceptsPromptIDs(p, p.Decode):
		ids = p.promptIDs
	}
	if cached < 0 && ids == nil && p.Slot == nil {
		return handle
	}
	return leg.Render(func(dst []byte) []byte {
		dst = append(dst, handle[:len(handle)-1]...)
		if cached >= 0 {
			dst = appendUint(append(dst, `,"remote_prefill_cached_tokens":`...), uint64(cached))
		}
		if ids != nil {
			dst = append(append(dst, `,"prompt_token_ids":`...), ids...)
		}
		return append(appendSlot(dst, p), '}')
	})
}

// appendSlot appends the completion slot to which the decode engine's connector reports the end of
// its transfer. Without a slot it appends nothing.
func appendSlot(dst []byte, p *Handover) []byte {
	if p.Slot == nil {
		return dst
	}
	return append(append(dst, `,"sluice":`...), p.Slot...)
}

// acceptsPromptIDs reports whether an engine accepts a chat's prompt as token ids beside its
// messages. It does so for chats that contain only text and whose answer needs no prompt.
func acceptsPromptIDs(p *Handover, engine *worker.Rank) bool {
	return p.Kind == front.Chat && engine.VersionAtLeast(0, 32, 0) && !answersPrompt(p.Doc) && p.textOnly()
}
