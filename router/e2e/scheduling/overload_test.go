package scheduling

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// statuses sends n concurrent requests and counts the responses by status.
func statuses(t *testing.T, url string, n int) (map[int]int, []*harness.Answer) {
	t.Helper()
	var mu sync.Mutex
	count, all := map[int]int{}, []*harness.Answer(nil)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			a, err := harness.TryPost(context.Background(), url+"/v1/chat/completions", harness.Chat(""))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			count[a.Status]++
			all = append(all, a)
		})
	}
	wg.Wait()
	return count, all
}

// TestOverloadedPoolAnswers429: with a bound on running requests no rank ever exceeds it. Further
// requests are refused with the reason and Retry-After.
func TestOverloadedPoolAnswers429(t *testing.T) {
	t.Parallel()
	var most, now int
	var mu sync.Mutex
	slow := func(o *sim.Options) { o.Speed = 0.05 }
	a, b := harness.StartSim(t, slow), harness.StartSim(t, slow)
	r := harness.StartRouter(t, func(c *config.Config) { c.Limits.RankRequests, c.Admission.Mode = 2, "off" }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			mu.Lock()
			now = 0
			for _, e := range []*sim.Engine{a, b} {
				now = max(now, runningRequests(e))
			}
			most = max(most, now)
			mu.Unlock()
		}
	})
	count, all := statuses(t, r.URL, 40)
	close(stop)
	watch.Wait()
	if count[200] == 0 || count[429] == 0 || count[200]+count[429] != 40 {
		t.Fatalf("statuses %v; want some 200 and the others 429", count)
	}
	for _, x := range all {
		if x.Status == 429 && (x.Header.Get("Retry-After") == "" || x.Header.Get("X-Sluice-Reason") != "pool_overloaded") {
			t.Errorf("429 with Retry-After %q, reason %q", x.Header.Get("Retry-After"), x.Header.Get("X-Sluice-Reason"))
		}
	}
	t.Logf("%v; at most %d in progress on one engine", count, most)
	if most > 2 {
		t.Errorf("%d requests in flight on one engine; want at most 2", most)
	}
	testwait.UntilWithin(t, 5*time.Second, "places are given back", func() bool {
		return !slices.ContainsFunc(r.AllRanks(), func(rank *worker.Rank) bool { return rank.Requests.Load() > 0 })
	})
	if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 200 {
		t.Errorf("status %d after the load", a.Status)
	}
}

// TestPerWorkerLimits: a worker's own bounds replace the configured limits, for each rank and for
// all its ranks together.
func TestPerWorkerLimits(t *testing.T) {
	t.Parallel()
	slow := func(o *sim.Options) { o.Speed, o.Ranks = 0.2, 2 }
	for _, c := range []struct {
		name           string
		own            func(*config.Worker)
		rank, together int
	}{
		{"rank_requests", func(w *config.Worker) { w.RankRequests = 3 }, 3, 6},
		{"max_requests", func(w *config.Worker) { w.MaxRequests = 5 }, 5, 5},
		{"both", func(w *config.Worker) { w.RankRequests, w.MaxRequests = 3, 4 }, 3, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := harness.StartSim(t, slow)
			w := harness.SimWorker(e, worker.Aggregated, "a")
			w.Ranks = []uint16{0, 1}
			c.own(&w)
			r := harness.StartRouter(t, func(cfg *config.Config) {
				cfg.Admission.Mode = "off"
				if cfg.Limits.RankRequests = 1; c.name == "max_requests" {
					cfg.Limits.RankRequests = 0
				}
			}, w)
			var most [3]atomic.Int64 // by rank, and of all ranks
			stop := make(chan struct{})
			var watch sync.WaitGroup
			watch.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
					}
					sum := 0
					for i, s := range e.Stats().Ranks {
						most[i].Store(max(most[i].Load(), int64(s.Running+s.Waiting)))
						sum += s.Running + s.Waiting
					}
					most[2].Store(max(most[2].Load(), int64(sum)))
				}
			})
			count, _ := statuses(t, r.URL, 30)
			close(stop)
			watch.Wait()
			if count[200] == 0 || count[429] == 0 || count[200]+count[429] != 30 {
				t.Errorf("statuses %v; want some 200 and the others 429", count)
			}
			one, all := max(most[0].Load(), most[1].Load()), most[2].Load()
			t.Logf("%v; most on a rank %d, together %d", count, one, all)
			if one > int64(c.rank) || all > int64(c.together) || all <= 2 {
				t.Errorf("most on a rank %d, together %d; want at most %d and %d, more than the limit of 1 a rank", one, all, c.rank, c.together)
			}
		})
	}
}

