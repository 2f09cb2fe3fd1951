package sim

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"strconv"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/textgen"
)

// serveAux serves every endpoint that does not generate.
func serveAux(c *conn, r *httpconn.Request) {
	get, known := c.incarnation.e.surface.get[r.Path]
	post, known2 := c.incarnation.e.surface.post[r.Path]
	switch {
	case get != nil && (r.Method == "GET" || r.Method == "HEAD"):
		get(c, r)
	case post != nil && r.Method == "POST":
		post(c, r)
	case known || known2:
		c.Respond(r, 405, "application/json", []byte(`{"detail":"Method Not Allowed"}`))
	default:
		c.Respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
	}
}

var vllmGet = map[string]func(*conn, *httpconn.Request){
	"/health":           func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "", nil) },
	"/ping":             func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "", nil) },
	"/version":          func(c *conn, r *httpconn.Request) { c.json(r, map[string]string{"version": c.incarnation.e.o.Version}) },
	"/v1/models":        serveModels,
	"/load":             serveLoad,
	"/metrics":          serveMetrics,
	"/kv_event_sources": serveEventSources,
	"/tokenizer_info":   serveTokenizerInfo,
	"/is_sleeping":      func(c *conn, r *httpconn.Request) { c.json(r, map[string]bool{"is_sleeping": false}) },
}

var vllmPost = map[string]func(*conn, *httpconn.Request){
	"/ping":                        func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "", nil) },
	"/tokenize":                    serveTokenize,
	"/detokenize":                  serveDetokenize,
	"/v1/embeddings":               serveEmbeddings,
	"/v1/messages/count_tokens":    serveCountTokens,
	"/reset_prefix_cache":          serveReset,
	"/abort_requests":              serveAbort,
	"/inference/v1/abort_requests": serveAbort,
}

func (c *conn) json(r *httpconn.Request, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		c.Respond(r, 500, "application/json", c.incarnation.e.errorBody(500, err.Error(), ""))
		return
	}
	c.Respond(r, 200, "application/json", b)
}

func (c *conn) writeRefusal(r *httpconn.Request, err error) {
	ref := api.AsRefusal(err)
	c.incarnation.rejected.Add(1)
	c.Respond(r, ref.Status, "application/json", c.incarnation.e.errorBody(ref.Status, ref.Msg, ref.Param))
}

// auxBody decodes the body and checks the model.
func (c *conn) auxBody(r *httpconn.Request) (*api.Body, bool) {
	b, err := api.ReadBody(r.Body)
	if err == nil && b.Model != "" && b.Model != c.incarnation.e.o.Model {
		err = api.Refuse(404, "model", "The model `%s` does not exist.", b.Model)
	}
	if err != nil {
		c.writeRefusal(r, err)
	}
	return b, err == nil
}

