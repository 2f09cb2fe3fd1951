package sim

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/textgen"
)

// sglangGet and sglangPost are SGLang's endpoints that do not generate (0.5.23). There
// is no /version and no /kv_event_sources.
var sglangGet = map[string]func(*conn, *httpconn.Request){
	"/health":          serveHealthGenerate,
	"/health_generate": serveHealthGenerate,
	"/ping":            func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "", nil) },
	"/ready":           serveReady,
	"/server_info":     serveServerInfo,
	"/get_server_info": serveServerInfo,
	"/model_info":      serveModelInfo,
	"/get_model_info":  serveModelInfo,
	"/v1/models":       serveSGLangModels,
	"/v1/loads":        serveLoads,
	"/metrics":         serveSGLangMetrics,
	"/flush_cache":     serveFlush,
}

var sglangPost = map[string]func(*conn, *httpconn.Request){
	"/flush_cache":   serveFlush,
	"/abort_request": serveAbortRID,
	"/tokenize":      serveSGLangTokenize,
	"/v1/tokenize":   serveSGLangTokenize,
	"/detokenize":    serveDetokenize,
	"/v1/detokenize": serveDetokenize,
	"/v1/embeddings": serveEmbeddings,
}

// serveSGLangTokenize accepts several texts at once, too, and returns no token strings.
func serveSGLangTokenize(c *conn, r *httpconn.Request) {
	var list struct {
		Prompt []string `json:"prompt"`
	}
	if json.Unmarshal(r.Body, &list) != nil || list.Prompt == nil {
		serveTokenize(c, r)
		return
	}
	tokens, counts := make([][]uint32, len(list.Prompt)), make([]int, len(list.Prompt))
	for i, text := range list.Prompt {
		tokens[i] = textgen.Vocab().Append(nil, text)
		counts[i] = len(tokens[i])
	}
	c.json(r, map[string]any{"tokens": tokens, "count": counts, "max_model_len": c.incarnation.e.o.MaxModelLen})
}

// serveHealthGenerate probes the scheduler with one token and polls for the result once
// a second: the response takes that long.
func serveHealthGenerate(c *conn, r *httpconn.Request) {
	if c.WaitOrGone(cost.Scale(time.Second, c.incarnation.e.o.Speed)) {
		return
	}
	c.Respond(r, 200, "", nil)
}

// serveReady returns 200 once requests are accepted; on a prefill, once its ranks are
// registered.
func serveReady(c *conn, r *httpconn.Request) {
	if c.incarnation.bootstrapListener != nil && !c.incarnation.bootstrap.Registered() {
		c.Respond(r, 503, "", nil)
		return
	}
	c.Respond(r, 200, "", nil)
}

// serveServerInfo returns the server's arguments and, in kv_events, the endpoints of
// events.
func serveServerInfo(c *conn, r *httpconn.Request) {
	e := c.incarnation.e
	host, port, _ := net.SplitHostPort(e.addrs[0])
	n, _ := strconv.Atoi(port)
	info := map[string]any{"model_path": e.o.Model, "served_model_name": e.o.Model, "version": e.o.Version, "dp_size": e.o.Ranks, "tp_size": 1, "page_size": e.o.BlockSize,
		"host": host, "port": n, "context_length": e.o.MaxModelLen, "skip_tokenizer_init": e.o.SkipTokenizer, "incremental_streaming_output": e.o.Incremental,
		"load_balance_method": e.o.Balance, "disaggregation_transfer_backend": "nixl", "disaggregation_bootstrap_port": 8998,
		"disaggregation_mode": map[string]string{"prefill": "prefill", "decode": "decode", "aggregated": "null"}[e.o.Role],
		"internal_states":     c.incarnation.internalStates(), "kv_events": nil}
	if _, p := e.Bootstrap(); p > 0 {
		info["disaggregation_bootstrap_port"] = p
	}
	if len(e.pubs) > 0 {
		split := func(endpoint string) (string, int) {
			i := strings.LastIndexByte(endpoint, ':')
			port, _ := strconv.Atoi(endpoint[i+1:])
			return strings.TrimPrefix(endpoint[:i], "tcp://"), port
		}
		host, port := split(e.pubs[0])
		ev := map[string]any{"publisher": "zmq", "endpoint_host": host, "endpoint_port_base": port, "topic": e.o.Topic, "block_size": e.o.BlockSize, "dp_size": e.o.Ranks}
		if len(e.reps) > 0 {
			_, ev["replay_endpoint_port_base"] = split(e.reps[0])
		}
		if len(e.loads) > 0 {
			_, ev["load_endpoint_port_base"] = split(e.loads[0])
			ev["load_topic"] = "load"
		}
		info["kv_events"] = ev
	}
	c.json(r, info)
}

