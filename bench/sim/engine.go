package sim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Engine is one simulated engine: a process of it, in this process. All its
// methods may be called from any goroutine.
type Engine struct {
	o      Options
	face   *face
	addrs  []string // listening addresses: the main one, then one a rank with RankPorts
	holds  []*placeholder
	faults *faultSet
	log    *recorder
	kept   *keptLog
	start  time.Time

	pubs, reps []string // endpoints of the KV events of each rank; nil when off
	loads      []string // and of the load snapshots, SGLang's
	bootAddr   string   // of the bootstrap server, "" when there is none

	mu      sync.Mutex // life, closed and refusing change under it
	life    *life
	last    *life // the newest, alive or not
	closed  bool
	refuse  bool
	bg      sync.WaitGroup
	crashes atomic.Int64
	lives   atomic.Int64
	gone    chan struct{} // closed by Close
	dead    chan struct{} // closed by Close and by a crash that nothing undoes
	deadOne sync.Once
}

// Start binds all sockets of an engine and serves until Close, or until ctx ends.
// It returns at once; the addresses are known then.
func Start(ctx context.Context, o Options) (*Engine, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("sim: cannot start on %q: %w", o.Listen, err)
	}
	e := &Engine{o: o, face: faces[o.Engine], faults: newFaultSet(o.FaultSeed), log: newRecorder(o.Records), kept: newKeptLog(o.LogKept), start: time.Now(), gone: make(chan struct{}), dead: make(chan struct{})}
	for _, f := range o.Faults {
		e.faults.add(f)
	}
	l, err := e.newLife()
	if err != nil {
		for _, h := range e.holds {
			h.close()
		}
		return nil, err
	}
	e.life, e.last = l, l
	for _, f := range o.Faults {
		if f.Kind == Refuse {
			e.Fault(f)
		}
	}
	if ctx.Done() != nil {
		e.background(func() {
			select {
			case <-ctx.Done():
				e.end()
			case <-e.gone:
			}
		})
	}
	return e, nil
}

// Close ends the engine: sockets, streams, goroutines. It is safe to call twice.
func (e *Engine) Close() error {
	e.end()
	e.bg.Wait()
	return nil
}

func (e *Engine) end() {
	e.mu.Lock()
	l := e.last // its stop is waited for, whoever began it
	e.life = nil
	first := !e.closed
	e.closed = true
	if first {
		close(e.gone)
	}
	e.mu.Unlock()
	l.stop(false)
	e.deadOne.Do(func() { close(e.dead) })
	if first {
		for _, h := range e.holds {
			h.close()
		}
	}
}

// Crash kills the engine as kill -9 would: connections are reset, ports refuse,
// pinned blocks and caches are lost. Restart brings it back.
func (e *Engine) Crash() {
	if l := e.current(); l != nil {
		e.die(l, true)
	}
}

// die ends l as a crash, unless it has ended already.
func (e *Engine) die(l *life, abrupt bool) {
	e.mu.Lock()
	mine := e.life == l
	if mine {
		e.life = nil
	}
	e.mu.Unlock()
	if !mine {
		return
	}
	e.crashes.Add(1)
	l.stop(abrupt)
	d := e.o.RestartAfter
	if d <= 0 {
		e.deadOne.Do(func() { close(e.dead) })
		return
	}
	e.background(func() {
		if e.wait(d) {
			e.Restart()
		}
	})
}

// background runs f in a goroutine that Close waits for; not after Close.
func (e *Engine) background(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.bg.Go(f)
	}
}

// wait sleeps d; it is false when the engine was closed meanwhile.
func (e *Engine) wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-e.gone:
		return false
	}
}

// Restart ends the engine if it still lives and starts a new life on the same
// addresses: new engine identity, empty cache, event sequence from 0.
func (e *Engine) Restart() error {
	e.mu.Lock()
	l := e.last
	e.life = nil
	e.mu.Unlock()
	l.stop(true)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.life != nil {
		return nil
	}
	l, err := e.newLife()
	if err != nil {
		return err
	}
	e.life, e.last = l, l
	return nil
}

// Alive says whether the engine has not crashed or been closed.
func (e *Engine) Alive() bool { return e.current() != nil }

// Dead is closed once the engine has been closed, or has crashed and will not
// come back by itself: where a real server's process would have ended.
func (e *Engine) Dead() <-chan struct{} { return e.dead }

func (e *Engine) current() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.life
}

// URL is the main address, as in "http://127.0.0.1:8000".
func (e *Engine) URL() string { return "http://" + e.addrs[0] }

// Addr is the main address without the scheme.
func (e *Engine) Addr() string { return e.addrs[0] }

// RankURLs is one URL a rank: its own port with Options.RankPorts, else the main one.
func (e *Engine) RankURLs() []string {
	urls := make([]string, e.o.Ranks)
	for i := range urls {
		urls[i] = e.URL()
		if e.o.RankPorts {
			urls[i] = "http://" + e.addrs[1+i]
		}
	}
	return urls
}

// KVEndpoints are the PUB endpoints, by rank; none when events are off.
func (e *Engine) KVEndpoints() []string { return slices.Clone(e.pubs) }

// ReplayEndpoints are the replay ROUTER endpoints, by rank; none when off.
func (e *Engine) ReplayEndpoints() []string { return slices.Clone(e.reps) }

// EngineID is the identity of this life (remote_engine_id without the rank's
// suffix), "" when dead.
func (e *Engine) EngineID() string {
	if l := e.current(); l != nil {
		return l.id
	}
	return ""
}

// Fault arms a fault from now on.
func (e *Engine) Fault(f Fault) {
	if f.Kind != Refuse {
		e.faults.add(f)
		return
	}
	e.setRefuse(true)
	if f.Delay > 0 {
		e.background(func() {
			if e.wait(f.Delay) {
				e.setRefuse(false)
			}
		})
	}
}

// ClearFaults disarms all faults; stalled requests stay stalled.
func (e *Engine) ClearFaults() {
	e.faults.clear()
	e.setRefuse(false)
}

func (e *Engine) setRefuse(on bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.refuse == on {
		return
	}
	e.refuse = on
	if e.life == nil {
		return
	}
	if on {
		e.life.closeListeners()
		return
	}
	// The port is held, so listening again cannot meet a stranger on it.
	if l := e.life; l.listen() != nil {
		go e.die(l, true)
	}
}
