package core

import "sync"

// frozenRank is a rank whose engine core is stopped: what its API server continues to
// report.
type frozenRank struct {
	stats    RankStats
	counters Counters
	thaw     chan struct{} // closed by Thaw
	once     sync.Once
}

// Freeze stops the rank's goroutine until Thaw, and returns when it has stopped. Stats and
// CountersNow then return the values of that time.
func (r *Rank) Freeze() {
	if r.frozen.Load() != nil {
		return
	}
	f := &frozenRank{stats: r.Stats(), thaw: make(chan struct{})}
	stopped := make(chan struct{})
	if !r.Post(func() {
		f.counters = r.Counters
		r.frozen.Store(f)
		close(stopped)
		select {
		case <-f.thaw:
		case <-r.Process.Context.Done():
		}
		r.frozen.CompareAndSwap(f, nil)
	}) {
		return
	}
	<-stopped
}

// Thaw makes a frozen rank continue.
func (r *Rank) Thaw() {
	if f := r.frozen.Load(); f != nil {
		f.once.Do(func() { close(f.thaw) })
	}
}

// CountersNow returns a copy of the counters. Any goroutine may call it.
func (r *Rank) CountersNow() (n Counters) {
	if f := r.frozen.Load(); f != nil {
		return f.counters
	}
	r.Do(func() { n = r.Counters })
	return n
}
