package fleet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// leaves counts the restarts that listeners were notified of, when the fleet has come to rest.
func (l *listener) leaves() int { return strings.Count(l.String(), "leave:") }

// identified is a fleet with one worker of an engine that shows no sign of its life but
// the id in its hand-overs.
func identified(t *testing.T, spec worker.Spec) (*Fleet, *listener, *worker.Rank) {
	t.Helper()
	e := newEngine(t)
	e.metrics.Store(nil)
	f, l := newFleet(t, Options{})
	spec.ID, spec.URL = "p", e.url()
	mustAdd(t, f, spec)
	waitRanks(t, f, "tiny", max(1, len(spec.Ranks)))
	return f, l, f.View().Workers[0].Ranks[0]
}

func reportID(f *Fleet, r *worker.Rank, id string) { f.ReportEngineID(r, []byte(id), time.Now()) }

func idOf(f *Fleet, r *worker.Rank) string {
	if id := f.breaker(r).server.engineIDs.current.Load(); id != nil {
		return *id
	}
	return ""
}

// Another engine id is a restart: the rank is out of the choice before Identified
// returns, and comes back when its listeners have dropped what they knew.
func TestAnotherEngineIDIsARestart(t *testing.T) {
	f, l, r := identified(t, worker.Spec{})
	reportID(f, r, "a1")
	reportID(f, r, "a1")
	if n := l.leaves(); n != 0 || idOf(f, r) != "a1" {
		t.Fatalf("%d restarts after one id, known as %q", n, idOf(f, r))
	}
	reportID(f, r, "b2")
	if p, _ := f.View().Pool("tiny"); len(p.Aggregated) != 0 && l.leaves() == 0 {
		t.Error("the rank is in the choice, and what its old life held was not dropped")
	}
	testwait.Until(t, "leave and join", func() bool { return strings.Contains(l.String(), "leave:p join:p") })
	waitRanks(t, f, "tiny", 1)
	// Neither requests in flight at its end nor other reports of the new process are evidence.
	reportID(f, r, "a1")
	reportID(f, r, "b2")
	waitRanks(t, f, "tiny", 1)
	if n := l.leaves(); n != 1 || f.Restarts(restartEngineID) != 1 {
		t.Errorf("%d restarts, %d counted; want 1", n, f.Restarts(restartEngineID))
	}
	if s, _ := stateOf(f, "p"); s != worker.Ready {
		t.Errorf("the worker is %v", s)
	}
}

// The ranks of one engine share its id, each with an end of its own, whether the
// router knows of them or not.
func TestRanksShareAnEngineID(t *testing.T) {
	for _, spec := range []worker.Spec{{}, {Ranks: []uint16{0, 1}}} {
		f, l, r := identified(t, spec)
		for i := range 6 {
			reportID(f, r.Worker.Ranks[i%len(r.Worker.Ranks)], fmt.Sprintf("a1_dp%d", i%2))
		}
		if n := l.leaves(); n != 0 {
			t.Errorf("%d restarts of an engine with two ranks", n)
		}
		reportID(f, r, "b2_dp1")
		testwait.Until(t, "one restart", func() bool { return l.leaves() == 1 })
		waitRanks(t, f, "tiny", len(r.Worker.Ranks))
	}
	for in, want := range map[string]string{"x_dp": "x_dp", "_dp3": "_dp3", "x_dp12": "x", "x12": "x12", "12": "12", "x_dp1_dp2": "x_dp1"} {
		if got := string(withoutRank([]byte(in))); got != want {
			t.Errorf("%q is the engine %q, want %q", in, got, want)
		}
	}
}

