package patrol

import (
	"sync"
	"sync/atomic"
	"time"
	"weak"
)

// Patrol looks at every T that has joined, each interval, while one of them is on
// duty. It holds them weakly: those that are pooled may be dropped by the pool. All
// methods may be called from any goroutine.
type Patrol[T any] struct {
	every  time.Duration
	look   func(t *T, now time.Time) (onDuty bool)
	active atomic.Bool // a round is due

	mu     sync.Mutex
	joined []weak.Pointer[T]
}

// New makes a Patrol. look is called from a goroutine of its own, for one T after
// another; it says whether t is on duty still, and must not block. Between going on
// duty and the first look lies at most every.
func New[T any](every time.Duration, look func(t *T, now time.Time) (onDuty bool)) *Patrol[T] {
	return &Patrol[T]{every: every, look: look}
}

// Join has t looked at until it is collected. Once for each t.
func (p *Patrol[T]) Join(t *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.joined = append(p.joined, weak.Make(t))
}

// OnDuty is called after a T has gone on duty. It costs a load but when nothing was
// on duty for a while.
func (p *Patrol[T]) OnDuty() {
	if !p.active.Load() && p.active.CompareAndSwap(false, true) {
		time.AfterFunc(p.every, p.round)
	}
}

func (p *Patrol[T]) round() {
	if p.lookAtAll() {
		time.AfterFunc(p.every, p.round)
		return
	}
	p.active.Store(false)
	// One may have gone on duty after it was looked at and before the store: it
	// found the patrol active and relied on it.
	if p.lookAtAll() {
		p.OnDuty()
	}
}

// lookAtAll says whether any is on duty. What is gone is forgotten.
func (p *Patrol[T]) lookAtAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, any, kept := time.Now(), false, p.joined[:0]
	for _, w := range p.joined {
		if t := w.Value(); t != nil {
			kept = append(kept, w)
			any = p.look(t, now) || any
		}
	}
	clear(p.joined[len(kept):])
	p.joined = kept
	return any
}
