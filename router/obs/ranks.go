package obs

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"

	"sluice/router/worker"
)

// feedCounterNames are the counters of kvevents.Observer, in the order of the catalog. The last
// one counts all unknown names.
var feedCounterNames = [...]string{"batches", "stored", "removed", "cleared", "duplicate", "unknown_removed", "orphans", "gaps",
	"tail_checks", "resyncs", "replays", "replayed_batches", "replay_failures", "ignored", "restarts", "resets", "malformed", "oversize", "remote", "unknown_locality", "wrong_rank", "other"}

// rankSeries holds the counters of one rank. Its gauges are read from the worker.Rank at each
// scrape.
type rankSeries struct {
	rank *worker.Rank
	feed [len(feedCounterNames)]atomic.Uint64
	legs labelMap[legOutcome, atomic.Uint64]
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
	m.updateRanks(func(all map[worker.ID]*rankSeries) { all[r.ID] = &rankSeries{rank: r} })
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

// writeWorkers writes the series of workers and ranks.
func (m *Metrics) writeWorkers(w io.Writer) {
	m.mu.Lock()
	list := m.workers
	m.mu.Unlock()
	if list != nil {
		for _, wk := range list() {
			s, _ := wk.State()
			fmt.Fprintf(w, "sluice_worker_state{%s} 1\n", labelList("worker", wk.Spec.ID, "role", wk.Spec.Role.String(), "state", s.String()))
		}
	}
	p := m.ranks.Load()
	if p == nil || len(*p) == 0 {
		return
	}
	ranks := slices.SortedFunc(maps.Values(*p), func(a, b *rankSeries) int {
		return cmp.Or(cmp.Compare(a.rank.ID.Worker, b.rank.ID.Worker), cmp.Compare(a.rank.ID.Rank, b.rank.ID.Rank))
	})
	labels := make([]string, len(ranks))
	for i, s := range ranks {
		labels[i] = labelList("worker", s.rank.ID.Worker, "rank", strconv.Itoa(int(s.rank.ID.Rank)))
	}
	for _, g := range rankGauges {
		for i, s := range ranks {
			if v, ok := g.read(s.rank); ok {
				fmt.Fprintf(w, "%s{%s} %g\n", g.name, labels[i], v)
			}
		}
	}
	for i, s := range ranks {
		for k, n := range s.legs.all() {
			fmt.Fprintf(w, "sluice_rank_legs_total{%s,%s} %d\n", labels[i], labelList("leg", k.leg.String(), "outcome", k.outcome), n.Load())
		}
	}
	for i, s := range ranks {
		for k := range s.feed {
			if n := s.feed[k].Load(); n > 0 {
				fmt.Fprintf(w, "sluice_kv_feed_total{%s,kind=%q} %d\n", labels[i], feedCounterNames[k], n)
			}
		}
	}
}