func (l *incarnation) internalStates() (list []map[string]any) {
	for _, rk := range l.Ranks {
		s := rk.Stats()
		list = append(list, map[string]any{"dp_rank": rk.Index, "load": s.Running + s.Waiting, "memory_usage": map[string]any{"token_capacity": s.BlocksTotal * l.e.o.BlockSize},
			"last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": l.e.o.MaxSeqs})
	}
	return list
}

func serveModelInfo(c *conn, r *httpconn.Request) {
	o := &c.incarnation.e.o
	c.json(r, map[string]any{"model_path": o.Model, "tokenizer_path": o.Model, "is_generation": true, "preferred_sampling_params": nil, "weight_version": "default",
		"has_image_understanding": false, "has_audio_understanding": false})
}

func serveSGLangModels(c *conn, r *httpconn.Request) {
	o, at := &c.incarnation.e.o, c.incarnation.e.start.Unix()
	c.json(r, map[string]any{"object": "list", "data": []any{map[string]any{"id": o.Model, "object": "model", "created": at, "owned_by": "sglang",
		"root": o.Model, "parent": nil, "max_model_len": o.MaxModelLen}}})
}

// loadSnapshot is one rank in /v1/loads and on the load socket.
type loadSnapshot struct {
	Timestamp   float64 `json:"timestamp"`
	DPRank      int     `json:"dp_rank"`
	Running     int     `json:"num_running_reqs"`
	Waiting     int     `json:"num_waiting_reqs"`
	Uncached    int     `json:"num_waiting_uncached_tokens"`
	Used        int     `json:"num_used_tokens"`
	Total       int     `json:"num_total_tokens"`
	MaxTotal    int     `json:"max_total_num_tokens"`
	MaxRunning  int     `json:"max_running_requests"`
	Usage       float64 `json:"token_usage"`
	Throughput  float64 `json:"gen_throughput"`
	HitRate     float64 `json:"cache_hit_rate"`
	Utilization float64 `json:"utilization"`
}

func snapshotLoad(r *core.Rank) loadSnapshot {
	s, o := r.Stats(), r.Process.Options
	used := (s.BlocksTotal - s.BlocksFree) * o.BlockSize
	total := s.BlocksTotal * o.BlockSize
	return loadSnapshot{Timestamp: float64(time.Now().UnixMicro()) / 1e6, DPRank: r.Index, Running: s.Running, Waiting: s.Waiting, Uncached: s.WaitingTokens, Used: used, Total: used, MaxTotal: total,
		MaxRunning: o.MaxSeqs, Usage: float64(used) / float64(total), HitRate: float64(s.PrefixHits) / float64(max(s.PrefixQueries, 1)),
		Utilization: float64(s.Running) / float64(o.MaxSeqs)}
}

func serveLoads(c *conn, r *httpconn.Request) {
	q, _ := url.ParseQuery(r.Query)
	only := -1
	if v := q.Get("dp_rank"); v != "" {
		k, err := strconv.Atoi(v)
		if err != nil || k < 0 || k >= len(c.incarnation.Ranks) {
			c.Respond(r, 400, "application/json", api.SGLangError(400, fmt.Sprintf("dp_rank %q is out of range [0, %d).", v, len(c.incarnation.Ranks)), ""))
			return
		}
		only = k
	}
	loads := []loadSnapshot{}
	for i, rk := range c.incarnation.Ranks {
		if only < 0 || only == i {
			loads = append(loads, snapshotLoad(rk))
		}
	}
	if q.Get("format") == "prometheus" {
		var b strings.Builder
		for _, s := range loads {
			fmt.Fprintf(&b, "sglang:num_running_reqs{dp_rank=\"%d\"} %d\nsglang:num_queue_reqs{dp_rank=\"%d\"} %d\n", s.DPRank, s.Running, s.DPRank, s.Waiting)
		}
		c.Respond(r, 200, "text/plain; version=0.0.4; charset=utf-8", []byte(b.String()))
		return
	}
	c.json(r, struct {
		Timestamp    float64        `json:"timestamp"`
		Version      string         `json:"version"`
		Accelerator  string         `json:"accelerator"`
		Accelerators int            `json:"num_accelerators"`
		Loads        []loadSnapshot `json:"loads"`
	}{float64(time.Now().UnixMicro()) / 1e6, c.incarnation.e.o.Version, "sim", len(c.incarnation.Ranks), loads})
}