// TestOverloadedDecodeIsDetectedBeforePrefill: the router runs no prefill for a request if the
// decode pool is at capacity.
func TestOverloadedDecodeIsDetectedBeforePrefill(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Limits.RankRequests, c.Admission.Mode = 1, "off" }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	var rank *worker.Rank
	for _, w := range r.Fleet.View().Workers {
		if w.Spec.ID == "d0" {
			rank = w.Ranks[0]
		}
	}
	rank.Requests.Add(1)
	got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	rank.Requests.Add(-1)
	if got.Status != 429 || got.Header.Get("X-Sluice-Reason") != "pool_overloaded" || !strings.Contains(string(got.Body), "decode") {
		t.Errorf("status %d, reason %q: %s", got.Status, got.Header.Get("X-Sluice-Reason"), got.Body)
	}
	if n := p.Stats().Ranks[0].Requests; n != 0 {
		t.Errorf("prefill served %d requests; want none", n)
	}
	if got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); got.Status != 200 {
		t.Errorf("status %d with a free place", got.Status)
	}
}

// TestRetriesNeverDoubleAnOverload: engines that refuse everything receive each request once and a
// fifth of them again, not each request three times.
func TestRetriesNeverDoubleAnOverload(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Fleet.RetryBudgetMinPerSecond = 0
		c.Schedule.Policy = "round_robin"
	}, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	for _, e := range []*sim.Engine{a, b} {
		e.Fault(sim.Fault{Kind: sim.Status, Path: "/v1/chat", Status: 503})
	}
	const n = 200
	for range n {
		if got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")); got.Status != 503 {
			t.Fatalf("status %d; want the engine's own 503", got.Status)
		}
	}
	calls := legCalls(t, r)
	t.Logf("%d requests, %d engine calls", n, calls)
	if calls < n+n/10 || calls > n+n/4 {
		t.Errorf("%d engine calls for %d requests; want a fifth more, retries being bounded", calls, n)
	}
	if n := r.Fleet.RetriesDenied(); n == 0 {
		t.Error("no retry counted as denied")
	}
}

// legCalls returns the number of engine calls in the router's metrics.
func legCalls(t *testing.T, r *harness.Router) (n int) {
	t.Helper()
	for line := range strings.Lines(string(harness.Get(t, r.URL+"/metrics").Body)) {
		if strings.HasPrefix(line, "sluice_legs_total{") {
			v, err := strconv.Atoi(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]))
			if err != nil {
				t.Fatal(err)
			}
			n += v
		}
	}
	return n
}

// TestWaitersAreBounded: requests that arrive before there is a worker wait, but at most as many
// as the bound.
func TestWaitersAreBounded(t *testing.T) {
	e := harness.StartSim(t, nil)
	e.Crash()
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Limits.PoolWaiters = 3 }, harness.SimWorker(e, worker.Aggregated, "a"))
	full := make(chan *harness.Answer, 8)
	var wg sync.WaitGroup
	ok := make(chan *harness.Answer, 8)
	for range 8 {
		wg.Go(func() {
			a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(""))
			switch {
			case err != nil:
				t.Error(err)
			case a.Status == 200:
				ok <- a
			default:
				full <- a
			}
		})
	}
	for range 5 {
		a := <-full
		if a.Status != http.StatusServiceUnavailable || a.Header.Get("X-Sluice-Reason") != "pool_queue_full" || a.Header.Get("Retry-After") == "" {
			t.Errorf("status %d, reason %q, Retry-After %q: %s", a.Status, a.Header.Get("X-Sluice-Reason"), a.Header.Get("Retry-After"), a.Body)
		}
	}
	e.Restart()
	for range 3 {
		if a := <-ok; a.Header.Get("X-Sluice-Queue-Time") == "" {
			t.Error("a request that waited does not say so")
		}
	}
	wg.Wait()
}

