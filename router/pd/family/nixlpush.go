package family

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// nixlPush is vLLM's NixlPushConnector (0.24 and later). The decode engine registers its blocks
// with the prefill engine, which writes into them. Both engines identify the request by its
// X-Request-Id (vLLM 0.32, push_worker.py, compares ids without their random suffixes). The legs
// can therefore run concurrently once the router knows the prefill engine's address. That address
// is the same for all requests of an engine, and the router learns it from the engine's first
// handle; the first request runs its legs one after the other.
type nixlPush struct{ nixlPull }

// Name implements Family.
func (nixlPush) Name() string { return "nixl-push" }

// Traits implements Family.
func (f nixlPush) Traits() Traits {
	t := f.nixlPull.Traits()
	t.Pulls, t.Refetchable, t.JoinsByRequestID = false, true, true
	return t
}

// Order implements Family. The router cannot predict the request ids of other endpoints.
func (nixlPush) Order(p *Handover) Order {
	if p.PeerInfo == "" || p.Kind != front.Chat && p.Kind != front.Completions && p.Kind != front.Generate {
		return PrefillFirst
	}
	return Concurrent
}

// Prefill implements Family. With concurrent legs it does not ask for the prompt's token ids, which
// would arrive after the decode request was sent.
func (f nixlPush) Prefill(leg *LegRequest, p *Handover) {
	if f.Order(p) == PrefillFirst {
		f.nixlPull.Prefill(leg, p)
		return
	}
	leg.disableStream()
	leg.Set(jsonscan.KeyKVTransferParams, leg.setPromptIDs(p, p.Prefill, nixlPrefillParams))
	leg.limitToOneToken(p)
}

// pushMembers are the members of a handle that are the same for all requests of an engine. The
// first four are required.
var pushMembers = [...]string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "dcp_size"}

// inPush are the members that Handle reads, pushMembers first.
var inPush = [...]string{pushMembers[0], pushMembers[1], pushMembers[2], pushMembers[3], pushMembers[4], pushMembers[5], "remote_prefill_cached_tokens", "prompt_token_ids", remotePrefillFlag, remoteDecodeFlag}

// Handle implements Family. In push mode the handle also names blocks, but the decode engine
// ignores them, so Handle does not check them.
func (nixlPush) Handle(p *Handover, body []byte) ([]byte, error) {
	const n = len(pushMembers)
	var vals [n + 4]jsonscan.Value
	handle, err := transferParams(p, body, vals[:], 4, inPush[:]...)
	if err == nil {
		p.handleMembers = handleMembers{parsed: true, push: [n]jsonscan.Value(vals[:n]), hasCachedTokens: vals[n].Kind != jsonscan.Absent, hasPromptIDs: vals[n+1].Kind != jsonscan.Absent}
		p.EngineID = handle[vals[0].Start:vals[0].End]
	}
	return handle, err
}

// LearnPeerInfo implements PeerInfoLearner.
func (nixlPush) LearnPeerInfo(fact []byte, p *Handover) []byte {
	if !p.handleMembers.parsed {
		jsonscan.Members(p.Handle, p.handleMembers.push[:], pushMembers[:]...)
	}
	for i, name := range pushMembers {
		v := p.handleMembers.push[i]
		if v.Kind <= jsonscan.Null {
			continue
		}
		fact = append(append(append(fact, '"'), name...), `":`...)
		fact = append(append(fact, p.Handle[v.Start:v.End]...), ',')
	}
	return fact
}

// Decode implements Family.
func (f nixlPush) Decode(leg *LegRequest, p *Handover) {
	if p.Handle != nil {
		f.nixlPull.Decode(leg, p)
		return
	}
	leg.Set(jsonscan.KeyKVTransferParams, leg.setPromptIDs(p, p.Decode, leg.Render(func(dst []byte) []byte {
		dst = append(dst, `{"do_remote_prefill":true,"do_remote_decode":false,`...)
		dst = append(dst, p.PeerInfo...)
		// The engine requires this id and names prefill's request by it in lease renewals, but
		// matches requests by its own id.
		dst = append(dst, `"remote_request_id":"`...)
		switch p.Kind {
		case front.Chat:
			dst = appendEscaped(append(dst, "chatcmpl-"...), p.RequestID)
		case front.Completions:
			dst = append(appendEscaped(append(dst, "cmpl-"...), p.RequestID), "-0"...)
		default:
			dst = appendEscaped(append(dst, "generate-tokens-"...), p.RequestID)
		}
		return append(appendSlot(append(dst, `","transfer_mode":"push"`...), p), '}')
	})))
}
