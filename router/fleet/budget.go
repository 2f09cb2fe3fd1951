package fleet

import (
	"sync/atomic"
	"time"
)

// budget is a pool's account of retries: each request pays a share of one in,
// time pays in a little more, each retry takes one out. An overloaded or failing
// pool so gets at most RetryShare more work, and never twice as much.
//
// held is the balance in millionths of a retry. Requests add to it, retries
// compare and swap it down, and one of many at a time pays in for time gone by,
// by swapping paid. Nobody waits.
type budget struct {
	held atomic.Int64
	paid atomic.Int64 // ns since began, up to which time has paid in

	began time.Time
	pay   atomic.Pointer[pay]
}

// pay is what is paid into a budget.
type pay struct {
	share int64 // millionths a request
	each  int64 // ns for one retry paid in by time; 0: none
	most  int64 // the balance is held under this
}

const (
	oneRetry = 1_000_000
	// budgetSeconds of time's pay, and budgetRequests of requests', can be saved up.
	budgetSeconds  = 10
	budgetRequests = 500
)

func payOf(p *Pace) *pay {
	to := &pay{share: int64(max(p.RetryShare, 0) * oneRetry)}
	perSecond := max(p.RetryPerSecond, 0)
	if perSecond > 0 {
		to.each = int64(float64(time.Second) / perSecond)
	}
	to.most = int64(perSecond*budgetSeconds*oneRetry) + to.share*budgetRequests
	return to
}

func newBudget(p *Pace) *budget {
	b := &budget{began: time.Now()}
	b.pay.Store(payOf(p))
	b.held.Store(int64(max(p.RetryPerSecond, 0) * budgetSeconds * oneRetry))
	return b
}

// budgetOf gives the budget of a model's pool. Called with mu.
func (f *Fleet) budgetOf(model string) *budget {
	b := f.budgets[model]
	if b == nil {
		b = newBudget(&f.pace.Load().Pace)
		f.budgets[model] = b
	}
	return b
}

// Requested pays a request's share into its pool's budget of retries. Call it
// once for each request, whatever becomes of it.
func (f *Fleet) Requested(p *Pool) {
	if p == nil || p.budget == nil {
		return
	}
	b := p.budget
	if to := b.pay.Load(); b.held.Load() < to.most {
		b.held.Add(to.share)
	}
}

// Retry takes one retry out of the pool's budget; false: it is spent, and the
// request must end with what it has. A try that no engine has seen (the
// connection was refused) is no load on the pool and need not be asked for.
func (f *Fleet) Retry(p *Pool) bool {
	if p == nil || p.budget == nil {
		return true
	}
	b := p.budget
	b.tick()
	for {
		held := b.held.Load()
		if held < oneRetry {
			f.denied.Add(1)
			return false
		}
		if b.held.CompareAndSwap(held, held-oneRetry) {
			return true
		}
	}
}

// RetriesDenied counts the retries that no budget was left for.
func (f *Fleet) RetriesDenied() uint64 { return f.denied.Load() }

// tick pays in for the time gone by.
func (b *budget) tick() {
	to := b.pay.Load()
	if to.each == 0 {
		return
	}
	now, paid := int64(time.Since(b.began)), b.paid.Load()
	n := (now - paid) / to.each
	if n <= 0 || !b.paid.CompareAndSwap(paid, paid+n*to.each) {
		return
	}
	if room := to.most - b.held.Load(); room > 0 {
		b.held.Add(min(n*oneRetry, room))
	}
}
