package family

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// mooncake is vLLM's MooncakeConnector. From vLLM 0.16 on there is no handle: the router sends both
// legs at once with the same transfer_id, and the decode leg names prefill's engine id and
// bootstrap server. The router fetches the engine id from the bootstrap server. vLLM 0.13 to 0.15
// hand over as NIXL does, with remote_host and remote_port.
type mooncake struct{}

// mooncakePort is the default of VLLM_MOONCAKE_BOOTSTRAP_PORT.
const mooncakePort = "8998"

var (
	mooncakeSequential = []byte(`{"do_remote_decode":true,"do_remote_prefill":false}`)
	mooncakePrefill    = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"`)
	mooncakeDecode     = []byte(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":`)
)

// Name implements Family.
func (mooncake) Name() string { return "mooncake" }

// Traits implements Family. Only these endpoints have ignore_eos. Without it prefill may end with
// "stop" and drop the transfer.
func (mooncake) Traits() Traits {
	return Traits{Kinds: kindsOf(front.Chat, front.Completions), Refetchable: true, PromptIDs: true}
}

// Order implements Family.
func (mooncake) Order(p *Handover) Order {
	if p.Prefill.VersionBefore(0, 16, 0) {
		return PrefillFirst
	}
	return Concurrent
}

// PeerInfoURL implements PeerInfoFetcher.
func (m mooncake) PeerInfoURL(p *Handover) (base, path string) {
	if m.Order(p) == PrefillFirst {
		return "", ""
	}
	host, port := bootstrapAddr(p.Prefill)
	return "http://" + host + ":" + port, "/query"
}

// ParsePeerInfo implements PeerInfoFetcher. It returns the rank's engine id as a JSON string.
func (mooncake) ParsePeerInfo(p *Handover, body []byte) (string, error) {
	name := string(appendUint(nil, uint64(p.Prefill.EngineRank())))
	v, ok, err := jsonscan.Find(body, name)
	if err != nil {
		return "", fmt.Errorf("GET /query is not what was expected: %w; want {\"<rank>\":{\"engine_id\":…}}", err)
	}
	if !ok || v.Kind != jsonscan.Object {
		return "", fmt.Errorf("GET /query names no engine of rank %s", name)
	}
	entry := body[v.Start:v.End]
	id, ok, err := jsonscan.Find(entry, "engine_id")
	if err != nil || !ok || id.Kind != jsonscan.String {
		return "", fmt.Errorf("GET /query names no engine_id of rank %s", name)
	}
	if id.End-id.Start <= len(`""`) { // no engine has this id, so decode would wait until its timeout
		return "", fmt.Errorf("GET /query: engine_id of rank %s is empty, want the id of the prefill engine", name)
	}
	p.EngineID = entry[id.Start:id.End]
	return string(p.EngineID), nil
}

// Prefill implements Family. It asks for one token and ignores all stop conditions, because the
// connector transfers the KV only if prefill ends with the reason "length".
func (m mooncake) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	if m.Order(p) == PrefillFirst {
		leg.Set(jsonscan.KeyKVTransferParams, mooncakeSequential)
	} else {
		leg.Set(jsonscan.KeyKVTransferParams, leg.setPromptIDs(p, p.Prefill, leg.Render(func(dst []byte) []byte {
			return append(appendTransferID(append(dst, mooncakePrefill...), p), '}')
		})))
	}
	leg.limitToOneToken(p)
	leg.Set(jsonscan.KeyIgnoreEOS, jsonTrue)
	leg.Remove(jsonscan.KeyStop)
	leg.Remove(jsonscan.KeyStopTokenIDs)
}

// Handle implements Family. Only vLLM 0.13 to 0.15 have handles.
func (mooncake) Handle(p *Handover, body []byte) ([]byte, error) {
	var vals [4]jsonscan.Value
	return transferParams(p, body, vals[:], 2, "remote_host", "remote_port", remotePrefillFlag, remoteDecodeFlag)
}

// Decode implements Family.
func (mooncake) Decode(leg *LegRequest, p *Handover) {
	if p.Handle != nil {
		leg.Set(jsonscan.KeyKVTransferParams, p.Handle)
		return
	}
	host, port := bootstrapAddr(p.Prefill)
	leg.Set(jsonscan.KeyKVTransferParams, leg.setPromptIDs(p, p.Decode, leg.Render(func(dst []byte) []byte {
		dst = append(append(dst, mooncakeDecode...), p.PeerInfo...)
		dst = appendEscaped(append(dst, `,"remote_bootstrap_addr":"http://`...), host)
		dst = append(append(append(dst, ':'), port...), `","transfer_id":"`...)
		return append(appendTransferID(dst, p), '}')
	})))
}

// appendTransferID appends the transfer id and its closing quote.
func appendTransferID(dst []byte, p *Handover) []byte {
	const hex = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, hex[p.Token>>shift&15])
	}
	return append(dst, '"')
}

// bootstrapAddr returns the address of a prefill rank's bootstrap server.
func bootstrapAddr(r *worker.Rank) (host, port string) {
	if host = r.Option("bootstrap_host"); host == "" {
		host = r.Host()
	}
	if port = r.Option("bootstrap_port"); port == "" {
		port = mooncakePort
	}
	return host, port
}
