package sweeper

import (
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// Sweeper looks at every T that has joined, each interval, while one of them is on
// duty. It holds them weakly: those that are pooled may be dropped by the pool. All
// methods may be called from any goroutine.
type Sweeper[T any] struct {
	interval time.Duration
	check    func(t *T, now time.Time) (onDuty bool)
	active   atomic.Bool // a round is due

	mu    sync.Mutex
	items []weak.Pointer[T]
}

// New makes a Patrol. look is called from a goroutine of its own, for one T after
// another; it says whether t is on duty still, and must not block. Between going on
// duty and the first look lies at most every.
func New[T any](interval time.Duration, check func(t *T, now time.Time) (active bool)) *Sweeper[T] {
	return &Sweeper[T]{interval: interval, check: check}
}

// Add has t looked at until it is collected. Once for each t.
func (p *Sweeper[T]) Add(t *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.items = append(p.items, weak.Make(t))
}

// Wake is called after a T has gone on duty. It costs a load but when nothing was
// on duty for a while.
func (p *Sweeper[T]) Wake() {
	if !p.active.Load() && p.active.CompareAndSwap(false, true) {
		time.AfterFunc(p.interval, p.sweep)
	}
}

func (p *Sweeper[T]) sweep() {
	if p.checkAll() {
		time.AfterFunc(p.interval, p.sweep)
		return
	}
	p.active.Store(false)
	// One may have gone on duty after it was looked at and before the store: it
	// found the patrol active and relied on it.
	if p.checkAll() {
		p.Wake()
	}
}

// checkAll says whether any is on duty. What is gone is forgotten.
func (p *Sweeper[T]) checkAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, any, kept := time.Now(), false, p.items[:0]
	for _, w := range p.items {
		if t := w.Value(); t != nil {
			kept = append(kept, w)
			any = p.check(t, now) || any
		}
	}
	clear(p.items[len(kept):])
	p.items = kept
	return any
}
