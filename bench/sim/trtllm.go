package sim

import (
	"encoding/base64"
	"encoding/json"
	"net"
	"slices"
	"strconv"

	"sluice/bench/sim/api"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// TensorRT-LLM's surface: two endpoints, no /tokenize, flat errors, and its hand-over
// with disaggregated_params in the request and in each choice of a response. Written
// from its public source; chunk formats are vLLM's except for that member. The transfer
// is that of NIXL's pull mode under another name: the opaque state contains the address
// of the context server's side channel.

var trtllmGet = map[string]func(*conn, *httpconn.Request){
	"/health":      vllmGet["/health"],
	"/version":     vllmGet["/version"],
	"/v1/models":   serveModels,
	"/metrics":     func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "application/json", []byte("[]")) },
	"/server_info": func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "application/json", []byte("{}")) },
}

var trtllmPost = map[string]func(*conn, *httpconn.Request){}

// trtllmParams is disaggregated_params.
type trtllmParams struct {
	Type   string   `json:"request_type"`
	First  []uint32 `json:"first_gen_tokens"`
	CtxID  *int64   `json:"ctx_request_id"`
	Opaque string   `json:"encoded_opaque_state"`
	Draft  []uint32 `json:"draft_tokens"`
}

// trtllmState is the content of the opaque state.
type trtllmState struct {
	Host    string `json:"host"`
	Port    int    `json:"port"`
	Engine  string `json:"engine"`
	Request string `json:"request"`
	Tokens  int    `json:"tokens"`
}

// trtllmLeg is one leg of the hand-over.
type trtllmLeg struct {
	defaultLeg
	context bool
	wire    trtllmParams
	ids     []uint32 // generation: the prompt, from prompt_token_ids
	h       *handle
}

func readTRTLLM(_ *incarnation, _ *api.Body, r *httpconn.Request) (pdLeg, error) {
	var p struct {
		Params json.RawMessage `json:"disaggregated_params"`
		IDs    json.RawMessage `json:"prompt_token_ids"`
		Stream bool            `json:"stream"`
	}
	if err := json.Unmarshal(r.Body, &p); err != nil || len(p.Params) == 0 || string(p.Params) == "null" {
		return nil, nil
	}
	g := &trtllmLeg{}
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
	var st trtllmState
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
	g.h = &handle{cancelled: make(chan struct{})}
	w := &g.h.wire
	w.RemotePrefill, w.BlockIDs, w.EngineID, w.RequestID = true, json.RawMessage("[1]"), st.Engine, st.Request
	w.Host, w.Port, w.NumTokens = st.Host, st.Port, st.Tokens
	return g, nil
}

func (g *trtllmLeg) side() string {
	if g.context {
		return "prefill"
	}
	return "decode"
}

// begin limits a context_only request to one token, whatever it asks for, and sets the
// prompt of a generation request to the tokens it received.
func (g *trtllmLeg) begin(j *job) error {
	p := j.Params
	if g.context {
		p.MaxTokens, p.ReturnIDs = 1, true // chat returns the ids in the response anyway
		return nil
	}
	j.handle = g.h
	for _, s := range j.seqs {
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

func (g *trtllmLeg) submit(r *rank, j *job) {
	if g.context {
		r.waiting = append(r.waiting, j.seqs...)
		return
	}
	r.waiting = append(r.waiting, j.seqs[0])
	r.l.pull.track(g.h)
}

// retainBlocks keeps the KV on a context server if the sequence is not finished.
func (g *trtllmLeg) retainBlocks(r *rank, s *seq) bool {
	if !g.context || s.Reason != "length" {
		return false
	}
	s.leased = true
	r.lease(s)
	return true
}

func (g *trtllmLeg) onRefused(l *incarnation) {
	if g.h != nil {
		l.pull.release(g.h)
	}
}

// choiceMembers appends disaggregated_params to a choice: null while a generation
// streams, the hand-over in a context server's response. A generation repeats its own
// at its end, as the server does.
func (g *trtllmLeg) choiceMembers(b []byte, s *seq) []byte {
	b = append(b, `,"disaggregated_params":`...)
	if s.Reason == "" || g.context && !s.leased {
		return append(b, "null"...)
	}
	p := g.wire
	if g.context {
		if f := s.j.fault; f != nil && f.Kind == faults.NoHandle {
			return append(b, "null"...)
		}
		l := s.j.rank.l
		host, port, _ := net.SplitHostPort(l.side.Addr().String())
		n, _ := strconv.Atoi(port)
		state, _ := json.Marshal(trtllmState{host, n, l.rankID(s.j.rank.index), s.j.internal, len(s.Prompt)})
		id := int64(1)<<53 + 1 + int64(l.next.Add(1)) // larger than a double can represent exactly
		p = trtllmParams{Type: "context_only", First: slices.Clone(s.Out), CtxID: &id, Opaque: base64.StdEncoding.EncodeToString(state)}
		if f := s.j.fault; f != nil && f.Kind == faults.BadHandle {
			p.First = nil
		}
	}
	out, _ := json.Marshal(p)
	return append(b, out...)
}

// answerMembers appends a context server's prompt_token_ids to the response.
func (g *trtllmLeg) answerMembers(b []byte, j *job) []byte {
	if !g.context {
		return b
	}
	return api.AppendIDs(append(b, `,"prompt_token_ids":`...), j.seqs[0].Prompt)
}

// memberAppender is implemented by a pdLeg that adds members to responses.
type memberAppender interface {
	choiceMembers(b []byte, s *seq) []byte // to every choice
	answerMembers(b []byte, j *job) []byte // to a whole response
}

// AppendToChoice implements api.Transfer.
func (j *job) AppendToChoice(b []byte, index int) []byte {
	if t, ok := j.pd.(memberAppender); ok {
		return t.choiceMembers(b, j.seqs[index])
	}
	return b
}

// AppendToAnswer implements api.Transfer.
func (j *job) AppendToAnswer(b []byte) []byte {
	if t, ok := j.pd.(memberAppender); ok {
		return t.answerMembers(b, j)
	}
	return b
}
