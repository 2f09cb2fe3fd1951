package scheduling

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// forwardPassPublisher publishes forward-pass metrics like Dynamo's vLLM worker: each rank's
// scheduler has a ZMQ socket of its own. The frames of a message are the topic "", a sequence
// number of eight bytes, and a map.
type forwardPassPublisher struct {
	t    *testing.T
	pubs []*zmq.Socket
	seq  uint64
}

func newForwardPassPublisher(t *testing.T, ranks int) (p *forwardPassPublisher, endpoints []string) {
	t.Helper()
	p = &forwardPassPublisher{t: t}
	for range ranks {
		s, err := zmq.NewSocket(zmq.PUB)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		s.SetLinger(0)
		if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
			t.Fatal(err)
		}
		ep, _ := s.GetLastEndpoint()
		p.pubs, endpoints = append(p.pubs, s), append(endpoints, ep)
	}
	return p, endpoints
}

// rankQueue is the queue of a rank.
type rankQueue struct{ rank, requests, tokens int }

// message appends a map of all fields to b, in msgspec's encoding.
func (q rankQueue) message(b []byte) []byte {
	count := func(b []byte, name string, n int) []byte { return msgp.AppendInt(msgp.AppendString(b, name), n) }
	real := func(b []byte, name string) []byte { return msgp.AppendFloat64(msgp.AppendString(b, name), 0) }
	b = count(msgp.AppendMapHeader(b, 7), "version", 1)
	b = msgp.AppendString(msgp.AppendString(b, "worker_id"), "w0")
	b = count(count(b, "dp_rank", q.rank), "counter_id", 7)
	b = real(b, "wall_time")
	b = msgp.AppendMapHeader(msgp.AppendString(b, "scheduled_requests"), 7)
	b = real(count(count(b, "num_prefill_requests", 0), "sum_prefill_tokens", 0), "var_prefill_length")
	b = real(count(count(count(b, "sum_prefill_kv_tokens", 0), "num_decode_requests", 1), "sum_decode_kv_tokens", 50), "var_decode_kv_tokens")
	b = msgp.AppendMapHeader(msgp.AppendString(b, "queued_requests"), 6)
	b = real(count(count(b, "num_prefill_requests", q.requests), "sum_prefill_tokens", q.tokens), "var_prefill_length")
	return real(count(count(b, "num_decode_requests", 0), "sum_decode_kv_tokens", 0), "var_decode_kv_tokens")
}

func (p *forwardPassPublisher) send(socket int, payload []byte) {
	p.t.Helper()
	p.seq++
	if _, err := p.pubs[socket].SendMessage("", fmt.Appendf(nil, "%08d", p.seq), payload); err != nil {
		p.t.Fatal(err)
	}
}

