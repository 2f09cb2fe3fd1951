package core

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/eventpub"
	"sluice/bench/sim/kvcache"
	"sluice/bench/sim/options"
	"sluice/bench/sim/textgen"
)

// Rank is one data-parallel rank: a scheduler, its batch and its KV memory. All of it
// belongs to the goroutine of loop; other goroutines send it functions with Post or Do.
type Rank struct {
	Process   *Process
	Index     int
	Publisher *eventpub.Publisher // nil if events are off; set before Start
	Counters  Counters            // belongs to the rank's goroutine
	Load      atomic.Int64        // jobs accepted and not served yet

	o       *options.Options
	mu      sync.Mutex
	inbox   []func()
	closed  bool
	wake    chan struct{}
	started atomic.Bool
	stopped chan struct{}

	pool     *kvcache.Pool
	hash     kvcache.Hasher
	waiting  []*Seq // accepted by the engine, not in the batch; in the order of the scheduling policy
	arrivals uint64 // sequences queued so far
	ready    []*Seq // their transfer is done; scheduled before waiting
	running  []*Seq
	pulls    map[*Seq]struct{} // sequences whose blocks wait for a transfer
	heldLast map[*Seq]struct{} // sequences whose last token waits until the leg calls FinishHeld
	batch    []*Seq            // scratch space of emit
	leases   leases
	events   []eventcodec.Event
	stepEnd  time.Time // when the current step ends
	scratch  api.Chunker
	dirty    []*Job // jobs with events held back

	frozen atomic.Pointer[frozenRank] // nil unless frozen
}

// NewRank returns a rank of p, which Start makes run.
func NewRank(p *Process, index int) *Rank {
	r := &Rank{Process: p, o: p.Options, Index: index, wake: make(chan struct{}, 1), stopped: make(chan struct{})}
	r.hash.SGLang = r.o.Engine == "sglang"
	r.pool = kvcache.NewPool(r.o.Blocks, func(h *kvcache.BlockHash) {
		r.Counters.Evicted++
		r.event(eventcodec.Event{Kind: eventcodec.Removed, Hashes: []kvcache.BlockHash{*h}})
	})
	r.pulls, r.heldLast = make(map[*Seq]struct{}), make(map[*Seq]struct{})
	r.leases.byKey = make(map[string]*Lease)
	r.scratch.Coalesce = r.o.Coalesce
	return r
}

// Start starts the rank's goroutine.
func (r *Rank) Start() {
	r.started.Store(true)
	r.Process.Go(r.loop)
}

// Wait waits for the end of the rank's goroutine. It returns false at once if there was no Start.
func (r *Rank) Wait() bool {
	if !r.started.Load() {
		return false
	}
	<-r.stopped
	return true
}

// stopping reports whether the end of the incarnation has begun.
func (r *Rank) stopping() bool { return r.Process.Context.Err() != nil }

// Post sends f to the rank's goroutine. After the rank's end it returns false and f
// does not run.
func (r *Rank) Post(f func()) bool {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return false
	}
	r.inbox = append(r.inbox, f)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return true
}

// Do runs f on the rank's goroutine and waits for it. After the rank's end it runs f
// itself, when no other goroutine uses the rank.
func (r *Rank) Do(f func()) {
	done := make(chan struct{})
	if r.Post(func() { f(); close(done) }) {
		<-done
		return
	}
	<-r.stopped
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// runPosted runs the functions that were posted.
func (r *Rank) runPosted() {
	for {
		r.mu.Lock()
		list := r.inbox
		r.inbox = nil
		r.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, f := range list {
			f()
		}
	}
}

// maxLag is how far steps may run behind and still catch up, so that a short stall of
// this machine does not slow the simulated one.
const maxLag = 50 * time.Millisecond

// loop is the engine core: it steps while there is work, else it sleeps.
func (r *Rank) loop() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		r.runPosted()
		now := time.Now()
		r.Expire(now)
		if r.stopping() {
			r.finish()
			return
		}
		d, work := r.planStep(now)
		if !work {
			r.stepEnd = time.Time{}
			r.sleep(timer, r.leases.untilNext(now))
			continue
		}
		if d = cost.Scale(d, r.o.Speed); r.stepEnd.Before(now.Add(-max(d, maxLag))) {
			r.stepEnd = now
		}
		r.stepEnd = r.stepEnd.Add(d)
		for !r.stopping() {
			wait := time.Until(r.stepEnd)
			if wait <= 0 {
				break
			}
			r.sleep(timer, wait)
			r.runPosted()
		}
		r.emit()
		r.flushEvents()
		r.Counters.Steps++
	}
}

// sleep waits for d, a post or the end.
func (r *Rank) sleep(t *time.Timer, d time.Duration) {
	t.Reset(d)
	select {
	case <-t.C:
	case <-r.wake:
	case <-r.Process.Context.Done():
	}
}

// finish fails the remaining jobs and releases everything.
func (r *Rank) finish() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.runPosted()
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		r.Fail(s.Job, 500, DeadMessage)
	}
	for s := range r.pulls {
		r.Fail(s.Job, 500, DeadMessage)
	}
	for s := range r.heldLast {
		r.Fail(s.Job, 500, DeadMessage)
	}
	close(r.stopped)
}

