package load

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Run sends requests until the duration is over, the workload ends, or ctx ends. It
// waits for the requests in flight and returns the report. progress, if not nil, is
// called about twice a second from one goroutine.
func Run(ctx context.Context, o Options, progress func(Snapshot)) (*Report, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if !o.open() && o.Concurrency == 0 {
		o.Concurrency = defaultConcurrency
	}
	w, err := newWorkload(o)
	if err != nil {
		return nil, err
	}
	r := &run{o: o, jobs: &jobQueue{w: w}, rec: newRecorder(), began: time.Now()}
	if o.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.Duration)
		defer cancel()
	}
	stop := r.watch(progress)
	if o.open() {
		r.openLoop(ctx)
	} else {
		r.closedLoop(ctx)
	}
	stop()
	if t, ok := w.(*trace); ok && t.err != nil {
		return nil, t.err
	}
	return r.report(), nil
}

type run struct {
	o        Options
	jobs     *jobQueue
	rec      *recorder
	began    time.Time
	inFlight atomic.Int64
	dropped  atomic.Int64
}

// closedLoop runs users, each with one request at a time. A request in flight when ctx
// ends is finished, so that slow requests are counted too.
func (r *run) closedLoop(ctx context.Context) {
	var wg sync.WaitGroup
	for range r.o.Concurrency {
		wg.Go(func() {
			c, err := newClient(&r.o, r.rec.gap)
			if err != nil {
				return // Validate parsed the same URL
			}
			defer c.close()
			for ctx.Err() == nil {
				job, ok := r.jobs.next()
				if !ok {
					return
				}
				r.inFlight.Add(1)
				res := r.runRequest(c, job, time.Now())
				r.inFlight.Add(-1)
				if res.Err != nil && res.Status == 0 {
					// Avoids a busy loop when the server is down.
					select {
					case <-ctx.Done():
					case <-time.After(50 * time.Millisecond):
					}
				}
			}
		})
	}
	wg.Wait()
}

// openLoop sends each request when it is due, on an idle connection or a new one. A
// slow server does not slow the arrivals.
func (r *run) openLoop(ctx context.Context) {
	var wg sync.WaitGroup
	idle := make(chan *client, r.o.MaxInFlight)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		job, ok := r.jobs.next()
		if !ok {
			break
		}
		due := r.began.Add(job.Due)
		if wait := time.Until(due); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				continue
			}
		}
		if r.inFlight.Load() >= int64(r.o.MaxInFlight) {
			r.dropped.Add(1)
			continue
		}
		var c *client
		select {
		case c = <-idle:
		default:
			var err error
			if c, err = newClient(&r.o, r.rec.gap); err != nil {
				return
			}
		}
		r.inFlight.Add(1)
		wg.Go(func() {
			r.runRequest(c, job, due)
			r.inFlight.Add(-1)
			idle <- c
		})
	}
	wg.Wait()
	close(idle)
	for c := range idle {
		c.close()
	}
}

func (r *run) runRequest(c *client, job Job, from time.Time) Result {
	res := c.do(&job, from)
	r.rec.result(&res, job)
	if r.o.OnResult != nil {
		r.o.OnResult(res)
	}
	return res
}

// watch calls progress until the caller calls the returned function.
func (r *run) watch(progress func(Snapshot)) (stop func()) {
	if progress == nil {
		return func() {}
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				progress(r.snapshot())
			case <-done:
				return
			}
		}
	})
	return func() { close(done); wg.Wait() }
}
