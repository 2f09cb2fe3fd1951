package fleet

import (
	"sync/atomic"
	"time"
)

// retryBudget is a pool's account of retries: each request pays a share of one in,
// time pays in a little more, each retry takes one out. An overloaded or failing
// pool so gets at most RetryShare more work, and never twice as much.
//
// held is the balance in millionths of a retry. Requests add to it, retries
// compare and swap it down, and one of many at a time pays in for time gone by,
// by swapping paid. Nobody waits.
type retryBudget struct {
	balance       atomic.Int64
	creditedUntil atomic.Int64 // ns since began, up to which time has paid in

	began time.Time
	rate  atomic.Pointer[budgetRate]
}

// budgetRate is what is paid into a budget.
type budgetRate struct {
	share    int64 // millionths a request
	interval int64 // ns for one retry paid in by time; 0: none
	max      int64 // the balance is held under this
}

const (
	oneRetry = 1_000_000
	// budgetSeconds of time's pay, and budgetRequests of requests', can be saved up.
	budgetSeconds  = 10
	budgetRequests = 500
)

func newBudgetRate(p *Settings) *budgetRate {
	to := &budgetRate{share: int64(max(p.RetryShare, 0) * oneRetry)}
	perSecond := max(p.RetryPerSecond, 0)
	if perSecond > 0 {
		to.interval = int64(float64(time.Second) / perSecond)
	}
	to.max = int64(perSecond*budgetSeconds*oneRetry) + to.share*budgetRequests
	return to
}

func newBudget(p *Settings) *retryBudget {
	b := &retryBudget{began: time.Now()}
	b.rate.Store(newBudgetRate(p))
	b.balance.Store(int64(max(p.RetryPerSecond, 0) * budgetSeconds * oneRetry))
	return b
}

// budgetOf gives the budget of a model's pool. Called with mu.
func (f *Fleet) budgetOf(model string) *retryBudget {
	b := f.budgets[model]
	if b == nil {
		b = newBudget(&f.settings.Load().Settings)
		f.budgets[model] = b
	}
	return b
}

// CreditRequest pays a request's share into its pool's budget of retries. Call it
// once for each request, whatever becomes of it.
func (f *Fleet) CreditRequest(p *Pool) {
	if p == nil || p.budget == nil {
		return
	}
	b := p.budget
	if to := b.rate.Load(); b.balance.Load() < to.max {
		b.balance.Add(to.share)
	}
}

// WithdrawRetry takes one retry out of the pool's budget; false: it is spent, and the
// request must end with what it has. A try that no engine has seen (the
// connection was refused) is no load on the pool and need not be asked for.
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

// RetriesDenied counts the retries that no budget was left for.
func (f *Fleet) RetriesDenied() uint64 { return f.retriesDenied.Load() }

// credit pays in for the time gone by.
func (b *retryBudget) credit() {
	to := b.rate.Load()
	if to.interval == 0 {
		return
	}
	now, credited := int64(time.Since(b.began)), b.creditedUntil.Load()
	n := (now - credited) / to.interval
	if n <= 0 || !b.creditedUntil.CompareAndSwap(credited, credited+n*to.interval) {
		return
	}
	if capacity := to.max - b.balance.Load(); capacity > 0 {
		b.balance.Add(min(n*oneRetry, capacity))
	}
}