// DeadMessage is the error of an engine whose core has ended.
const DeadMessage = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// Submit queues a job.
func (r *Rank) Submit(j *Job) {
	r.Counters.Requests++
	r.Process.Blocks.acquire(j.BlockLogID)
	if j.Leg != nil {
		j.Leg.Submit(r, j)
		return
	}
	r.Queue(j.Seqs...)
}

// abort drops a job whose client has disconnected.
func (r *Rank) abort(j *Job) {
	if j.ended {
		return
	}
	if !j.finished { // otherwise its leased blocks stay
		r.Counters.Aborted++
		r.drop(j)
	}
	if j.Leg != nil {
		j.Leg.OnAborted(r, j)
	}
	r.markAnswered(j)
}

// drop removes the job's sequences from the batch and frees their blocks.
func (r *Rank) drop(j *Job) {
	mine := func(s *Seq) bool { return s.Job == j }
	r.running = slices.DeleteFunc(r.running, mine)
	r.waiting = slices.DeleteFunc(r.waiting, mine)
	r.ready = slices.DeleteFunc(r.ready, mine)
	if j.Leg != nil {
		j.Leg.Cancel(r, j)
	}
	for _, s := range j.Seqs {
		delete(r.heldLast, s)
		if !s.pulling { // a transfer in flight frees them when it ends
			r.pool.Release(s.blocks)
			s.blocks = nil
		}
	}
}

// markAnswered marks the job as served.
func (r *Rank) markAnswered(j *Job) {
	if j.ended {
		return
	}
	j.ended = true
	r.Load.Add(-1)
	r.Process.Blocks.release(j.BlockLogID)
	close(j.done)
	if j.Request.Close {
		j.conn.InterruptRead()
	}
}

// Fail ends the job with an error response if its head is not sent, or else with an
// error event.
func (r *Rank) Fail(j *Job, status int, msg string) {
	if j.ended {
		return
	}
	r.Counters.Failed++
	r.drop(j)
	if j.Params.Stream && j.headSent {
		r.scratch.Open(&j.Response)
		j.Format.StreamError(&r.scratch, &j.Response, status, msg)
		r.scratch.Finish()
	} else {
		j.conn.Respond(j.Request, status, "application/json", j.Format.ErrorBody(status, msg))
	}
	r.markAnswered(j)
}

// flushEvents sends the step's events to the publisher, as one batch.
func (r *Rank) flushEvents() {
	if len(r.events) == 0 {
		return
	}
	r.Publisher.Publish(r.events)
	r.events = nil
}

// ResetCache serves /reset_prefix_cache. As in vLLM it fails while blocks are in use,
// and the event is published with the next step that has work.
func (r *Rank) ResetCache() bool {
	if !r.pool.Clear() {
		return false
	}
	r.event(eventcodec.Event{Kind: eventcodec.Cleared})
	return true
}

// Jobs returns the jobs accepted and not served yet, each once.
func (r *Rank) Jobs() []*Job {
	seen := make(map[*Job]bool)
	var list []*Job
	add := func(s *Seq) {
		if !s.Job.ended && !seen[s.Job] {
			seen[s.Job] = true
			list = append(list, s.Job)
		}
	}
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		add(s)
	}
	for s := range r.pulls {
		add(s)
	}
	for s := range r.heldLast {
		add(s)
	}
	return list
}

// AbortID aborts requests by id as the abort endpoints do: they finish with reason
// "abort" and their output so far.
func (r *Rank) AbortID(id string) {
	for _, j := range r.Jobs() {
		if j.ID == id {
			r.FinishAborted(j)
		}
	}
}

// FinishAborted ends a job of the rank and sends its response: the output so far, with finish reason
// "abort" for each choice that had none. It runs on the rank's goroutine.
func (r *Rank) FinishAborted(j *Job) {
	r.Counters.Aborted++
	r.drop(j)
	w := &r.scratch
	w.Open(&j.Response)
	for _, s := range j.Seqs {
		if s.Reason != "" {
			continue
		}
		s.Reason = "abort"
		if j.Params.Stream {
			j.Format.Delta(w, &s.Choice, textgen.EOS, "")
		}
	}
	if j.Params.Stream {
		j.Format.Last(w, &j.Response)
		w.Finish()
	} else {
		j.conn.Respond(j.Request, 200, "application/json", j.Format.Full(nil, &j.Response))
	}
	r.markAnswered(j)
}

// Decline ends a job before its first token, with a finish reason.
func (r *Rank) Decline(j *Job, reason string) {
	r.drop(j)
	w := &r.scratch
	w.Open(&j.Response)
	for _, s := range j.Seqs {
		s.Reason = reason
		if j.Params.Stream {
			j.Format.First(w, &s.Choice)
			j.Format.Delta(w, &s.Choice, textgen.EOS, "")
		}
	}
	if j.Params.Stream {
		j.Format.Last(w, &j.Response)
		w.Finish()
	} else {
		j.conn.Respond(j.Request, 200, "application/json", j.Format.Full(nil, &j.Response))
	}
	r.markAnswered(j)
}

// Hashes returns the hashes of the first n full blocks of s.
func (r *Rank) Hashes(s *Seq, n int) []kvcache.BlockHash {
	s.hashTo(&r.hash, n, r.o.BlockSize)
	return s.hashes[:n]
}

// EachCached calls f with the hash of every cached block, each copy counted.
func (r *Rank) EachCached(f func(h *kvcache.BlockHash)) {
	for i := range r.pool.Blocks {
		if b := &r.pool.Blocks[i]; b.Hashed {
			f(&b.Hash)
		}
	}
}
