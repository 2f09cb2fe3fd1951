package discovery

import (
	"context"

	"sluice/router/worker"
)

// Sink adds and removes workers; *fleet.Fleet implements it. Several sources may call it
// concurrently.
type Sink interface {
	// Add adds a worker. It fails if a worker with this id exists.
	Add(spec worker.Spec) error
	// Remove removes the worker with this id. It fails if there is none.
	Remove(id string) error
}

// Source is one way to find workers.
type Source interface {
	// Name is the source's name in logs, metrics and the admin API, such as "file
	// /etc/sluice/workers.yaml". It is unique among a router's sources.
	Name() string
	// Run reports workers to set as they come and go. It returns nil after ctx ends and leaves its
	// workers in the fleet. It returns an error before that only if the source can never work as
	// configured; it reports transient failures to set and tries again.
	Run(ctx context.Context, set *Set) error
}

// Static is a fixed list of workers, from the configuration.
type Static []worker.Spec

// Name implements Source.
func (Static) Name() string { return "config" }

// Run adds the workers of the list to set.
func (s Static) Run(ctx context.Context, set *Set) error {
	set.Replace(s)
	<-ctx.Done()
	return nil
}