func serveFlush(c *conn, r *httpconn.Request) {
	ok := true
	for _, rk := range c.incarnation.Ranks {
		rk.Do(func() { ok = rk.ResetCache() && ok })
	}
	if !ok {
		c.Respond(r, 400, "text/plain; charset=utf-8", []byte("Flush cache failed: there are running or waiting requests.\n"))
		return
	}
	c.Respond(r, 200, "text/plain; charset=utf-8", []byte("Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"))
}

// serveAbortRID aborts the requests whose rid starts with the given one. Unknown and
// empty ones are ignored, and the response is always 200.
func serveAbortRID(c *conn, r *httpconn.Request) {
	var q struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if json.Unmarshal(r.Body, &q) != nil {
		c.Respond(r, 400, "application/json", api.SGLangError(400, "rid must be a string", "rid"))
		return
	}
	for _, rk := range c.incarnation.Ranks {
		rk.Do(func() {
			for _, j := range rk.Jobs() {
				if q.All || q.RID != "" && hasRID(j, q.RID) {
					rk.FinishAborted(j)
				}
			}
		})
	}
	c.Respond(r, 200, "", nil)
}

func hasRID(j *core.Job, prefix string) bool {
	for _, id := range j.RIDs {
		if strings.HasPrefix(id, prefix) {
			return true
		}
	}
	return strings.HasPrefix(j.ID, prefix)
}

// serveSGLangMetrics serves /metrics with --enable-metrics: the metrics that a router
// scrapes.
func serveSGLangMetrics(c *conn, r *httpconn.Request) {
	l := c.incarnation
	var b strings.Builder
	families := []struct {
		name, kind string
		value      func(s *RankStats) float64
	}{
		{"num_running_reqs", "gauge", func(s *RankStats) float64 { return float64(s.Running) }},
		{"num_queue_reqs", "gauge", func(s *RankStats) float64 { return float64(s.Waiting) }},
		{"token_usage", "gauge", func(s *RankStats) float64 { return 1 - float64(s.BlocksFree)/float64(s.BlocksTotal) }},
		{"num_used_tokens", "gauge", func(s *RankStats) float64 { return float64((s.BlocksTotal - s.BlocksFree) * l.e.o.BlockSize) }},
		{"max_total_num_tokens", "gauge", func(s *RankStats) float64 { return float64(s.BlocksTotal * l.e.o.BlockSize) }},
		{"cache_hit_rate", "gauge", func(s *RankStats) float64 { return float64(s.PrefixHits) / float64(max(s.PrefixQueries, 1)) }},
		{"gen_throughput", "gauge", func(*RankStats) float64 { return 0 }},
		{"prompt_tokens_total", "counter", func(s *RankStats) float64 { return float64(s.PromptTokens) }},
		{"generation_tokens_total", "counter", func(s *RankStats) float64 { return float64(s.GeneratedTokens) }},
		{"cached_tokens_total", "counter", func(s *RankStats) float64 { return float64(s.LocalHit) }},
		{"num_prefill_bootstrap_queue_reqs", "gauge", func(s *RankStats) float64 { return float64(s.Rooms) }},
		{"num_bootstrap_failed_reqs_total", "counter", func(s *RankStats) float64 { return float64(s.RoomsTimedOut) }},
		{"num_transfer_failed_reqs_total", "counter", func(s *RankStats) float64 { return float64(s.TransfersFailed) }},
	}
	stats := make([]RankStats, len(l.Ranks))
	for i, rk := range l.Ranks {
		stats[i] = rk.Stats()
	}
	for _, f := range families {
		fmt.Fprintf(&b, "# HELP sglang:%s Of the scheduler.\n# TYPE sglang:%s %s\n", f.name, f.name, f.kind)
		for i := range stats {
			fmt.Fprintf(&b, "sglang:%s{dp_rank=\"%d\",model_name=%q,pp_rank=\"0\",tp_rank=\"0\"} %s\n", f.name, i, l.e.o.Model, number(f.value(&stats[i])))
		}
	}
	b.WriteString("# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds " +
		strconv.FormatFloat(float64(l.startedAt.UnixMilli())/1000, 'f', 2, 64) + "\n")
	c.Respond(r, 200, "text/plain; version=0.0.4; charset=utf-8", []byte(b.String()))
}
