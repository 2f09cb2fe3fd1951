package obs

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"

	dto "github.com/prometheus/client_model/go"

	"sluice/router/schedule"
	"sluice/router/worker"
)

// feedCounterNames are the counters of kvevents.Observer, in the order of the catalog. The last
// one counts all unknown names.
var feedCounterNames = [...]string{"batches", "stored", "removed", "cleared", "duplicate", "unknown_removed", "orphans", "gaps",
	"tail_checks", "resyncs", "replays", "replayed_batches", "replay_failures", "ignored", "restarts", "resets", "malformed", "oversize", "remote", "unknown_locality", "wrong_rank", "other"}

// maxRankLegs bounds the series of sluice_rank_legs_total of one rank.
const maxRankLegs = 48

// rankSeries holds the counters of one rank. Its gauges are read from the worker.Rank at each
// scrape.
type rankSeries struct {
	rank *worker.Rank
	feed [len(feedCounterNames)]atomic.Uint64
	legs labelMap[legOutcome, counter]
	// legTimes are the summed durations of the legs that succeeded, in ns.
	legTimes [legKinds]atomic.Int64
}

func (m *Metrics) rank(id worker.ID) *rankSeries {
	if p := m.ranks.Load(); p != nil {
		return (*p)[id]
	}
	return nil
}

// RankAdded starts the series of a rank. If the rank had series before, its counters start at
// zero.
func (m *Metrics) RankAdded(r *worker.Rank) {
	m.updateRanks(func(all map[worker.ID]*rankSeries) {
		s := &rankSeries{rank: r}
		s.legs.bound, s.legs.overflow = maxRankLegs, otherOutcome
		all[r.ID] = s
	})
}

// RankRemoved ends the series of a rank; the next scrape does not have them. The series of a newer
// rank with the same id stay.
func (m *Metrics) RankRemoved(r *worker.Rank) {
	m.updateRanks(func(all map[worker.ID]*rankSeries) {
		if s := all[r.ID]; s != nil && s.rank == r {
			delete(all, r.ID)
		}
	})
}

func (m *Metrics) updateRanks(change func(map[worker.ID]*rankSeries)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := map[worker.ID]*rankSeries{}
	if p := m.ranks.Load(); p != nil {
		next = maps.Clone(*p)
	}
	change(next)
	m.ranks.Store(&next)
}

// ExposeWorkers makes each scrape report the state of every worker that list returns.
func (m *Metrics) ExposeWorkers(list func() []*worker.Worker) {
	m.mu.Lock()
	m.workers = list
	m.mu.Unlock()
}

// AddFeedCount implements kvevents.Observer.
func (m *Metrics) AddFeedCount(id worker.ID, counter string, n int) {
	s := m.rank(id)
	if s == nil || n <= 0 {
		return
	}
	at := len(feedCounterNames) - 1
	for i, k := range feedCounterNames {
		if k == counter {
			at = i
			break
		}
	}
	s.feed[at].Add(uint64(n))
}

// LegCount is the number of legs of a kind on a rank that ended with an outcome.
type LegCount struct {
	Leg     string `json:"leg"`
	Outcome string `json:"outcome"`
	Count   uint64 `json:"count"`
	// Seconds is the sum of the durations of legs with the outcome ok.
	Seconds float64 `json:"seconds,omitempty"`
}

// RankLegs returns the numbers of a rank's legs by kind and outcome, sorted.
func (m *Metrics) RankLegs(id worker.ID) []LegCount {
	out := []LegCount{}
	s := m.rank(id)
	if s == nil {
		return out
	}
	for k, c := range s.legs.all() {
		n := LegCount{Leg: k.leg.String(), Outcome: k.outcome, Count: c.Get()}
		if k.outcome == "ok" && int(k.leg) < legKinds {
			n.Seconds = float64(s.legTimes[k.leg].Load()) / 1e9
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b LegCount) int {
		return cmp.Or(cmp.Compare(a.Leg, b.Leg), cmp.Compare(a.Outcome, b.Outcome))
	})
	return out
}

