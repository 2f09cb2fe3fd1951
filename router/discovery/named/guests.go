package named

import (
	"fmt"
	"maps"
	"strconv"
	"time"

	"sluice/router/worker"
)

// maxTexts bounds how many ways of writing are remembered for each guest.
const maxTexts = 4

// invite gives the guest of a key, taking it into the fleet if it must, and
// remembers what led to it.
func (n *Namer) invite(text string, k key, until time.Time) (*guest, error) {
	n.mu.Lock()
	g, there := n.guests[k]
	var out *guest
	if !there {
		if n.closed {
			n.mu.Unlock()
			return nil, fmt.Errorf("%w: the sidecar ends", errElsewhere)
		}
		if len(n.guests) >= n.opt.Most {
			if out = n.oldest(); out == nil {
				n.mu.Unlock()
				return nil, fmt.Errorf("%w: %d, and each is in use", errFull, n.opt.Most)
			}
			n.drop(out)
		}
		w, err := n.opt.Fleet.Guest(n.spec(k))
		if err != nil {
			n.mu.Unlock()
			n.left(out)
			return nil, fmt.Errorf("%w: %v", errFull, err)
		}
		g = &guest{key: k, w: w}
		n.guests[k] = g
	}
	g.named.Store(time.Now().UnixNano())
	known := *n.known.Load()
	texts := 0
	for _, e := range known {
		if e.g == g {
			texts++
		}
	}
	if _, again := known[text]; again || texts < maxTexts {
		known = maps.Clone(known)
		known[text] = &entry{g, until}
		n.known.Store(&known)
	}
	if !there && n.opt.Joined != nil {
		n.opt.Joined(g.w)
	}
	n.mu.Unlock()
	n.left(out)
	if !there {
		n.opt.Log.Info("prefill worker named by a request", "worker", g.w.Spec.ID)
	}
	return g, nil
}

// spec is what the fleet is told of a guest.
func (n *Namer) spec(k key) worker.Spec {
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

// oldest is the idle guest named longest ago; nil when none may go. Called with mu.
func (n *Namer) oldest() *guest {
	before := time.Now().Add(-min(freshFor, n.opt.Idle)).UnixNano()
	var found *guest
	for _, g := range n.guests {
		if at := g.named.Load(); at < before && idle(g.w) && (found == nil || at < found.named.Load()) {
			found = g
		}
	}
	return found
}

func idle(w *worker.Worker) bool {
	for _, r := range w.Ranks {
		if r.Requests.Load() > 0 {
			return false
		}
	}
	return true
}

// drop forgets a guest and every text that led to it. Called with mu; the caller
// calls left without.
func (n *Namer) drop(g *guest) {
	delete(n.guests, g.key)
	known := maps.Clone(*n.known.Load())
	maps.DeleteFunc(known, func(_ string, e *entry) bool { return e.g == g })
	n.known.Store(&known)
}

func (n *Namer) left(g *guest) {
	if g == nil {
		return
	}
	if n.opt.Left != nil {
		n.opt.Left(g.w)
	}
	n.opt.Fleet.Dismiss(g.w)
}

// sweep dismisses guests that have not been named for Idle.
func (n *Namer) sweep() {
	defer close(n.done)
	tick := time.NewTicker(max(min(n.opt.Idle/4, 10*time.Second), time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-tick.C:
		}
		before := time.Now().Add(-n.opt.Idle).UnixNano()
		var out []*guest
		n.mu.Lock()
		for _, g := range n.guests {
			if g.named.Load() < before && idle(g.w) {
				n.drop(g)
				out = append(out, g)
			}
		}
		n.mu.Unlock()
		for _, g := range out {
			n.left(g)
			n.opt.Log.Info("prefill worker dismissed: no request has named it lately", "worker", g.w.Spec.ID, "idle", n.opt.Idle)
		}
	}
}

// Guests counts the prefill workers that are known by headers now.
func (n *Namer) Guests() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.guests)
}

// Close dismisses every guest. Nothing may be under way on them any more.
func (n *Namer) Close() {
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
	var out []*guest
	for _, g := range n.guests {
		n.drop(g)
		out = append(out, g)
	}
	n.mu.Unlock()
	for _, g := range out {
		n.left(g)
	}
}
