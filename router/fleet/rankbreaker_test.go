package fleet

import (
	"errors"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

func breaker(r *worker.Rank) worker.BreakerState { return worker.BreakerState(r.Breaker.Load()) }

// inPool says whether a rank can be chosen.
func inPool(f *Fleet, r *worker.Rank) bool {
	p, _ := f.View().Pool("tiny")
	for _, x := range p.Aggregated {
		if x == r {
			return true
		}
	}
	return false
}

func TestBreakerIsOfOneRank(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond, BreakerTimeout: 50 * time.Millisecond, BreakerThreshold: 3})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url(), Ranks: []uint16{0, 1}})
	p := waitRanks(t, f, "tiny", 2)
	bad, good := p.Aggregated[0], p.Aggregated[1]

	for range 50 {
		f.ReportStatus(bad, 400)
		f.ReportStatus(bad, 422)
		f.ReportStatus(bad, 503)
		f.ReportStatus(bad, 429)
	}
	f.ReportStatus(bad, 500)
	f.ReportStatus(bad, 500)
	f.ReportStatus(bad, 404) // an answer between: not in a row
	f.ReportStatus(bad, 500)
	f.ReportStatus(bad, 500)
	if breaker(bad) != worker.BreakerClosed {
		t.Fatal("opened by the client's own errors, by a full queue, or by failures that were not in a row")
	}
	f.ReportStatus(bad, 502)
	if breaker(bad) != worker.BreakerOpen || inPool(f, bad) || !inPool(f, good) || breaker(good) != worker.BreakerClosed {
		t.Fatalf("after three failures in a row: %v, in the pool %v; its neighbour %v", breaker(bad), inPool(f, bad), breaker(good))
	}
	if s, why := stateOf(f, "w"); s != worker.Ready || !strings.Contains(why, "rank 0") || !strings.Contains(why, "502") {
		t.Errorf("worker is %s, %q; want ready, with the rank and its failure named", s, why)
	}

	testwait.Until(t, "it is half open without any traffic", func() bool { return breaker(bad) == worker.BreakerHalfOpen && inPool(f, bad) })
	if f.AtCapacity(bad) || !f.HasLimits() {
		t.Error("half open and idle: it takes one request")
	}
	bad.Requests.Add(1)
	if !f.AtCapacity(bad) || f.AtCapacity(good) {
		t.Error("half open with a request in flight: it takes no second; its neighbour does")
	}
	bad.Requests.Add(-1)
	f.ReportStatus(bad, 500)
	if breaker(bad) != worker.BreakerOpen {
		t.Error("one failure while half open opens it again")
	}
	testwait.Until(t, "half open again", func() bool { return breaker(bad) == worker.BreakerHalfOpen })
	f.ReportStatus(bad, 200)
	if breaker(bad) != worker.BreakerClosed || f.HasLimits() {
		t.Errorf("%v after a success, some rank limited: %v", breaker(bad), f.HasLimits())
	}
	if s, why := stateOf(f, "w"); s != worker.Ready || why != "" {
		t.Errorf("worker is %s, %q", s, why)
	}
}

// Where a role has no other ranks an open breaker does not empty the pool.
func TestBreakersNeverEmptyAPool(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond, BreakerTimeout: time.Minute})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url(), Ranks: []uint16{0, 1}})
	p := waitRanks(t, f, "tiny", 2)
	for i, r := range p.Aggregated {
		for range 5 {
			f.ReportStatus(r, 500)
		}
		if now, _ := f.View().Pool("tiny"); breaker(r) != worker.BreakerOpen || len(now.Aggregated) != 1+i {
			t.Fatalf("%d breakers open, %d ranks to choose from", i+1, len(now.Aggregated))
		}
	}
}

// A connection failure counts for the rank too, and a server that is admitted
// again begins with closed breakers; removal stops their clocks.
func TestBreakerEndsWithItsServer(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond, BreakerTimeout: 30 * time.Second, BreakerThreshold: 1, UnhealthyThreshold: 100})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url(), Ranks: []uint16{0, 1}})
	r := waitRanks(t, f, "tiny", 2).Aggregated[0]
	f.ReportFailure(r, errors.New("connection reset by peer"))
	if breaker(r) != worker.BreakerOpen {
		t.Fatal(breaker(r))
	}
	e.kill()
	testwait.Until(t, "the server is out", func() bool { s, _ := stateOf(f, "w"); return s == worker.Unhealthy })
	e.setIncarnation(2000)
	e.start()
	waitRanks(t, f, "tiny", 2)
	if breaker(r) != worker.BreakerClosed {
		t.Errorf("%v after a restart of the engine", breaker(r))
	}
	f.ReportFailure(r, errors.New("connection reset by peer"))
	if err := f.Remove("w"); err != nil {
		t.Fatal(err)
	}
	if f.halfOpenCount.Load() != 0 || breaker(r) != worker.BreakerClosed {
		t.Error("a breaker outlives its worker")
	}
}

// A half-open breaker whose trial is never answered closes all the same.
func TestHalfOpenEndsByTheClock(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{ProbeInterval: 20 * time.Millisecond})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url()})
	r := waitRanks(t, f, "tiny", 1).Aggregated[0]
	f.mu.Lock()
	f.breaker(r).transition(worker.BreakerHalfOpen, 30*time.Millisecond)
	f.mu.Unlock()
	r.Requests.Add(1) // one that hangs
	if !f.AtCapacity(r) {
		t.Error("it takes a second request while half open")
	}
	testwait.Until(t, "closed by the clock", func() bool { return breaker(r) == worker.BreakerClosed && !f.AtCapacity(r) })
	r.Requests.Add(-1)
}

// The slot of a worker that went is not given out while requests placed on it
// are in flight: their reservations are booked under it.
func TestSlotWaitsForItsRequests(t *testing.T) {
	e := newEngine(t)
	f, log := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "a", URL: e.url()})
	old := waitRanks(t, f, "tiny", 1).Aggregated[0]
	old.Requests.Add(1)
	if err := f.Remove("a"); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "it left", func() bool { return strings.Contains(log.String(), "leave:a") })
	mustAdd(t, f, worker.Spec{ID: "b", URL: e.url()})
	if r := waitRanks(t, f, "tiny", 1).Aggregated[0]; r.Slot == old.Slot {
		t.Error("the slot was given out under a request")
	}
	old.Requests.Add(-1)
	mustAdd(t, f, worker.Spec{ID: "c", URL: e.url()})
	testwait.Until(t, "the slot is used again", func() bool {
		for _, w := range f.View().Workers {
			if w.Spec.ID == "c" {
				return w.Ranks[0].Slot == old.Slot
			}
		}
		return false
	})
}
