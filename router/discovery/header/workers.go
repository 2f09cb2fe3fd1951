package header

import (
	"fmt"
	"maps"
	"strconv"
	"time"

	"sluice/router/worker"
)

// maxTexts bounds how many spellings of its header entry the selector caches per worker.
const maxTexts = 4

// add returns the worker of a key and caches text as an entry that leads to it. It adds the worker
// to the fleet if it is new. At MaxWorkers it first removes the worker that has been idle longest;
// it fails with errFull if none is idle.
func (n *Selector) add(text string, k key, until time.Time) (*headerWorker, error) {
	n.mu.Lock()
	g, there := n.workers[k]
	var out *headerWorker
	if !there {
		if n.closed {
			n.mu.Unlock()
			return nil, fmt.Errorf("%w: the sidecar ends", errNotAllowed)
		}
		if len(n.workers) >= n.opt.MaxWorkers {
			if out = n.oldestIdle(); out == nil {
				n.mu.Unlock()
				return nil, fmt.Errorf("%w: %d, and each is in use", errFull, n.opt.MaxWorkers)
			}
			n.remove(out)
		}
		w, err := n.opt.Fleet.AddTransient(n.spec(k))
		if err != nil {
			n.mu.Unlock()
			n.notifyRemoved(out)
			return nil, fmt.Errorf("%w: %v", errFull, err)
		}
		g = &headerWorker{key: k, w: w}
		n.workers[k] = g
	}
	g.lastUsed.Store(time.Now().UnixNano())
	known := *n.byText.Load()
	texts := 0
	for _, e := range known {
		if e.worker == g {
			texts++
		}
	}
	if _, again := known[text]; again || texts < maxTexts {
		known = maps.Clone(known)
		known[text] = &entry{g, until}
		n.byText.Store(&known)
	}
	if !there && n.opt.OnAdded != nil {
		n.opt.OnAdded(g.w)
	}
	n.mu.Unlock()
	n.notifyRemoved(out)
	if !there {
		n.opt.Log.Info("prefill worker named by a request", "worker", g.w.Spec.ID)
	}
	return g, nil
}

// spec returns the Spec of the fleet's transient worker for a key.
func (n *Selector) spec(k key) worker.Spec {
	s := n.opt.Spec
	s.ID, s.URL = k.at.String(), "http://"+k.at.String()
	s.Role, s.Source, s.KVEvents = worker.Prefill, "header", []string{"off"}
	if k.ranked {
		s.Ranks = []uint16{k.rank}
	}
	if k.bootstrap != 0 {
		s.Options = maps.Clone(s.Options)
		if s.Options == nil {
			s.Options = map[string][]string{}
		}
		s.Options["bootstrap_port"] = []string{strconv.Itoa(int(k.bootstrap))}
	}
	return s
}

// oldestIdle returns the idle worker whose last use is the longest ago, or nil if every worker is
// in use or was named within minLifetime. The caller holds mu.
func (n *Selector) oldestIdle() *headerWorker {
	before := time.Now().Add(-min(minLifetime, n.opt.IdleTimeout)).UnixNano()
	var found *headerWorker
	for _, g := range n.workers {
		if at := g.lastUsed.Load(); at < before && isIdle(g.w) && (found == nil || at < found.lastUsed.Load()) {
			found = g
		}
	}
	return found
}

func isIdle(w *worker.Worker) bool {
	for _, r := range w.Ranks {
		if r.Requests.Load() > 0 {
			return false
		}
	}
	return true
}

// remove deletes a worker and every cached text that leads to it. The caller holds mu, and calls
// notifyRemoved after it has released mu.
func (n *Selector) remove(g *headerWorker) {
	delete(n.workers, g.key)
	known := maps.Clone(*n.byText.Load())
	maps.DeleteFunc(known, func(_ string, e *entry) bool { return e.worker == g })
	n.byText.Store(&known)
}

// notifyRemoved calls OnRemoved and removes the worker from the fleet. It does nothing for nil.
// The caller does not hold mu.
func (n *Selector) notifyRemoved(g *headerWorker) {
	if g == nil {
		return
	}
	if n.opt.OnRemoved != nil {
		n.opt.OnRemoved(g.w)
	}
	n.opt.Fleet.RemoveTransient(g.w)
}

// sweep removes idle workers that no request has named for IdleTimeout, until Close.
func (n *Selector) sweep() {
	defer close(n.done)
	tick := time.NewTicker(max(min(n.opt.IdleTimeout/4, 10*time.Second), time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-tick.C:
		}
		before := time.Now().Add(-n.opt.IdleTimeout).UnixNano()
		var out []*headerWorker
		n.mu.Lock()
		for _, g := range n.workers {
			if g.lastUsed.Load() < before && isIdle(g.w) {
				n.remove(g)
				out = append(out, g)
			}
		}
		n.mu.Unlock()
		for _, g := range out {
			n.notifyRemoved(g)
			n.opt.Log.Info("prefill worker removed: no request has named it recently", "worker", g.w.Spec.ID, "idle_timeout", n.opt.IdleTimeout)
		}
	}
}

// Workers returns the number of workers that headers have added and that are still in the fleet.
func (n *Selector) Workers() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.workers)
}

// Close stops the sweep and removes every worker. The caller must ensure that no request is in
// flight on them.
func (n *Selector) Close() {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return
	}
	n.closed = true
	n.mu.Unlock()
	close(n.stop)
	<-n.done
	n.mu.Lock()
	var out []*headerWorker
	for _, g := range n.workers {
		n.remove(g)
		out = append(out, g)
	}
	n.mu.Unlock()
	for _, g := range out {
		n.notifyRemoved(g)
	}
}
