package fleet

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// naiveSamples is eachSample without its short cuts.
func naiveSamples(page string) (all []string) {
	for line := range strings.SplitSeq(page, "\n") {
		name, rest, labels := line, "", ""
		if i := strings.IndexAny(line, "{ \t"); i >= 0 {
			name, rest = line[:i], line[i:]
		}
		m := metricOf([]byte(name))
		if m == otherMetric {
			continue
		}
		if strings.HasPrefix(rest, "{") {
			end := labelsEnd([]byte(rest))
			if end < 0 {
				continue
			}
			labels, rest = rest[1:end], rest[end+1:]
		}
		fields := strings.Fields(rest)
		if len(fields) == 0 || len(fields) > 2 {
			continue
		}
		if v, err := strconv.ParseFloat(fields[0], 64); err == nil {
			all = append(all, fmt.Sprint(m, labels, v))
		}
	}
	return all
}

// The short cuts over the lines of other metrics leave out none of those that are read.
func TestSamplesAgainstNaive(t *testing.T) {
	names := []string{
		"process_start_time_seconds", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:cache_config_info",
		"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "sglang:prompt_tokens_total",
		"vllm:num_preemptions_total", "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum", "vllm:prefix_cache_queries_total", "sglang:num_used_tokens", "sglang:gen_throughput",
		"sglang:generation_tokens_total", "vllm:prompt_tokens_created", "vllm:generation_tokens_created", "sglang:prompt_tokens_created",
	}
	known := names
	names = append(names, "vllm:num_requests_runnin", "vllm:num_requests_running_total", "vllm:request_latency_seconds_bucket", "process_cpu_seconds_total", "python_info", "vllm", "", "#", "v", "process", " vllm:num_requests_running")
	labels := []string{"", "{}", `{engine="0"}`, `{engine="1",model_name="a b}"}`, `{a="\"}",engine="2"}`, "{", `{engine="0`}
	values := []string{"1", "1.0", "2.5e+09", "NaN", "+Inf", "-1", "", "x", "1 1700000000", "1 2 3", "0x10", "1\t2"}
	spaces := []string{" ", "\t", "  ", ""}
	rng := rand.New(rand.NewPCG(1, 2))
	pick := func(list []string) string { return list[rng.IntN(len(list))] }
	for range 3000 {
		var b strings.Builder
		for range rng.IntN(12) {
			b.WriteString(pick(names) + pick(labels) + pick(spaces) + pick(values) + pick(spaces))
			if rng.IntN(10) > 0 {
				b.WriteString("\n")
			}
		}
		want := naiveSamples(b.String())
		var got []string
		eachSample([]byte(b.String()), func(m metric, labels []byte, v float64) { got = append(got, fmt.Sprint(m, string(labels), v)) })
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("page:\n%s\ngot  %v\nwant %v", b.String(), got, want)
		}
	}
	for _, name := range known {
		n := 0
		eachSample([]byte(name+" 1"), func(metric, []byte, float64) { n++ })
		if n != 1 {
			t.Errorf("%s is not read", name)
		}
	}
}

func BenchmarkReadPage(b *testing.B) {
	for _, size := range []string{"small", "large"} {
		page := []byte(metricsPage(size))
		b.Run(size, func(b *testing.B) {
			b.SetBytes(int64(len(page)))
			b.ReportAllocs()
			for b.Loop() {
				readPage(page)
			}
		})
	}
}
