package discovery

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"sluice/router/worker"
)

// Set holds the workers that one source has added to the fleet. The source reports what exists
// now; Set applies the difference, so no source can leave a stale worker behind. Set is safe for
// concurrent use.
type Set struct {
	name string
	sink Sink
	log  *slog.Logger

	mu      sync.Mutex
	workers map[string]worker.Spec // by id; those in the fleet
	refused map[string]worker.Spec // by id; those that the fleet refused
	partial error                  // why the source's last report was incomplete; nil: it was complete
	state   State
}

// State is the state of a source, for the admin API.
type State struct {
	Source  string    `json:"source"`
	Workers int       `json:"workers"`              // number of this source's workers in the fleet
	Changed time.Time `json:"changed,omitzero"`     // last time that a worker was added or removed
	Seen    time.Time `json:"seen,omitzero"`        // last successful report
	Error   string    `json:"error,omitempty"`      // why the source fails, or why the fleet refused workers; "" if neither
	Since   time.Time `json:"error_since,omitzero"` // when Error began
}

// Diff is the effect of a Replace, as sorted ids. Changed workers were removed and added again.
// Err has the workers that the fleet refused.
type Diff struct {
	Added, Changed, Removed []string
	Unchanged               int
	Err                     error // joined; nil if the fleet refused none
}

// Empty reports whether nothing changed.
func (d *Diff) Empty() bool { return len(d.Added)+len(d.Changed)+len(d.Removed) == 0 }

// NewSet returns the Set of one source. If log is nil, the Set does not log.
func NewSet(name string, sink Sink, log *slog.Logger) *Set {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Set{name: name, sink: sink, log: log.With("source", name), workers: map[string]worker.Spec{}, refused: map[string]worker.Spec{}, state: State{Source: name}}
}

// Replace makes specs the complete list of the source's workers in the fleet. It does not touch a
// worker that is unchanged: the worker keeps its connections, its KV events and its entries in the
// index. If two specs have the same id, Replace refuses the second.
func (s *Set) Replace(specs []worker.Spec) Diff { return s.ReplaceExcept(specs, nil) }

// ReplaceExcept is Replace for a source that found workers which it cannot describe. partial is
// the reason and stays in State until the next Replace without one. It is not part of the Diff's
// Err, which covers only what the fleet refused.
func (s *Set) ReplaceExcept(specs []worker.Spec, partial error) Diff {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partial = partial
	var d Diff
	want := map[string]worker.Spec{}
	var errs []error
	for _, spec := range specs {
		spec.ID = IDOf(spec)
		if _, twice := want[spec.ID]; twice {
			errs = append(errs, fmt.Errorf("discovery: %s names the worker %q twice; want a unique id for each", s.name, spec.ID))
			continue
		}
		want[spec.ID] = spec
	}
	for _, id := range slices.Sorted(maps.Keys(s.workers)) {
		if _, stays := want[id]; !stays {
			s.remove(id)
			d.Removed = append(d.Removed, id)
		}
	}
	clear(s.refused)
	for _, id := range slices.Sorted(maps.Keys(want)) {
		spec := want[id]
		old, there := s.workers[id]
		if there && reflect.DeepEqual(old, spec) {
			d.Unchanged++
			continue
		}
		if there {
			s.remove(id)
		}
		if err := s.sink.Add(spec); err != nil {
			errs = append(errs, err)
			s.refused[id] = spec
			if there {
				d.Removed = append(d.Removed, id)
			}
			continue
		}
		s.workers[id] = spec
		if there {
			d.Changed = append(d.Changed, id)
		} else {
			d.Added = append(d.Added, id)
		}
	}
	d.Err = errors.Join(errs...)
	s.recordSuccess(!d.Empty(), d.Err)
	if !d.Empty() {
		s.log.Info("workers changed", "added", d.Added, "changed", d.Changed, "removed", d.Removed, "unchanged", d.Unchanged)
	}
	return d
}

// Put adds one worker, or replaces the worker with its id if the spec differs. It reports whether
// the fleet has changed, also with an error: the fleet may refuse the new spec after Put has
// removed the old worker.
func (s *Set) Put(spec worker.Spec) (changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec.ID = IDOf(spec)
	old, there := s.workers[spec.ID]
	if there && reflect.DeepEqual(old, spec) {
		return false, nil
	}
	if there {
		s.remove(spec.ID)
	}
	if err := s.sink.Add(spec); err != nil {
		return there, err
	}
	s.workers[spec.ID] = spec
	s.recordSuccess(true, nil)
	return true, nil
}

// Remove removes one worker. It returns false if the source has no worker with this id.
func (s *Set) Remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.workers[id]; !there {
		return false
	}
	s.remove(id)
	s.recordSuccess(true, nil)
	return true
}

// Failed records why the source cannot find workers. The workers of its last report stay in the
// fleet, because an outage of a source must not take the fleet down; the fleet itself checks
// whether workers are healthy.
func (s *Set) Failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Error != err.Error() {
		s.log.Error("cannot list the workers of this source; its earlier workers stay", "error", err)
	}
	s.errorText(err)
}

// Retry tries again to add the workers that the fleet refused. The cause may have passed: another
// source had the id, or there were no free slots.
func (s *Set) Retry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refused) == 0 {
		return
	}
	var errs []error
	changed := false
	for _, id := range slices.Sorted(maps.Keys(s.refused)) {
		if err := s.sink.Add(s.refused[id]); err != nil {
			errs = append(errs, err)
			continue
		}
		s.workers[id] = s.refused[id]
		delete(s.refused, id)
		changed = true
	}
	s.recordSuccess(changed, errors.Join(errs...))
}

// State returns the state of the source.
func (s *Set) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// remove removes one of the set's workers. An error of the fleet is unexpected, because only the
// set removes its own workers; remove logs it. The caller holds mu.
func (s *Set) remove(id string) {
	if err := s.sink.Remove(id); err != nil {
		s.log.Warn("cannot remove a worker", "worker", id, "error", err)
	}
	delete(s.workers, id)
}

// recordSuccess updates State after a successful report. err covers the workers that the fleet
// refused. The caller holds mu.
func (s *Set) recordSuccess(changed bool, err error) {
	if s.partial != nil {
		err = errors.Join(err, s.partial)
	}
	s.state.Seen = time.Now()
	if changed {
		s.state.Changed = s.state.Seen
	}
	s.state.Workers = len(s.workers)
	if err == nil {
		if s.state.Error != "" {
			s.log.Info("the source of workers works again", "duration", time.Since(s.state.Since).Round(time.Second))
		}
		s.state.Error, s.state.Since = "", time.Time{}
		return
	}
	if s.state.Error != err.Error() {
		s.log.Error("some workers of this source were not added", "error", err)
	}
	s.errorText(err)
}

func (s *Set) errorText(err error) {
	if s.state.Error == "" {
		s.state.Since = time.Now()
	}
	s.state.Error = err.Error()
}
