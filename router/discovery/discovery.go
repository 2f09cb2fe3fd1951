package discovery

import (
	"context"
	"errors"

	"sluice/router/worker"
)

// Sink takes workers in and out; *fleet.Fleet is one. Its methods may be called
// from several sources at once.
type Sink interface {
	// Add takes a worker in; it fails on an id that is there.
	Add(spec worker.Spec) error
	// Remove takes one out by its id; it fails on one that is not there.
	Remove(id string) error
}

// Source is one way to find workers.
type Source interface {
	// Run tells sink of workers as they come and go, until ctx ends; then it
	// returns nil and leaves in what it had put in. Any error returned before
	// that means that the source has stopped. A worker that changed is removed
	// and added again.
	Run(ctx context.Context, sink Sink) error
}

// Static is a fixed list, from a configuration.
type Static []worker.Spec

// Run adds all workers of the list. When one cannot be added it returns at
// once, with the fault of every such worker; the others are in.
func (s Static) Run(ctx context.Context, sink Sink) error {
	var errs []error
	for _, spec := range s {
		if err := sink.Add(spec); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	<-ctx.Done()
	return nil
}
