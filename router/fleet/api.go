package fleet

import (
	"context"
	"log/slog"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// Options of a Fleet; zero values mean the default in brackets.
type Options struct {
	Log           *slog.Logger
	Upstream      upstream.Options
	ProbeInterval time.Duration // between health probes of a worker [500ms]
	ProbeTimeout  time.Duration // [1s]
	// FailAfter consecutive failures (probes, or connection-level failures of
	// traffic) a worker is Unhealthy [2]; one success of a probe brings it back.
	FailAfter int
	// ScrapeInterval of /metrics for running, waiting, KV usage [1s]; <0: never.
	ScrapeInterval time.Duration
	// OnJoin is called when a worker first becomes Ready or its engine changed
	// (restart: OnLeave, then OnJoin); OnLeave when it was removed. Both run on
	// the fleet's own goroutines, one at a time per worker.
	OnJoin  func(*worker.Worker)
	OnLeave func(*worker.Worker)
	// OnState is called at every change of a worker's state.
	OnState func(w *worker.Worker, from, to worker.State, reason string)
}

// Fleet is the membership. Safe for concurrent use.
type Fleet struct {
	impl fleet
}

type fleet struct{}

// New makes an empty Fleet.
func New(opt Options) *Fleet { panic("contract") }

// Add takes a worker in, in state Joining, and starts to probe it. It fails on
// an id already there, a URL that is none, or when slots have run out.
func (f *Fleet) Add(spec worker.Spec) error { panic("contract") }

// Remove takes a worker out: it leaves the choice at once, its probes end.
func (f *Fleet) Remove(id string) error { panic("contract") }

// Drain puts a worker in state Draining (on) or back to Joining (off).
func (f *Fleet) Drain(id string, on bool) error { panic("contract") }

// View is the present snapshot; never nil. No lock, no allocation.
func (f *Fleet) View() *View { panic("contract") }

// Wait returns the first View for which ok holds, or the present one and false
// when ctx ends first.
func (f *Fleet) Wait(ctx context.Context, ok func(*View) bool) (*View, bool) { panic("contract") }

// Endpoint gives the connections of a rank; never nil for a rank of a View.
func (f *Fleet) Endpoint(r *worker.Rank) *upstream.Endpoint { panic("contract") }

// Failed reports a connection-level failure of traffic to a rank (refused,
// reset, timed out before the head); Succeeded that the engine answered, with
// whatever status. Both are cheap and safe on the request path. An error of
// the client's own (4xx) is a success here.
func (f *Fleet) Failed(r *worker.Rank, err error) { panic("contract") }

// Succeeded: see Failed.
func (f *Fleet) Succeeded(r *worker.Rank) { panic("contract") }

// Close ends all probes and goroutines.
func (f *Fleet) Close() { panic("contract") }

// View is an immutable snapshot of the fleet.
type View struct {
	Workers []*worker.Worker // every member, by id
	Models  []string         // served by at least one member that is Ready or was
	pools   map[string]*Pool
}

// Pool is the Ready ranks that serve one model, by role. Slices are read only.
type Pool struct {
	Model      string
	Prefill    []*worker.Rank
	Decode     []*worker.Rank
	Aggregated []*worker.Rank
	// Members counts workers of each role in any state but Gone, so that a 503
	// can tell an empty pool from an unhealthy one.
	Members [3]int
}

// Pool gives the pool of a model; ok is false for an unknown model. The empty
// model name gives the only pool there is, when there is just one.
func (v *View) Pool(model string) (p *Pool, ok bool) { panic("contract") }
