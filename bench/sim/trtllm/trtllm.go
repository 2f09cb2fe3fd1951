// Package trtllm has TensorRT-LLM's hand-over, with disaggregated_params in the request and in each choice
// of a response. It is written from its public source. The transfer is that of NIXL's pull mode under another
// name: the opaque state contains the address of the context server's side channel.
package trtllm

import (
	"encoding/base64"
	"encoding/json"
	"slices"
	"sync/atomic"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/nixl"
)

// params is disaggregated_params.
type params struct {
	Type   string   `json:"request_type"`
	First  []uint32 `json:"first_gen_tokens"`
	CtxID  *int64   `json:"ctx_request_id"`
	Opaque string   `json:"encoded_opaque_state"`
	Draft  []uint32 `json:"draft_tokens"`
}

// opaqueState is the content of the opaque state.
type opaqueState struct {
	Host    string `json:"host"`
	Port    int    `json:"port"`
	Engine  string `json:"engine"`
	Request string `json:"request"`
	Tokens  int    `json:"tokens"`
}

// leg is one leg of the hand-over.
type leg struct {
	nixl.Decode // of a generation request
	family      *family
	context     bool
	leased      bool // context: the blocks of the sequence are kept
	wire        params
	ids         []uint32 // generation: the prompt, from prompt_token_ids
}

// family is the family in one incarnation.
type family struct {
	p      *core.Process
	puller *nixl.Puller
	next   atomic.Int64 // number of hand-overs so far
}

// New returns the family for one incarnation.
func New(p *core.Process) core.Family { return &family{p: p, puller: nixl.NewPuller(p)} }

// ServeSide implements core.Family.
func (f *family) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	core.ServeLeases(f.p, c, r, func(*core.Rank, string, bool) {})
}

// Close implements core.Family.
func (f *family) Close() {}

// Read implements core.Family.
func (f *family) Read(_ *api.Body, r *httpconn.Request) (core.Leg, error) {
	var p struct {
		Params json.RawMessage `json:"disaggregated_params"`
		IDs    json.RawMessage `json:"prompt_token_ids"`
		Stream bool            `json:"stream"`
	}
	if err := json.Unmarshal(r.Body, &p); err != nil || len(p.Params) == 0 || string(p.Params) == "null" {
		return nil, nil
	}
	g := &leg{family: f}
	if err := json.Unmarshal(p.Params, &g.wire); err != nil {
		return nil, api.Refuse(400, "disaggregated_params", "disaggregated_params: %s", err)
	}
	switch g.wire.Type {
	case "context_only":
		if p.Stream {
			return nil, api.Refuse(400, "stream", "a context_only request cannot be streamed")
		}
		g.context = true
		return g, nil
	case "generation_only":
	default:
		return nil, api.Refuse(400, "disaggregated_params", "unknown request_type %q", g.wire.Type)
	}
	raw, err := base64.StdEncoding.DecodeString(g.wire.Opaque)
	var st opaqueState
	if err == nil {
		err = json.Unmarshal(raw, &st)
	}
	if err != nil || len(g.wire.First) == 0 || g.wire.CtxID == nil {
		return nil, api.Refuse(400, "disaggregated_params", "a generation_only request needs first_gen_tokens, ctx_request_id and the opaque state as the context server gave it")
	}
	if len(p.IDs) > 0 && r.Path == "/v1/chat/completions" {
		ids, ok := api.ParseIDs(p.IDs)
		if !ok || len(ids) == 0 {
			return nil, api.Refuse(400, "prompt_token_ids", "prompt_token_ids is not a list of ids")
		}
		g.ids = ids
	}
	g.Decode = nixl.NewDecode(f.puller, nixl.NewHandle(nixl.Params{
		RemotePrefill: true, BlockIDs: json.RawMessage("[1]"), EngineID: st.Engine, RequestID: st.Request, Host: st.Host, Port: st.Port, NumTokens: st.Tokens,
	}))
	return g, nil
}

// Side implements core.Leg.
func (g *leg) Side() string {
	if g.context {
		return "prefill"
	}
	return "decode"
}

// Begin limits a context_only request to one token, whatever it asks for, and sets the
// prompt of a generation request to the tokens it received.
func (g *leg) Begin(j *core.Job) error {
	p := j.Params
	if g.context {
		p.MaxTokens, p.ReturnIDs = 1, true // chat returns the ids in the response anyway
		return nil
	}
	for _, s := range j.Seqs {
		if g.ids != nil {
			s.SetPrompt(g.ids)
		}
		if s.Index == 0 {
			if first := s.FirstToken(); first != g.wire.First[0] {
				return api.Refuse(400, "disaggregated_params", "first_gen_tokens %v is not what follows the prompt (%d)", g.wire.First, first)
			}
		}
	}
	return nil
}

// RetainBlocks keeps the KV on a context server if the sequence is not finished.
func (g *leg) RetainBlocks(r *core.Rank, s *core.Seq) bool {
	if !g.context || s.Reason != "length" {
		return false
	}
	g.leased = true
	r.Lease(s.Job.Internal, s, r.Process.Options.Lease)
	return true
}

// OnRefused implements core.Leg.
func (g *leg) OnRefused() { g.Release() }

// AppendHandle appends no kv_transfer_params: the hand-over is in the choices.
func (g *leg) AppendHandle(b []byte, _ *core.Job) []byte { return append(b, "null"...) }

// AppendToChoice appends disaggregated_params to a choice: null while a generation
// streams, the hand-over in a context server's response. A generation repeats its own
// at its end, as the server does.
func (g *leg) AppendToChoice(b []byte, s *core.Seq) []byte {
	b = append(b, `,"disaggregated_params":`...)
	if s.Reason == "" || g.context && !g.leased {
		return append(b, "null"...)
	}
	p := g.wire
	if g.context {
		if s.Job.FaultIs(faults.NoHandle) {
			return append(b, "null"...)
		}
		host, n := g.family.p.SideHostPort()
		state, _ := json.Marshal(opaqueState{host, n, g.family.p.RankID(s.Job.Rank.Index), s.Job.Internal, len(s.Prompt)})
		id := int64(1)<<53 + 1 + g.family.next.Add(1) // larger than a double can represent exactly
		p = params{Type: "context_only", First: slices.Clone(s.Out), CtxID: &id, Opaque: base64.StdEncoding.EncodeToString(state)}
		if s.Job.FaultIs(faults.BadHandle) {
			p.First = nil
		}
	}
	out, _ := json.Marshal(p)
	return append(b, out...)
}

// AppendToAnswer appends a context server's prompt_token_ids to the response.
func (g *leg) AppendToAnswer(b []byte, j *core.Job) []byte {
	if !g.context {
		return b
	}
	return api.AppendIDs(append(b, `,"prompt_token_ids":`...), j.Seqs[0].Prompt)
}
