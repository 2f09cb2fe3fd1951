package discovery

import (
	"context"

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
	// Name is what the source is called in logs, metrics and the admin API, as
	// "file /etc/sluice/workers.yaml"; unique among a router's sources.
	Name() string
	// Run tells set of workers as they come and go, until ctx ends; then it
	// returns nil and leaves in what it had put in. An error returned before
	// that means that the source can never work as it was configured; what may
	// pass it reports to set and tries again.
	Run(ctx context.Context, set *Set) error
}

// Static is a fixed list, from a configuration.
type Static []worker.Spec

// Name implements Source.
func (Static) Name() string { return "config" }

// Run puts the list in.
func (s Static) Run(ctx context.Context, set *Set) error {
	set.Replace(s)
	<-ctx.Done()
	return nil
}
