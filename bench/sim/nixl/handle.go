package nixl

import (
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/options"
)

// Params is kv_transfer_params as a request carries it.
type Params struct {
	RemotePrefill bool            `json:"do_remote_prefill"`
	RemoteDecode  bool            `json:"do_remote_decode"`
	BlockIDs      json.RawMessage `json:"remote_block_ids"`
	EngineID      string          `json:"remote_engine_id"`
	RequestID     string          `json:"remote_request_id"`
	Host          string          `json:"remote_host"`
	Port          int             `json:"remote_port"`
	NumTokens     int             `json:"remote_num_tokens"`
	PrefillCached *int            `json:"remote_prefill_cached_tokens"`
	PromptIDs     json.RawMessage `json:"prompt_token_ids"`
}

// ReadParams reads a request's kv_transfer_params; null and absent are nil.
func ReadParams(raw json.RawMessage) (*Params, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if raw[0] != '{' {
		return nil, api.Refuse(400, "body.kv_transfer_params", "1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': %s}", strings.ReplaceAll(string(raw), `"`, `'`))
	}
	p := new(Params)
	if err := json.Unmarshal(raw, p); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "%s", fmt.Errorf("kv_transfer_params: %w", err))
	}
	return p, nil
}

// PromptIDs returns the prompt of a request whose kv_transfer_params carry its token ids, nil if they do
// not. vLLM 0.32 takes them in the APIs that render a chat, with any connector and on both legs
// (online_renderer.py, _reused_prompt_token_ids).
func PromptIDs(b *api.Body, path string, o *options.Options) ([]uint32, error) {
	switch path {
	case "/v1/chat/completions", "/v1/responses", "/v1/messages":
	default:
		return nil, nil
	}
	if o.Engine != "vllm" || !o.VLLM.AcceptsPromptIDs() || b.Echo {
		return nil, nil
	}
	p, err := ReadParams(b.KVTransfer)
	if p == nil || err != nil {
		return nil, err
	}
	list, ok := api.ParseIDs(p.PromptIDs)
	switch {
	case len(p.PromptIDs) == 0 || string(p.PromptIDs) == "null":
		return nil, nil
	case !ok || len(list) == 0:
		return nil, api.Refuse(400, "kv_transfer_params.prompt_token_ids", "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.")
	case len(list) >= o.MaxModelLen:
		return nil, api.Refuse(400, "kv_transfer_params", "kv_transfer_params.prompt_token_ids has %d ids; want 1 to %d.", len(list), o.MaxModelLen-1)
	}
	return list, nil
}

// Handle is decode's view of the handle of a prefill.
type Handle struct {
	Params
	cancel    sync.Once
	cancelled chan struct{} // closed when the job is dropped
	once      sync.Once     // one release only
}

// NewHandle returns the handle with the given params.
func NewHandle(p Params) *Handle { return &Handle{Params: p, cancelled: make(chan struct{})} }

// incomplete reports that the block ids are missing, null or empty, which crashes a
// real 0.32 decode engine.
func (h *Handle) incomplete() bool {
	s := strings.Map(func(r rune) rune {
		if r == ' ' || r == '\n' || r == '\t' || r == '\r' {
			return -1
		}
		return r
	}, string(h.BlockIDs))
	return s == "" || s == "null" || s == "[]" || s == "[[]]"
}

// usable reports that vLLM would pull: it needs all four of these.
func (h *Handle) usable() bool {
	return h.EngineID != "" && h.RequestID != "" && h.Host != "" && h.Port > 0
}

func (h *Handle) peer() string { return net.JoinHostPort(h.Host, strconv.Itoa(h.Port)) }

// appendHandle appends the handle of blocks leased under key, with the keys of vLLM 0.32 in
// their order.
func appendHandle(b []byte, j *core.Job, key, mode string) []byte {
	s, p := j.Seqs[0], j.Rank.Process
	rel := p.Options.VLLM
	b = append(b, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[`...)
	if !j.FaultIs(faults.BadHandle) {
		if !rel.FlatIDs() {
			b = append(b, '[')
		}
		if leased := j.Rank.Leased(key); leased != nil {
			for i, id := range leased.Blocks {
				if i > 0 {
					b = append(b, ',')
				}
				b = strconv.AppendInt(b, int64(id), 10)
			}
		}
		if !rel.FlatIDs() {
			b = append(b, ']')
		}
	}
	host, port := p.SideHostPort()
	str := func(name, v string) {
		b = append(b, `,"`+name+`":`...)
		b = api.AppendJSON(b, v)
	}
	raw := func(minor int, name, v string) {
		if rel.Since(minor, 0) {
			b = append(b, `,"`+name+`":`+v...)
		}
	}
	b = append(b, ']')
	str("remote_engine_id", p.RankID(j.Rank.Index))
	if rel.RemoteID() {
		str("remote_request_id", j.Internal)
	}
	str("remote_host", host)
	raw(9, "remote_port", strconv.Itoa(port))
	if rel.Since(9, 1) {
		raw(9, "tp_size", "1")
	}
	raw(29, "dcp_size", "1")
	if mode == "push" {
		raw(26, "pp_size", "1")
	} else {
		raw(29, "pp_size", "1")
	}
	raw(21, "remote_num_tokens", strconv.Itoa(len(s.Prompt)))
	raw(26, "remote_blocks_expiry_time", "null")
	raw(28, "transfer_mode", `"`+mode+`"`)
	raw(31, "remote_prefill_cached_tokens", strconv.Itoa(s.Cached))
	raw(33, "remote_registration_generation", "0")
	return append(b, '}')
}