// Engines that take turns behind one address cost one restart for each but the first,
// and what gives another id for each request costs a few, then none.
func TestEngineIDsWithoutRestart(t *testing.T) {
	defer func(was time.Duration) { minIncarnation = was }(minIncarnation)
	minIncarnation = time.Hour
	f, l, r := identified(t, worker.Spec{})
	for i := range 20 {
		reportID(f, r, []string{"a1", "b2"}[i%2])
		waitRanks(t, f, "tiny", 1)
	}
	if n := l.leaves(); n != 1 {
		t.Errorf("%d restarts for two engines in turn, want 1", n)
	}
	for i := range 20 {
		reportID(f, r, fmt.Sprint("request-", i))
		waitRanks(t, f, "tiny", 1)
	}
	if n := l.leaves(); n >= maxQuickRestarts {
		t.Errorf("%d restarts for ids of requests, want fewer than %d", n, maxQuickRestarts)
	}
	for i := range 3 * maxPastIDs {
		reportID(f, r, fmt.Sprint("more-", i))
	}
	if n := len(f.breaker(r).server.engineIDs.past); n > maxPastIDs {
		t.Errorf("%d ids are kept", n)
	}
}

// A restart that events have already shown is not counted again by the id that follows.
func TestEngineIDAfterItsEvents(t *testing.T) {
	f, l, r := identified(t, worker.Spec{Ranks: []uint16{0, 1}})
	other := r.Worker.Ranks[1]
	before := time.Now()
	reportID(f, r, "a1_dp0")
	f.ReportEventRestart(r)
	if idOf(f, r) != "a1" {
		t.Error("one rank's events ended the life of both")
	}
	f.ReportEventRestart(other)
	if idOf(f, r) != "" {
		t.Error("the id of the old life is known still")
	}
	f.ReportEngineID(r, []byte("a1_dp0"), before) // was in progress
	if idOf(f, r) != "" {
		t.Error("an answer of the old life named the new one")
	}
	reportID(f, r, "b2_dp0")
	reportID(f, other, "b2_dp1")
	waitRanks(t, f, "tiny", 2)
	if n := l.leaves(); n != 0 || idOf(f, r) != "b2" {
		t.Errorf("%d restarts, known as %q", n, idOf(f, r))
	}
	// A sign that was none: the same process answers what is asked later.
	f.ReportEventRestart(r)
	f.ReportEventRestart(other)
	reportID(f, r, "b2_dp0")
	if idOf(f, r) != "b2" {
		t.Error("the engine that lives on is not known again")
	}
	reportID(f, r, "c3_dp0")
	testwait.Until(t, "the next one is a restart", func() bool { return l.leaves() == 1 })
}

// A start time that has changed is the same restart as the id that changed with it,
// whichever is heard of first.
func TestEngineIDAndStartTimeAreOneRestart(t *testing.T) {
	e := newEngine(t)
	f, l := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "p", URL: e.url()})
	waitRanks(t, f, "tiny", 1)
	r := f.View().Workers[0].Ranks[0]
	reportID(f, r, "a1")
	e.setIncarnation(2000)
	testwait.Until(t, "the scrape sees it", func() bool { return l.leaves() == 1 })
	waitRanks(t, f, "tiny", 1)
	reportID(f, r, "b2")
	waitRanks(t, f, "tiny", 1)
	e.setIncarnation(3000)
	reportID(f, r, "c3")
	testwait.Until(t, "the id shows it", func() bool { return l.leaves() == 2 })
	waitRanks(t, f, "tiny", 1)
	seen := e.count("/metrics")
	testwait.Until(t, "two more scrapes", func() bool { return e.count("/metrics") > seen+2 })
	if n := l.leaves(); n != 2 {
		t.Errorf("%d restarts, want 2", n)
	}
}

func TestReportEngineIDAllocatesNothing(t *testing.T) {
	f, _, r := identified(t, worker.Spec{})
	id, now := []byte("5f0c6c1e-0a3f-4f57-8d4b-2f2f6a2d8c11_dp0"), time.Now()
	f.ReportEngineID(r, id, now)
	if n := testing.AllocsPerRun(1000, func() { f.ReportEngineID(r, id, now) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	f.ReportEngineID(r, nil, now)
	f.ReportEngineID(&worker.Rank{Slot: worker.MaxSlots}, id, now)
	f.ReportEngineID(r, make([]byte, maxEngineID+1), now)
}
