package fleet

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/router/worker"
)

// metricsBody bounds a page of /metrics in bytes; a vLLM with eight ranks has 300 KiB.
const metricsBody = 8 << 20

// After staleAfter consecutive failed scrapes a rank's load is unknown.
const staleAfter = 3

// The models are requested again after modelsEvery scrapes of a server with requests, or
// modelsScrapes of one without, whichever takes longer.
const modelsScrapes, modelsEvery = 3, 10

// rankLoad is the content of one page about one rank; -1: nothing.
type rankLoad struct {
	running, waiting, usage float64
	seen                    int    // usage samples, for the mean
	progress                uint64 // digest of the samples whose metric has a progressOf, in any order
}

// page is the content of one GET /metrics.
type page struct {
	incarnation incarnation
	loads       map[int]*rankLoad // by data-parallel rank; -1: samples without a rank
	engine      string
	blockSize   int
	totalBlocks int
}

func readPage(text []byte) *page {
	p := &page{loads: map[int]*rankLoad{}, incarnation: incarnation{tokens: -1}}
	eachSample(text, func(m metric, labels []byte, v float64) {
		p.incarnation.observe(m, v)
		if !usable(v) {
			return
		}
		if engine := m.progressOf(); engine != "" {
			p.load(labels, engine).progress += progressDigest(m, v)
		}
		switch m {
		case vllmRunning:
			add(&p.load(labels, VLLM).running, v)
		case vllmWaiting:
			add(&p.load(labels, VLLM).waiting, v)
		case vllmUsage:
			p.load(labels, VLLM).use(v)
		case sglangRunning:
			add(&p.load(labels, SGLang).running, v)
		case sglangWaiting:
			add(&p.load(labels, SGLang).waiting, v)
		case sglangUsage:
			p.load(labels, SGLang).use(v)
		case vllmConfig:
			p.engine = VLLM
			setInt(&p.blockSize, labels, "block_size")
			setInt(&p.totalBlocks, labels, "num_gpu_blocks")
		}
	})
	return p
}

// progressDigest is the contribution of one sample to rankLoad.progress.
func progressDigest(m metric, v float64) uint64 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], math.Float64bits(v))
	return xxh3.HashSeed(b[:], uint64(m))
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

// use keeps the highest usage: SGLang repeats the value for every tensor-parallel rank.
func (l *rankLoad) use(v float64) { l.usage = max(l.usage, min(v, 1)) }

func setInt(to *int, labels []byte, name string) {
	if v, ok := label(labels, name); ok {
		if n, ok := positive(v); ok {
			*to = n
		}
	}
}

// loadOf returns the load of one rank of a server that serves one or several. A server with one
// rank here may run more engines inside; they are one target, so their counts are added. Samples
// without a rank say nothing about one rank of many.
func (p *page) loadOf(rank int, alone bool) rankLoad {
	if l := p.loads[rank]; l != nil && (!alone || len(p.loads) == 1) {
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
	r.CountReport()
}

// pages are buffers for pages of metrics and lists of models.
var pages = objpool.Pool[[]byte]{New: func() *[]byte { return new([]byte) }}

// scrape reads /metrics whenever the schedule requests it, until ctx ends: the load of the server's
// ranks, and whether it is still the same process.
func (s *server) scrape(ctx context.Context) {
	var a httpGetter
	defer a.bindContext(ctx)()
	failed, modelsAt := 0, monotime.Uptime()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.schedule.scrapeNow:
		}
		buf := pages.Get()
		a.buf = *buf
		if s.live.Load() {
			if iv := s.member.fleet.intervals(); monotime.Uptime()-modelsAt >= iv.models {
				modelsAt = monotime.Uptime()
				s.refreshModels(&a)
			}
			if s.scrapeOnce(&a) {
				failed = 0
			} else if failed++; failed == staleAfter {
				for _, r := range s.ranks {
					setUnknownLoad(r)
				}
			}
		} else {
			failed = 0
		}
		*buf, a.buf = a.buf, nil
		pages.Put(buf)
		s.schedule.scraping.Store(false)
	}
}

