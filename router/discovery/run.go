package discovery

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"sluice/router/worker"
)

// retryInterval is the time between two attempts to add workers that the fleet refused.
const retryInterval = 5 * time.Second

// Runner runs sources on one fleet. NewRunner creates one; the zero value is not usable. States of
// a nil Runner is empty.
type Runner struct {
	sink   Sink
	log    *slog.Logger
	sets   []*Set
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// NewRunner returns a Runner that adds workers to sink.
func NewRunner(sink Sink, log *slog.Logger) *Runner {
	r := &Runner{sink: sink, log: log}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Start runs a source until Close. Start adds the workers in first, which the source is known to
// report, before it returns. The error covers those of first that the fleet refused; the source
// runs in any case. If Run of the source fails, its State has the reason. Start must not be called
// concurrently.
func (r *Runner) Start(src Source, first ...worker.Spec) error {
	set := NewSet(src.Name(), r.sink, r.log)
	r.sets = append(r.sets, set)
	var err error
	if len(first) > 0 {
		err = set.Replace(first).Err
	}
	r.work.Go(func() {
		if err := src.Run(r.ctx, set); err != nil && !errors.Is(err, context.Canceled) {
			set.Failed(err)
		}
	})
	r.work.Go(func() {
		for tick := time.NewTicker(retryInterval); ; {
			select {
			case <-r.ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				set.Retry()
			}
		}
	})
	return err
}

// States returns the State of each source, in the order of Start.
func (r *Runner) States() []State {
	if r == nil {
		return []State{}
	}
	states := make([]State, len(r.sets))
	for i, s := range r.sets {
		states[i] = s.State()
	}
	return states
}

// Close ends the sources and waits for them. Their workers stay in the fleet.
func (r *Runner) Close() {
	r.cancel()
	r.work.Wait()
}
