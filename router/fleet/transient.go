package fleet

import (
	"fmt"
	"strings"

	"sluice/router/worker"
)

// AddTransient adds a worker that requests name themselves. It has slots, connections and breakers
// like any other, but is in no View and no pool, and is neither probed nor inspected: the caller
// assigns its ranks to the requests that name it, and removes it when none do any more. No callback
// reports it. It fails as Add does, except that two transient workers may share an id.
func (f *Fleet) AddTransient(spec worker.Spec) (*worker.Worker, error) {
	spec.URL = strings.TrimRight(spec.URL, "/")
	if err := f.checkSpec(spec); err != nil {
		return nil, fmt.Errorf("fleet: cannot add transient worker %q: %w", spec.ID, err)
	}
	w := worker.New(spec)
	m := &member{fleet: f, worker: w, transient: true, ctx: f.ctx, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if err := m.makeServers(); err != nil {
		return nil, fmt.Errorf("fleet: cannot add transient worker %q: %w", spec.ID, err)
	}
	w.SetState(worker.Ready, "named by a request")
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("fleet: cannot add transient worker %q: %w", spec.ID, errClosed)
	}
	if left := f.slotsLeft(); len(w.Ranks) > left {
		return nil, fmt.Errorf("fleet: cannot add transient worker %q: its %d ranks exceed the %d free slots of %d", spec.ID, len(w.Ranks), left, worker.MaxSlots)
	}
	f.assignSlots(m)
	m.setConnLimit(f.settings.Load().Engines) // the current limits
	f.transients[w] = m
	return w, nil
}

// RemoveTransient removes a transient worker: its connections are closed and its slots released.
// Running legs on it end by themselves. It has no effect on other workers.
func (f *Fleet) RemoveTransient(w *worker.Worker) {
	f.mu.Lock()
	m, ok := f.transients[w]
	if !ok {
		f.mu.Unlock()
		return
	}
	delete(f.transients, w)
	m.removed = true
	for _, s := range m.servers {
		for _, t := range s.breakers {
			t.reset()
		}
	}
	w.SetState(worker.Gone, "dismissed")
	f.mu.Unlock()
	f.releaseSlots(m)
	m.closeServers()
}

// TransientWorkers returns the number of transient workers.
func (f *Fleet) TransientWorkers() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.transients)
}

// assignSlots assigns a slot to every rank of a member. Called with mu.
func (f *Fleet) assignSlots(m *member) {
	if hasOwnLimits(&m.worker.Spec) {
		f.hasLimits.Store(true)
	}
	for _, s := range m.servers {
		for _, r := range s.ranks {
			r.Slot = f.acquireSlot()
			t := &rankBreaker{server: s, rank: r}
			s.breakers = append(s.breakers, t)
			f.slots[r.Slot].Store(t)
		}
	}
}

func (m *member) closeServers() {
	for _, s := range m.servers {
		s.close()
	}
}