// scrapeOnce reads /metrics once.
func (s *server) scrapeOnce(a *httpGetter) bool {
	pace := s.member.fleet.settings.Load()
	downs := s.downCount.Load()
	status, text, err := a.get(s.probes, "/metrics", time.Now().Add(pace.ProbeTimeout), metricsBody)
	s.evidence.add(err)
	s.schedule.noMetrics.Store(err == nil && (status == 404 || status == 405))
	if err != nil || status != 200 {
		return false
	}
	s.applyPage(readPage(text), downs)
	return true
}

// refreshModels requests /v1/models again: engines load and unload LoRA adapters at run time. An
// invalid response changes nothing.
func (s *server) refreshModels(ask *httpGetter) {
	m := s.member
	if s != m.servers[0] {
		return
	}
	downs := s.downCount.Load()
	status, body, err := ask.get(s.probes, "/v1/models", time.Now().Add(m.fleet.settings.Load().ProbeTimeout), maxInspectBody)
	if err != nil || status != 200 {
		return
	}
	seen := seenModels{maphash.Bytes(modelsSeed, body), downs}
	if seen != s.models && s.applyModels(body, downs) {
		s.models = seen
	}
}

// seenModels identifies the list of models that a server returned last: a checksum, and downCount
// when it was requested. An unchanged list is not parsed again.
type seenModels struct {
	sum   uint64
	downs uint32
}

var modelsSeed = maphash.MakeSeed()

// applyModels applies a server's list of models, unless the server went down since downs was read
// or the list is invalid.
func (s *server) applyModels(body []byte, downs uint32) bool {
	m := s.member
	var a EngineInfo
	a.readModels(body)
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	info := *m.worker.Info()
	if a.Err != nil || s.downCount.Load() != downs {
		return false
	}
	if len(a.Refused) > 0 {
		m.fleet.opt.Log.Warn("ignoring invalid values from the engine", "worker", m.worker.Spec.ID, "invalid", a.Refused)
	}
	names := a.Names()
	if len(m.worker.Spec.Models) > 0 {
		names = info.Models
	}
	// The adapters determine the name under which events are hashed.
	adapters := a.adapters()
	for _, name := range info.Adapters { // of the worker's other servers
		if slices.Contains(names, name) && !slices.Contains(a.Names(), name) {
			adapters = append(adapters, name)
		}
	}
	if slices.Equal(info.Models, names) && slices.Equal(info.Adapters, adapters) {
		return true
	}
	m.fleet.opt.Log.Info("models changed", "worker", m.worker.Spec.ID, "models", names, "adapters", adapters)
	info.Models, info.Adapters = names, adapters
	m.worker.SetInfo(&info)
	m.fleet.publish()
	return true
}

// applyPage stores the content of a page unless the server went down since downs was read.
func (s *server) applyPage(p *page, downs uint32) {
	f := s.member.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	if !s.live.Load() || s.downCount.Load() != downs || f.settings.Load().ScrapeInterval <= 0 {
		return
	}
	old := s.incarnation.Load()
	if _, why := old.restartSign(&p.incarnation, false); why != "" {
		s.downCount.Add(1)
		s.member.lastFailure = "engine restarted: " + why
		s.withdraw(s.member.lastFailure)
		return
	}
	if p.incarnation.tokens > old.tokens {
		next := *old
		next.tokens = p.incarnation.tokens
		s.incarnation.Store(&next)
	}
	for i, r := range s.ranks {
		load := p.loadOf(r.EngineRank(), len(s.ranks) == 1)
		load.store(r)
		if v := &s.breakers[i].evidence; load.progress != 0 {
			v.digest.Store(load.progress)
			v.reads.Add(1)
		}
	}
}
