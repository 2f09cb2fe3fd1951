package fleet

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/router/worker"
)

// metricsBody bounds a page of /metrics; a vLLM with eight ranks has 300 KiB.
const metricsBody = 8 << 20

// staleAfter this many failed scrapes in a row a rank's load is unknown.
const staleAfter = 3

// modelsEvery this many scrapes the models are asked again.
const modelsEvery = 10

// rankLoad is what one page says of one rank; -1: nothing.
type rankLoad struct {
	running, waiting, usage float64
	seen                    int    // usage samples, for the mean
	progress                uint64 // digest of the samples in progressSamples, in any order
}

// page is what one GET /metrics tells.
type page struct {
	life        life
	loads       map[int]*rankLoad // by data-parallel rank; -1: samples that name none
	engine      string
	blockSize   int
	totalBlocks int
}

func readPage(text []byte) *page {
	p := &page{loads: map[int]*rankLoad{}, life: life{tokens: -1}}
	eachSample(text, func(name, labels []byte, v float64) {
		n := string(name)
		p.life.observe(n, v)
		if !usable(v) {
			return
		}
		if engine := progressSamples[n]; engine != "" {
			p.load(labels, engine).progress += xxh3.HashSeed(name, math.Float64bits(v))
		}
		switch n {
		case "vllm:num_requests_running":
			add(&p.load(labels, VLLM).running, v)
		case "vllm:num_requests_waiting":
			add(&p.load(labels, VLLM).waiting, v)
		case "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc":
			p.load(labels, VLLM).use(v)
		case "sglang:num_running_reqs":
			add(&p.load(labels, SGLang).running, v)
		case "sglang:num_queue_reqs":
			add(&p.load(labels, SGLang).waiting, v)
		case "sglang:token_usage":
			p.load(labels, SGLang).use(v)
		case "vllm:cache_config_info":
			p.engine = VLLM
			setInt(&p.blockSize, labels, "block_size")
			setInt(&p.totalBlocks, labels, "num_gpu_blocks")
		}
	})
	return p
}

// progressSamples are those that change only when the engine core has made a step, with
// their engine. What an API server counts by itself (requests, aborts, its own latencies)
// is not among them.
var progressSamples = map[string]string{
	"vllm:num_requests_running": VLLM, "vllm:num_requests_waiting": VLLM, "vllm:kv_cache_usage_perc": VLLM, "vllm:gpu_cache_usage_perc": VLLM,
	"vllm:prompt_tokens_total": VLLM, "vllm:generation_tokens_total": VLLM, "vllm:num_preemptions_total": VLLM,
	"vllm:iteration_tokens_total_count": VLLM, "vllm:iteration_tokens_total_sum": VLLM, "vllm:prefix_cache_queries_total": VLLM,
	"sglang:num_running_reqs": SGLang, "sglang:num_queue_reqs": SGLang, "sglang:token_usage": SGLang, "sglang:num_used_tokens": SGLang,
	"sglang:gen_throughput": SGLang, "sglang:prompt_tokens_total": SGLang, "sglang:generation_tokens_total": SGLang,
}

func (p *page) load(labels []byte, engine string) *rankLoad {
	p.engine = engine
	r := rankOf(labels)
	l := p.loads[r]
	if l == nil {
		l = &rankLoad{running: -1, waiting: -1, usage: -1}
		p.loads[r] = l
	}
	return l
}

func add(to *float64, v float64) { *to = max(*to, 0) + v }

// use takes the fullest: SGLang repeats the figure for every tensor-parallel rank.
func (l *rankLoad) use(v float64) { l.usage = max(l.usage, min(v, 1)) }

func setInt(to *int, labels []byte, name string) {
	if v, ok := label(labels, name); ok {
		if n, ok := positive(v); ok {
			*to = n
		}
	}
}

