package fleet

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
)

// retryBudget is a pool's budget of retries: each request credits a fraction of one, time credits a
// little more, each retry withdraws one. An overloaded or failing pool thus gets at most the fraction
// RetryBudgetRatio more work, instead of several times as much.
//
// The balance is in millionths of a retry. Requests add to it, retries compare and swap it down,
// and one of many concurrent callers credits the elapsed time by swapping creditedUntil. No caller
// waits.
type retryBudget struct {
	balance       atomic.Int64
	creditedUntil atomic.Int64 // ns on clock up to which time was credited

	clock monotime.Clock
	rate  atomic.Pointer[budgetRate]
}

// budgetRate is the rate at which a budget is credited.
type budgetRate struct {
	share    int64 // millionths per request
	interval int64 // ns per retry credited by time; 0: none
	max      int64 // upper bound of the balance
}

const (
	oneRetry = 1_000_000
	// The balance is bounded by the credit of budgetSeconds and of budgetRequests.
	budgetSeconds  = 10
	budgetRequests = 500
)

func newBudgetRate(p *Settings) *budgetRate {
	to := &budgetRate{share: int64(max(p.RetryBudgetRatio, 0) * oneRetry)}
	perSecond := max(p.RetryBudgetMinPerSecond, 0)
	if perSecond > 0 {
		to.interval = int64(float64(time.Second) / perSecond)
	}
	to.max = int64(perSecond*budgetSeconds*oneRetry) + to.share*budgetRequests
	return to
}

func newBudget(p *Settings) *retryBudget {
	b := &retryBudget{clock: monotime.StartClock()}
	b.rate.Store(newBudgetRate(p))
	b.balance.Store(int64(max(p.RetryBudgetMinPerSecond, 0) * budgetSeconds * oneRetry))
	return b
}

// budgetOf returns the budget of a model's pool. Called with mu.
func (f *Fleet) budgetOf(model string) *retryBudget {
	b := f.budgets[model]
	if b == nil {
		b = newBudget(&f.settings.Load().Settings)
		f.budgets[model] = b
	}
	return b
}

// CreditRequest credits a request's fraction to its pool's budget of retries. Call it once per
// request, whatever its result.
func (f *Fleet) CreditRequest(p *Pool) {
	if p == nil || p.budget == nil {
		return
	}
	b := p.budget
	if to := b.rate.Load(); b.balance.Load() < to.max {
		b.balance.Add(to.share)
	}
}

// WithdrawRetry withdraws one retry from the pool's budget; if it returns false the budget is
// exhausted, and the request must end with its current result. An attempt that no engine has seen
// (the connection was refused) puts no load on the pool and needs no withdrawal.
func (f *Fleet) WithdrawRetry(p *Pool) bool {
	if p == nil || p.budget == nil {
		return true
	}
	b := p.budget
	b.credit()
	for {
		balance := b.balance.Load()
		if balance < oneRetry {
			f.retriesDenied.Add(1)
			return false
		}
		if b.balance.CompareAndSwap(balance, balance-oneRetry) {
			return true
		}
	}
}

// RetriesDenied counts the retries that the budget did not allow.
func (f *Fleet) RetriesDenied() uint64 { return f.retriesDenied.Load() }

// credit credits the elapsed time.
func (b *retryBudget) credit() {
	to := b.rate.Load()
	if to.interval == 0 {
		return
	}
	now, credited := int64(b.clock.Now()), b.creditedUntil.Load()
	n := (now - credited) / to.interval
	if n <= 0 || !b.creditedUntil.CompareAndSwap(credited, credited+n*to.interval) {
		return
	}
	if capacity := to.max - b.balance.Load(); capacity > 0 {
		b.balance.Add(min(n*oneRetry, capacity))
	}
}
