package fleet

import (
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/worker"
)

// grants counts the retries a budget gives now.
func grants(f *Fleet, p *Pool, tries int) (n int) {
	for range tries {
		if f.WithdrawRetry(p) {
			n++
		}
	}
	return n
}

func TestRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := New(Options{RetryBudgetRatio: 0.2, RetryBudgetMinPerSecond: 2})
		defer f.Close()
		p := &Pool{Model: "m", budget: f.budgetOf("m")}
		other := &Pool{Model: "n", budget: f.budgetOf("n")}
		if n := grants(f, p, 1000); n != 20 {
			t.Errorf("%d retries before any request; want the 20 of 10 s of two a second", n)
		}
		for range 1000 {
			f.CreditRequest(p)
		}
		if n := grants(f, p, 1000); n < 115 || n > 120 {
			t.Errorf("%d retries for 1,000 requests at once; want about 120, what can be saved up", n)
		}
		// An overload: every request fails and asks for a retry.
		requests, retries := 0, 0
		for range 10_000 {
			f.CreditRequest(p)
			requests++
			retries += grants(f, p, 1)
		}
		if share := float64(retries) / float64(requests); share > 0.21 || share < 0.19 {
			t.Errorf("%.3f retries a request under overload; want 0.2", share)
		}
		if f.RetriesDenied() == 0 {
			t.Error("none counted as denied")
		}
		time.Sleep(3 * time.Second)
		if n := grants(f, p, 100); n < 6 || n > 7 {
			t.Errorf("%d retries after three seconds without requests; want 6", n)
		}
		if n := grants(f, other, 100); n != 26 {
			t.Errorf("another pool was left %d; want its own 20, and 6 of three seconds", n)
		}
	})
}

func TestRetriesOff(t *testing.T) {
	f := New(Options{RetryBudgetRatio: -1, RetryBudgetMinPerSecond: -1})
	defer f.Close()
	p := &Pool{budget: f.budgetOf("m")}
	f.CreditRequest(p)
	if f.WithdrawRetry(p) {
		t.Error("a retry though none are granted")
	}
}

func TestAtCapacityAndOverLimit(t *testing.T) {
	f := New(Options{MaxRequests: 2, MaxTokens: 1000})
	defer f.Close()
	r := worker.New(worker.Spec{ID: "w"}).Ranks[0]
	for n, want := range []bool{false, false, true, true} {
		r.Requests.Store(int64(n))
		if f.AtCapacity(r) != want || f.OverLimit(r) != (n > 2) {
			t.Errorf("%d requests: full %v, overbooked %v", n, f.AtCapacity(r), f.OverLimit(r))
		}
	}
	r.Requests.Store(0)
	r.PrefillTokens.Store(1000)
	if !f.AtCapacity(r) {
		t.Error("not full at its bound of tokens")
	}
}

// Asked on every request: no allocation.
func TestLimitChecksAllocateNothing(t *testing.T) {
	e := newEngine(t)
	f, _ := newFleet(t, Options{MaxRequests: 10})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.url()})
	p := waitRanks(t, f, "tiny", 1)
	r := p.Aggregated[0]
	if n := testing.AllocsPerRun(1000, func() {
		f.CreditRequest(p)
		f.WithdrawRetry(p)
		f.ReportStatus(r, 200)
		_ = f.HasLimits() && f.AtCapacity(r) && f.OverLimit(r)
	}); n != 0 {
		t.Errorf("%.1f allocations", n)
	}
}