// of is the load of one rank of a server that serves several or one. A server
// with one rank here may run more engines inside; they are one target, so their
// counts add up. Of samples that name no rank nothing is known for one of many.
func (p *page) of(rank uint16, alone bool) rankLoad {
	if l := p.loads[int(rank)]; l != nil && (!alone || len(p.loads) == 1) {
		return *l
	}
	sum := rankLoad{running: -1, waiting: -1, usage: -1}
	if !alone {
		return sum
	}
	for _, l := range p.loads {
		sum.progress += l.progress
		if l.running >= 0 {
			add(&sum.running, l.running)
		}
		if l.waiting >= 0 {
			add(&sum.waiting, l.waiting)
		}
		if l.usage >= 0 {
			add(&sum.usage, l.usage)
			sum.seen++
		}
	}
	if sum.seen > 1 {
		sum.usage /= float64(sum.seen)
	}
	return sum
}

func (l rankLoad) store(r *worker.Rank) {
	r.Running.Store(int64(min(l.running, 1e9)))
	r.Waiting.Store(int64(min(l.waiting, 1e9)))
	r.SetKVUsage(l.usage)
}

// scrape reads /metrics of a live server until ctx ends: the load of its ranks,
// and whether it is still the same process.
func (s *server) scrape(ctx context.Context) {
	last, timer := time.Now(), time.NewTimer(time.Hour)
	defer timer.Stop()
	failed, rounds := 0, 0
	for {
		pace := s.m.f.pace.Load()
		if pace.ScrapeInterval > 0 {
			timer.Reset(time.Until(last.Add(pace.ScrapeInterval)))
		} else {
			timer.Stop()
			if rounds > 0 { // what was read before is of no use any more
				rounds = 0
				for _, r := range s.ranks {
					unknown(r)
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-pace.over:
			continue
		case <-timer.C:
			last = time.Now()
		}
		if !s.live.Load() {
			failed = 0
			continue
		}
		if rounds++; rounds%modelsEvery == 0 {
			s.refreshModels(ctx)
		}
		downs := s.downs.Load()
		status, text, err := get(ctx, s.probes, "/metrics", s.m.f.pace.Load().ProbeTimeout, metricsBody)
		s.signs.note(err)
		if err != nil || status != 200 {
			if failed++; failed == staleAfter {
				for _, r := range s.ranks {
					unknown(r)
				}
			}
			continue
		}
		failed = 0
		s.take(readPage(text), downs)
	}
}

// refreshModels asks /v1/models again: engines load and unload LoRA adapters
// while they run. What cannot be read changes nothing.
func (s *server) refreshModels(ctx context.Context) {
	m := s.m
	if s != m.servers[0] {
		return
	}
	downs := s.downs.Load()
	status, body, err := get(ctx, s.probes, "/v1/models", m.f.pace.Load().ProbeTimeout, askBody)
	if err != nil || status != 200 {
		return
	}
	var a Answer
	a.readModels(body)
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	info := *m.w.Info()
	if a.Err != nil || s.downs.Load() != downs {
		return
	}
	names := a.Names()
	if len(m.w.Spec.Models) > 0 {
		names = info.Models
	}
	// Which of them are adapters decides under what name events are looked for.
	adapters := a.adapters()
	for _, name := range info.Adapters { // of the worker's other servers
		if slices.Contains(names, name) && !slices.Contains(a.Names(), name) {
			adapters = append(adapters, name)
		}
	}
	if slices.Equal(info.Models, names) && slices.Equal(info.Adapters, adapters) {
		return
	}
	m.f.opt.Log.Info("models changed", "worker", m.w.Spec.ID, "models", names, "adapters", adapters)
	info.Models, info.Adapters = names, adapters
	m.w.SetInfo(&info)
	m.f.publish()
}

// take stores what a page says unless the server fell since downs was read.
func (s *server) take(p *page, downs uint32) {
	f := s.m.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if !s.live.Load() || s.downs.Load() != downs {
		return
	}
	old := s.life.Load()
	if _, why := old.ended(&p.life, false); why != "" {
		s.downs.Add(1)
		s.m.why = "engine restarted: " + why
		s.lower(s.m.why)
		return
	}
	next := *old
	next.tokens = max(next.tokens, p.life.tokens)
	s.life.Store(&next)
	for i, r := range s.ranks {
		load := p.of(r.ID.Rank, len(s.ranks) == 1)
		load.store(r)
		if v := &s.seats[i].vital; load.progress != 0 {
			v.digest.Store(load.progress)
			v.reads.Add(1)
		}
	}
}