// TestMinWorkers: at the start /readyz waits for fleet.min_workers workers, for at most
// fleet.start_timeout. A worker that leaves later does not restart the wait.
func TestMinWorkers(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	b.Crash()
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Fleet.MinWorkers = 2 }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	testwait.UntilWithin(t, 5*time.Second, "a is ready", func() bool { return r.State("a") == worker.Ready })
	got := harness.Get(t, r.URL+"/readyz")
	if got.Status != 503 || !strings.Contains(string(got.Body), "1 of 2 workers") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	b.Restart()
	testwait.UntilWithin(t, 5*time.Second, "/readyz is 200", func() bool { return harness.Get(t, r.URL+"/readyz").Status == 200 })
	b.Crash()
	testwait.UntilWithin(t, 5*time.Second, "b is out", func() bool { return r.State("b") == worker.Unhealthy })
	if got := harness.Get(t, r.URL+"/readyz"); got.Status != 200 {
		t.Errorf("%d %s after the start", got.Status, got.Body)
	}

	late := harness.LaunchRouter(t, func(c *config.Config) { c.Fleet.MinWorkers, c.Fleet.StartTimeout = 2, 300*time.Millisecond }, harness.SimWorker(a, worker.Aggregated, "a"))
	testwait.UntilWithin(t, 5*time.Second, "it waits no longer than the answer said", func() bool { return harness.Get(t, late.URL+"/readyz").Status == 200 })
	if !strings.Contains(late.Logs.String(), "fewer workers") {
		t.Error("nothing in the log")
	}
}

// TestBreakerOfOneRank: if the engine of one rank fails, only this rank leaves the pool. It returns
// once it is healthy.
func TestBreakerOfOneRank(t *testing.T) {
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	w := config.Worker{ID: "w", URL: a.URL(), RankURLs: []string{a.URL(), b.URL()}, Ranks: []uint16{0, 1}}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Health.BreakerFailures, c.Health.BreakerOpenTime = 3, 200*time.Millisecond
		c.Health.UnhealthyThreshold = 1000 // a late probe must not leave only the failing rank in the pool: clients would receive its 500
		c.Schedule.Policy = "round_robin"
	}, w)
	// A worker becomes ready with the first of its servers.
	testwait.UntilWithin(t, 10*time.Second, "both ranks are in the pool", func() bool {
		p, ok := r.Fleet.View().Pool("sim")
		return ok && len(p.Aggregated) == 2
	})
	a.Fault(sim.Fault{Kind: sim.Status, Path: "/v1/chat", Status: 500})
	broken := func() worker.BreakerState {
		return worker.BreakerState(r.Fleet.View().Workers[0].Ranks[0].Breaker.Load())
	}
	for i := range 8 {
		id := fmt.Sprint("breaks-", i)
		if got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", id); got.Status != 200 || got.Header.Get("X-Sluice-Rank") != "1" {
			t.Errorf("status %d from rank %s: %+v", got.Status, got.Header.Get("X-Sluice-Rank"), r.Outcome(t, id).Notes)
		}
	}
	if broken() == worker.BreakerClosed {
		t.Error("the breaker of a rank that fails is closed")
	}
	a.ClearFaults()
	testwait.UntilWithin(t, 10*time.Second, "the rank is chosen again", func() bool {
		got := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		return got.Status == 200 && got.Header.Get("X-Sluice-Rank") == "0" && broken() == worker.BreakerClosed
	})
}

// TestHalfOpenBreakerOfOnlyRank: while one request tests a rank whose breaker is half open, the
// errors of other requests say that no rank serves them, not that the pool is at capacity.
func TestHalfOpenBreakerOfOnlyRank(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Health.BreakerFailures, c.Health.BreakerOpenTime = 2, 50*time.Millisecond
		c.Health.UnhealthyThreshold = 1000
	}, harness.SimWorker(e, worker.Aggregated, "w"))
	e.Fault(sim.Fault{Kind: sim.Status, Path: "/v1/chat", Status: 500})
	rank := r.Fleet.View().Workers[0].Ranks[0]
	state := func() worker.BreakerState { return worker.BreakerState(rank.Breaker.Load()) }
	for range 2 {
		harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	}
	e.ClearFaults()
	e.Fault(sim.Fault{Kind: sim.Stall, Path: "/v1/chat", Delay: 3 * time.Second})
	testwait.UntilWithin(t, 10*time.Second, "it may be tried", func() bool { return state() == worker.BreakerHalfOpen })
	tries := make(chan *harness.Answer)
	go func() { tries <- harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")) }()
	testwait.UntilWithin(t, 10*time.Second, "it is tried", func() bool { return rank.Requests.Load() == 1 })
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	if a.Status != 503 || a.Header.Get("Retry-After") == "" || !strings.Contains(string(a.Body), "one request each") {
		t.Errorf("%d %s", a.Status, a.Body)
	}
	if a := <-tries; a.Status != 200 {
		t.Errorf("the one that tries it: %d %s", a.Status, a.Body)
	}
}

func runningRequests(e *sim.Engine) (n int) {
	for _, r := range e.Stats().Ranks {
		n += r.Running + r.Waiting
	}
	return n
}
