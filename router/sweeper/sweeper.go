package sweeper

import (
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// Sweeper checks every T that was added, once per interval, while at least one of them is active.
// It refers to them weakly: pooled objects may be dropped by their pool. All methods may be called
// from any goroutine.
type Sweeper[T any] struct {
	interval time.Duration
	check    func(t *T, now time.Time) (active bool)
	active   atomic.Bool // a round is due

	mu    sync.Mutex
	items []weak.Pointer[T]
}

// New returns a Sweeper. It calls check on a goroutine of its own, for one T after another; check
// returns whether t is still active, and must not block. The first check of an active T comes at
// most interval after Wake.
func New[T any](interval time.Duration, check func(t *T, now time.Time) (active bool)) *Sweeper[T] {
	return &Sweeper[T]{interval: interval, check: check}
}

// Add makes t be checked until it is garbage-collected. It is called once per t.
func (p *Sweeper[T]) Add(t *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.items = append(p.items, weak.Make(t))
}

// Wake is called after a T has become active. It costs one atomic load unless nothing was active
// for a while.
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
	// A T may have become active after its check and before the store, and then relied on active
	// being set.
	if p.checkAll() {
		p.Wake()
	}
}

// checkAll reports whether any T is active. It removes collected ones.
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
