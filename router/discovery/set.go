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

// Set is what one source has put into the fleet. Sources say what there is now;
// Set finds what that changes and does it, so that no source can leave a worker
// behind. Safe for concurrent use.
type Set struct {
	name string
	sink Sink
	log  *slog.Logger

	mu      sync.Mutex
	workers map[string]worker.Spec // by id: in the fleet
	refused map[string]worker.Spec // wanted, but the fleet did not take them
	partial error                  // why the source told of no more, where it told of some
	state   State
}

// State is how a source is doing, for the admin API.
type State struct {
	Source  string    `json:"source"`
	Workers int       `json:"workers"`              // in the fleet by this source
	Changed time.Time `json:"changed,omitzero"`     // when it last put in or took out
	Seen    time.Time `json:"seen,omitzero"`        // when it last told what there is
	Error   string    `json:"error,omitempty"`      // why it cannot tell, or why workers were refused; "" when all is well
	Since   time.Time `json:"error_since,omitzero"` // of Error
}

// Diff is what a Replace changed: ids, sorted. Changed workers were taken out
// and put in anew; Refused ones are in Err.
type Diff struct {
	Added, Changed, Removed []string
	Unchanged               int
	Err                     error // joined; nil when the fleet took all
}

// Empty says that nothing was changed.
func (d *Diff) Empty() bool { return len(d.Added)+len(d.Changed)+len(d.Removed) == 0 }

// NewSet makes the Set of one source.
func NewSet(name string, sink Sink, log *slog.Logger) *Set {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Set{name: name, sink: sink, log: log.With("source", name), workers: map[string]worker.Spec{}, refused: map[string]worker.Spec{}, state: State{Source: name}}
}

// Replace makes specs the whole of what the source has in the fleet. A worker
// that is there unchanged is not touched: its connections, its KV events and
// what the index knows of it stay. Of two specs with one id the second is
// refused.
func (s *Set) Replace(specs []worker.Spec) Diff { return s.ReplaceExcept(specs, nil) }

// ReplaceExcept is Replace by a source that cannot make a worker of everything it
// has found: partial says of what and why, and stands in State until a Replace without
// one. It is not part of the Diff's Err, which is of what the fleet refused.
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
			errs = append(errs, fmt.Errorf("discovery: %s names the worker %q twice; want one id for each", s.name, spec.ID))
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
		s.log.Info("workers changed", "added", d.Added, "changed", d.Changed, "removed", d.Removed, "kept", d.Unchanged)
	}
	return d
}

// Put adds one worker, or replaces the one of its id if anything changed; it
// says whether anything did.
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

// Remove removes one worker; false when the source has none of this id in.
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

// Failed notes why the source cannot tell what there is. What it told before
// stays in the fleet: whether a worker is well is the fleet's to find out, and a
// source that is down must not take a fleet down.
func (s *Set) Failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Error != err.Error() {
		s.log.Error("cannot tell which workers there are; those it told before stay", "err", err)
	}
	s.errorText(err)
}

// Retry puts in what the fleet refused and may take now (its id was another
// source's, or slots had run out).
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

// State is how the source is doing.
func (s *Set) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// remove removes one that is in. The fleet may have lost it to nobody: a set's
// workers are its own. Called with mu.
func (s *Set) remove(id string) {
	if err := s.sink.Remove(id); err != nil {
		s.log.Warn("cannot remove a worker", "worker", id, "err", err)
	}
	delete(s.workers, id)
}

// recordSuccess books a success of the source; err is of workers that were refused.
// Called with mu.
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
			s.log.Info("well again", "after", time.Since(s.state.Since).Round(time.Second))
		}
		s.state.Error, s.state.Since = "", time.Time{}
		return
	}
	if s.state.Error != err.Error() {
		s.log.Error("not all workers are in", "err", err)
	}
	s.errorText(err)
}

func (s *Set) errorText(err error) {
	if s.state.Error == "" {
		s.state.Since = time.Now()
	}
	s.state.Error = err.Error()
}
