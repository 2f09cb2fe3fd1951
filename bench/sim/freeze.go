package sim

import "sync"

// frozenRank is a rank whose engine core is stopped: what its API server continues to
// report.
type frozenRank struct {
	stats    RankStats
	counters counters
	thaw     chan struct{} // closed by Thaw
	once     sync.Once
}

// Freeze stops the engine core of every rank, as SIGSTOP to vLLM's EngineCore process
// does. The API server continues to accept requests and to serve /health, /v1/models
// and /metrics with the current values; nothing else happens until Thaw. Freeze returns
// when all ranks have stopped.
func (e *Engine) Freeze() {
	l := e.incarnation()
	if l == nil {
		return
	}
	for _, r := range l.ranks {
		if r.frozen.Load() != nil {
			continue
		}
		f := &frozenRank{stats: r.stats(), thaw: make(chan struct{})}
		stopped := make(chan struct{})
		if !r.post(func() {
			f.counters = r.counters
			r.frozen.Store(f)
			close(stopped)
			select {
			case <-f.thaw:
			case <-r.l.stopc:
			}
			r.frozen.CompareAndSwap(f, nil)
		}) {
			continue
		}
		<-stopped
	}
}

// Thaw makes frozen cores continue.
func (e *Engine) Thaw() {
	l := e.incarnation()
	if l == nil {
		return
	}
	for _, r := range l.ranks {
		if f := r.frozen.Load(); f != nil {
			f.once.Do(func() { close(f.thaw) })
		}
	}
}