// rankGauges are the gauges that are read from a worker.Rank; ok is false if the engine has not
// reported the value.
var rankGauges = []struct {
	name string
	read func(r *worker.Rank) (v float64, ok bool)
}{
	{"sluice_rank_requests", func(r *worker.Rank) (float64, bool) { return float64(r.Requests.Load()), true }},
	{"sluice_rank_prefill_tokens", func(r *worker.Rank) (float64, bool) { return float64(r.PrefillTokens.Load()), true }},
	{"sluice_rank_decode_blocks", func(r *worker.Rank) (float64, bool) { return float64(r.DecodeBlocks.Load()), true }},
	{"sluice_rank_engine_running", func(r *worker.Rank) (float64, bool) { n := r.Running.Load(); return float64(n), n >= 0 }},
	{"sluice_rank_engine_waiting", func(r *worker.Rank) (float64, bool) { n := r.Waiting.Load(); return float64(n), n >= 0 }},
	{"sluice_rank_engine_queued_tokens", func(r *worker.Rank) (float64, bool) { n := r.QueuedTokens.Load(); return float64(n), n >= 0 }},
	{"sluice_rank_kv_usage_ratio", func(r *worker.Rank) (float64, bool) { return r.KVUsage(), r.KVUsage() >= 0 }},
	{"sluice_rank_breaker_state", func(r *worker.Rank) (float64, bool) { return float64(r.Breaker.Load()), true }},
	{"sluice_rank_prefill_token_seconds", func(r *worker.Rank) (float64, bool) { return learnedRate(r, worker.Prefilling) }},
	{"sluice_rank_transfer_token_seconds", func(r *worker.Rank) (float64, bool) { return learnedRate(r, worker.Pulling) }},
	{"sluice_rank_decode_block_seconds", func(r *worker.Rank) (float64, bool) { return learnedRate(r, worker.Decoding) }},
	{"sluice_rank_cached_blocks", func(r *worker.Rank) (float64, bool) { return float64(r.CachedBlocks.Load()), true }},
	{"sluice_rank_feed_live", func(r *worker.Rank) (float64, bool) {
		if worker.FeedState(r.Feed.Load()) == worker.FeedLive {
			return 1, true
		}
		return 0, true
	}},
}

func learnedRate(r *worker.Rank, w worker.Work) (float64, bool) {
	ns := r.Price[w].Load()
	return float64(ns) / 1e9, ns > 0
}

// maxRanks bounds the ranks with series of their own; the console and the admin API show all.
const maxRanks = 2000

// collectWorkers adds the series of workers and ranks.
func (m *Metrics) collectWorkers(p *page) {
	m.mu.Lock()
	list := m.workers
	m.mu.Unlock()
	if list != nil {
		workers := list()
		for _, wk := range workers[:min(len(workers), maxRanks)] {
			s, _ := wk.State()
			p.add("sluice_worker_state", labelPairs("worker", wk.Spec.ID, "role", wk.Spec.Role.String(), "state", s.String()), 1)
		}
	}
	all := m.ranks.Load()
	if all == nil {
		return
	}
	ranks := slices.SortedFunc(maps.Values(*all), func(a, b *rankSeries) int {
		return cmp.Or(cmp.Compare(a.rank.ID.Worker, b.rank.ID.Worker), cmp.Compare(a.rank.ID.Rank, b.rank.ID.Rank))
	})
	p.add("sluice_metrics_hidden_ranks", nil, float64(max(0, len(ranks)-maxRanks)))
	ranks = ranks[:min(len(ranks), maxRanks)]
	labels, info := make([][]*dto.LabelPair, len(ranks)), make([][]*dto.LabelPair, len(ranks))
	for i, s := range ranks {
		labels[i] = labelPairs("worker", s.rank.ID.Worker, "rank", strconv.Itoa(int(s.rank.ID.Rank)))
		model := ""
		if models := s.rank.Worker.Info().Models; len(models) > 0 {
			model = models[0]
		}
		info[i] = append(slices.Clip(labels[i]), labelPairs("role", s.rank.Worker.Spec.Role.String(), "model", model)...)
	}
	p.addAll("sluice_rank_info", info, func(int) (float64, bool) { return 1, true })
	for _, g := range rankGauges {
		p.addAll(g.name, labels, func(i int) (float64, bool) { return g.read(ranks[i].rank) })
	}
	type legKey struct {
		legOutcome
		rank int
	}
	var legs []legKey
	for i, s := range ranks {
		for k := range s.legs.all() {
			legs = append(legs, legKey{k, i})
		}
	}
	slices.SortFunc(legs, func(a, b legKey) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.leg, b.leg), cmp.Compare(a.outcome, b.outcome))
	})
	for _, k := range legs {
		l := append(slices.Clip(labels[k.rank]), labelPairs("leg", k.leg.String(), "outcome", k.outcome)...)
		p.add("sluice_rank_legs_total", l, float64(ranks[k.rank].legs.get(k.legOutcome).Get()))
	}
	for kind := range legKinds {
		leg := labelPairs("leg", schedule.LegKind(kind).String())
		for i, s := range ranks {
			if ns := s.legTimes[kind].Load(); ns > 0 {
				p.add("sluice_rank_leg_seconds_total", append(slices.Clip(labels[i]), leg...), float64(ns)/1e9)
			}
		}
	}
	kinds := make([]*dto.LabelPair, len(feedCounterNames))
	for k, name := range feedCounterNames {
		kinds[k] = labelPairs("kind", name)[0]
	}
	for i, s := range ranks {
		for k := range s.feed {
			if n := s.feed[k].Load(); n > 0 {
				p.add("sluice_kv_feed_total", append(slices.Clip(labels[i]), kinds[k]), float64(n))
			}
		}
	}
}