func serveModels(c *conn, r *httpconn.Request) {
	o, at := &c.incarnation.e.o, c.incarnation.e.start.Unix()
	perm := map[string]any{"id": "modelperm-sim", "object": "model_permission", "created": at, "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
		"allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false, "organization": "*", "group": nil, "is_blocking": false}
	owner := "vllm"
	if o.Engine == "trtllm" {
		owner = "tensorrt_llm"
	}
	c.json(r, map[string]any{"object": "list", "data": []any{map[string]any{"id": o.Model, "object": "model", "created": at, "owned_by": owner,
		"root": o.Model, "parent": nil, "max_model_len": o.MaxModelLen, "permission": []any{perm}}}})
}

func serveLoad(c *conn, r *httpconn.Request) {
	n := int64(0)
	for _, rk := range c.incarnation.Ranks {
		n += rk.Load.Load()
	}
	c.json(r, map[string]int64{"server_load": n})
}

func serveEventSources(c *conn, r *httpconn.Request) {
	e := c.incarnation.e
	out := map[string]any{}
	for i, p := range e.pubs {
		var rep any
		if i < len(e.reps) {
			rep = e.reps[i]
		}
		out[strconv.Itoa(i)] = map[string]any{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": p, "replay_endpoint": rep,
			"buffer_steps": e.o.BufferSteps, "hwm": 100000, "max_queue_size": 100000, "topic": e.o.Topic}
	}
	c.json(r, out)
}

// serveTokenizerInfo serves what --enable-tokenizer-info-endpoint adds to vLLM.
func serveTokenizerInfo(c *conn, r *httpconn.Request) {
	template := c.incarnation.e.o.ChatTemplate
	if template == "" {
		c.Respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
		return
	}
	c.json(r, map[string]string{"tokenizer_class": "SimTokenizer", "chat_template": template})
}

func serveTokenize(c *conn, r *httpconn.Request) {
	if c.incarnation.e.o.NoTokenize {
		c.Respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
		return
	}
	b, ok := c.auxBody(r)
	if !ok {
		return
	}
	var ids []uint32
	if len(b.Messages) > 0 {
		text, err := api.RenderChat(b.Messages, b.Tools, b.AddGeneration == nil || *b.AddGeneration)
		if err != nil {
			c.writeRefusal(r, err)
			return
		}
		ids = textgen.Vocab().Append(nil, text)
	} else {
		var text string
		if json.Unmarshal(b.Prompt, &text) != nil {
			c.writeRefusal(r, api.Refuse(400, "body.prompt", "1 validation error:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required: prompt or messages'}"))
			return
		}
		ids = textgen.Vocab().Append(nil, text)
	}
	out := append([]byte(nil), `{"count":`...)
	out = strconv.AppendInt(out, int64(len(ids)), 10)
	out = append(out, `,"max_model_len":`...)
	out = strconv.AppendInt(out, int64(c.incarnation.e.o.MaxModelLen), 10)
	out = append(out, `,"tokens":`...)
	out = api.AppendIDs(out, ids)
	out = append(out, `,"token_strs":`...)
	if b.TokenStrings {
		for i, id := range ids {
			out = append(out, "[,"[min(i, 1)])
			out = api.AppendJSON(out, textgen.Vocab().Piece(id))
		}
		if len(ids) == 0 {
			out = append(out, '[')
		}
		out = append(out, ']')
	} else {
		out = append(out, "null"...)
	}
	c.Respond(r, 200, "application/json", append(out, '}'))
}

func serveDetokenize(c *conn, r *httpconn.Request) {
	b, ok := c.auxBody(r)
	if !ok {
		return
	}
	ids, ok := api.ParseIDs(b.Tokens)
	if !ok {
		c.writeRefusal(r, api.Refuse(400, "body.tokens", "1 validation error:\n  {'type': 'list_type', 'loc': 'body.tokens', 'msg': 'Input should be a list of token ids'}"))
		return
	}
	out := api.AppendJSON([]byte(`{"prompt":`), textgen.Detokenize(ids))
	c.Respond(r, 200, "application/json", append(out, '}'))
}

func serveCountTokens(c *conn, r *httpconn.Request) {
	b, ok := c.auxBody(r)
	if !ok {
		return
	}
	text, err := api.RenderChat(b.Messages, b.Tools, true)
	if err != nil {
		c.writeRefusal(r, err)
		return
	}
	c.json(r, map[string]int{"input_tokens": len(textgen.Tokenize(text))})
}

// serveEmbeddings returns unit vectors that are a function of the token ids.
func serveEmbeddings(c *conn, r *httpconn.Request) {
	b, ok := c.auxBody(r)
	if !ok {
		return
	}
	lists, err := api.ParsePrompts(b.Input)
	if err != nil || b.Dimensions < 0 || b.Dimensions > 8192 || len(lists) > 2048 {
		c.writeRefusal(r, api.Refuse(400, "input", "input must be a non-empty string, a list of token ids, or a list of up to 2048 of either; dimensions 1 to 8192."))
		return
	}
	if c.WaitOrGone(cost.Scale(c.incarnation.e.o.Cost.Step, c.incarnation.e.o.Speed)) {
		return
	}
	dims := b.Dimensions
	if dims == 0 {
		dims = 64
	}
	type item struct {
		Index     int    `json:"index"`
		Object    string `json:"object"`
		Embedding any    `json:"embedding"`
	}
	data, total := []item{}, 0
	for i, ids := range lists {
		total += len(ids)
		g := textgen.NewGenerator(c.incarnation.e.o.Model, c.incarnation.e.o.Seed, 0, 0, ids)
		vec, sum := make([]float32, dims), 0.0
		for k := range vec {
			vec[k] = float32(textgen.Mix(g.State+uint64(k)))/float32(1<<63) - 1
			sum += float64(vec[k]) * float64(vec[k])
		}
		for k := range vec {
			vec[k] /= float32(math.Sqrt(sum))
		}
		it := item{i, "embedding", vec}
		if b.Encoding == "base64" {
			raw := make([]byte, 0, 4*dims)
			for _, v := range vec {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
			}
			it.Embedding = base64.StdEncoding.EncodeToString(raw)
		}
		data = append(data, it)
	}
	c.json(r, struct {
		ID      string         `json:"id"`
		Object  string         `json:"object"`
		Created int64          `json:"created"`
		Model   string         `json:"model"`
		Data    []item         `json:"data"`
		Usage   map[string]int `json:"usage"`
	}{"embd-" + randomHex(8), "list", time.Now().Unix(), c.incarnation.e.o.Model, data, map[string]int{"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}})
}

func serveReset(c *conn, r *httpconn.Request) {
	ok := true
	for _, rk := range c.incarnation.Ranks {
		rk.Do(func() { ok = rk.ResetCache() && ok })
	}
	if !ok {
		c.Respond(r, 500, "application/json", c.incarnation.e.errorBody(500, "Failed to reset prefix cache: blocks are in use.", ""))
		return
	}
	c.Respond(r, 200, "", nil)
}

// serveAbort aborts requests by the ids that their clients see.
func serveAbort(c *conn, r *httpconn.Request) {
	var q struct {
		IDs []string `json:"request_ids"`
	}
	if json.Unmarshal(r.Body, &q) != nil {
		c.writeRefusal(r, api.Refuse(400, "body.request_ids", "request_ids must be a list of strings."))
		return
	}
	for _, rk := range c.incarnation.Ranks {
		rk.Do(func() {
			for _, id := range q.IDs {
				rk.AbortID(id)
			}
		})
	}
	c.Respond(r, 200, "", nil)
}
