package fleet

import (
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// A Pace that is new reaches the connections of workers that are there, of those that
// come later, of guests and of probes.
func TestChangeReachesConnections(t *testing.T) {
	a, b := newEngine(t), newEngine(t)
	opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1}
	f, _ := newFleet(t, opt)
	mustAdd(t, f, worker.Spec{ID: "a", URL: a.url()})
	transient, err := f.AddTransient(worker.Spec{ID: "transient", URL: a.url()})
	if err != nil {
		t.Fatal(err)
	}
	opt.Upstream = upstream.Options{MaxConns: 7, IdleTimeout: time.Minute, MaxAge: time.Hour, ConnectTimeout: time.Second}
	want := opt.Upstream.Reloadable()
	f.Reload(opt.Settings())
	mustAdd(t, f, worker.Spec{ID: "b", URL: b.url()})
	few := want
	few.MaxConns = probeConns
	f.mu.Lock()
	for _, m := range []*member{f.members["a"], f.members["b"], f.transients[transient]} {
		for _, s := range m.servers {
			if s.traffic.Reloadable() != want || s.probes.Reloadable() != few {
				t.Errorf("%s: %+v and for probes %+v, want %+v", m.worker.Spec.ID, s.traffic.Reloadable(), s.probes.Reloadable(), want)
			}
		}
	}
	f.mu.Unlock()
	f.RemoveTransient(transient)
	if got := f.Endpoint(transient.Ranks[0]).Reloadable(); got != want {
		t.Errorf("of a worker that is gone: %+v", got)
	}
}

// Engines' metrics are read from when that is asked for, and what they said is forgotten
// when it is not any more.
func TestChangeOfScraping(t *testing.T) {
	e := newEngine(t)
	opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1}
	f, _ := newFleet(t, opt)
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	known := func() bool { return rank.Running.Load() >= 0 }
	if known() {
		t.Error("read although it is off")
	}
	opt.ScrapeInterval = 5 * time.Millisecond
	f.Reload(opt.Settings())
	testwait.Until(t, "the load is known", known)
	opt.ScrapeInterval = -1
	f.Reload(opt.Settings())
	testwait.Until(t, "it is unknown again", func() bool { return !known() })
	n := e.count("/metrics")
	opt.ScrapeInterval = time.Hour
	f.Reload(opt.Settings())
	opt.ScrapeInterval, opt.ProbeInference = 5*time.Millisecond, true
	f.Reload(opt.Settings())
	testwait.Until(t, "read again", func() bool { return e.count("/metrics") > n && known() })
	b := newEngine(t)
	mustAdd(t, f, worker.Spec{ID: "b", URL: b.url()})
	waitRanks(t, f, "tiny", 2)
	if b.count("/v1/completions") != 1 || e.count("/v1/completions") != 0 {
		t.Error("ProbeInference holds for who comes later, and for nobody else")
	}
}

// Retries are granted by the pay of now; what was saved up stays.
func TestChangeOfRetries(t *testing.T) {
	e := newEngine(t)
	opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1, RetryBudgetRatio: -1, RetryBudgetMinPerSecond: -1}
	f, _ := newFleet(t, opt)
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	p := waitRanks(t, f, "tiny", 1)
	f.CreditRequest(p)
	if f.WithdrawRetry(p) {
		t.Error("a retry of nothing")
	}
	opt.RetryBudgetRatio = 1
	f.Reload(opt.Settings())
	f.CreditRequest(p)
	if !f.WithdrawRetry(p) || f.WithdrawRetry(p) {
		t.Error("one request pays for one retry")
	}
	f.CreditRequest(p)
	opt.RetryBudgetRatio = -1
	f.Reload(opt.Settings())
	f.CreditRequest(p)
	if !f.WithdrawRetry(p) || f.WithdrawRetry(p) {
		t.Error("what was paid before stays, and nothing more is")
	}
}
