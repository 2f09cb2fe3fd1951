package pd

import (
	"slices"
	"testing"
	"time"

	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// claimant returns a request of a class, by a configuration with these classes, the highest first.
func claimant(t *testing.T, r *Runner, model, class string, classes ...string) *request {
	t.Helper()
	a := config.Admission{Mode: "fair"}
	for _, name := range classes {
		a.Classes = append(a.Classes, config.AdmissionClass{Name: name})
	}
	s, err := newAdmissionSettings(&a, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	q := &request{}
	q.r, q.settings, q.class, q.pool = r, &settings{admission: s}, s.class(class), &fleet.Pool{Model: model}
	return q
}

// A claim keeps a rank from its own class and lower ones, by the order of each request's configuration; there is one
// for each model and for each rank, of the highest class that wants it.
func TestKVClaims(t *testing.T) {
	runner := &Runner{}
	c := &runner.kvClaims
	a, b := &worker.Rank{}, &worker.Rank{}
	by := func(class string, classes ...string) *request { return claimant(t, runner, "m", class, classes...) }
	want := func(what string, r *worker.Rank, q *request, open bool) {
		t.Helper()
		if got := c.isOpen(r, q); got != open {
			t.Errorf("%s: the rank is open %v; want %v", what, got, open)
		}
	}
	owner := by("batch", "chat", "batch")
	c.claim(a, owner, 10, false)
	want("the owner", a, owner, true)
	want("its class", a, by("batch", "chat", "batch"), false)
	want("a higher class", a, by("chat", "chat", "batch"), true)
	want("another rank", b, by("batch", "chat", "batch"), true)
	want("its class, after a reload has removed the one above", a, by("batch", "batch"), false)
	want("a class that a reload has put above", a, by("urgent", "urgent", "batch"), true)
	want("a configuration without the class", a, by("chat", "chat"), true)
	if !c.owns(a, owner) || c.owns(b, owner) {
		t.Error("the owner must own its rank alone")
	}

	resumed := &request{}
	resumed.r, resumed.settings = owner.r, owner.settings
	want("a request without a class", a, resumed, false)
	second, other := by("batch", "chat", "batch"), claimant(t, runner, "n", "batch", "chat", "batch")
	c.claim(b, second, 1, false)
	c.claim(a, other, 1, false)
	if c.owns(b, second) || c.owns(a, other) {
		t.Error("a second claim for the model or the rank was made")
	}
	higher := by("chat", "chat", "batch")
	c.claim(b, higher, 1, false)
	if !c.owns(b, higher) || c.owns(a, owner) {
		t.Error("a request of a higher class must get the claim of the model")
	}
	c.release(higher)
	want("after a release", b, owner, true)
	if n := c.n.Load(); n != 0 {
		t.Errorf("%d claims are left; want 0", n)
	}
}

// A claim lapses if its owner is not tried any more, and is given up if the rank comes no nearer to having the blocks.
func TestKVClaimEnds(t *testing.T) {
	runner := &Runner{}
	c := &runner.kvClaims
	r := &worker.Rank{}
	owner, other := claimant(t, runner, "m", "batch", "chat", "batch"), claimant(t, runner, "m", "batch", "chat", "batch")
	missing := int64(10)
	var stalled *worker.Rank
	renew := func() (ok bool) {
		ok, stalled = c.renew(owner, []*worker.Rank{r}, func(*worker.Rank) int64 { return missing })
		return ok
	}
	c.claim(r, owner, missing, false)
	c.list[0].lapses = time.Now().Add(-time.Millisecond)
	if !c.isOpen(r, other) {
		t.Error("a claim whose owner is not tried holds")
	}
	if renew() {
		t.Error("a claim that has lapsed was renewed")
	}

	c.claim(r, owner, missing, false)
	for range 3 { // each time nearer
		c.list[0].fell = time.Now().Add(-2 * claimStalls)
		missing--
		if !renew() || stalled != nil || c.isOpen(r, other) {
			t.Fatal("a claim that comes nearer was given up")
		}
	}
	c.list[0].fell = time.Now().Add(-2 * claimStalls)
	if renew(); !c.isOpen(r, other) || stalled != r {
		t.Error("a claim that has stalled holds")
	}
	if c.claim(r, owner, missing, false); c.owns(r, owner) {
		t.Error("a claim was made at once after one that was given up")
	}
	if c.claim(r, owner, missing, true); !c.owns(r, owner) {
		t.Error("a claim on blocks that become free for certain was not made")
	}
	c.list[0].fell = time.Now().Add(-2 * claimStalls)
	renew()
	higher := claimant(t, runner, "m", "chat", "chat", "batch")
	if c.claim(r, higher, missing, false); !c.owns(r, higher) {
		t.Error("a claim of a lower class that was given up keeps a higher class from its own")
	}
	c.release(higher)
	c.claim(r, owner, missing, false)
	if ok, _ := c.renew(owner, nil, nil); !c.owns(r, owner) || ok {
		t.Error("a claim on a rank that the request may not use any more was renewed")
	}
	if c.keep(owner, time.Hour); time.Until(c.list[0].lapses) < time.Minute {
		t.Error("a claim that is kept lapses")
	}
}

// A choice outside the queue avoids kept ranks and, among the others, slow ones. If it finds none, it takes slow ones
// first.
func TestAvoidsFewer(t *testing.T) {
	failed, kept, slow, over := &worker.Rank{}, &worker.Rank{}, &worker.Rank{}, &worker.Rank{}
	q := &request{}
	q.skipped = []*worker.Rank{failed, kept, slow, over}
	a := avoided{from: 1, kept: 1, slow: 1}
	for i, want := range [][]*worker.Rank{{failed, kept, over}, {failed, over}} {
		if !q.avoidsFewer(&a) || !slices.Equal(q.skipped, want) {
			t.Errorf("step %d leaves out %d ranks; want %d", i, len(q.skipped), len(want))
		}
	}
	if q.avoidsFewer(&a) || len(q.skipped) != 2 {
		t.Error("ranks that have failed or are over their limits must be left out in any case")
	}
}
