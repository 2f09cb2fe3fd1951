package sim

import (
	"fmt"
	"strconv"
	"strings"

	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/vllm"
)

// metric is one family of /metrics: vLLM's name, its kind, and the samples of a rank.
type metric struct {
	name, kind, help string
	samples          func(s *RankStats, n *core.Counters) []sample
}

type sample struct {
	label string // `source="x"`, or none
	value float64
}

func one(v float64) []sample { return []sample{{"", v}} }

var metricFamilies = []metric{
	{"vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", func(s *RankStats, n *core.Counters) []sample { return one(float64(s.Running)) }},
	{"vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", func(s *RankStats, n *core.Counters) []sample { return one(float64(s.Waiting)) }},
	{"vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", func(s *RankStats, n *core.Counters) []sample {
		return one(1 - float64(s.BlocksFree)/float64(s.BlocksTotal))
	}},
	{"vllm:prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of number of queried tokens.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Queries)) }},
	{"vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Hits)) }},
	{"vllm:external_prefix_cache_queries_total", "counter", "External prefix cache queries, in tokens.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.External)) }},
	{"vllm:external_prefix_cache_hits_total", "counter", "External prefix cache hits, in tokens.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.External)) }},
	{"vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Preempted)) }},
	{"vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Prompt)) }},
	{"vllm:prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.", func(s *RankStats, n *core.Counters) []sample {
		return []sample{{`source="local_compute"`, float64(n.LocalCompute)}, {`source="local_cache_hit"`, float64(n.LocalHit)}, {`source="external_kv_transfer"`, float64(n.External)}}
	}},
	{"vllm:prompt_tokens_cached_total", "counter", "Number of cached prompt tokens (local + external).", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.LocalHit + n.External)) }},
	{"vllm:prompt_tokens_cached_by_source_total", "counter", "Prefix-cache hit tokens by the cache tier that supplied them.", func(s *RankStats, n *core.Counters) []sample {
		return []sample{{`source="device"`, float64(n.LocalHit)}, {`source="host"`, 0}, {`source="p2p"`, float64(n.External)}, {`source="disk"`, 0}, {`source="external_unspecified"`, 0}}
	}},
	{"vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Generated)) }},
	{"vllm:request_success_total", "counter", "Count of successfully processed requests.", func(s *RankStats, n *core.Counters) []sample {
		return []sample{{`finished_reason="stop"`, float64(n.Stopped + n.ToolCalls)}, {`finished_reason="length"`, float64(n.Length)}, {`finished_reason="abort"`, float64(n.Aborted)}, {`finished_reason="error"`, float64(n.Failed)}}
	}},
	{"vllm:nixl_xfer_time_seconds_sum", "", "", func(s *RankStats, n *core.Counters) []sample { return one(n.TransferTime.Seconds()) }},
	{"vllm:nixl_xfer_time_seconds_count", "", "", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Transfers)) }},
	{"vllm:nixl_bytes_transferred_sum", "", "", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.TransferBytes)) }},
	{"vllm:nixl_bytes_transferred_count", "", "", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Transfers)) }},
	{"vllm:nixl_num_descriptors_sum", "", "", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Descriptors)) }},
	{"vllm:nixl_num_descriptors_count", "", "", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Transfers)) }},
	{"vllm:nixl_num_failed_transfers_total", "counter", "Number of failed NIXL KV Cache transfers.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.PullsFailed)) }},
	{"vllm:nixl_num_failed_notifications_total", "counter", "Number of failed NIXL KV Cache notifications.", func(s *RankStats, n *core.Counters) []sample { return one(0) }},
	{"vllm:nixl_num_kv_expired_reqs_total", "counter", "Number of requests that had their KV expire.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Expired)) }},
	{"vllm:nixl_num_notifications_after_expiry_total", "counter", "Number of notifications for requests whose KV had expired.", func(s *RankStats, n *core.Counters) []sample { return one(float64(n.Late)) }},
}

// serveMetrics serves /metrics, Prometheus text with vLLM's names and labels; the label
// engine is the rank.
func serveMetrics(c *conn, r *httpconn.Request) {
	l := c.incarnation
	stats := make([]RankStats, len(l.Ranks))
	ns := make([]core.Counters, len(l.Ranks))
	for i, rk := range l.Ranks {
		stats[i] = rk.Stats()
		ns[i] = rk.CountersNow()
	}
	var b strings.Builder
	for _, m := range metricFamilies {
		if m.kind != "" {
			fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", m.name, m.help, m.name, m.kind)
		} else if base, ok := strings.CutSuffix(m.name, "_sum"); ok {
			fmt.Fprintf(&b, "# HELP %s Of NIXL KV cache transfers.\n# TYPE %s summary\n", base, base)
		}
		for i := range stats {
			for _, s := range m.samples(&stats[i], &ns[i]) {
				fmt.Fprintf(&b, `%s{engine="%d",model_name=%q`, m.name, i, l.e.o.Model)
				if s.label != "" {
					b.WriteString("," + s.label)
				}
				b.WriteString("} " + number(s.value) + "\n")
			}
		}
	}
	b.WriteString("# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n")
	for i := range l.Ranks {
		fmt.Fprintf(&b, "vllm:cache_config_info{block_size=\"%d\",cache_dtype=\"auto\",enable_prefix_caching=\"%s\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1.0\n",
			l.e.o.BlockSize, map[bool]string{true: "False", false: "True"}[l.e.o.NoPrefixCache], i, l.e.o.Blocks)
	}
	b.WriteString("# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds " +
		strconv.FormatFloat(float64(l.startedAt.UnixMilli())/1000, 'f', 2, 64) + "\n")
	page := b.String()
	if !l.e.o.VLLM.Since(12, 0) {
		page = vllm.OldMetrics.Replace(page)
	}
	c.Respond(r, 200, "text/plain; version=0.0.4; charset=utf-8", []byte(page))
}

// number formats a float as Python's client does: 3.0, not 3.
func number(v float64) string {
	s := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(s, ".eIN") {
		s += ".0"
	}
	return s
}
