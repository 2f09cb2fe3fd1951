package discovery

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"sluice/router/worker"
)

// retryInterval is how often workers that the fleet refused are offered again.
const retryInterval = 5 * time.Second

// Runner runs sources over one fleet. The zero value is not usable; a nil one
// has no sources.
type Runner struct {
	sink   Sink
	log    *slog.Logger
	sets   []*Set
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// NewRunner makes a Runner over a fleet.
func NewRunner(sink Sink, log *slog.Logger) *Runner {
	r := &Runner{sink: sink, log: log}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Start runs a source until Close. first are workers that it is known to tell:
// they are put in before Start returns, and the error is of those that the fleet
// refused; the source runs all the same. A source that gives up says why in its
// State. Not to be called from several goroutines at once.
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

// States is how each source is doing, in the order of Start.
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

// Close ends the sources and waits for them; workers stay in the fleet.
func (r *Runner) Close() {
	r.cancel()
	r.work.Wait()
}
