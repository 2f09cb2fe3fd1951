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
	r, err := newRun(&o)
	if err != nil {
		return nil, err
	}
	if o.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.Warmup+o.Duration+o.Cooldown)
		defer cancel()
	}
	r.cut = context.Background()
	if o.Cooldown > 0 {
		r.cut = ctx
	}
	stop := r.watch(progress)
	var wg sync.WaitGroup
	for _, s := range r.streams {
		wg.Go(func() { s(ctx) })
	}
	wg.Wait()
	stop()
	if r.trace != nil && r.trace.err != nil {
		return nil, r.trace.err
	}
	return r.report(), nil
}

type run struct {
	o        Options
	sources  []Source
	heads    []string // request headers of each source
	open     bool     // some requests have a time at which they are due
	trace    *trace   // nil without one
	streams  []func(context.Context)
	rec      *recorder
	began    time.Time
	cut      context.Context // ends the requests in flight
	inFlight atomic.Int64
}

func newRun(o *Options) (*run, error) {
	r := &run{o: *o, sources: o.sources(), began: time.Now()}
	for i := range r.sources {
		r.heads = append(r.heads, r.sources[i].head())
	}
	w := window{from: r.began.Add(o.Warmup)}
	if o.Warmup > 0 || o.Cooldown > 0 {
		w.until = w.from.Add(o.Duration)
	}
	r.rec = newRecorder(r.sources, w, len(o.Sources) > 0)
	if o.Trace != "" {
		t, err := openTrace(&r.o, r.sources)
		if err != nil {
			return nil, err
		}
		r.trace = t
		r.addStream(&jobQueue{w: t}, o.Concurrency)
		return r, nil
	}
	for i := range r.sources {
		s := &r.sources[i]
		switch {
		case s.Agents > 0:
			r.streams = append(r.streams, func(ctx context.Context) { r.runAgents(ctx, i) })
			continue
		case s.Rate == 0 && s.Users == 0:
			s.Users = defaultConcurrency
		}
		users := s.Users
		if s.Rate > 0 {
			users = 0
		}
		r.addStream(&jobQueue{w: newSynthetic(&r.o, s, i)}, users)
	}
	return r, nil
}

// addStream sends the jobs of a workload: in a closed loop of users, or when they are due.
func (r *run) addStream(jobs *jobQueue, users int) {
	if users > 0 {
		r.streams = append(r.streams, func(ctx context.Context) { r.closedLoop(ctx, jobs, users) })
		return
	}
	r.open = true
	r.streams = append(r.streams, func(ctx context.Context) { r.openLoop(ctx, jobs) })
}

func (r *run) newClient() *client { return newClient(&r.o, r.heads) }

// pauseAfterFailure is how long a user of a closed loop waits after a request that got no
// response, or a refusal, so that a server that is down or full is not asked in a busy loop.
const pauseAfterFailure = 50 * time.Millisecond

// closedLoop runs users, each with one request at a time. A request in flight when ctx
// ends is finished, so that slow requests are counted too, unless the run cuts it off.
func (r *run) closedLoop(ctx context.Context, jobs *jobQueue, users int) {
	var wg sync.WaitGroup
	for range users {
		wg.Go(func() {
			c := r.newClient()
			defer c.close()
			for ctx.Err() == nil {
				job, ok := jobs.next()
				if !ok {
					return
				}
				r.inFlight.Add(1)
				res := r.runRequest(c, &job, time.Now())
				r.inFlight.Add(-1)
				if res.Err != nil && (res.Status == 0 || res.refused()) {
					pause(ctx, pauseAfterFailure)
				}
			}
		})
	}
	wg.Wait()
}

// openLoop sends each request when it is due, on an idle connection or a new one. A
// slow server does not slow the arrivals.
func (r *run) openLoop(ctx context.Context, jobs *jobQueue) {
	var wg sync.WaitGroup
	idle := make(chan *client, r.o.MaxInFlight)
	for ctx.Err() == nil {
		job, ok := jobs.next()
		if !ok {
			break
		}
		due := r.began.Add(job.Due)
		if !pause(ctx, time.Until(due)) {
			break
		}
		if r.inFlight.Add(1) > int64(r.o.MaxInFlight) {
			r.inFlight.Add(-1)
			r.rec.drop(job.source, due)
			continue
		}
		var c *client
		select {
		case c = <-idle:
		default:
			c = r.newClient()
		}
		wg.Go(func() {
			r.runRequest(c, &job, due)
			r.inFlight.Add(-1)
			select {
			case idle <- c:
			default:
				c.close()
			}
		})
	}
	wg.Wait()
	close(idle)
	for c := range idle {
		c.close()
	}
}

func (r *run) runRequest(c *client, job *Job, from time.Time) Result {
	c.gap = nil
	if r.rec.window.has(from) {
		c.gap = r.rec.gap
	}
	res := c.do(r.cut, job, from)
	r.finish(&res, job, from)
	return res
}

// finish counts a request that was due at from.
func (r *run) finish(res *Result, job *Job, from time.Time) {
	r.rec.result(res, job, from)
	if r.o.OnResult != nil {
		r.o.OnResult(*res)
	}
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
