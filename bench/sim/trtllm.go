package sim

import (
	"encoding/base64"
	"encoding/json"
	"net"
	"slices"
	"strconv"

	"sluice/bench/sim/faults"
	"sluice/bench/sim/textgen"
)

// TensorRT-LLM's surface: two endpoints, no /tokenize, flat errors, and its hand-over
// with disaggregated_params in the request and in each choice of a response. Written
// from its public source; chunk formats are vLLM's except for that member. The transfer
// is that of NIXL's pull mode under another name: the opaque state contains the address
// of the context server's side channel.

var trtllmInference = map[string]func(*job) format{
	"/v1/chat/completions": newChatFormat,
	"/v1/completions":      newCompletionFormat,
}

var trtllmGet = map[string]func(*conn, *httpRequest){
	"/health":      vllmGet["/health"],
	"/version":     vllmGet["/version"],
	"/v1/models":   serveModels,
	"/metrics":     func(c *conn, r *httpRequest) { c.respond(r, 200, "application/json", []byte("[]")) },
	"/server_info": func(c *conn, r *httpRequest) { c.respond(r, 200, "application/json", []byte("{}")) },
}

// trtllmMembers are the members that /v1/completions accepts (CompletionRequest of
// serve/openai_protocol.py); a request with any other member is rejected.
var trtllmMembers = map[string]bool{}

func init() {
	for _, name := range []string{
		"model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options",
		"suffix", "temperature", "top_p", "user", "lora_request", "prompt_ignore_length", "use_beam_search", "top_k", "top_p_min", "min_p", "repetition_penalty", "length_penalty",
		"early_stopping", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
		"truncate_prompt_tokens", "return_context_logits", "detokenize", "thinking_token_budget", "add_special_tokens", "response_format", "disaggregated_params", "priority",
		"conversation_params",
	} {
		trtllmMembers[name] = true
	}
}

// readTRTLLMBody parses a request; for completions the token ids replace the text.
func readTRTLLMBody(path string, raw []byte) (*body, error) {
	b, err := readBody(raw)
	if err != nil || path != "/v1/completions" {
		return b, err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return b, refuse(400, "", "%s", err)
	}
	for name := range members {
		if !trtllmMembers[name] {
			return b, refuse(400, "", "[{'type': 'extra_forbidden', 'loc': ('body', '%s'), 'msg': 'Extra inputs are not permitted'}]", name)
		}
	}
	b.ReturnIDs = string(members["detokenize"]) == "false"
	return b, nil
}

var trtllmPost = map[string]func(*conn, *httpRequest){}

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

func readTRTLLM(_ *incarnation, _ *body, r *httpRequest) (pdLeg, error) {
	var p struct {
		Params json.RawMessage `json:"disaggregated_params"`
		IDs    json.RawMessage `json:"prompt_token_ids"`
		Stream bool            `json:"stream"`
	}
	if err := json.Unmarshal(r.body, &p); err != nil || len(p.Params) == 0 || string(p.Params) == "null" {
		return nil, nil
	}
	g := &trtllmLeg{}
	if err := json.Unmarshal(p.Params, &g.wire); err != nil {
		return nil, refuse(400, "disaggregated_params", "disaggregated_params: %s", err)
	}
	switch g.wire.Type {
	case "context_only":
		if p.Stream {
			return nil, refuse(400, "stream", "a context_only request cannot be streamed")
		}
		g.context = true
		return g, nil
	case "generation_only":
	default:
		return nil, refuse(400, "disaggregated_params", "unknown request_type %q", g.wire.Type)
	}
	raw, err := base64.StdEncoding.DecodeString(g.wire.Opaque)
	var st trtllmState
	if err == nil {
		err = json.Unmarshal(raw, &st)
	}
	if err != nil || len(g.wire.First) == 0 || g.wire.CtxID == nil {
		return nil, refuse(400, "disaggregated_params", "a generation_only request needs first_gen_tokens, ctx_request_id and the opaque state as the context server gave it")
	}
	if len(p.IDs) > 0 && r.path == "/v1/chat/completions" {
		ids, ok := idList(p.IDs)
		if !ok || len(ids) == 0 {
			return nil, refuse(400, "prompt_token_ids", "prompt_token_ids is not a list of ids")
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
	p := j.params
	if g.context {
		p.maxTokens, p.returnIDs = 1, true // chat returns the ids in the response anyway
		return nil
	}
	p.handle = g.h
	for _, s := range j.seqs {
		if g.ids != nil {
			s.prompt = g.ids
			s.gen = textgen.NewGenerator(j.model, j.c.incarnation.e.o.Seed, p.seed, s.index%p.n, g.ids)
		}
		if s.index == 0 {
			first := s.gen.Next(false)
			if len(s.script) > 0 { // a tool call
				first = s.script[0]
			}
			if first != g.wire.First[0] {
				return refuse(400, "disaggregated_params", "first_gen_tokens %v is not what follows the prompt (%d)", g.wire.First, first)
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
	if !g.context || s.reason != "length" {
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
	if s.reason == "" || g.context && !s.leased {
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
		state, _ := json.Marshal(trtllmState{host, n, l.rankID(s.j.rank.index), s.j.internal, len(s.prompt)})
		id := int64(1)<<53 + 1 + int64(l.next.Add(1)) // larger than a double can represent exactly
		p = trtllmParams{Type: "context_only", First: slices.Clone(s.out), CtxID: &id, Opaque: base64.StdEncoding.EncodeToString(state)}
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
	return appendIDs(append(b, `,"prompt_token_ids":`...), j.seqs[0].prompt)
}

// memberAppender is implemented by a pdLeg that adds members to responses.
type memberAppender interface {
	choiceMembers(b []byte, s *seq) []byte // to every choice
	answerMembers(b []byte, j *job) []byte // to a whole response
}

func (j *job) choiceMembers(b []byte, s *seq) []byte {
	if t, ok := j.params.pd.(memberAppender); ok {
		return t.choiceMembers(b, s)
	}
	return b
}

func (j *job) answerMembers(b []byte) []byte {
	if t, ok := j.params.pd.(memberAppender); ok {
		return t.answerMembers(b, j)
	}
	return b
}
