package sim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/portreserve"
)

// Engine is one simulated engine: it plays a process of an engine inside this process.
// All its methods may be called from any goroutine.
type Engine struct {
	o            Options
	surface      *surface
	formats      *api.Config
	addrs        []string // listening addresses: the main one, then with RankPorts one for each rank
	placeholders []*portreserve.Port
	faults       *faults.Set
	log          *recorder
	blockLog     *core.BlockLog
	start        time.Time

	pubs, reps    []string // endpoints of the KV events of each rank; nil if off
	loads         []string // endpoints of SGLang's load snapshots
	bootstrapAddr string   // address of the bootstrap server, "" if there is none

	mu           sync.Mutex // guards the fields below that change
	current      *incarnation
	newest       *incarnation // the newest incarnation, running or not
	closed       bool
	refusing     bool
	bg           sync.WaitGroup
	crashes      atomic.Int64
	incarnations atomic.Int64
	closedCh     chan struct{} // closed by Close
	deadCh       chan struct{} // closed by Close, and by a crash without restart
	deadOnce     sync.Once
}

// Start binds all sockets of an engine and serves until Close, or until ctx ends. It
// returns at once; the addresses are then known.
func Start(ctx context.Context, o Options) (*Engine, error) {
	o, err := o.WithDefaults()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("sim: cannot start on %q: %w", o.Listen, err)
	}
	e := &Engine{o: o, surface: surfaces[o.Engine], faults: faults.NewSet(o.FaultSeed), log: newRecorder(o.Records), blockLog: core.NewBlockLog(o.LogBlocks), start: time.Now(), closedCh: make(chan struct{}), deadCh: make(chan struct{})}
	e.formats = &api.Config{Engine: o.Engine, Version: o.Version, Model: o.Model, Release: o.VLLM, Seed: o.Seed, MaxModelLen: o.MaxModelLen, Ranks: o.Ranks,
		HideCached: o.HideCached, SkipTokenizer: o.SkipTokenizer, Incremental: o.Incremental, HidesPromptLogprobs: o.PD == "sglang" && o.Role == "decode",
		DisableScaleUp: o.DisableScaleUp, Failure: e.errorBody}
	for _, f := range o.Faults {
		e.faults.Add(f)
	}
	l, err := e.newIncarnation()
	if err != nil {
		for _, h := range e.placeholders {
			h.Close()
		}
		return nil, err
	}
	e.current, e.newest = l, l
	for _, f := range o.Faults {
		if f.Kind == faults.Refuse {
			e.Fault(f)
		}
	}
	if ctx.Done() != nil {
		e.background(func() {
			select {
			case <-ctx.Done():
				e.end()
			case <-e.closedCh:
			}
		})
	}
	return e, nil
}

// Close ends the engine: sockets, streams, goroutines. It may be called twice.
func (e *Engine) Close() error {
	e.end()
	e.bg.Wait()
	return nil
}

func (e *Engine) end() {
	e.mu.Lock()
	l := e.newest // Close waits for its stop, whichever goroutine started that
	e.current = nil
	first := !e.closed
	e.closed = true
	if first {
		close(e.closedCh)
	}
	e.mu.Unlock()
	l.stop(false)
	e.deadOnce.Do(func() { close(e.deadCh) })
	if first {
		for _, h := range e.placeholders {
			h.Close()
		}
	}
}

// Crash kills the engine as kill -9 would: connections are reset, ports refuse
// connections, leased blocks and caches are lost. Restart starts it again.
func (e *Engine) Crash() {
	if l := e.incarnation(); l != nil {
		e.crash(l, true)
	}
}

// crash ends l as a crash, unless it has ended already.
func (e *Engine) crash(l *incarnation, abrupt bool) {
	e.mu.Lock()
	isCurrent := e.current == l
	if isCurrent {
		e.current = nil
	}
	e.mu.Unlock()
	if !isCurrent {
		return
	}
	e.crashes.Add(1)
	l.stop(abrupt)
	d := e.o.RestartAfter
	if d <= 0 {
		e.deadOnce.Do(func() { close(e.deadCh) })
		return
	}
	e.background(func() {
		if e.wait(d) {
			e.Restart()
		}
	})
}

// background runs f in a goroutine for which Close waits; after Close it does nothing.
func (e *Engine) background(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.bg.Go(f)
	}
}

// wait sleeps d; it returns false if the engine is closed meanwhile.
func (e *Engine) wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-e.closedCh:
		return false
	}
}

// Restart ends the engine if it is running and starts a new incarnation on the same
// addresses: with a new engine id, an empty cache, and an event sequence from 0.
func (e *Engine) Restart() error {
	e.mu.Lock()
	l := e.newest
	e.current = nil
	e.mu.Unlock()
	l.stop(true)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.current != nil {
		return nil
	}
	l, err := e.newIncarnation()
	if err != nil {
		return err
	}
	e.current, e.newest = l, l
	return nil
}

// Alive reports whether the engine has neither crashed nor been closed.
func (e *Engine) Alive() bool { return e.incarnation() != nil }

// Dead returns a channel that is closed when the engine is closed, or crashes and will
// not restart by itself: when the process of a real server would have ended.
func (e *Engine) Dead() <-chan struct{} { return e.deadCh }

func (e *Engine) incarnation() *incarnation {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.current
}

// URL is the main address, as in "http://127.0.0.1:8000".
func (e *Engine) URL() string { return "http://" + e.addrs[0] }

// Addr returns the main address without the scheme.
func (e *Engine) Addr() string { return e.addrs[0] }

// RankURLs returns one URL for each rank: its own port with Options.RankPorts, else the
// main one.
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

// KVEndpoints returns the PUB endpoints, by rank; none if events are off.
func (e *Engine) KVEndpoints() []string { return slices.Clone(e.pubs) }

// ReplayEndpoints returns the replay ROUTER endpoints, by rank; none if replay is off.
func (e *Engine) ReplayEndpoints() []string { return slices.Clone(e.reps) }

// EngineID returns the id of this incarnation (remote_engine_id without the rank's
// suffix), or "" after a crash.
func (e *Engine) EngineID() string {
	if l := e.incarnation(); l != nil {
		return l.ID
	}
	return ""
}

// Fault arms a fault.
func (e *Engine) Fault(f faults.Fault) {
	if f.Kind != faults.Refuse {
		e.faults.Add(f)
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

// ClearFaults disarms all faults; stalled requests remain stalled.
func (e *Engine) ClearFaults() {
	e.faults.Clear()
	e.setRefuse(false)
}

func (e *Engine) setRefuse(on bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.refusing == on {
		return
	}
	e.refusing = on
	if e.current == nil {
		return
	}
	if on {
		e.current.closeListeners()
		return
	}
	// The port is reserved, so listening again cannot conflict with another process.
	if l := e.current; l.listen() != nil {
		go e.crash(l, true)
	}
}

// BlockReleaseTimes returns, by X-Request-Id, when the last block of a request was
// released on this engine. A zero time means that some blocks are still referenced. It
// needs Options.LogBlocks.
func (e *Engine) BlockReleaseTimes() map[string]time.Time { return e.blockLog.ReleaseTimes() }