// TestForwardPassMetricsInfluenceScheduling: the queue that each rank's engine reports decides
// between otherwise equal ranks. It applies to the rank that the message names, and is part of
// /metrics and the explain record. Scraping is off.
func TestForwardPassMetricsInfluenceScheduling(t *testing.T) {
	const ranks = 4
	e := harness.StartSim(t, func(o *sim.Options) { o.Ranks = ranks })
	p, endpoints := newForwardPassPublisher(t, ranks)
	w := harness.SimWorker(e, worker.Aggregated, "w")
	w.Ranks, w.LoadEvents = []uint16{0, 1, 2, 3}, endpoints
	r := harness.StartRouter(t, func(c *config.Config) { c.Health.MetricsInterval = time.Hour }, w)
	state := r.AllRanks()
	series := func(name string, rank int) string {
		return fmt.Sprintf(`sluice_rank_engine_%s{worker="w",rank="%d"}`, name, rank)
	}
	received := false // a message of every socket was received; until then messages may be lost and are sent again
	publish := func(queues ...rankQueue) {
		t.Helper()
		sent := false
		testwait.UntilWithin(t, 10*time.Second, fmt.Sprint("the ranks have ", queues), func() bool {
			for _, q := range queues {
				if !received || !sent {
					p.send(q.rank, q.message(nil))
				}
			}
			sent = true
			for _, q := range queues {
				if state[q.rank].Waiting.Load() != int64(q.requests) || state[q.rank].QueuedTokens.Load() != int64(q.tokens) {
					return false
				}
			}
			return true
		})
	}
	publish(rankQueue{0, 1, 1}, rankQueue{1, 1, 1}, rankQueue{2, 1, 1}, rankQueue{3, 1, 1})
	received = true
	prompts := 0
	wantRank := func(want string) {
		t.Helper()
		for range 3 {
			prompts++
			id := fmt.Sprint("passes-", prompts)
			a := harness.Post(t, r.URL+"/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":"%d, a prompt that nobody holds","max_tokens":1}`, prompts), "X-Request-Id", id)
			if got := a.Header.Get("X-Sluice-Rank"); a.Status != 200 || got != want {
				t.Fatalf("%d, placed on rank %q, want %s: %s", a.Status, got, want, a.Body)
			}
		}
	}

	// One rank at a time is idle, in an order that does not favour the first.
	for _, idle := range []int{2, 0, 3, 1} {
		queues := []rankQueue{{0, 4, 40_000}, {1, 5, 50_000}, {2, 6, 60_000}, {3, 7, 70_000}}
		queues[idle].requests, queues[idle].tokens = 0, 0
		publish(queues...)
		wantRank(strconv.Itoa(idle))
	}
	for rank, want := range [ranks]rankQueue{{0, 4, 40_000}, {1, 0, 0}, {2, 6, 60_000}, {3, 7, 70_000}} {
		if got := r.Metric(series("waiting", rank)); got != float64(want.requests) {
			t.Errorf("/metrics: %v requests wait on rank %d, want %d", got, rank, want.requests)
		}
		if got := r.Metric(series("queued_tokens", rank)); got != float64(want.tokens) {
			t.Errorf("/metrics: %v tokens wait on rank %d, want %d", got, rank, want.tokens)
		}
	}
	shown := 0
	for _, c := range r.Explain(t, fmt.Sprint("passes-", prompts)).Decisions[0].Shown {
		for rank, want := range [ranks]rankQueue{{0, 4, 40_000}, {1, 0, 0}, {2, 6, 60_000}, {3, 7, 70_000}} {
			if c.Rank != fmt.Sprint("w/", rank) {
				continue
			}
			shown++
			ms := float64(want.tokens) * c.Rates.Prefill * r.Config.Schedule.QueueWeight
			if c.Waiting != want.requests || c.OtherTokens != int64(want.tokens) || c.Terms.Waiting < 0.99*ms || c.Terms.Waiting > 1.01*ms || c.Chosen != (rank == 1) {
				t.Errorf("explained: %+v, want %d requests of %d tokens, %.1f ms", c, want.requests, want.tokens, ms)
			}
		}
	}
	if shown != ranks {
		t.Errorf("%d of %d ranks are explained", shown, ranks)
	}

	// One socket reports several ranks, in any order, each by its number. Ranks that the message
	// omits keep their values, and an empty vector changes nothing.
	vector := msgp.AppendArrayHeader(nil, 3)
	for _, q := range []rankQueue{{3, 0, 0}, {1, 9, 90_000}, {0, 8, 80_000}} {
		vector = q.message(vector)
	}
	p.send(2, vector)
	testwait.UntilWithin(t, 10*time.Second, "a vector's loads are with their ranks", func() bool {
		return state[3].QueuedTokens.Load() == 0 && state[1].QueuedTokens.Load() == 90_000 && state[0].QueuedTokens.Load() == 80_000
	})
	if n := state[2].QueuedTokens.Load(); n != 60_000 {
		t.Errorf("rank 2, which the vector leaves out, has %d tokens", n)
	}
	wantRank("3")
	before := r.Metric(`sluice_load_messages_total{kind="applied"}`)
	p.send(3, msgp.AppendArrayHeader(nil, 0))
	p.send(3, msgp.AppendMapHeader(nil, 0))
	testwait.UntilWithin(t, 10*time.Second, "a message that is not a load message is counted", func() bool { return r.Metric(`sluice_load_messages_total{kind="malformed"}`) == 1 })
	if after := r.Metric(`sluice_load_messages_total{kind="applied"}`); after != before {
		t.Errorf("%v messages applied of an empty vector", after-before)
	}
	wantRank("3")
}
