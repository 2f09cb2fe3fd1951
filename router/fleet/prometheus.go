package fleet

import (
	"bytes"
	"strconv"
)

// metric is one of the metrics that are read.
type metric uint8

const (
	otherMetric metric = iota
	processStart
	vllmRunning
	vllmWaiting
	vllmUsage
	vllmConfig
	sglangRunning
	sglangWaiting
	sglangUsage
	vllmPromptTokens
	vllmGenerationTokens
	sglangPromptTokens
	sglangGenerationTokens
	tokensCreated
	vllmPreemptions
	vllmIterationCount
	vllmIterationSum
	vllmPrefixQueries
	sglangUsedTokens
	sglangThroughput
)

// metricOf returns the metric with a name.
func metricOf(name []byte) metric {
	switch string(name) {
	case "process_start_time_seconds":
		return processStart
	case "vllm:num_requests_running":
		return vllmRunning
	case "vllm:num_requests_waiting":
		return vllmWaiting
	case "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc":
		return vllmUsage
	case "vllm:cache_config_info":
		return vllmConfig
	case "sglang:num_running_reqs":
		return sglangRunning
	case "sglang:num_queue_reqs":
		return sglangWaiting
	case "sglang:token_usage":
		return sglangUsage
	case "vllm:prompt_tokens_total":
		return vllmPromptTokens
	case "vllm:generation_tokens_total":
		return vllmGenerationTokens
	case "sglang:prompt_tokens_total":
		return sglangPromptTokens
	case "sglang:generation_tokens_total":
		return sglangGenerationTokens
	case "vllm:num_preemptions_total":
		return vllmPreemptions
	case "vllm:iteration_tokens_total_count":
		return vllmIterationCount
	case "vllm:iteration_tokens_total_sum":
		return vllmIterationSum
	case "vllm:prefix_cache_queries_total":
		return vllmPrefixQueries
	case "sglang:num_used_tokens":
		return sglangUsedTokens
	case "sglang:gen_throughput":
		return sglangThroughput
	case "vllm:prompt_tokens_created", "vllm:generation_tokens_created", "sglang:prompt_tokens_created":
		return tokensCreated
	}
	return otherMetric
}

// progressOf returns the engine of a metric that changes only when the engine core has made a step,
// "" for all others. What an API server counts by itself (requests, aborts, its own latencies) is
// not included.
func (m metric) progressOf() (engine string) {
	switch m {
	case vllmRunning, vllmWaiting, vllmUsage, vllmPromptTokens, vllmGenerationTokens, vllmPreemptions, vllmIterationCount, vllmIterationSum, vllmPrefixQueries:
		return VLLM
	case sglangRunning, sglangWaiting, sglangUsage, sglangUsedTokens, sglangThroughput, sglangPromptTokens, sglangGenerationTokens:
		return SGLang
	}
	return ""
}

// mayBeRead reports whether a line may begin with a name that metricOf knows. A page has hundreds
// of lines, most of them of histograms, of which ten are read; the first bytes exclude most others.
func mayBeRead(line []byte) bool {
	if len(line) < len("vllm:xx") {
		return false
	}
	switch line[0] {
	case 'p':
		return line[1] == 'r' && line[2] == 'o' && line[3] == 'c'
	case 's':
		return line[1] == 'g' && line[2] == 'l'
	case 'v':
		if line[1] != 'l' || line[4] != ':' {
			return false
		}
		switch line[5] {
		case 'n':
			return line[6] == 'u'
		case 'k', 'g', 'c':
			return true
		case 'i':
			return line[6] == 't'
		case 'p':
			return line[6] == 'r'
		}
	}
	return false
}

// eachSample calls f for every well-formed sample of a Prometheus text page whose metric is read.
// Everything else on the page is skipped: it comes from an engine and may be invalid. labels is the
// text in the braces, and is borrowed.
func eachSample(page []byte, f func(m metric, labels []byte, value float64)) {
	for len(page) > 0 {
		line := page
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			page = nil
		}
		if !mayBeRead(line) {
			continue
		}
		end := nameEnd(line)
		m := metricOf(line[:end])
		if m == otherMetric {
			continue
		}
		rest := line[end:]
		var labels []byte
		if rest[0] == '{' {
			end := labelsEnd(rest)
			if end < 0 {
				continue
			}
			labels, rest = rest[1:end], rest[end+1:]
		}
		if v, ok := sampleValue(rest); ok {
			f(m, labels, v)
		}
	}
}

// nameEnd returns the length of the name at the start of a line.
func nameEnd(line []byte) int {
	for i, c := range line {
		if c == '{' || c == ' ' || c == '\t' {
			return i
		}
	}
	return 0
}

// sampleValue parses a value with an optional timestamp after it.
func sampleValue(text []byte) (float64, bool) {
	text = bytes.TrimSpace(text)
	if i := bytes.IndexAny(text, " \t"); i >= 0 {
		stamp := bytes.TrimSpace(text[i:])
		if bytes.ContainsAny(stamp, " \t") {
			return 0, false
		}
		text = text[:i]
	}
	v, err := strconv.ParseFloat(string(text), 64)
	return v, err == nil
}

// labelsEnd returns the index of the brace that closes s[0], or -1.
func labelsEnd(s []byte) int {
	quoted := false
	for i := 1; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++
		case s[i] == '"':
			quoted = !quoted
		case s[i] == '}' && !quoted:
			return i
		}
	}
	return -1
}

// label finds one label's value. Escapes are left as they are: the values used here are numbers and
// plain words.
func label(labels []byte, want string) (string, bool) {
	for len(labels) > 0 {
		eq := bytes.IndexByte(labels, '=')
		if eq < 0 || eq+1 >= len(labels) || labels[eq+1] != '"' {
			return "", false
		}
		name := bytes.Trim(labels[:eq], ", \t")
		rest := labels[eq+2:]
		end := 0
		for end < len(rest) && rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(rest) {
			return "", false
		}
		if string(name) == want {
			return string(rest[:end]), true
		}
		labels = rest[end+1:]
	}
	return "", false
}

// rankOf returns the data-parallel rank of a sample, or -1 if it has none.
func rankOf(labels []byte) int {
	for _, name := range [...]string{"engine", "dp_rank"} {
		if v, ok := label(labels, name); ok {
			if n, err := strconv.ParseUint(v, 10, 16); err == nil {
				return int(n)
			}
		}
	}
	return -1
}
