package fleet

import (
	"testing"
	"time"

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
	guest, err := f.Guest(worker.Spec{ID: "guest", URL: a.url()})
	if err != nil {
		t.Fatal(err)
	}
	opt.Upstream = upstream.Options{MaxConns: 7, IdleTimeout: time.Minute, MaxAge: time.Hour, ConnectTimeout: time.Second}
	want := opt.Upstream.Bounds()
	f.Change(opt.Pace())
	mustAdd(t, f, worker.Spec{ID: "b", URL: b.url()})
	few := want
	few.MaxConns = probeConns
	f.mu.Lock()
	for _, m := range []*member{f.members["a"], f.members["b"], f.guests[guest]} {
		for _, s := range m.servers {
			if s.traffic.Bounds() != want || s.probes.Bounds() != few {
				t.Errorf("%s: %+v and for probes %+v, want %+v", m.w.Spec.ID, s.traffic.Bounds(), s.probes.Bounds(), want)
			}
		}
	}
	f.mu.Unlock()
	f.Dismiss(guest)
	if got := f.Endpoint(guest.Ranks[0]).Bounds(); got != want {
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
	f.Change(opt.Pace())
	until(t, "the load is known", known)
	opt.ScrapeInterval = -1
	f.Change(opt.Pace())
	until(t, "it is unknown again", func() bool { return !known() })
	n := e.count("/metrics")
	opt.ScrapeInterval = time.Hour
	f.Change(opt.Pace())
	opt.ScrapeInterval, opt.ProbeInference = 5*time.Millisecond, true
	f.Change(opt.Pace())
	until(t, "read again", func() bool { return e.count("/metrics") > n && known() })
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
	opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1, RetryShare: -1, RetryPerSecond: -1}
	f, _ := newFleet(t, opt)
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	p := waitRanks(t, f, "tiny", 1)
	f.Requested(p)
	if f.Retry(p) {
		t.Error("a retry of nothing")
	}
	opt.RetryShare = 1
	f.Change(opt.Pace())
	f.Requested(p)
	if !f.Retry(p) || f.Retry(p) {
		t.Error("one request pays for one retry")
	}
	f.Requested(p)
	opt.RetryShare = -1
	f.Change(opt.Pace())
	f.Requested(p)
	if !f.Retry(p) || f.Retry(p) {
		t.Error("what was paid before stays, and nothing more is")
	}
}
